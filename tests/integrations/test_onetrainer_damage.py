"""An entry that is lost or damaged in the middle of an epoch: the item is encoded again where it is requested."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.pack_damage import damage as flip_bit
from helpers.photo_files import write_photo
from helpers.pipeline_sdxl import Run, Setup, concept

from latentcache.errors import EntryDamagedError, ItemsError
from latentcache.integrations.onetrainer import restoring
from latentcache.store.disk import DiskStore

NUM = 4
DAMAGED = 2
TENSORS = {"image": "latent_image", "text": "text_encoder_2_pooled_state"}
ONE_EACH = {"image": Counter(vae=1), "text": Counter(text_encoder=1, text_encoder_2=1)}


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def setup(
    pipeline: SimpleNamespace, tmp_path: Path, folder: Path, parts: dict[str, Any], calls: list[str]
) -> Callable[..., Setup]:
    """A setup whose functions before and after encoding write down that they were called."""

    def make(**changes: Any) -> Setup:
        settings = {"host": pipeline, "cache_dir": tmp_path / "cache", "concepts": [concept(folder)], "parts": parts}
        functions = {"after_cache_fun": lambda: calls.append("after")} | changes.pop("changes", {})
        return Setup(**settings | {"before": lambda kind: calls.append(f"before {kind}")} | changes, changes=functions)

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


def warm(setup: Callable[..., Setup], **changes: Any) -> Run:
    """A run that encoded nothing, as an epoch of a later run: what it reads first it compares with its digest."""
    setup().start()
    run = setup(**changes).start()
    assert run.encoded == Counter()
    return run


def assert_same(items: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for item, other in zip(items, expected, strict=True):
        assert item.keys() == other.keys()
        for name, value in item.items():
            assert torch.equal(value, other[name]) if torch.is_tensor(value) else value == other[name], name


@pytest.mark.parametrize("kind", ["image", "text"])
def test_an_entry_that_is_damaged_in_an_epoch_is_encoded_again_in_its_place(
    setup: Callable[..., Setup],
    calls: list[str],
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    expected = setup().start().items
    run = warm(setup)
    damage(run, kind)
    calls.clear()
    streams = torch.get_rng_state()
    with caplog.at_level(logging.WARNING), run.counting():
        first, again = run.items, run.items
    assert_same(first, expected)
    assert_same(again, expected)
    assert run.encoded == ONE_EACH[kind], "once, however often it is requested"
    assert calls == [f"before {kind}", "after"]
    assert torch.equal(torch.get_rng_state(), streams)
    assert {name: cache.num_encoded_again for name, cache in run.caches.items()} == {"image": 0, "text": 0} | {kind: 1}
    (message,) = [record.getMessage() for record in caplog.records if "encoded again" in record.getMessage()]
    assert message.startswith(f"'photo number {DAMAGED}'" if kind == "text" else expected[DAMAGED]["image_path"])
    assert key_of(run, kind) in message
    assert setup().start().encoded == Counter(), "it is stored"


@pytest.mark.parametrize("kind", ["image", "text"])
def test_entries_that_are_lost_together_are_encoded_together(
    setup: Callable[..., Setup], calls: list[str], kind: str
) -> None:
    """The parts are moved once, not for each entry of a pack that is gone."""
    expected = setup().start().items
    run = warm(setup)
    lose(run, kind)
    calls.clear()
    with run.counting():
        assert_same(run.items, expected)
    assert run.encoded == Counter({part: NUM for part in ONE_EACH[kind]})
    assert calls == [f"before {kind}", "after"] and run.caches[kind].num_encoded_again == NUM


def test_the_trainers_own_reading_of_an_epoch_goes_on(setup: Callable[..., Setup]) -> None:
    expected = {item["image_path"]: item["latent_image"] for item in setup().start().pipeline}
    run = warm(setup)
    damage(run, "image")
    found = {item["image_path"]: item["latent_image"] for item in run.pipeline}
    assert found.keys() == expected.keys() and len(found) == NUM
    assert all(torch.equal(latents, expected[path]) for path, latents in found.items())


def test_parts_have_their_modes_and_gradients_after_it(setup: Callable[..., Setup]) -> None:
    model = SimpleNamespace(unet=torch.nn.Linear(2, 2).train(), vae=torch.nn.Linear(2, 2).eval())
    model.unet.weight.grad = torch.ones(2, 2)
    run = warm(setup, before=lambda kind: model.unet.eval())
    restoring(model).around(run.caches["image"])
    damage(run, "image")
    model.unet.train()
    run.cache_items("image")
    assert run.caches["image"].num_encoded_again == 1
    assert model.unet.training and not model.vae.training and torch.equal(model.unet.weight.grad, torch.ones(2, 2))


def fails(run: Run, kind: str = "image") -> str:
    """The note on the error that ends the epoch."""
    with pytest.raises(EntryDamagedError) as caught:
        run.cache_items(kind)
    assert run.caches[kind].num_encoded_again == 0
    (note,) = caught.value.__notes__
    return note


def test_without_a_way_to_put_the_parts_back_it_is_an_error(setup: Callable[..., Setup], calls: list[str]) -> None:
    """The UNet would be left where `before_cache_fun` puts it, in eval mode, in the middle of an epoch."""
    run = warm(setup, changes={"after_cache_fun": None})
    damage(run, "image")
    calls.clear()
    assert re.search(r"p02\.png: .*install\(model=\.\.\.\).*start the trainer again", fails(run))
    assert calls == []


def test_with_nothing_that_moves_parts_it_needs_no_way_to_put_them_back(setup: Callable[..., Setup]) -> None:
    run = warm(setup, changes={"after_cache_fun": None, "before_cache_fun": None})
    damage(run, "image")
    assert len(run.cache_items("image")) == NUM and run.caches["image"].num_encoded_again == 1


def test_a_thread_that_did_not_start_the_epoch_moves_no_parts(setup: Callable[..., Setup], calls: list[str]) -> None:
    """The thread that trains may use them at this moment."""
    run = warm(setup)
    damage(run, "image")
    calls.clear()
    notes: list[str] = []
    thread = threading.Thread(target=lambda: notes.append(fails(run)))
    thread.start()
    thread.join()
    assert re.search(r"p02\.png: .*another thread", notes[0]) and calls == []
    with run.counting():
        assert len(run.cache_items("image")) == NUM  # in the thread that started the epoch
    assert run.encoded["vae"] == 1


def test_a_file_that_changed_since_the_epoch_began_is_an_error(setup: Callable[..., Setup], folder: Path) -> None:
    run = warm(setup)
    damage(run, "image")
    write_photo(folder / "p02.png", 77, (96, 64))
    assert re.search(r"p02\.png: .*changed since the epoch began", fails(run))


def test_a_cache_that_cannot_be_written_is_an_error(
    setup: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(warm(setup), "image")
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode, **how: not mode & os.W_OK and access(path, mode, **how))
    run = setup().start()
    assert re.search(r"p02\.png: .*cannot be written", fails(run))


def test_an_item_that_cannot_be_encoded_again_is_named(
    setup: Callable[..., Setup], parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    run = warm(setup)
    damage(run, "image")
    calls.clear()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(parts["vae"], "encode", fail)
    with pytest.raises(ItemsError, match=r"(?s)1 of 1 items .*p02\.png: RuntimeError: no kernel image"):
        run.cache_items("image")
    assert calls == ["before image", "after"], "the parts are back after an error too"
    assert run.caches["image"].num_encoded_again == 0


def test_a_stop_request_does_not_end_the_epoch(setup: Callable[..., Setup]) -> None:
    """The trainer ends it itself, after the batch."""
    stop: list[bool] = []
    run = warm(setup, changes={"should_stop": lambda: bool(stop)})
    damage(run, "image")
    stop.append(True)
    assert len(run.cache_items("image")) == NUM and run.caches["image"].num_encoded_again == 1
