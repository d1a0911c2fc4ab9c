"""From a sample to the pixels that the encoder sees, or to the weights of its mask.

Neither torch nor a model is imported: processes that only decode start quickly.
"""

from __future__ import annotations

import numpy as np

from latentcache.config import ImagesConfig
from latentcache.dataset.clips import decode_clip
from latentcache.dataset.images import decode, prepare
from latentcache.dataset.masks import luma, prepare_mask
from latentcache.dataset.samples import Sample, SampleSource
from latentcache.errors import ImageRefused
from latentcache.identity import ImageIdentity, MaskIdentity, digest


def pixels_of(
    identity: ImageIdentity | MaskIdentity,
    sample: Sample,
    source: SampleSource,
    images: ImagesConfig,
    is_alpha: bool = False,
) -> np.ndarray:
    """What becomes of a file for the entry with this identity: uint8 [H, W, 3]; of a clip [frames, H, W, 3].

    A mask is uint8 [1, h, w]; `is_alpha`: it is the alpha channel. The bytes that are decoded are hashed, so that the
    entry fits its key. Raises ImageRefused.
    """
    data, preparation = source.read(sample), identity.preparation
    if digest(data) != identity.source:
        raise ImageRefused(sample.path, "changed", "the file changed during the run; run precache again")
    if isinstance(identity, MaskIdentity):
        pixels = decode(data, sample.path, images, alpha_only=is_alpha)
        return prepare_mask(pixels if is_alpha else luma(pixels), preparation.geometry, identity.downscale)
    if preparation.geometry.num_frames is not None:
        return decode_clip(data, sample.path, images, preparation)
    return prepare(decode(data, sample.path, images), preparation.geometry, preparation.resample)
