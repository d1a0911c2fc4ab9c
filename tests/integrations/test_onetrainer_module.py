"""The cache module beyond its values: interruption, random streams, the identity of upstream modules, damage."""

from __future__ import annotations

import logging
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pack_damage import damage
from helpers.photo_files import write_photo
from helpers.pipeline_sdxl import Run, Setup, concept, exact
from helpers.tensor_bits import bits

from latentcache.errors import EntryDamagedError, EntryMissingError, PipelineError
from latentcache.integrations.onetrainer.items import GroupNames, Groups
from latentcache.integrations.onetrainer.values import PLAIN_FIELD, fields_of, values_of
from latentcache.models.tiny import tiny_parts
from latentcache.utils.signals import handlers_kept

Make = Callable[..., Setup]

NUM = 4
TENSORS = {"image": "latent_image", "text": "text_encoder_2_pooled_state"}
EACH = {"image": ("vae",), "text": ("text_encoder", "text_encoder_2")}


def test_masks_are_cached_and_an_edited_mask_is_noticed(setup: Make, folder: Path) -> None:
    write_photo(folder / "p00-masklabel.png", 5, (96, 64))
    first = setup(masks=True).start().by_photo()
    assert first["p00.png"]["latent_mask"].shape[0] == 1
    assert not torch.equal(first["p00.png"]["latent_mask"], first["p02.png"]["latent_mask"])
    assert setup(masks=True).start().encoded == Counter()
    write_photo(folder / "p02-masklabel.png", 6, (96, 64))  # replaces a generated one
    run = setup(masks=True).start()
    assert run.encoded == Counter(vae=1)
    assert not torch.equal(run.by_photo()["p02.png"]["latent_mask"], first["p02.png"]["latent_mask"])


def test_each_variation_has_a_draw_of_its_own(setup: Make, folder: Path) -> None:
    def sampling(image_variations: int) -> Run:
        run = Run(setup(concepts=[concept(folder, image_variations=image_variations)]))
        next(m for m in run.pipeline.modules if type(m).__name__ == "SampleVAEDistribution").mode = "sample"
        run.next_epoch()
        return run

    run = sampling(2)
    first = run.by_photo()
    run.next_epoch()
    assert run.encoded["vae"] == 2 * NUM
    assert all(
        not torch.equal(item["latent_image"], first[name]["latent_image"]) for name, item in run.by_photo().items()
    )
    assert sampling(1).encoded["vae"] == 0


def test_ctrl_c_waits_for_running_encoders(setup: Make) -> None:
    """The main thread gets it while others encode: models are moved back only when no thread uses them."""
    using: list[int] = []
    seen: list[int] = []
    raised = threading.Event()

    def press(*_: Any) -> None:
        using.append(1)
        if len(using) == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]

    def interrupt(*_: Any) -> None:
        raised.set()
        raise KeyboardInterrupt

    def leave(*_: Any) -> None:
        assert raised.wait(60)
        time.sleep(0.5)  # the main thread has to cancel the other images before they are begun
        using.append(-1)

    parts = tiny_parts(0)
    run = Run(setup(parts=parts, changes={"after_cache_fun": lambda: seen.append(sum(using))}))
    parts["vae"].encoder.register_forward_pre_hook(press)
    parts["vae"].encoder.register_forward_hook(leave)
    with handlers_kept(signal.SIGINT), pytest.raises(KeyboardInterrupt):
        signal.signal(signal.SIGINT, interrupt)
        run.next_epoch()
    assert run.begun == ["image"] and seen == [0]
    assert 1 <= run.encoded["vae"] < NUM
    assert setup().start().encoded["vae"] == NUM - run.encoded["vae"]


def test_random_streams_and_gradient_mode_are_as_before(setup: Make) -> None:
    def draw(*_: Any) -> None:
        torch.rand(3), np.random.rand(3), random.random()

    parts = tiny_parts(0)
    parts["vae"].encoder.register_forward_hook(draw)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[union-attr]
    run = Run(setup(parts=parts))
    with torch.enable_grad():
        run.next_epoch()
        assert torch.is_grad_enabled()
    assert torch.equal(before[0], torch.get_rng_state()) and before[2] == random.getstate()
    assert np.array_equal(before[1], np.random.get_state()[1])  # type: ignore[arg-type]
    assert not run.items[0]["latent_image"].requires_grad


# The identity of upstream modules


def with_module(setup: Setup, module: Any) -> Run:
    """A run in which `module` computes the latents from those of the VAE."""
    run = Run(setup)
    place = run.pipeline.modules.index(run.caches["image"])
    run.pipeline.modules.insert(place, module)
    for index, each in enumerate(run.pipeline.modules):
        each.init(run.pipeline, 42, index, run.state)
    run.next_epoch()
    return run


