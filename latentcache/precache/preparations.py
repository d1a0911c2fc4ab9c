"""What becomes of a dataset's images: their geometry by its rule of buckets, and so their identities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from latentcache.config import DatasetConfig
from latentcache.dataset.bucket_rules import BucketRule
from latentcache.dataset.clips import num_frames_of_clip
from latentcache.dataset.images import preparation_policy, with_filter
from latentcache.dataset.manifest_row import ImageRef
from latentcache.errors import ConfigError, ImageRefused
from latentcache.identity import ImageIdentity, Preparation, keys_like
from latentcache.types import Geometry, Size

CLIP_DECODER = "pillow-or-pyav"
"""Pillow reads animated images and PyAV videos: the bytes of a file say which."""

if TYPE_CHECKING:  # it imports diffusers
    from latentcache.precache.encodings import Encodings


class Preparations:
    """Gives each image of a dataset, and each clip, its entries.

    ConfigError if the rule of buckets makes no bucket at all, or one whose sides the model cannot take; and for clips
    of a model that takes none.
    """

    def __init__(self, dataset: DatasetConfig, encodings: Encodings, salt: str):
        self._encoding, self._salt = encodings.image, salt
        self._policy = preparation_policy(dataset.images)
        self._frames, factor = dataset.frames, encodings.facts.frames_factor
        self._rule = rule = BucketRule(dataset.buckets)
        if dataset.frames is not None and not encodings.family.has_clips:
            message = f"dataset {dataset.name} has frames, but models of {encodings.family.name} take no clips"
            raise ConfigError(f"{message}; leave frames out", key="datasets.frames")

        def entries(size: Size, num_available: int | None) -> tuple[tuple[Geometry, Callable[[str], str]], ...]:
            flips = (False, True) if dataset.flip else (False,)
            found = [each for flip in flips if (each := rule.geometry(size, flip=flip)) is not None]
            for each in found:
                encodings.check_bucket(each.target_size, str(rule))
            if dataset.frames is not None and num_available is not None:
                num_frames = num_frames_of_clip(num_available, dataset.frames, factor)
                found = [replace(each, num_frames=num_frames) for each in found]
            return tuple((each, keys_like(self.identity("", each))) for each in found)

        # Most images share their size with others: one value in memory for all of them.
        self._entries = lru_cache(1 << 14)(entries)

    @property
    def policy(self) -> dict[str, str]:
        """What changes the pixels of every image, by name; where a rule has two filters, both."""
        return with_filter(self._policy, self._rule.filters)

    @property
    def frames(self) -> dict[str, Any]:
        """The rule of clips' frames, by name; empty where the dataset has none."""
        return {} if self._frames is None else {"fps": self._frames.fps, "start": self._frames.start}

    def refs(self, source: str, size: Size, path: str, num_available: int | None = None) -> tuple[ImageRef, ...]:
        """The entries of an image of this digest and upright size: it and, if the dataset flips, its mirrored twin.

        Of a file with `num_available` frames (`probe_clip`) they are clips.
        ImageRefused (`no-bucket`), naming `path`, where the rule makes no bucket of it.
        """
        entries = self._entries(size, num_available)
        if not entries:
            detail = f"{self._rule} makes no bucket of an image of {size}: it is too small, or too long"
            raise ImageRefused(path, "no-bucket", detail)
        return tuple([ImageRef(key(source), geometry) for geometry, key in entries])

    @property
    def rule(self) -> BucketRule:
        """The dataset's rule of buckets."""
        return self._rule

    def identity(self, source: str, geometry: Geometry) -> ImageIdentity:
        """What the entry of such an image is."""
        policy: dict[str, Any] = with_filter(self._policy, self._rule.resample(geometry))
        if geometry.num_frames is not None:
            policy = {**policy, **self.frames, "decoder": CLIP_DECODER}
        preparation = Preparation.of(policy, geometry)
        return ImageIdentity(source, preparation, self._encoding, self._salt)
