"""The lines of docs/howto/import-export.md that write other formats."""

from __future__ import annotations

import os
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

ROOT = Path(__file__).parents[2]
PARQUET, *_ = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs/howto/import-export.md").read_text(encoding="utf-8"), flags=re.DOTALL
)


@pytest.mark.remote
@pytest.mark.filterwarnings("ignore")
def test_datasets_loads_the_parquet_file(make_config: Callable[..., Config], tmp_path: Path) -> None:
    config = make_config(**{"cache.path": tmp_path / "cache/quickstart"})  # where the recipe has its
    run_precache(config)
    (tmp_path / "program.py").write_text(PARQUET)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "program.py"], cwd=tmp_path, env=environment, check=True)
    import datasets

    file, folder = str(tmp_path / "photos.parquet"), str(tmp_path / "loaded")
    rows = list(datasets.load_dataset("parquet", data_files=file, split="train", cache_dir=folder))
    with LatentCache(config.cache.path) as cache:
        assert [row["sample_id"] for row in rows] == cache.sample_ids()
        for row in rows:
            batch = cache.batch([row["sample_id"]], device="cpu", scaled=True)
            assert row["caption"] == cache.row(row["sample_id"])[1].captions[0].text
            for name in ("latents", "prompt_embeds"):
                np.testing.assert_array_equal(np.asarray(row[name], np.float32), batch[name][0].float().numpy())