def scaling_class(pipeline: SimpleNamespace) -> type:
    class ScaleLatents(pipeline.PipelineModule, pipeline.RandomAccessPipelineModule):  # type: ignore[misc,name-defined]
        def __init__(self, factor: Any, noise: float = 0.0):
            super().__init__()
            self.factor, self.noise = factor, noise

        def length(self) -> int:
            return self._get_previous_length("latent_image")

        def get_inputs(self) -> list[str]:
            return ["latent_image"]

        get_outputs = get_inputs

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            factor = self.factor() if callable(self.factor) else self.factor
            noise = self.noise * self._get_rand(variation, index).random()
            return {"latent_image": self._get_previous_item(variation, "latent_image", index) * factor + noise}

    return ScaleLatents


def test_an_unknown_module(setup: Make, pipeline: Any, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is identified by class, settings and position."""
    scale = scaling_class(pipeline)
    with caplog.at_level(logging.INFO, "latentcache"):
        one = with_module(setup(), scale(2.0))
    assert "ScaleLatents is not a known module: its class and settings identify it" in caplog.text
    assert one.encoded["vae"] == NUM
    assert with_module(setup(), scale(2.0)).encoded["vae"] == 0
    three = with_module(setup(), scale(3.0))
    assert three.encoded["vae"] == NUM
    a, b = one.by_photo(), three.by_photo()
    assert all(torch.equal(a[name]["latent_image"] * 1.5, b[name]["latent_image"]) for name in a)
    assert with_module(setup(), type("Other", (scale,), {})(2.0)).encoded["vae"] == NUM
    # It may draw random numbers by position, and so may a known module without a switch.
    always = type("RandomLatentMaskRemove", (scale,), {})
    for kind, name in ((scale, "p00.png"), (always, "p01.png")):
        noisy = kind(2.0, noise=1.0)
        noisy.latent_in_name = "latent_image"
        assert with_module(setup(), noisy).encoded["vae"] == NUM
        (folder / name).rename(folder / f"z{name}")  # this moves all others to another position
        assert with_module(setup(), noisy).encoded["vae"] == NUM


def test_what_cannot_be_read_must_be_stated(setup: Make, pipeline: SimpleNamespace) -> None:
    scale, two = scaling_class(pipeline), partial(float, 2.0)
    with pytest.raises(PipelineError, match=r"ScaleLatents: its setting 'factor' is a partial.*provenance=") as caught:
        with_module(setup(), scale(two))
    assert caught.value.module == "ScaleLatents"
    with pytest.raises(PipelineError, match="setting 'factor' is inf"):
        with_module(setup(), scale(float("inf")))
    for stated in ({"ScaleLatents": "v1"}, {"factor": 2.0}, {"latent_image": "twice"}):
        run = with_module(setup(changes={"provenance": stated}), scale(two))
        assert run.encoded["vae"] == NUM
        assert with_module(setup(changes={"provenance": stated}), scale(two)).encoded["vae"] == 0
    assert with_module(setup(changes={"provenance": {"ScaleLatents": "v2"}}), scale(two)).encoded["vae"] == NUM


@pytest.mark.parametrize("kind", ["image", "text"])
@pytest.mark.parametrize("is_lost", [False, True], ids=["damaged", "lost"])
def test_what_is_gone_ends_the_epoch_and_the_next_start_encodes_it(setup: Make, kind: str, is_lost: bool) -> None:
    expected = setup().start().items
    run = setup().start()  # a new process, which verifies an entry on first read
    assert run.encoded == Counter()
    store = run.setup.cache_dir / kind / "latentcache"
    if is_lost:
        for pack in (store / "packs").rglob("*.safetensors"):
            pack.unlink()
    else:  # one bit of one entry
        damage(store, bits(expected[2][TENSORS[kind]]).numpy().tobytes())
    with run.counting(), pytest.raises((EntryDamagedError, EntryMissingError)) as caught:
        run.cache_items(kind)
    assert run.encoded == Counter(), "the trainer may use the model at this moment"
    (note,) = caught.value.__notes__
    assert "start the training again" in note and (kind == "text" or ".png: " in note)
    again = setup().start()
    assert again.encoded == Counter({part: NUM if is_lost else 1 for part in EACH[kind]})
    assert [exact(item) for item in again.items] == [exact(item) for item in expected]


def test_plain_values_come_back_as_they_were_and_others_are_refused() -> None:
    values = {"a": (1, [2.0, True, "ü"], ()), "b": {"k": [], "l": {"m": (0.1,)}}, "c": False, "d": -(2**70)}
    fields = fields_of(values)
    assert fields.keys() == {PLAIN_FIELD}
    assert repr(values_of(fields)) == repr(values), "the types too"
    for value in (None, object(), np.float32(1), {1: "a"}, torch.tensor([1.0, torch.nan])):
        with pytest.raises(PipelineError, match="'name'"):
            fields_of({"name": value})


def test_each_epoch_continues_a_group_with_the_next_variation_of_its_items() -> None:
    """As in mgds' VariationSorting. Three items have four outputs per epoch."""
    values = {"variations": 2, "balancing": 1.5, "strategy": "REPEATS", "group": 0}
    names = GroupNames("variations", "balancing", "strategy", ("group",), None)
    groups = Groups(names, 3, lambda name, index: values[name])
    assert groups.inputs(0) == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert groups.inputs(1) == [(1, 1), (1, 2), (0, 0), (0, 1)]
