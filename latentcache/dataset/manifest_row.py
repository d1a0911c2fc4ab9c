"""One sample of a manifest: its keys, geometries and captions, and the line of the manifest's file that says them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, Literal

import msgspec

from latentcache.types import MAX_SIDE, Geometry, Refusal

Trust = Literal["verified", "unverified"]
"""`unverified`: imported, and not shown to equal what encoding gives. Everything else is `verified`."""


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
class Row:
    """One sample. A refused sample has a refusal, and keeps what was known before it was refused.

    `images` is the image and, if the dataset flips, its mirrored twin. `source` is the digest of the image's bytes.
    """

    sample_id: str
    path: str
    source: str | None
    images: tuple[ImageRef, ...]
    captions: tuple[CaptionRef, ...]
    refusal: Refusal | None = None

    def keys(self) -> Iterator[str]:
        """The keys of its images, then of its captions."""
        yield from (ref.key for ref in self.images)
        yield from (ref.key for ref in self.captions)

    @property
    def is_verified(self) -> bool:
        """Whether none of its entries was imported and left unverified."""
        # No Python function runs for a reference: each sample of a batch is asked.
        return "unverified" not in map(attrgetter("trust"), (*self.images, *self.captions))

    def to_json(self) -> dict[str, Any]:
        """The row as a line of the manifest."""
        return {
            "sample_id": self.sample_id,
            "path": self.path,
            "source": self.source,
            "images": [{"key": ref.key, **ref.geometry.to_json(), **_trust_json(ref)} for ref in self.images],
            "captions": [{"key": ref.key, "text": ref.text, **_trust_json(ref)} for ref in self.captions],
            "refusal": None if self.refusal is None else self.refusal.to_json(),
        }


def _trust_json(ref: ImageRef | CaptionRef) -> dict[str, str]:
    """Nothing for a verified entry, so that manifests stay small."""
    return {} if ref.trust == "verified" else {"trust": ref.trust}


_Side = Annotated[int, msgspec.Meta(ge=1, le=MAX_SIDE)]
_Place = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIDE)]


class _ImageLine(msgspec.Struct, gc=False):
    key: str
    original_size: tuple[_Side, _Side]
    resized_size: tuple[_Side, _Side]
    crop_top_left: tuple[_Place, _Place]
    target_size: tuple[_Side, _Side]
    flip: bool
    trust: Trust = "verified"


class _CaptionLine(msgspec.Struct, gc=False):
    key: str
    text: str
    trust: Trust = "verified"


class RowLine(msgspec.Struct):
    """What a line of a manifest has to say. Values of other types are refused, not converted.

    Keys and the source are texts here: `RowTableBuilder` checks that they are digests.
    """

    sample_id: str
    path: str
    source: str | None
    images: list[_ImageLine]
    captions: list[_CaptionLine]
    refusal: Refusal | None


def check_geometry(geometry: Geometry) -> None:
    """ValueError for one that no line of a manifest may have: sizes and a crop have their bounds."""
    msgspec.convert({"key": "", **geometry.to_json()}, _ImageLine)


_DECODER = msgspec.json.Decoder(RowLine)


def parse_lines(lines: bytes) -> list[RowLine]:
    """Whole lines. ValueError if one of them is no row, or is one that only `parse_line` reads."""
    return _DECODER.decode_lines(lines)


def parse_line(line: bytes) -> RowLine:
    """One line. ValueError or RecursionError saying why it is no row.

    It also reads half of a surrogate pair, which is no Unicode text: a name from a broken archive may hold it.
    """
    return msgspec.convert(json.loads(line), RowLine)
