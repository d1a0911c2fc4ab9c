"""An entry that is lost or damaged in the middle of an epoch: an error says so, and the next start encodes it again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.pack_damage import damage as flip_bit
from helpers.pipeline_sdxl import Run, Setup, concept

from latentcache.errors import EntryDamagedError, EntryMissingError
from latentcache.store.disk import DiskStore

NUM = 4
DAMAGED = 2
TENSORS = {"image": "latent_image", "text": "text_encoder_2_pooled_state"}
EACH = {"image": ("vae",), "text": ("text_encoder", "text_encoder_2")}


@pytest.fixture
def setup(pipeline: SimpleNamespace, tmp_path: Path, folder: Path, parts: dict[str, Any]) -> Callable[..., Setup]:
    def make() -> Setup:
        return Setup(host=pipeline, cache_dir=tmp_path / "cache", concepts=[concept(folder)], parts=parts)

    return make


def key_of(run: Run, kind: str, number: int = DAMAGED) -> str:
    cache = run.caches[kind]
    return cache._items[cache._outputs[number]][0]


def store_of(run: Run, kind: str) -> Path:
    return run.setup.cache_dir / kind / "latentcache"


def damage(run: Run, kind: str) -> None:
    """Flip one bit in the bytes of an entry of this run."""
    with DiskStore(store_of(run, kind)) as store:
        tensor = store.get(key_of(run, kind)).tensors[TENSORS[kind]].clone()
    flip_bit(store_of(run, kind), tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


def lose(run: Run, kind: str) -> None:
    """Remove the files of all entries."""
    for pack in (store_of(run, kind) / "packs").rglob("*.safetensors"):
        pack.unlink()


@pytest.mark.parametrize("kind", ["image", "text"])
@pytest.mark.parametrize(("harm", "num"), [(damage, 1), (lose, NUM)])
def test_what_is_gone_ends_the_epoch_and_is_encoded_again_by_the_next_start(
    setup: Callable[..., Setup], kind: str, harm: Callable[[Run, str], None], num: int
) -> None:
    expected = setup().start().items
    run = setup().start()  # it encoded nothing: what it reads first it compares with its digest
    assert run.encoded == Counter()
    harm(run, kind)
    with run.counting(), pytest.raises((EntryDamagedError, EntryMissingError)) as caught:
        run.cache_items(kind)
    assert run.encoded == Counter(), "the trainer may use the model at this moment"
    (note,) = caught.value.__notes__
    assert "start the training again" in note and (kind == "text" or ".png: " in note)
    again = setup().start()
    assert again.encoded == Counter({part: num for part in EACH[kind]})
    for item, other in zip(again.items, expected, strict=True):
        assert item.keys() == other.keys()
        for name, value in item.items():
            assert torch.equal(value, other[name]) if torch.is_tensor(value) else value == other[name], name
