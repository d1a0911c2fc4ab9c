"""OneTrainer and mgds: `LatentCacheModule` in place of mgds' DiskCache.

    from latentcache.integrations import onetrainer

    undo = onetrainer.install(model=lambda: trainer.model)   # before trainer.start()

mgds is imported when `LatentCacheModule` is first used. It is no dependency: OneTrainer has it.
"""

from __future__ import annotations

from typing import Any

from latentcache.integrations.onetrainer.installation import install, mgds_module_class, module_class
from latentcache.integrations.onetrainer.module_placement import PlacementGuard, restoring

__all__ = ["LatentCacheModule", "PlacementGuard", "install", "module_class", "restoring"]


def __getattr__(name: str) -> Any:
    if name == "LatentCacheModule":
        return mgds_module_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
