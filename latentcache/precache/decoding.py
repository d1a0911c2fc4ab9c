"""From a sample to the pixels that the encoder sees.

Neither torch nor a model is imported: processes that only decode start quickly.
"""

from __future__ import annotations

import numpy as np

from latentcache.config import ImagesConfig
from latentcache.dataset.clips import decode_clip
from latentcache.dataset.images import decode, prepare
from latentcache.dataset.samples import Sample, SampleSource
from latentcache.errors import ImageRefused
from latentcache.identity import ImageIdentity, digest


def pixels_of(identity: ImageIdentity, sample: Sample, source: SampleSource, images: ImagesConfig) -> np.ndarray:
    """The image of an entry with this identity, decoded and prepared: uint8 [H, W, 3]; of a clip [frames, H, W, 3].

    The bytes that are decoded are hashed, so that the entry fits its key. Raises ImageRefused.
    """
    data = source.read(sample)
    if digest(data) != identity.source:
        raise ImageRefused(sample.path, "changed", "the file changed during the run; run precache again")
    preparation = identity.preparation
    if preparation.num_frames is not None:
        return decode_clip(data, sample.path, images, preparation)
    return prepare(decode(data, sample.path, images), preparation.geometry, preparation.resample)
