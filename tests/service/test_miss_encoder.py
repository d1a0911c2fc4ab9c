"""Entries that are encoded when they are requested: the same as precache's, once each, and no failure but its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny_models import save_diffusers_folder
from PIL import Image

from latentcache import LatentCache
from latentcache.config import Config
from latentcache.errors import (
    EncodeError,
    EncoderBusyError,
    ModelError,
)
from latentcache.models.model_loader import LoadedModels, ModelLoader
from latentcache.models.tiny import tiny_parts
from latentcache.precache import plan as planner
from latentcache.precache.run import run_precache
from latentcache.precache.tasks import Task
from latentcache.precache.workspace import Workspace, open_workspace
from latentcache.service import miss_encoder
from latentcache.service.miss_encoder import MissEncoder
from latentcache.store.base import Store
from latentcache.store.entry import as_array
from latentcache.utils.locks import ReadersLock

WAIT_S = 60


class Gate:
    """A hook of a text encoder: calls wait while it is shut, and are counted."""

    def __init__(self, module: torch.nn.Module):
        self.num_calls, self.error = 0, None
        self.opened, self.entered = threading.Event(), threading.Event()
        self.opened.set()
        module.register_forward_pre_hook(self)

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        self.num_calls += 1
        self.entered.set()
        assert self.opened.wait(WAIT_S)


@pytest.fixture
def parts() -> dict[str, Any]:
    return tiny_parts()


@pytest.fixture
def gate(parts: dict[str, Any]) -> Gate:
    return Gate(parts["text_encoder"])


@pytest.fixture
def make_encoder(make_config: Callable[..., Config], parts: dict[str, Any]) -> Iterator[Callable[..., MissEncoder]]:
    """An encoder over an empty cache in memory, or over the workspace that is given."""
    made = []

    def make(config: Config | None = None, workspace: Workspace | None = None, **options: Any) -> MissEncoder:
        options.setdefault("models", LoadedModels(**parts))
        made.append(MissEncoder(config or make_config(), workspace or Workspace(), **options))
        return made[-1]

    yield make
    for encoder in made:
        encoder.close()


def entries(store: Store) -> dict[str, tuple[Any, dict[str, bytes]]]:
    """Identity and bytes of each entry."""
    found = {key: store.get(key) for key in store.keys()}
    return {
        key: (entry.record.identity, {name: as_array(tensor).tobytes() for name, tensor in entry.tensors.items()})
        for key, entry in found.items()
    }


def png(size: tuple[int, int] = (80, 144), seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    data = BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()


@pytest.mark.parametrize(
    "changes",
    [
        {"encode.clip_skip": 1, "datasets.0.flip": True},
        {"encode.image_output": "sample", "encode.seed": 7, "encode.store_dtype": "float16", "cache.salt": "s"},
    ],
    ids=["clip skip and flip", "a seeded draw"],
)
def test_entries_are_those_of_precache(
    make_config: Callable[..., Config], make_encoder: Callable[..., MissEncoder], photos: Path, changes: dict[str, Any]
) -> None:
    config, precached = make_config(**changes), Workspace()
    run_precache(config, workspace=precached)
    encoder = make_encoder(config, ours := Workspace())
    tasks: list[Task] = [encoder.prompt("", negative=True), encoder.prompt("ugly", negative=True)]
    tasks += [encoder.prompt(text) for text in ("a validation prompt", "", "a red house", "a house in the rain")]
    tasks += [encoder.prompt(text) for text in ("a blue car", "a tree")]
    geometries = {}
    for path in sorted(photos.rglob("*.png")):
        for ref, task in encoder.image(path.read_bytes(), name=path.name):
            geometries[ref.key] = ref.geometry
            tasks.append(task)
    for future in encoder.submit(tasks).values():
        future.result(WAIT_S)
    assert entries(ours.store) == entries(precached.store) and len(geometries) >= 5
    manifest = precached.manifests.read("photos")
    assert manifest is not None
    assert geometries == {ref.key: ref.geometry for row in manifest.rows.values() for ref in row.images}


def test_what_precache_made_is_there_without_any_model(config: Config, tmp_path: Path, photos: Path) -> None:
    folder = save_diffusers_folder(tiny_parts(), tmp_path / "model")
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})
    with open_workspace(config.cache) as workspace:
        run_precache(config, workspace=workspace)
        models = ModelLoader(str(folder), memo=workspace.memo)
        models._module = None  # type: ignore[assignment,method-assign]  # to load a module is an error
        with MissEncoder(config, workspace, models=models) as encoder:
            tasks: list[Task] = [encoder.prompt("a red house"), encoder.prompt("ugly", negative=True)]
            tasks += [task for _, task in encoder.image((photos / "a.png").read_bytes())]
            assert encoder.submit(tasks) == {}
            assert encoder.loaded is None


def test_one_that_breaks_the_encoder_costs_the_others_nothing(
    make_encoder: Callable[..., MissEncoder], parts: dict[str, Any], gate: Gate
) -> None:
    encoder = make_encoder()
    bad = parts["tokenizer"]("poison").input_ids

    def refuse(module: torch.nn.Module, inputs: Any) -> None:
        if inputs[0][0, : len(bad)].tolist() == bad:
            raise RuntimeError("a kernel failed")

    parts["text_encoder"].register_forward_pre_hook(refuse)
    texts = ["one", "poison", "two", "three"]
    futures = encoder.submit([encoder.prompt(text) for text in texts])
    again = encoder.submit([encoder.prompt("poison")])
    poisoned = encoder.prompt("poison").key
    for key, future in (*futures.items(), *again.items()):
        if key == poisoned:
            with pytest.raises(RuntimeError, match="a kernel failed"):
                future.result(WAIT_S)
        else:
            future.result(WAIT_S)
    [later] = encoder.submit([encoder.prompt("later")]).values()
    later.result(WAIT_S)


def test_an_output_that_cannot_be_used_is_refused(
    make_encoder: Callable[..., MissEncoder], parts: dict[str, Any]
) -> None:
    encoder = make_encoder()

    def damage(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        output.hidden_states[-2].fill_(float("nan"))

    parts["text_encoder_2"].register_forward_hook(damage)
    [future] = encoder.submit([encoder.prompt("not a number")]).values()
    with pytest.raises(EncodeError, match=r"prompt: not a number: the text encoders gave nan") as caught:
        future.result(WAIT_S)
    assert caught.value.problem == "bad-output"


def settle(encoder: MissEncoder) -> None:
    """Wait until the models have left the device, because nothing came."""
    until = time.monotonic() + WAIT_S
    while encoder.loaded and time.monotonic() < until:
        time.sleep(0.02)
    assert encoder.loaded is None


def test_what_is_beyond_the_size_of_the_cache_goes_when_nothing_comes(
    make_config: Callable[..., Config], make_encoder: Callable[..., MissEncoder]
) -> None:
    """As after a precache: of what no manifest refers to. What may be needed by a reader stays."""
    config = make_config(**{"cache.max_bytes": 0})
    run_precache(config)
    with open_workspace(config.cache) as workspace:
        needed = set(workspace.store.keys())
        encoder = make_encoder(config, workspace, idle_s=0.2)
        [(_, task)] = encoder.image(png())
        reader = ReadersLock(config.cache.path / "readers.lock")
        (config.cache.path / "manifests" / "new").touch()
        encoder.submit([task])[task.key].result(WAIT_S)
        settle(encoder)
        time.sleep(0.3)
        assert set(workspace.store.keys()) == {*needed, task.key}, "a reader began before the manifests changed"
        reader.close()
        [(_, other)] = encoder.image(png(seed=7))
        encoder.submit([other])[other.key].result(WAIT_S)
        until = time.monotonic() + WAIT_S
        while set(workspace.store.keys()) != needed and time.monotonic() < until:
            time.sleep(0.02)
        assert set(workspace.store.keys()) == needed
        encoder.submit([task])[task.key].result(WAIT_S)
        assert workspace.store.find([task.key]), "it can be requested again"


def test_the_encoders_of_one_kind_are_on_the_device(make_encoder: Callable[..., MissEncoder]) -> None:
    encoder = make_encoder()
    [(_, image)] = encoder.image(png())
    for task, kind in ((encoder.prompt("first"), "text"), (image, "image"), (encoder.prompt("second"), "text")):
        [future] = encoder.submit([task]).values()
        future.result(WAIT_S)
        assert encoder.loaded == kind


def test_the_queue_has_an_end(
    make_encoder: Callable[..., MissEncoder], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(miss_encoder, "MAX_WAITING", 3)
    encoder = make_encoder()
    gate.opened.clear()
    first = encoder.submit([encoder.prompt("first")])
    assert gate.entered.wait(WAIT_S)
    waiting = encoder.submit([encoder.prompt(f"{number}") for number in range(3)])
    with pytest.raises(EncoderBusyError, match="3 entries wait to be encoded, and there is no room for 1 more") as busy:
        encoder.submit([encoder.prompt("one more")])
    assert busy.value.retry_after_s >= 1
    assert encoder.submit([encoder.prompt("0")]).keys() <= waiting.keys(), "joining one that waits needs no room"
    gate.opened.set()
    for future in (*first.values(), *waiting.values()):
        future.result(WAIT_S)
    [later] = encoder.submit([encoder.prompt("one more")]).values()
    later.result(WAIT_S)


def test_prompts_join_the_manifest_and_a_precache_keeps_them(
    make_config: Callable[..., Config], make_encoder: Callable[..., MissEncoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    run_precache(config)
    with open_workspace(config.cache) as workspace:
        encoder = make_encoder(config, workspace)
        genuine = planner.make_plan

        def plan_then_encode(*arguments: Any, **options: Any) -> Any:
            """A service encodes a prompt while precache is at work."""
            plan = genuine(*arguments, **options)
            prompts = [encoder.prompt("from the service"), encoder.prompt("bad", negative=True)]
            for future in encoder.submit(prompts).values():
                future.result(WAIT_S)
            encoder.close()
            return plan

        monkeypatch.setattr("latentcache.precache.run.make_plan", plan_then_encode)
        run_precache(make_config(**{"validation.prompts": ["x"]}))
    with LatentCache(config.cache.path) as cache:
        assert cache.prompt("bad", negative=True, device="cpu")["prompt_embeds"].shape == (1, 77, 72)
        for text in ("from the service", "x", "a validation prompt"):
            assert cache.prompt(text, device="cpu")["prompt_embeds"].shape == (1, 77, 72)


def test_weights_that_changed_since_the_start_are_refused(make_config: Callable[..., Config], tmp_path: Path) -> None:
    folder = save_diffusers_folder(tiny_parts(), tmp_path / "model")
    config = make_config(**{"model.path": str(folder)})
    with open_workspace(config.cache) as workspace, MissEncoder(config, workspace, idle_s=0.1) as encoder:
        [future] = encoder.submit([encoder.prompt("before")]).values()
        future.result(WAIT_S)
        while encoder.loaded:
            time.sleep(0.02)
        other = save_diffusers_folder(tiny_parts(seed=1), tmp_path / "other")
        for part in ("text_encoder", "vae"):
            [weights] = (other / part).glob("*.safetensors")
            weights.replace(folder / part / weights.name)
        [(_, image)] = encoder.image(png())
        for task in (encoder.prompt("after"), image):
            [future] = encoder.submit([task]).values()
            with pytest.raises(ModelError, match="changed since they were first read"):
                future.result(WAIT_S)
        assert len(list(workspace.store.keys())) == 1
