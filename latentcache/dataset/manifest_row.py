"""One sample of a manifest: the keys, geometries and texts of all its parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from latentcache.types import Geometry, Refusal

Trust = Literal["verified", "unverified"]
"""`unverified`: imported, and not shown to equal what encoding gives. Everything else is `verified`."""

PartRole = Literal["control", "mask"]
"""What a further part of a sample is: an image that the model is given with the text, or the weights of the loss."""


@dataclass(frozen=True, slots=True)
class ImageRef:
    """One image entry of a sample."""

    key: str
    geometry: Geometry
    trust: Trust = "verified"


@dataclass(frozen=True, slots=True)
class CaptionRef:
    """One text entry of a sample."""

    text: str
    key: str
    trust: Trust = "verified"


@dataclass(frozen=True, slots=True)
class PartRef:
    """One entry of a further part of a sample. `source` is the digest of the bytes that it was made of."""

    role: PartRole
    key: str
    geometry: Geometry
    source: str
    trust: Trust = "verified"


@dataclass(frozen=True, slots=True)
class Row:
    """One sample. A refused sample has a refusal, and keeps what was known before it was refused.

    `images` is the image and, if the dataset flips, its mirrored twin. `source` is the digest of the image's bytes.
    `parts` are its control images in their order, then its mask; each is followed by its mirrored twin.
    """

    sample_id: str
    path: str
    source: str | None
    images: tuple[ImageRef, ...]
    captions: tuple[CaptionRef, ...]
    refusal: Refusal | None = None
    parts: tuple[PartRef, ...] = ()

    def keys(self) -> Iterator[str]:
        """The keys of its images, then of its captions, then of its further parts."""
        yield from (ref.key for ref in self.images)
        yield from (ref.key for ref in self.captions)
        yield from (ref.key for ref in self.parts)

    def named_parts(self, *, flip: bool | None = None) -> Iterator[tuple[str, PartRef]]:
        """Each further part with its name: `control 1`, `control 2`, `mask`. With `flip` only those mirrored so."""
        numbers: dict[tuple[str, bool], int] = {}
        for ref in self.parts:
            which = ref.role, ref.geometry.flip
            numbers[which] = numbers.get(which, 0) + 1
            if flip in (None, ref.geometry.flip):
                yield ref.role if ref.role == "mask" else f"{ref.role} {numbers[which]}", ref

    @property
    def is_verified(self) -> bool:
        """Whether none of its entries was imported and left unverified."""
        refs: tuple[ImageRef | CaptionRef | PartRef, ...] = (*self.images, *self.captions, *self.parts)
        return all(ref.trust == "verified" for ref in refs)

    def to_json(self) -> dict[str, Any]:
        """The row as a JSON object. Without further parts it does not speak of them."""
        line = {
            "sample_id": self.sample_id,
            "path": self.path,
            "source": self.source,
            "images": [{"key": ref.key, **ref.geometry.to_json(), **_trust_json(ref)} for ref in self.images],
            "captions": [{"key": ref.key, "text": ref.text, **_trust_json(ref)} for ref in self.captions],
            "refusal": None if self.refusal is None else self.refusal.to_json(),
        }
        if self.parts:
            line["parts"] = [
                {"role": ref.role, "key": ref.key, "source": ref.source, **ref.geometry.to_json(), **_trust_json(ref)}
                for ref in self.parts
            ]
        return line


def _trust_json(ref: ImageRef | CaptionRef | PartRef) -> dict[str, str]:
    """Nothing for a verified entry, so that manifests stay small."""
    return {} if ref.trust == "verified" else {"trust": ref.trust}
