"""A device-aware cache of VAE latents and text embeddings for diffusion fine-tuning.

The names below are the public API. They are imported lazily, so that `import latentcache` does not import torch. Type
checkers see the real objects through the imports under `TYPE_CHECKING`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from latentcache import errors as errors
    from latentcache.checkpoints.checkpoint import import_checkpoint as import_checkpoint
    from latentcache.checkpoints.checkpoint import load_checkpoint as load_checkpoint
    from latentcache.checkpoints.checkpoint import save_checkpoint as save_checkpoint
    from latentcache.config import Config as Config
    from latentcache.config_file import load_config as load_config
    from latentcache.devices.audit import audit as audit
    from latentcache.devices.guard import guard as guard
    from latentcache.devices.optimizer import load_optimizer_state as load_optimizer_state
    from latentcache.devices.optimizer import repair_optimizer as repair_optimizer
    from latentcache.doctor.environment import diagnose as diagnose
    from latentcache.errors import LatentCacheError as LatentCacheError
    from latentcache.loading.batch import unpadded as unpadded
    from latentcache.loading.cache import LatentCache as LatentCache
    from latentcache.loading.dataset import LatentDataset as LatentDataset
    from latentcache.loading.loader import CachedBatches as CachedBatches
    from latentcache.loading.loader import LatentLoader as LatentLoader
    from latentcache.loading.sampler import BucketBatchSampler as BucketBatchSampler
    from latentcache.models.model_loader import LoadedModels as LoadedModels
    from latentcache.phases.phases import Phase as Phase
    from latentcache.phases.phases import Phases as Phases
    from latentcache.precache.explanation import explain as explain
    from latentcache.precache.report import Report as Report
    from latentcache.precache.run import run_precache as run_precache
    from latentcache.precache.workspace import Workspace as Workspace
    from latentcache.store.disk import DiskStore as DiskStore
    from latentcache.store.memory import MemoryStore as MemoryStore
    from latentcache.types import Size as Size
    from latentcache.validation.checkpoint_validation import validate as validate
    from latentcache.validation.loss_parts import masked_errors as masked_errors
    from latentcache.validation.runner import ValidationRunner as ValidationRunner

__version__ = "0.1.0"

_HOMES = {
    "BucketBatchSampler": "loading.sampler",
    "CachedBatches": "loading.loader",
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
    "errors": "errors",
    "explain": "precache.explanation",
    "guard": "devices.guard",
    "import_checkpoint": "checkpoints.checkpoint",
    "load_checkpoint": "checkpoints.checkpoint",
    "load_config": "config_file",
    "load_optimizer_state": "devices.optimizer",
    "masked_errors": "validation.loss_parts",
    "repair_optimizer": "devices.optimizer",
    "run_precache": "precache.run",
    "save_checkpoint": "checkpoints.checkpoint",
    "unpadded": "loading.batch",
    "validate": "validation.checkpoint_validation",
}

__all__ = sorted(["__version__", *_HOMES])


if not TYPE_CHECKING:  # with this function a type checker would accept every name

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'latentcache' has no attribute {name!r}; it has {', '.join(__all__)}")
        from latentcache.utils.extras import naming_extras

        try:
            with naming_extras():
                module = importlib.import_module(f"latentcache.{_HOMES[name]}")
            return module if name == "errors" else getattr(module, name)
        except AttributeError as error:  # `from latentcache import ...` would report it as an unknown name
            raise ImportError(f"latentcache.{name} cannot be imported: {error}") from error


def __dir__() -> list[str]:
    return __all__
