"""The lines of docs/howto/import-export.md that write other formats."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from latentcache.config import Config
from latentcache.loading.cache import LatentCache
from latentcache.precache.run import run_precache

pytestmark = pytest.mark.remote

ROOT = Path(__file__).parents[2]
PARQUET, *_ = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs/howto/import-export.md").read_text(encoding="utf-8"), flags=re.DOTALL
)


@pytest.fixture
def filled(make_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The cache of the photos where the recipes have theirs, and its folder as the working one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    config = make_config(**{"cache.path": tmp_path / "cache/quickstart"})
    run_precache(config)
    return config


def assert_rows(config: Config, rows: list[dict[str, object]]) -> None:
    with LatentCache(config.cache.path) as cache:
        assert [str(row["sample_id"]) for row in rows] == cache.sample_ids()
        for row in rows:
            batch = cache.batch([str(row["sample_id"])], device="cpu", scaled=True)
            assert row["caption"] == cache.row(str(row["sample_id"]))[1].captions[0].text
            for name in ("latents", "prompt_embeds"):
                np.testing.assert_array_equal(np.asarray(row[name], np.float32), batch[name][0].float().numpy())


def run_program(text: str, folder: Path) -> None:
    (folder / "program.py").write_text(text)
    command = [sys.executable, "-W", "ignore", "program.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore")
def test_datasets_loads_the_parquet_file(filled: Config, tmp_path: Path) -> None:
    run_program(PARQUET, tmp_path)
    import datasets

    loaded = datasets.load_dataset("parquet", data_files="photos.parquet", split="train", cache_dir=str(tmp_path / "d"))
    assert_rows(filled, list(loaded))
