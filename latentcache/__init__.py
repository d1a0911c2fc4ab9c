"""A device-aware cache of VAE latents and CLIP text embeddings for diffusion fine-tuning.

Importing this package imports no torch: the names below load when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Config": "latentcache.config",
    "LatentCache": "latentcache.loading.cache",
    "LatentCacheError": "latentcache.errors",
    "LatentDataset": "latentcache.loading.dataset",
    "LatentLoader": "latentcache.loading.loader",
    "Phase": "latentcache.phases.phases",
    "Phases": "latentcache.phases.phases",
    "Report": "latentcache.precache.report",
    "Size": "latentcache.types",
    "ValidationRunner": "latentcache.validation.runner",
    "load_config": "latentcache.config",
    "run_precache": "latentcache.precache.run",
}

__all__ = [*sorted(_HOMES), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'latentcache' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
