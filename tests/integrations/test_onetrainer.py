"""A cache in a trainer's pipeline returns the right values and encodes each once, whatever is edited or interrupted.

Each test runs in the tests' own host, and in mgds if it can be imported (pipeline_host.py).
"""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pack_damage import damage
from helpers.photo_files import write_photo
from helpers.pipeline_host import host
from helpers.pipeline_sdxl import RECORDED, Run, Setup, concept, exact, write_photos
from helpers.tensor_bits import bits

from latentcache.dataset.samples import Signature
from latentcache.errors import EntryDamagedError, EntryMissingError, ItemsError, PipelineError
from latentcache.integrations.onetrainer.items import GroupNames, Groups
from latentcache.integrations.onetrainer.values import PLAIN_FIELD, fields_of, values_of
from latentcache.models.tiny import tiny_parts
from latentcache.store.disk import DiskStore
from latentcache.utils.signals import handlers_kept

Make = Callable[..., Setup]

NUM = 6
EVERYTHING = Counter(vae=NUM, text_encoder=NUM, text_encoder_2=NUM)


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    return tiny_parts(0)


@pytest.fixture(params=["own", "mgds"])
def pipeline(request: pytest.FixtureRequest) -> SimpleNamespace:
    return host(request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "photos", NUM)


@pytest.fixture
def setup(pipeline: SimpleNamespace, tmp_path: Path, folder: Path, parts: dict[str, Any]) -> Make:
    """A function that makes a setup over the photos, by default always with the same models."""

    def make(**changes: Any) -> Setup:
        settings = {"host": pipeline, "cache_dir": tmp_path / "cache", "concepts": [concept(folder)], "parts": parts}
        return Setup(**(settings | changes))

    return make


def assert_same_items(run: Run, expected: dict[str, dict[str, Any]]) -> None:
    """A cache's items equal the expected ones, which may have further values, by photo."""
    found = run.by_photo()
    assert found.keys() == expected.keys()
    for name, item in found.items():
        assert exact(item) == exact({key: expected[name][key] for key in item})


def live(setup: Setup) -> dict[str, dict[str, Any]]:
    """The items of the same pipeline without a cache, by photo."""
    return of_pipeline(Setup(**(vars(setup) | {"cached": False})).start())


def of_pipeline(run: Run) -> dict[str, dict[str, Any]]:
    return {Path(item["image_path"]).name: item for item in run.pipeline}


def add(folder: Path, name: str, seed: int) -> None:
    write_photo(folder / f"{name}.png", seed, (96, 64)).with_suffix(".txt").write_text(name, encoding="utf-8")


def test_fresh_values_are_those_without_a_cache_and_are_used_again(setup: Make) -> None:
    run = setup().start()
    assert run.encoded == EVERYTHING and run.begun == ["image", "after", "text", "after"]
    expected, got, first = live(setup()), of_pipeline(run), run.by_photo()
    assert got.keys() == expected.keys() and len(got) == NUM
    assert all(exact(item) == exact(expected[name]) for name, item in got.items())
    for changes in ({}, {"parts": tiny_parts(0)}):  # the same weights in other objects, as in another process
        run = setup(**changes).start()
        assert run.encoded == Counter() and run.begun == []
        assert_same_items(run, first)


def test_of_renamed_and_added_files_only_the_added_are_encoded(setup: Make, folder: Path) -> None:
    before = setup().start().by_photo()
    for suffix in (".png", ".txt"):  # this moves all others to another position
        (folder / f"p00{suffix}").rename(folder / f"zz{suffix}")
    run = setup().start()
    assert run.encoded == Counter()
    assert torch.equal(run.by_photo()["zz.png"]["latent_image"], before["p00.png"]["latent_image"])
    add(folder, "a", 70)
    add(folder, "p01b", 71)
    assert setup().start().encoded == Counter(vae=2, text_encoder=2, text_encoder_2=2)
    variations = setup(concepts=[concept(folder, image_variations=2)]).start(num_epochs=2)
    assert variations.encoded == Counter(), "without augmentation variations share one entry"


