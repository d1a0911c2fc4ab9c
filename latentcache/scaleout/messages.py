"""What the driver of a run and the other processes of its cluster tell each other, and the task that decodes.

No torch and no model: a process that only decodes starts quickly.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from latentcache.config import ImagesConfig
from latentcache.dataset.samples import Sample, SampleSource
from latentcache.errors import ImageRefused
from latentcache.identity import ImageIdentity
from latentcache.precache.decoding import pixels_of

Problem = tuple[str, str, str | None]
"""Why an entry cannot be made: reason, detail and path of a `report.Failure`."""


@dataclass(frozen=True, slots=True)
class EncoderAnswer:
    """What an encoder says of a batch, and of the entries that it has made durable since its last answer."""

    problems: dict[str, Problem] = field(default_factory=dict)
    """Keys of the batch that cannot be made."""
    sealed: frozenset[str] = frozenset()
    """Keys, of any batch, that are durable now."""
    bytes_written: int = 0
    """Of all packs of this encoder."""
    num_truncated_captions: int = 0
    num_retried_in_float32: int = 0


def decode_image(
    identity: ImageIdentity, sample: Sample, source: SampleSource, images: ImagesConfig
) -> tuple[np.ndarray | None, Problem | None]:
    """The pixels of an image, uint8 [H, W, 3]; or why it is refused."""
    try:
        return pixels_of(identity, sample, source, images), None
    except ImageRefused as refused:
        return None, (refused.reason, refused.detail, refused.path)
