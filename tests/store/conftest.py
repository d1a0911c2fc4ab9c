from __future__ import annotations

import pytest


@pytest.fixture
def root(tmp_path):
    return tmp_path / "cache"
