"""The quickstart's story, after the installation: what its document says is so."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from latentcache.config_file import load_config

ROOT = Path(__file__).parent.parent


@pytest.fixture
def quickstart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.chdir(tmp_path)
    import quickstart

    yield quickstart
    for name in ("quickstart", "train_lora"):
        sys.modules.pop(name, None)


def test_the_document(quickstart: Any, tmp_path: Path) -> None:
    config = load_config(ROOT / "configs" / "quickstart.yaml")
    (earlier := tmp_path / "cache" / "quickstart-lora").mkdir(parents=True)
    (earlier / "checkpoint.pt").touch()  # an earlier run is in nobody's way
    document = json.loads(json.dumps(quickstart.run(config), allow_nan=False))
    assert [done["num_encoded"] > 0 for done in document["passes"]] == [True, False]
    seen = {sample_id for batch in document["batches"] for sample_id in batch["sample_id"]}
    assert seen == set(quickstart.CAPTIONS) and not seen & set(quickstart.HELD_OUT)
    assert document["training"]["step"] == 20
    cold, warm = document["validations"]
    assert (cold["num_filled"] > 0, warm["num_filled"]) == (True, 0)
    assert warm["loss"] < cold["loss"]
    assert set(warm["loss_by_sample"]["held-out"]) == set(quickstart.HELD_OUT)
    for name in ("grid", "plot"):
        with Image.open(document["files"][name]) as picture:
            assert picture.format == "PNG" and min(picture.size) >= 128
    for name in ("metrics", "lora", "checkpoint"):
        assert Path(document["files"][name]).exists()
    text = quickstart.to_text(document)
    assert all(path in text for path in document["files"].values())
