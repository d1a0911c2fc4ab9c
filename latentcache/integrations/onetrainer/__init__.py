"""Plug-in for OneTrainer and mgds: `LatentCacheModule` replaces mgds' DiskCache.

    from latentcache.integrations import onetrainer

    undo = onetrainer.install(model=lambda: trainer.model)   # before trainer.start()

mgds is imported when `LatentCacheModule` is first used. It is not a dependency: OneTrainer brings it.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from latentcache.errors import PipelineError
from latentcache.integrations.onetrainer.module import CacheModule
from latentcache.integrations.onetrainer.module_placement import PlacementGuard

__all__ = ["LatentCacheModule", "PlacementGuard", "install", "module_class"]

LOADERS = (
    "modules.dataLoader.mixin.DataLoaderText2ImageMixin",
    "modules.dataLoader.StableDiffusionFineTuneVaeDataLoader",
)
"""OneTrainer's modules that construct a DiskCache."""
NAME = "DiskCache"
_BASES = ("mgds.PipelineModule", "mgds.pipelineModuleTypes.SingleVariationRandomAccessPipelineModule")
"""Modules of mgds, each with a class of the same name."""


@functools.cache
def module_class(pipeline_module: type, single_variation: type) -> type[CacheModule]:
    """LatentCacheModule with these base classes: mgds' own, or those of a host with the same contract."""
    bases = (CacheModule, pipeline_module, single_variation)
    return type("LatentCacheModule", bases, {"__module__": __name__, "__doc__": CacheModule.__doc__})


def _mgds_module_class() -> type[CacheModule]:
    """LatentCacheModule with the base classes of the installed mgds. PipelineError if there is none."""
    return module_class(*(_attribute(_import(name, "mgds"), name.rpartition(".")[2]) for name in _BASES))


def install(
    *,
    model: Any = None,
    cache_dir: str | os.PathLike[str] | None = None,
    provenance: Mapping[str, Any] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Callable[[], None]:
    """Make OneTrainer cache with `LatentCacheModule` from now on, and return a function that undoes it.

    Call it before `trainer.start()`, in a process that can import OneTrainer's `modules`. `model` is the model, or a
    function that returns it: after each refresh its parts get back their devices and train modes. `cache_dir` replaces
    OneTrainer's own cache folders, which it empties by default before training; all caches and runs may share one.
    `provenance` and `should_stop` are those of `LatentCacheModule`. Raises PipelineError, with nothing replaced, if a
    loader cannot be imported or has no DiskCache.
    """
    base, shared_dir = _mgds_module_class(), cache_dir
    settings = {"provenance": provenance, "should_stop": should_stop}

    def __init__(self: CacheModule, cache_dir: str, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, cache_dir if shared_dir is None else os.fspath(shared_dir), *args, **settings | kwargs)
        if model is not None:
            PlacementGuard(model).around(self)

    members = {"__init__": __init__, "__module__": base.__module__, "__doc__": base.__doc__}
    installed = type(base.__name__, (base,), members)
    originals = {loader: _attribute(loader, NAME) for loader in [_import(name, "OneTrainer") for name in LOADERS]}
    for loader in originals:
        setattr(loader, NAME, installed)

    def undo() -> None:
        for loader, original in originals.items():
            if getattr(loader, NAME) is installed:  # otherwise another call has replaced it since
                setattr(loader, NAME, original)

    return undo


def _import(name: str, owner: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        detail = f"{name} cannot be imported ({error}). It is part of {owner}: run this in {owner}'s environment"
        raise PipelineError(detail + (", from OneTrainer's folder." if owner == "OneTrainer" else ".")) from error


def _attribute(module: ModuleType, name: str) -> Any:
    if not hasattr(module, name):
        has = ", but SmartDiskCache, which caches by content itself" if hasattr(module, "SmartDiskCache") else ""
        raise PipelineError(
            f"it has no {name!r}{has}: this adapter was written for another release. Construct a LatentCacheModule "
            "yourself where the pipeline is built.",
            module=module.__name__,
        )
    return getattr(module, name)


def __getattr__(name: str) -> Any:
    if name == "LatentCacheModule":
        return _mgds_module_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
