"""Replacing DiskCache in OneTrainer's loaders, and undoing it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers.pipeline_host import host
from helpers.pipeline_sdxl import Setup, concept, write_photos

from latentcache.errors import PipelineError
from latentcache.integrations import onetrainer
from latentcache.integrations.onetrainer import LOADERS


@pytest.fixture
def mgds(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The base classes of the tests' host under mgds' names."""
    own = host("own")
    single = "SingleVariationRandomAccessPipelineModule"
    homes = {"mgds.PipelineModule": "PipelineModule", f"mgds.pipelineModuleTypes.{single}": single}
    for name, attribute in homes.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**{attribute: getattr(own, attribute)}))
    return own


@pytest.fixture
def loaders(monkeypatch: pytest.MonkeyPatch, mgds: SimpleNamespace) -> list[ModuleType]:
    made = [ModuleType(name) for name in LOADERS]
    for module in made:
        module.DiskCache = f"the DiskCache of {module.__name__}"  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


def test_importing_the_adapter_imports_no_mgds_and_no_release_of_diffusers() -> None:
    """OneTrainer has its own releases of diffusers and transformers, and caching its parts needs neither."""
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


class Model:
    """A trainer's model with the newer functions for moving parts."""

    def __init__(self) -> None:
        self.unet, self.vae = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).eval()

    def materialize(self, *names: str) -> None: ...

    evict = materialize


def test_what_is_installed_caches(loaders: list[ModuleType], mgds: SimpleNamespace, tmp_path: Path) -> None:
    """All caches share one folder outside the trainer's; the model's modes are restored; installing can be undone."""
    model, originals = Model(), [loader.DiskCache for loader in loaders]
    seen: list[bool] = []

    def before(kind: str) -> None:
        seen.append(model.unet.training)
        model.unet.eval()

    folder = write_photos(tmp_path / "photos", 2)

    def setup(place: str, loader: ModuleType) -> Setup:
        pipeline = SimpleNamespace(**(vars(mgds) | {"LatentCacheModule": loader.DiskCache}))
        return Setup(pipeline, tmp_path / place, [concept(folder)], before=before)

    undo = onetrainer.install(model=lambda: model, cache_dir=tmp_path / "shared", provenance={"build": 7})
    assert all(issubclass(loader.DiskCache, mgds.LatentCacheModule) for loader in loaders)
    run = setup("run", loaders[0]).start()
    assert run.encoded["vae"] == 2 and seen == [True, True] and model.unet.training and not model.vae.training
    assert (tmp_path / "shared" / "latentcache" / "CACHE.json").exists() and not (tmp_path / "run").exists()
    assert setup("another run", loaders[1]).start().encoded.total() == 0
    undo()
    assert [loader.DiskCache for loader in loaders] == originals
    later = onetrainer.install(cache_dir=tmp_path / "shared", provenance={"build": 8})
    undo()  # does not undo another installation
    assert setup("a third run", loaders[1]).start().encoded["vae"] == 2
    later()
    assert [loader.DiskCache for loader in loaders] == originals


def test_the_placement_is_restored_after_an_error_and_lost_weights_are_an_error() -> None:
    model = Model()
    module: Any = SimpleNamespace(before_cache_fun=model.unet.eval, after_cache_fun=Mock(side_effect=KeyboardInterrupt))
    onetrainer.PlacementGuard(model).around(module)
    module.before_cache_fun()
    assert not model.unet.training
    with pytest.raises(KeyboardInterrupt):
        module.after_cache_fun()
    assert model.unet.training
    # Weights that were loaded meanwhile stay where they are.
    model.vae = torch.nn.Linear(2, 2, device="meta").eval()
    kept = onetrainer.PlacementGuard(model)
    kept.before()
    model.vae.weight = torch.nn.Parameter(torch.ones(2, 2))
    model.vae.train()
    model.unet.to("meta").eval()
    with pytest.raises(PipelineError, match=r"unet\.weight had values .* Load the model again"):
        kept.after()
    assert model.vae.weight.device.type == "cpu"
    assert model.unet.training and not model.vae.training, "the others come back"
