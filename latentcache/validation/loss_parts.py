"""How the parts of a sample affect a loss: masks weight it, and the denoiser must read the control images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from latentcache.config import Config
from latentcache.dataset.manifest import Manifest
from latentcache.errors import ConfigError, StoreError
from latentcache.families import unread_controls
from latentcache.families.base import Family
from latentcache.families.scaling import patchified
from latentcache.loading.cache import LatentCache


def masked_errors(errors: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
    """Weight the errors of a prediction by the batch's `mask`. A batch without a mask leaves them unchanged.

    `errors` [B, C, (F,) h, w] has the layout of the batch's scaled latents, such as
    `F.mse_loss(predicted, target, reduction="none")`. Each latent's weight is `mask / 255`. Take the mean of the result
    over all latents, masked ones included: a half-masked sample then adds half as much to the loss, and a fully masked
    one adds zero. kohya's sd-scripts (`apply_masked_loss`, custom_train_functions.py) and OneTrainer by default
    (`masked_losses`, no `normalize_masked_area_loss`) do the same; OneTrainer's `unmasked_weight` is a grey mask here.
    If 2x2 patches of latents are folded into channels, each channel has its own latent's weight, as in OneTrainer.

    Raises StoreError for errors of another layout, such as tokens.
    """
    mask: torch.Tensor | None = batch.get("mask")
    if mask is None:
        return errors
    weights = mask.to(errors.dtype) / 255
    rows, columns = errors.shape[-2:]
    if errors.ndim == 4 and weights.shape[-2:] == (2 * rows, 2 * columns):
        weights = patchified(weights).repeat(1, errors.shape[1] // 4, 1, 1)
    if errors.ndim not in (4, 5) or weights.shape[-2:] != errors.shape[-2:] or len(weights) != len(errors):
        raise StoreError(
            f"the errors are {list(errors.shape)}, but the mask is {list(mask.shape)}: give errors [B, C, h, w] (for "
            "video [B, C, F, h, w]) in the layout of the batch's latents"
        )
    return errors * (weights.unsqueeze(2) if errors.ndim == 5 else weights)


def check_controls(family: Family, cache: LatentCache, datasets: Iterable[str], config: Config | None = None) -> None:
    """Raise ConfigError if one of these datasets has control images that the family's denoiser does not read.

    The denoiser would be trained or measured without them. Cached images count, and so does `control` in `config`.
    """
    reason = unread_controls(family)
    if reason is None:
        return
    planned = {dataset.name for dataset in config.datasets if dataset.control} if config else set()
    cached = set(cache.manifests.names())
    found = [
        each for each in datasets if each in planned or (each in cached and _has("control 1", cache.manifest(each)))
    ]
    if found:
        raise ConfigError(
            f"{', '.join(found)}: has control images, but {reason}. Train one of those families, or remove `control` "
            "from the dataset and run `latentcache precache CONFIG`",
            key="datasets.control",
        )


def check_masked(denoiser: Any, family: Family, cache: LatentCache, datasets: Iterable[str]) -> None:
    """Raise ConfigError if the denoiser inpaints and one of these datasets is cached without masked images."""
    cached = cache.manifests.names()
    lacking = [each for each in datasets if each in cached and not _has("masked image", cache.manifest(each))]
    if lacking and family.inpaints(denoiser):
        raise ConfigError(family.lacks_masked(f"{', '.join(lacking)} has none"), key="datasets.mask")


def _has(role: str, manifest: Manifest) -> bool:
    """Whether the dataset has parts of this role."""
    # One sample tells: each has all parts of its dataset, or is refused.
    first = next((row for row in manifest.rows.values() if row.refusal is None), None)
    return first is not None and any(part.role == role for part in first.parts)
