from __future__ import annotations

from pathlib import Path

import pytest
from helpers.comparing_server import object_server, s3_url  # noqa: F401 - fixtures


@pytest.fixture(autouse=True)
def _no_folder_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
