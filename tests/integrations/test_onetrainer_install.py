"""Putting the cache in DiskCache's place in OneTrainer's loaders, and taking it out again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.pipeline_host import host
from helpers.pipeline_sdxl import Setup, concept, write_photos

from latentcache.errors import PipelineError
from latentcache.integrations import onetrainer
from latentcache.integrations.onetrainer import LOADERS


def put(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> ModuleType:
    """A module of this dotted name, and its parents, for the time of a test."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        parent = ".".join(parts[:end])
        if parent not in sys.modules:
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    module = ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def mgds(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The own host's base classes under mgds' names."""
    own = host("own")
    put(monkeypatch, "mgds.PipelineModule", PipelineModule=own.PipelineModule)
    name = "SingleVariationRandomAccessPipelineModule"
    put(monkeypatch, f"mgds.pipelineModuleTypes.{name}", **{name: own.SingleVariationRandomAccessPipelineModule})
    return own


@pytest.fixture
def loaders(monkeypatch: pytest.MonkeyPatch, mgds: SimpleNamespace) -> list[ModuleType]:
    return [put(monkeypatch, name, DiskCache=f"the DiskCache of {name}") for name in LOADERS]


def test_importing_the_adapter_imports_no_mgds_and_no_release_of_diffusers() -> None:
    """OneTrainer has its own release of diffusers and of transformers: none of theirs is needed to cache its parts."""
    code = (
        "import sys; sys.modules |= dict.fromkeys(('mgds', 'diffusers', 'transformers', 'accelerate'))\n"
        "import latentcache.integrations.onetrainer as onetrainer\n"
        "print([name for name in sys.modules if name.startswith('mgds.')])\n"
        "from latentcache.errors import PipelineError\n"
        "try: onetrainer.LatentCacheModule\n"
        "except PipelineError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first == "[]" and second.startswith("mgds.PipelineModule cannot be imported (")


def test_install_and_undo(loaders: list[ModuleType], mgds: SimpleNamespace) -> None:
    before = [loader.DiskCache for loader in loaders]
    undo = onetrainer.install()
    assert all(issubclass(loader.DiskCache, mgds.LatentCacheModule) for loader in loaders)
    undo()
    assert [loader.DiskCache for loader in loaders] == before
    undo()
    assert [loader.DiskCache for loader in loaders] == before


class Model:
    """A trainer's model with the newer functions."""

    def __init__(self) -> None:
        self.unet, self.vae = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).eval()
        self.calls: list[str] = []

    def materialize(self, *names: str) -> None:
        self.calls.append(f"materialize {names}")

    def evict(self, *names: str) -> None:
        self.calls.append(f"evict {names}")


def test_what_is_installed_caches_as_configured(
    loaders: list[ModuleType], mgds: SimpleNamespace, tmp_path: Path
) -> None:
    """One folder for all, which the trainer does not empty; modes of the model are put back."""
    model = Model()
    seen: list[bool] = []

    def before(kind: str) -> None:
        seen.append(model.unet.training)
        model.unet.eval()

    undo = onetrainer.install(model=lambda: model, cache_dir=tmp_path / "shared", provenance={"build": 7})
    pipeline = SimpleNamespace(**(vars(mgds) | {"LatentCacheModule": loaders[0].DiskCache}))
    folder = write_photos(tmp_path / "photos", 2)

    def setup(place: str) -> Setup:
        return Setup(pipeline, tmp_path / place, [concept(folder)], before=before)

    run = setup("run").start()
    assert run.encoded["vae"] == 2 and seen == [True, True] and model.unet.training and not model.vae.training
    assert (tmp_path / "shared" / "latentcache" / "CACHE.json").exists() and not (tmp_path / "run").exists()
    assert setup("another run").start().encoded.total() == 0
    undo()
    later = onetrainer.install(cache_dir=tmp_path / "shared", provenance={"build": 8})
    pipeline.LatentCacheModule = loaders[1].DiskCache
    assert setup("a third run").start().encoded["vae"] == 2
    later()


def test_restoring_restores_after_an_error_of_the_trainers_own_function() -> None:
    model = Model()
    kept = onetrainer.PlacementGuard(model)

    def fail() -> None:
        raise RuntimeError("the trainer's own function")

    module = SimpleNamespace(before_cache_fun=model.unet.eval, after_cache_fun=fail)
    kept.around(module)
    module.before_cache_fun()
    assert not model.unet.training
    with pytest.raises(RuntimeError, match="the trainer's own"):
        module.after_cache_fun()
    assert model.unet.training


def test_a_part_that_was_on_meta_keeps_what_it_has_loaded() -> None:
    model = Model()
    model.vae = torch.nn.Linear(2, 2, device="meta").eval()
    kept = onetrainer.PlacementGuard(model)
    kept.before()
    model.vae.weight = torch.nn.Parameter(torch.ones(2, 2))
    model.vae.train()
    kept.after()
    assert model.vae.weight.device.type == "cpu" and not model.vae.training


def test_a_part_that_lost_its_values_is_an_error_and_the_others_come_back() -> None:
    model = Model()
    kept = onetrainer.PlacementGuard(model)
    kept.before()
    model.unet.to("meta").eval()
    model.vae.train()
    with pytest.raises(PipelineError, match=r"unet\.weight had values .* Load the model again"):
        kept.after()
    assert model.unet.training and not model.vae.training