def test_crop_jitter_makes_the_images_behind_a_new_one_new(setup: Make, folder: Path) -> None:
    assert RECORDED["concept"]["image"]["enable_crop_jitter"] is True
    for path in folder.glob("*.png"):
        write_photo(path, int(path.stem[1:]), (100, 130))

    def jittering() -> Setup:
        return setup(concepts=[concept(folder, **{"image.enable_crop_jitter": True})])

    run, expected = jittering().start(), live(jittering())
    assert run.encoded == EVERYTHING and len({item["crop_offset"] for item in expected.values()}) > 1
    assert_same_items(run, expected)
    assert jittering().start().encoded == Counter()
    add(folder, "zz", 70)  # it comes last
    assert jittering().start().encoded["vae"] == 1
    add(folder, "p03b", 71)  # three come after it
    assert jittering().start().encoded == Counter(vae=4, text_encoder=1, text_encoder_2=1)


def test_variations(setup: Make, folder: Path) -> None:
    """Each variation has the values that mgds would compute, and each is encoded once."""
    for path in folder.glob("*.txt"):
        path.write_text("one\ntwo\nthree\nfour\nfive", encoding="utf-8")
    concepts = [concept(folder, image_variations=2, text_variations=2, **{"image.enable_random_flip": True})]
    run = setup(concepts=concepts).start()
    cold, expected = [], []
    for epoch in range(4):
        cold.append(run.items)
        image, text = run.caches["image"], run.caches["text"]
        with torch.no_grad():
            inputs = [(image, "latent_image"), (text, "tokens_1"), (text, "text_encoder_2_pooled_state")]
            expected.append([{n: cache._get_previous_item(epoch % 2, n, i) for cache, n in inputs} for i in range(NUM)])
        run.next_epoch()
    assert run.encoded["vae"] <= 2 * NUM * 5  # the values of `expected` were encoded without a cache
    for epoch in range(4):
        for item, values in zip(cold[epoch], expected[epoch], strict=True):
            assert exact({name: item[name] for name in values}) == exact(values)
    for name in ("latent_image", "tokens_1"):
        assert any(not torch.equal(a[name], b[name]) for a, b in zip(*cold[:2], strict=True))
    again = setup(concepts=concepts).start(4)
    assert again.encoded == Counter() and again.begun == []


@pytest.mark.parametrize(("strategy", "balancing", "num_out"), [("REPEATS", 2.5, 15), ("SAMPLES", 4, 4)])
def test_balancing(setup: Make, tmp_path: Path, folder: Path, strategy: str, balancing: float, num_out: int) -> None:
    """Counted as in VariationSorting, over several epochs: cached and uncached values are joined by position."""
    other = write_photos(tmp_path / "others", 3)
    disabled = concept(tmp_path / "others", seed=9, enabled=False)
    concepts = [concept(folder, balancing=balancing, balancing_strategy=strategy), disabled, concept(other, seed=2)]
    run = setup(concepts=concepts).start()
    seen: list[str] = []
    for _ in range(3):
        assert run.caches["image"].length() == run.caches["text"].length() == num_out + 3
        sorting = run.pipeline.modules[-3]
        for index, item in enumerate(run.items):
            caption = Path(item["image_path"]).with_suffix(".txt").read_text(encoding="utf-8")
            assert sorting.get_item(run.caches["image"].current_variation, index, "prompt_1") == {"prompt_1": caption}
        seen += [Path(item["image_path"]).name for item in run.items[:num_out]]
        run.next_epoch()
    assert seen == [f"p{number % NUM:02}.png" for number in range(3 * num_out)]


def test_two_processes_encode_nothing_twice(setup: Make) -> None:
    barrier = threading.Barrier(2)
    both = {"before": lambda kind: barrier.wait(60) if kind == "image" else None}
    setups = [setup(**both, parts=tiny_parts(0)) for _ in range(2)]  # a model that ran may hold a lock
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(Setup.start, setups)
    assert one.encoded + other.encoded == EVERYTHING, "nothing is encoded by both"
    assert_same_items(one, other.by_photo())
    assert setup().start().encoded == Counter()


