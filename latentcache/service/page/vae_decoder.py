"""Pictures decoded by the VAE of a config. It is loaded on demand, and on its device only while it decodes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from latentcache.config import Config
from latentcache.devices.placement import device_named, placed
from latentcache.models.files import TINY, TINY_PHOTOS
from latentcache.models.model_loader import Models
from latentcache.models.vae import decode_fitting, vae_dtype
from latentcache.precache.encodings import load_models


def decoder_of(config: Config) -> VaeDecoder | None:
    """The decoder of a config's VAE if that is quick, else None. The VAE itself is loaded later, on demand.

    On a CPU a VAE takes seconds per picture; a picture without it takes a millisecond. DeviceError, ModelError.
    """
    return VaeDecoder(config, load_models(config.model, {})) if is_quick(config) else None


def is_quick(config: Config) -> bool:
    """Whether the VAE of a config is quick enough for a person who waits: on an accelerator, or a tiny one."""
    is_tiny = config.model.path in (TINY, TINY_PHOTOS) and config.model.vae is None
    return is_tiny or device_named(config.encode.device).type != "cpu"


class VaeDecoder:
    """Decodes latents with the VAE of a config. Thread-safe: one thread decodes at a time.

    It moves `models` between devices, so nothing else may use them.
    """

    def __init__(self, config: Config, models: Models):
        self._config, self._models = config, models
        self._lock = threading.Lock()
        self._vae: torch.nn.Module | None = None
        self._facts = models.vae_facts()
        self.downscale = self._facts.downscale_factor

    def takes(self, identity: Mapping[str, Any], shape: Sequence[int]) -> bool:
        """Whether the VAE decodes such latents, by its class and factors; for imported entries by the shape alone."""
        family, scaling, encoding = self._models.family, self._facts.scaling, identity.get("encoding")
        if shape[0] != self._facts.latent_channels or (len(shape) == 4) != family.latent.is_video:
            return False
        if not isinstance(encoding, Mapping):
            return True
        vae, factors = encoding.get("vae"), (encoding.get("scaling_factor"), encoding.get("shift_factor"))
        name = family.parts["vae"].class_name.rpartition(".")[2]
        is_same_class = isinstance(vae, Mapping) and vae.get("class_name") == name
        return is_same_class and factors == (scaling.scaling_factor, scaling.shift_factor)

    def __call__(self, latents: torch.Tensor) -> np.ndarray:
        """Pixels uint8 [H, W, 3] of unscaled latents [C, h, w]. ModelError, DeviceError."""
        if self._facts.scaling.rule == "batch_norm":  # joins rows and columns in pairs
            latents = latents[:, : latents.shape[1] // 2 * 2, : latents.shape[2] // 2 * 2]
        is_video = self._models.family.latent.is_video
        scaled = self._facts.scaling.apply(latents[None, :, None] if is_video else latents[None])
        with self._lock:
            vae = self._loaded()
            with placed(vae, device_named(self._config.encode.device)):
                images, _ = decode_fitting(vae, scaled, self._models.family)
        pixels: np.ndarray = images[0, 0] if is_video else images[0]
        return pixels

    def _loaded(self) -> torch.nn.Module:
        if self._vae is None:
            device = device_named(self._config.encode.device)
            dtype, _ = vae_dtype(self._config.encode.vae_dtype, self._facts, device)
            self._vae = self._models.vae(dtype)
        return self._vae
