"""What becomes of the control images and masks of a dataset: their geometry, and so their identities and keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from latentcache.config import BucketsConfig, DatasetConfig, part_names
from latentcache.dataset.buckets import fit_like, is_alike
from latentcache.dataset.images import preparation_policy
from latentcache.dataset.manifest_row import ImageRef, PartRef
from latentcache.dataset.masks import mask_policy
from latentcache.errors import ImageRefused
from latentcache.identity import ImageIdentity, MaskIdentity, Preparation, keys_like
from latentcache.precache.encodings import Encodings
from latentcache.precache.preparations import Preparations
from latentcache.types import Geometry, Json, Size

CONTROL_OUTPUT: Final = "mean"
"""A control image is no target of the loss: diffusers' pipelines and the trainers take the mode of its posterior."""

Facts = tuple[str, Size]
"""Of an image: the digest of its bytes, and its upright size."""


class PartPreparations:
    """Gives the further parts of each sample of a dataset their entries."""

    def __init__(self, dataset: DatasetConfig, encodings: Encodings, salt: str):
        self._dataset, self._encodings, self._salt = dataset, encodings, salt
        self.names = (*part_names(dataset.part_files), *(["mask"] if self.takes_alpha else []))
        of_controls = replace(encodings, image=replace(encodings.image, output=CONTROL_OUTPUT, seed=0))
        self.downscale = encodings.facts.downscale_factor
        self._mask_policy = mask_policy(preparation_policy(dataset.images), alpha=self.takes_alpha)
        areas = [control.area for control in dataset.control]
        self._controls = [Preparations(_with_area(dataset, area), of_controls, salt) for area in areas]
        self._keys: Callable[[int, Geometry], Callable[[str], str]] = lru_cache(1 << 14)(self._keys_of)

    @property
    def takes_alpha(self) -> bool:
        """Whether masks are the images' alpha channels."""
        return self._dataset.mask is not None and self._dataset.mask.alpha

    def to_json(self) -> list[Json]:
        """What all samples share of each part, for the manifest."""
        controls: list[Json] = [
            {"name": name, "policy": each.policy} for name, each in zip(self.names, self._controls, strict=False)
        ]
        if self._dataset.mask is None:
            return controls
        return [*controls, {"name": "mask", "policy": self._mask_policy, "downscale": self.downscale}]

    def refs(self, images: Sequence[ImageRef], image: Facts, parts: Sequence[Facts], path: str) -> tuple[PartRef, ...]:
        """The entries of a sample's parts, whose image has these entries and facts: see `Row.parts`.

        ImageRefused, naming `path` and the part, for a control image without a bucket, and for a mask that cannot lie
        on its image.
        """
        facts = [*parts, image] if self.takes_alpha else parts
        found = []
        for number, (name, (source, size)) in enumerate(zip(self.names, facts, strict=True)):
            for ref in images:
                geometry = self._geometry(number, size, ref.geometry)
                if geometry is None:
                    raise self._refusal(name, size, image[1], path)
                key = self._keys(number, geometry)(source)
                found.append(PartRef("mask" if name == "mask" else "control", key, geometry, source))
        return tuple(found)

    def identity(self, number: int, source: str, geometry: Geometry) -> ImageIdentity | MaskIdentity:
        """What the entry of part `number`, of `names`, is."""
        if number < len(self._controls):
            return self._controls[number].identity(source, geometry)
        return MaskIdentity(source, Preparation.of(self._mask_policy, geometry), self.downscale, self._salt)

    def _keys_of(self, number: int, geometry: Geometry) -> Callable[[str], str]:
        return keys_like(self.identity(number, "", geometry))

    def _geometry(self, number: int, size: Size, image: Geometry) -> Geometry | None:
        if number >= len(self._controls):
            return fit_like(size, image) if is_alike(size, image.original_size) else None
        if self._dataset.control[number].area is None:
            return fit_like(size, image)
        geometry = self._controls[number].rule.geometry(size, flip=image.flip)
        if geometry is not None:
            self._encodings.check_bucket(geometry.target_size, f"{self.names[number]}, {self._controls[number].rule}")
        return geometry

    def _refusal(self, name: str, size: Size, image: Size, path: str) -> ImageRefused:
        if name == "mask":
            detail = f"mask: it is {size}, its image {image}; save it with the proportions of the image"
            return ImageRefused(path, "other-shape", detail)
        return ImageRefused(
            path, "no-bucket", f"{name}: no bucket takes an image of {size}: it is too small, or too long"
        )


def _with_area(dataset: DatasetConfig, area: int | None) -> DatasetConfig:
    """The dataset with buckets of this area in place of its own."""
    if area is None:
        return dataset
    step, max_aspect = dataset.buckets.step, dataset.buckets.max_aspect
    buckets = BucketsConfig(area=area, step=step, max_aspect=max_aspect)
    return dataset.model_copy(update={"buckets": buckets})