def test_edited_captions_and_images_are_noticed(setup: Make, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even an image with the same mtime and size, whose digest was cached."""
    monkeypatch.setattr(Signature, "is_settled", lambda signature: True)  # caches digests of new files too
    path = folder / "p04.png"
    write_photo(path, 50, (96, 64), compress_level=0)
    before, old = setup().start().by_photo(), path.stat()
    (folder / "p02.txt").write_text("quite another caption", encoding="utf-8")
    run = setup().start()
    assert run.encoded == Counter(text_encoder=1, text_encoder_2=1) and run.begun == ["text", "after"]
    after = run.by_photo()
    assert not torch.equal(after["p02.png"]["tokens_1"], before["p02.png"]["tokens_1"])
    assert exact(after["p01.png"]) == exact(before["p01.png"])
    write_photo(path, 51, (96, 64), compress_level=0)
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (old.st_size, old.st_mtime_ns)
    run = setup().start()
    assert run.encoded == Counter(vae=1)
    assert_same_items(run, live(setup()))
    assert not torch.equal(run.by_photo()["p04.png"]["latent_image"], before["p04.png"]["latent_image"])


@pytest.mark.parametrize("kind", ["image", "text"])
def test_what_changes_during_caching_is_not_stored_under_its_old_key(setup: Make, folder: Path, kind: str) -> None:
    path = folder / ("p02.png" if kind == "image" else "p02.txt")
    other, before = (folder / f"p04{path.suffix}").read_bytes(), path.read_bytes()
    with pytest.raises(ItemsError, match="changed before it was encoded"):
        setup(before=lambda begun: path.write_bytes(other) if begun == kind else None).start()
    path.write_bytes(before)
    assert_same_items(setup().start(), live(setup()))


def test_an_insert_followed_by_a_change_of_a_text_setting_only(setup: Make, folder: Path) -> None:
    """With DiskCache every caption went to the wrong image: its two caches had different orders."""
    setup().start()
    (folder / "p05.png").unlink()
    add(folder, "a", 70)
    run = setup(concepts=[concept(folder, **{"text.keep_tags_count": 2})]).start()
    assert run.encoded == Counter(vae=1, text_encoder=1, text_encoder_2=1)
    assert_same_items(run, live(setup()))


TEXTS = Counter(text_encoder=NUM, text_encoder_2=NUM)
"""The outputs of both text encoders are one item of the pipeline."""


def swapped(part: str) -> dict[str, Any]:
    return {"parts": tiny_parts(0) | {part: tiny_parts(1)[part]}}


@pytest.mark.parametrize(
    ("changes", "name", "encoded"),
    [
        (lambda: swapped("vae"), "latent_image", Counter(vae=NUM)),
        (lambda: swapped("text_encoder"), "text_encoder_1_hidden_state", TEXTS),
        (lambda: swapped("text_encoder_2"), "text_encoder_2_hidden_state", TEXTS),
        (lambda: {"clip_layer": -1}, "text_encoder_1_hidden_state", TEXTS),
        (lambda: {"resolution": "110"}, "latent_image", Counter(vae=NUM)),
    ],
    ids=["vae", "text_encoder", "text_encoder_2", "layer", "resolution"],
)
def test_another_model_or_setting(setup: Make, changes: Any, name: str, encoded: Counter[str]) -> None:
    """Only its outputs are encoded again."""
    before, changed = setup().start().by_photo(), changes()
    run = setup(**changed).start()
    assert run.encoded == encoded
    assert_same_items(run, live(setup(**changed)))
    assert not any(torch.equal(item[name], before[photo][name]) for photo, item in run.by_photo().items())
    assert setup().start().encoded == Counter(), "the entries of the first models are still there"


def test_an_epoch_waits_for_a_compaction(setup: Make, folder: Path) -> None:
    run = setup().start()
    add(folder, "later", 99)
    with DiskStore(run.setup.cache_dir / "image" / "latentcache") as store, ExitStack() as held:
        held.enter_context(store.lock("compact", shared=False))
        threading.Timer(2, held.close).start()
        assert setup().start().encoded["vae"] == 1


# Interruption, random streams, what identifies upstream modules, and damage

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
