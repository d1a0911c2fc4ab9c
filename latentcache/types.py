"""Frozen values that all layers share. Sizes are (height, width), always."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import torch

Kind = Literal["image", "text", "mask"]
ImageOutput = Literal["moments", "mean", "sample"]
Json = Mapping[str, Any]
Batch = dict[str, Any]
"""Field -> tensor of the batch's rows, or list with one value a row."""

RefusalReason = Literal[
    "missing",  # the file is not there, or a part of the sample is not
    "unreadable",  # the operating system refused to read it
    "empty",  # zero bytes
    "not-an-image",  # no known image format
    "unsupported-format",  # an image of a format, or of a kind of it, that is not read
    "wrong-suffix",  # the name says one format, the bytes another
    "truncated",  # the bytes end too early
    "corrupt",  # the bytes are there but cannot be decoded
    "animated",  # more than one frame
    "too-many-pixels",  # a decompression bomb, or just too large
    "too-small",  # smaller than the least usable side
    "too-short",  # a still image, or a clip of one frame, where the model needs more
    "extreme-aspect",  # longer than max_aspect times its shorter side
    "other-shape",  # the mask has other proportions than its image
    "has-parts",  # exported: the format has no place for control images or masks
    "no-bucket",  # the trainer whose rule it is makes no bucket of this size
    "other-bucket",  # exported: the trainer would make another bucket of it, and fails on this one
    "bad-output",  # the encoder gave NaN, Inf or all zeros, in float32 too
    "out-of-memory",  # one image alone does not fit on the device
    "crashed",  # of manifests that were written before an encoder's death ended the run
    "duplicate",  # another sample of the dataset has the same sample_id; or several files could be one part of it
    "changed",  # the file changed while the run was reading it
    "bad-caption",  # the caption cannot be read, or cannot be encoded
    "unequal",  # imported, but encoding the image or the caption gives something else
]


MAX_SIDE = 1 << 24
"""The longest side of an image, in pixels. Up to here float32, in which UNets take sizes, has all whole numbers."""


class Size(NamedTuple):
    """Height and width, in pixels."""

    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"


class Crop(NamedTuple):
    """Top left corner of a crop, in pixels of the resized image."""

    top: int
    left: int


Bucket = Size


class ClipSize(NamedTuple):
    """Height and width of a clip, in pixels, and its number of frames."""

    height: int
    width: int
    num_frames: int

    def __str__(self) -> str:
        return f"{self.num_frames} frames of {self.height}x{self.width}"


Extent = Size | ClipSize
"""What the images of one batch have in common: their bucket, and of clips the number of frames."""


def prompt_id(text: str, *, negative: bool = False) -> str:
    """The sample_id of a validation prompt in the manifest of prompts."""
    return f"{'negative ' if negative else ''}prompt: {text}"


@dataclass(frozen=True, slots=True)
class Geometry:
    """What was done to an image between decoding and encoding, in integers.

    Every trainer's time ids can be derived from it. `original_size` is the size after the EXIF turn,
    `resized_size` the size before the crop, `target_size` the bucket. `num_frames` is a clip's; None of an image.
    `crop_top_left` is the crop in the upright image, also of one that is mirrored.
    """

    original_size: Size
    resized_size: Size
    crop_top_left: Crop
    target_size: Bucket
    flip: bool = False
    num_frames: int | None = None

    @property
    def seen_crop(self) -> Crop:
        """The crop in the image that is encoded, mirrored or not: what time ids hold.

        kohya's sd-scripts swap left and right of a flipped image's crop (train_util.py, `get_crop_ltrb` of `flip_aug`);
        diffusers' scripts mirror the image before they crop it.
        """
        if not self.flip:
            return self.crop_top_left
        top, left = self.crop_top_left
        return Crop(top, self.resized_size.width - self.target_size.width - left)

    @property
    def extent(self) -> Extent:
        """What it has to have in common with all others of its batch."""
        return self.target_size if self.num_frames is None else ClipSize(*self.target_size, self.num_frames)

    def to_json(self) -> dict[str, Any]:
        """The geometry as a JSON object; sizes are lists of two. An image says nothing of frames."""
        frames = {} if self.num_frames is None else {"num_frames": self.num_frames}
        return {
            "original_size": list(self.original_size),
            "resized_size": list(self.resized_size),
            "crop_top_left": list(self.crop_top_left),
            "target_size": list(self.target_size),
            "flip": self.flip,
            **frames,
        }


@dataclass(frozen=True, slots=True)
class Refusal:
    """One item of a dataset that was left out, and why. `reason` is a `RefusalReason`."""

    sample_id: str
    path: str
    reason: str
    detail: str

    def to_json(self) -> dict[str, str]:
        """The refusal as a JSON object."""
        return {"sample_id": self.sample_id, "path": self.path, "reason": self.reason, "detail": self.detail}


@dataclass(frozen=True, slots=True)
class Record:
    """What an entry is (`identity`, from which `key` follows) and how it was made (`provenance`). Both are JSON."""

    key: str
    kind: str
    identity: Json
    provenance: Json


@dataclass(frozen=True, slots=True)
class Entry:
    """One cached value: its record and its named CPU tensors.

    `ragged` names the fields whose first dimension is a length of the entry's own, as that of a caption.
    """

    record: Record
    tensors: Mapping[str, torch.Tensor]
    ragged: frozenset[str] = frozenset()

    @property
    def num_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class Padding:
    """How a field of natural length is padded in a batch: to `length` rows, or to the longest of the batch.

    The rows are `value`. They come at this `side`, or before the last `num_last` rows of each entry. ValueError for a
    length below 1, a negative `num_last` and an unknown side.
    """

    length: int | None = None
    value: float = 0.0
    side: Literal["left", "right"] = "right"
    num_last: int = 0

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 1:
            raise ValueError(f"padding to length {self.length}: give 1 or more, or None for the longest of the batch")
        if self.side not in ("left", "right"):
            raise ValueError(f"padding side {self.side!r}: give left or right")
        if self.num_last < 0 or (self.num_last and self.side == "left"):
            raise ValueError(f"padding before the last {self.num_last} rows: give 0 or more, and side right")
