"""What the further parts of samples mean for a loss: masks weight it, and control images have to be read."""

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
    """The errors of a prediction, weighted by the batch's `mask`; the same tensor where the batch has none.

    `errors` [B, C, (F,) h, w] are floating point, in the layout of the batch's scaled latents, one for each number:
    `F.mse_loss(predicted, target, reduction="none")`. The weight is `mask / 255`. The loss is the mean of what is
    returned over all places, also those that do not count: a sample of which half counts adds half as much, and one of
    which nothing counts adds zero. So do kohya's sd-scripts (`apply_masked_loss`, custom_train_functions.py) and
    OneTrainer (`masked_losses` without `normalize_masked_area_loss`, its default; its `unmasked_weight` is a grey of
    the mask). Where 2x2 patches of latents are channels, each number has the weight of its own latent, as
    OneTrainer has it.

    StoreError for errors of another layout, such as tokens.
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
            f"the errors are {list(errors.shape)}, but the mask is {list(mask.shape)}: give errors [B, C, h, w] (of a "
            "video [B, C, F, h, w]) in the layout of the batch's latents"
        )
    return errors * (weights.unsqueeze(2) if errors.ndim == 5 else weights)


def check_controls(family: Family, cache: LatentCache, datasets: Iterable[str], config: Config | None = None) -> None:
    """ConfigError if one of these datasets has control images, and the denoiser of the family is not given them.

    It would learn, or be measured, without its input. What is cached of them counts, and what `config` says of them.
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
            "of the dataset and run `latentcache precache CONFIG`",
            key="datasets.control",
        )


def check_masked(denoiser: Any, family: Family, cache: LatentCache, datasets: Iterable[str]) -> None:
    """ConfigError if the denoiser inpaints, and one of these datasets is cached without masked images."""
    cached = cache.manifests.names()
    lacking = [each for each in datasets if each in cached and not _has("masked image", cache.manifest(each))]
    if lacking and family.inpaints(denoiser):
        raise ConfigError(family.lacks_masked(f"{', '.join(lacking)} has none"), key="datasets.mask")


def _has(role: str, manifest: Manifest) -> bool:
    """Every sample has all parts of its dataset, or is refused."""
    first = next((row for row in manifest.rows.values() if row.refusal is None), None)
    return first is not None and any(part.role == role for part in first.parts)
