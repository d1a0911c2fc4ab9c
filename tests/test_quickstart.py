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
    for name in ("quickstart", "train_lora", "bootstrap"):
        sys.modules.pop(name, None)


def test_the_document(quickstart: Any, tmp_path: Path) -> None:
    config = load_config(ROOT / "configs" / "quickstart.yaml")
    (earlier := tmp_path / "cache" / "quickstart-lora").mkdir(parents=True)
    (earlier / "checkpoint.pt").touch()  # an earlier run is in nobody's way
    document = json.loads(json.dumps(quickstart.run(config), allow_nan=False))
    first, second = document["passes"]
    assert (first["num_hits"], first["num_encoded"]) == (0, 37)
    assert (second["num_hits"], second["num_encoded"]) == (36, 1), "one caption was edited"
    assert list(second["misses_by_reason"]) == ["caption changed"]
    assert document["edited"]["caption"].endswith(", take 2")
    seen = {sample_id for batch in document["batches"] for sample_id in batch["sample_id"]}
    assert seen == set(quickstart.CAPTIONS) and not seen & set(quickstart.HELD_OUT)
    assert document["training"]["step"] == 40
    cold, warm = document["validations"]
    assert (cold["num_filled"] > 0, warm["num_filled"]) == (True, 0)
    before, after = document["untrained"]["loss_by_sample"]["held-out"], warm["loss_by_sample"]["held-out"]
    assert all(after[name] < before[name] for name in quickstart.HELD_OUT)
    assert warm["loss"] < 0.99 * document["untrained"]["loss"]
    assert set(warm["loss_by_sample"]["held-out"]) == set(quickstart.HELD_OUT)
    for name in ("grid", "plot"):
        with Image.open(document["files"][name]) as picture:
            assert picture.format == "PNG" and min(picture.size) >= 128
    for name in ("metrics", "lora", "checkpoint"):
        assert Path(document["files"][name]).exists()
    text = quickstart.to_text(document)
    assert all(path in text for path in document["files"].values())
    assert "36 entries found, 1 encoded (caption changed)" in text and "lower for 3 of 3 photos" in text
    assert "latentcache init" in text.splitlines()[-2]


def test_an_edit_is_new_each_time(quickstart: Any, tmp_path: Path) -> None:
    file = tmp_path / "cat.txt"
    file.write_text("a cat\n", encoding="utf-8")
    edits = [quickstart.edit_caption(file) for _ in range(3)]
    assert edits == ["a cat, take 2", "a cat, take 3", "a cat, take 4"]
    assert file.read_text(encoding="utf-8") == "a cat, take 4\n"


def test_what_is_installed(quickstart: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quickstart installs little; the tests add the rest to it; nothing is installed twice."""
    bootstrap = quickstart.bootstrap
    done: list[Any] = []

    def make(environment: Any) -> None:
        done.append("cleared" if environment.path.exists() else "made")
        environment.path.mkdir(exist_ok=True)

    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(bootstrap, "make", make)
    monkeypatch.setattr(bootstrap, "pip_install", lambda made, *what: done.append(what))
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text("first", encoding="utf-8")
    little = [("-e", ".[encode,lora]"), ("--no-deps", "scikit-image")]
    rest = ("-e", f".[{bootstrap.DEFAULT.extras}]")
    for wanted, expected in (
        (bootstrap.QUICKSTART, ["made", *little]),
        (bootstrap.QUICKSTART, []),
        (bootstrap.DEFAULT, [rest]),
        (bootstrap.DEFAULT, []),
        (bootstrap.QUICKSTART, []),
    ):
        bootstrap.install(wanted)
        assert done == expected
        done.clear()
    (tmp_path / "constraints.txt").write_text("second", encoding="utf-8")
    bootstrap.install(bootstrap.DEFAULT)
    assert done == ["cleared", rest]
