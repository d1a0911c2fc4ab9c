"""A device-aware cache of VAE latents and text embeddings for diffusion fine-tuning.

These names are the public API. Importing this package imports no torch: each name loads when it is first used.
Type checkers see the real objects, because they read the imports under `TYPE_CHECKING`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from latentcache import errors
    from latentcache.checkpoints.checkpoint import import_checkpoint, load_checkpoint, save_checkpoint
    from latentcache.config import Config, load_config
    from latentcache.devices.audit import audit
    from latentcache.devices.guard import guard
    from latentcache.devices.optimizer import load_optimizer_state, repair_optimizer
    from latentcache.doctor.environment import diagnose
    from latentcache.errors import LatentCacheError
    from latentcache.loading.cache import LatentCache
    from latentcache.loading.dataset import LatentDataset
    from latentcache.loading.loader import LatentLoader
    from latentcache.loading.sampler import BucketBatchSampler
    from latentcache.models.model_loader import LoadedModels
    from latentcache.phases.phases import Phase, Phases
    from latentcache.precache.explanation import explain
    from latentcache.precache.report import Report
    from latentcache.precache.run import run_precache
    from latentcache.precache.workspace import Workspace
    from latentcache.store.disk import DiskStore
    from latentcache.store.memory import MemoryStore
    from latentcache.types import Size
    from latentcache.validation.checkpoint_validation import validate
    from latentcache.validation.loss_parts import masked_errors
    from latentcache.validation.runner import ValidationRunner

__version__ = "0.1.0"

__all__ = [
    "BucketBatchSampler",
    "Config",
    "DiskStore",
    "LatentCache",
    "LatentCacheError",
    "LatentDataset",
    "LatentLoader",
    "LoadedModels",
    "MemoryStore",
    "Phase",
    "Phases",
    "Report",
    "Size",
    "ValidationRunner",
    "Workspace",
    "__version__",
    "audit",
    "diagnose",
    "errors",
    "explain",
    "guard",
    "import_checkpoint",
    "load_checkpoint",
    "load_config",
    "load_optimizer_state",
    "masked_errors",
    "repair_optimizer",
    "run_precache",
    "save_checkpoint",
    "validate",
]

_HOMES = {
    "BucketBatchSampler": "loading.sampler",
    "Config": "config",
    "DiskStore": "store.disk",
    "LatentCache": "loading.cache",
    "LatentCacheError": "errors",
    "LatentDataset": "loading.dataset",
    "LatentLoader": "loading.loader",
    "LoadedModels": "models.model_loader",
    "MemoryStore": "store.memory",
    "Phase": "phases.phases",
    "Phases": "phases.phases",
    "Report": "precache.report",
    "Size": "types",
    "ValidationRunner": "validation.runner",
    "Workspace": "precache.workspace",
    "audit": "devices.audit",
    "diagnose": "doctor.environment",
    "explain": "precache.explanation",
    "guard": "devices.guard",
    "import_checkpoint": "checkpoints.checkpoint",
    "load_checkpoint": "checkpoints.checkpoint",
    "load_config": "config",
    "load_optimizer_state": "devices.optimizer",
    "masked_errors": "validation.loss_parts",
    "repair_optimizer": "devices.optimizer",
    "run_precache": "precache.run",
    "save_checkpoint": "checkpoints.checkpoint",
    "validate": "validation.checkpoint_validation",
}


if not TYPE_CHECKING:  # a type checker that saw this function would accept every name

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'latentcache' has no attribute {name!r}; it has {', '.join(__all__)}")
        if name == "errors":
            return importlib.import_module("latentcache.errors")
        try:
            return getattr(importlib.import_module(f"latentcache.{_HOMES[name]}"), name)
        except AttributeError as error:  # which `from latentcache import ...` would take for a name that is not there
            raise ImportError(f"latentcache.{name} cannot be loaded: {error}") from error


def __dir__() -> list[str]:
    return __all__
