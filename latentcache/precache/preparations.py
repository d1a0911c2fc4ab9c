"""What becomes of a dataset's images: their geometry by its rule of buckets, and so their identities."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from latentcache.config import DatasetConfig
from latentcache.dataset.bucket_rules import BucketRule
from latentcache.dataset.images import preparation_policy, with_filter
from latentcache.dataset.manifest_row import ImageRef
from latentcache.errors import ImageRefused
from latentcache.identity import ImageIdentity, Preparation, keys_like
from latentcache.types import Geometry, Size

if TYPE_CHECKING:  # it imports diffusers
    from latentcache.precache.encodings import Encodings


class Preparations:
    """Gives each image of a dataset its entries.

    ConfigError if the rule of buckets makes no bucket at all, or one whose sides the model cannot take.
    """

    def __init__(self, dataset: DatasetConfig, encodings: Encodings, salt: str):
        self._encoding, self._salt = encodings.image, salt
        self._policy = preparation_policy(dataset.images)
        self._rule = rule = BucketRule(dataset.buckets)

        def entries(size: Size) -> tuple[tuple[Geometry, Callable[[str], str]], ...]:
            flips = (False, True) if dataset.flip else (False,)
            found = [each for flip in flips if (each := rule.geometry(size, flip=flip)) is not None]
            for each in found:
                encodings.check_bucket(each.target_size, str(rule))
            return tuple((each, keys_like(self.identity("", each))) for each in found)

        # Most images share their size with others: one value in memory for all of them.
        self._entries = lru_cache(1 << 14)(entries)

    @property
    def policy(self) -> dict[str, str]:
        """What changes the pixels of every image, by name; where a rule has two filters, both."""
        return with_filter(self._policy, self._rule.filters)

    def refs(self, source: str, size: Size, path: str) -> tuple[ImageRef, ...]:
        """The entries of an image of this digest and upright size: it and, if the dataset flips, its mirrored twin.

        ImageRefused (`no-bucket`), naming `path`, where the rule makes no bucket of it.
        """
        entries = self._entries(size)
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
        preparation = Preparation.of(with_filter(self._policy, self._rule.resample(geometry)), geometry)
        return ImageIdentity(source, preparation, self._encoding, self._salt)
