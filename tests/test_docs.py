"""The site builds without a warning, and its reference is that of the code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import latentcache

ROOT = Path(__file__).parent.parent


def test_the_site_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    # Material for MkDocs would advertise its successor.
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "architecture" / "index.html").exists()


def test_the_api_page_has_all_public_names() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    shown = re.findall(r"^::: latentcache\.(\w+)$", page, flags=re.MULTILINE)
    assert sorted(shown) == sorted(set(latentcache.__all__) - {"__version__", "errors"})


def test_the_reference_is_that_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import make_reference

    for name, text in make_reference.pages().items():
        committed = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
        assert committed == text, f"docs/reference/{name} is not up to date: run scripts/make_reference.py"
