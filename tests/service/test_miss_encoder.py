"""Encoding on request: each entry is encoded once, and a failure affects no other entry.

test_encode_routes.py compares the entries with precache's; tests/sim checks which encoders are on the device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from helpers.photo_files import write_photo
from helpers.serving import wait_until
from helpers.tiny_models import save_diffusers_folder

from latentcache import LatentCache
from latentcache.config import Config
from latentcache.errors import EncodeError, EncoderBusyError, ModelError
from latentcache.models.model_loader import LoadedModels
from latentcache.models.tiny import tiny_parts
from latentcache.precache import plan as planner
from latentcache.precache.run import run_precache
from latentcache.precache.tasks import Task
from latentcache.precache.workspace import Workspace, open_workspace
from latentcache.service import miss_encoder
from latentcache.service.miss_encoder import MissEncoder
from latentcache.utils.locks import ReadersLock

WAIT_S = 60
MakeConfig = Callable[..., Config]
MakeEncoder = Callable[..., MissEncoder]


@pytest.fixture
def parts() -> dict[str, Any]:
    return tiny_parts()


@pytest.fixture
def make_encoder(make_config: MakeConfig, parts: dict[str, Any]) -> Iterator[MakeEncoder]:
    """An encoder over an empty cache in memory, or over the workspace that is given."""
    with ExitStack() as opened:

        def make(config: Config | None = None, workspace: Workspace | None = None, **options: Any) -> MissEncoder:
            options = {"models": LoadedModels(**parts), **options}
            return opened.enter_context(MissEncoder(config or make_config(), workspace or Workspace(), **options))

        yield make


def encode(encoder: MissEncoder, tasks: Iterable[Task]) -> None:
    """Wait until the entries are there."""
    for future in encoder.submit(tasks).values():
        future.result(WAIT_S)


def test_an_entry_that_breaks_the_encoder_fails_alone(make_encoder: MakeEncoder, parts: dict[str, Any]) -> None:
    encoder = make_encoder()
    bad = parts["tokenizer"]("poison").input_ids

    def refuse(module: Any, inputs: Any) -> None:
        if inputs[0][0, : len(bad)].tolist() == bad:
            raise RuntimeError("a kernel failed")

    parts["text_encoder"].register_forward_pre_hook(refuse)
    futures = encoder.submit([encoder.prompt(text) for text in ("one", "poison", "two", "three")])
    with pytest.raises(RuntimeError, match="a kernel failed"):
        futures.pop(encoder.prompt("poison").key).result(WAIT_S)
    for future in futures.values():
        future.result(WAIT_S)
    encode(encoder, [encoder.prompt("later")])

    def damage(module: Any, inputs: Any, output: Any) -> None:
        output.hidden_states[-2].fill_(float("nan"))

    parts["text_encoder_2"].register_forward_hook(damage)
    with pytest.raises(EncodeError, match=r"prompt: not a number: the text encoders gave nan") as caught:
        encode(encoder, [encoder.prompt("not a number")])
    assert caught.value.problem == "bad-output"


def test_an_idle_encoder_prunes_the_cache_to_its_size(
    make_config: MakeConfig, make_encoder: MakeEncoder, tmp_path: Path
) -> None:
    """As after a precache, entries that no manifest uses are pruned, unless a reader may need them."""
    config = make_config(**{"cache.max_bytes": 0})
    run_precache(config)
    with open_workspace(config.cache) as workspace:
        assert workspace.path is not None
        needed = set(workspace.store.keys())
        encoder = make_encoder(config, workspace, idle_s=0.1)
        photos = [write_photo(tmp_path / "new.png", seed, (80, 144)).read_bytes() for seed in (10, 17)]
        [(_, task)], [(_, other)] = map(encoder.image, photos)
        reader = ReadersLock(workspace.path / "readers.lock")
        (workspace.path / "manifests" / "new").touch()
        encode(encoder, [task])
        wait_until(lambda: encoder.loaded is None, WAIT_S)
        time.sleep(0.2)
        assert set(workspace.store.keys()) == {*needed, task.key}, "a reader began before the manifests changed"
        reader.close()
        encode(encoder, [other])
        wait_until(lambda: set(workspace.store.keys()) == needed, WAIT_S)
        encode(encoder, [task])
        assert workspace.store.find([task.key]), "it can be requested again"


def test_the_queue_is_bounded(
    make_encoder: MakeEncoder, parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, entered = threading.Event(), threading.Event()

    def hold(module: Any, inputs: Any) -> None:
        entered.set()
        assert opened.wait(WAIT_S)

    monkeypatch.setattr(miss_encoder, "MAX_WAITING", 3)
    encoder = make_encoder()
    parts["text_encoder"].register_forward_pre_hook(hold)
    first = encoder.submit([encoder.prompt("first")])
    assert entered.wait(WAIT_S)
    waiting = encoder.submit([encoder.prompt(f"{number}") for number in range(3)])
    with pytest.raises(EncoderBusyError, match=r"3 entries are queued .* no room for 1 more") as busy:
        encoder.submit([encoder.prompt("one more")])
    assert busy.value.retry_after_s >= 1
    assert encoder.submit([encoder.prompt("0")]).keys() <= waiting.keys(), "joining one that waits needs no room"
    opened.set()
    for future in (*first.values(), *waiting.values()):
        future.result(WAIT_S)
    encode(encoder, [encoder.prompt("one more")])


def test_prompts_join_the_manifest_and_a_precache_keeps_them(
    make_config: MakeConfig, make_encoder: MakeEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    run_precache(config)
    with open_workspace(config.cache) as workspace:
        encoder = make_encoder(config, workspace)
        genuine = planner.make_plan

        def plan_then_encode(*arguments: Any, **options: Any) -> Any:
            """A service encodes a prompt while precache is at work."""
            plan = genuine(*arguments, **options)
            encode(encoder, [encoder.prompt("from the service"), encoder.prompt("bad", negative=True)])
            encoder.close()
            return plan

        monkeypatch.setattr("latentcache.precache.run.make_plan", plan_then_encode)
        run_precache(make_config(**{"validation.prompts": ["x"]}))
    with LatentCache(config.cache.path) as cache:
        assert cache.prompt("bad", negative=True, device="cpu")
        assert all(cache.prompt(text, device="cpu") for text in ("from the service", "x", "a validation prompt"))


def test_weights_that_changed_since_the_start_are_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    folder = save_diffusers_folder(tiny_parts(), tmp_path / "model")
    config = make_config(**{"model.path": str(folder)})
    with open_workspace(config.cache) as workspace, MissEncoder(config, workspace, idle_s=0.1) as encoder:
        encode(encoder, [encoder.prompt("before")])
        wait_until(lambda: encoder.loaded is None, WAIT_S)
        other = save_diffusers_folder(tiny_parts(seed=1), tmp_path / "other")
        for part in ("text_encoder", "vae"):
            [weights] = (other / part).glob("*.safetensors")
            weights.replace(folder / part / weights.name)
        [(_, image)] = encoder.image(write_photo(tmp_path / "new.png", 10, (80, 144)).read_bytes())
        for task in (encoder.prompt("after"), image):
            with pytest.raises(ModelError, match="changed since they were first read"):
                encode(encoder, [task])
        assert len(list(workspace.store.keys())) == 1
