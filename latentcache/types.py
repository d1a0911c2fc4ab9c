"""Immutable values that all layers share. Sizes are always (height, width)."""

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
"""Field -> tensor with the rows of the batch, or list with one value per row."""

RefusalReason = Literal[
    "missing",  # the file, or a part of the sample, does not exist
    "unreadable",  # the operating system refused to read it
    "empty",  # zero bytes
    "not-an-image",  # no known image format
    "unsupported-format",  # the format, or this variant of it, is not supported
    "wrong-suffix",  # the extension names another format than the bytes have
    "truncated",  # the file ends too early
    "corrupt",  # the file is complete but cannot be decoded
    "animated",  # more than one frame
    "too-many-pixels",  # a decompression bomb, or just too large
    "too-small",  # the short side is below images.min_side
    "too-short",  # a still image, or a clip of one frame, but the model needs more
    "extreme-aspect",  # the aspect ratio is above images.max_aspect
    "other-shape",  # the mask has another aspect ratio than its image
    "has-parts",  # on export: the format cannot hold control images or masks
    "no-bucket",  # the trainer that the bucket rule follows has no bucket for this size
    "other-bucket",  # on export: the trainer would use another bucket, and fail on this one
    "bad-output",  # the encoder returned NaN, Inf or all zeros, even in float32
    "out-of-memory",  # even a single image does not fit on the device
    "crashed",  # only in old manifests: today a crash of the encoder ends the run
    "duplicate",  # another sample has the same sample_id, or several files match one part of the sample
    "changed",  # the file changed while the run was reading it
    "bad-caption",  # the caption cannot be read or encoded
    "unequal",  # imported, but encoding the image or caption again gives a different result
]


MAX_SIDE = 1 << 24
"""The longest side of an image, in pixels. UNets take sizes in float32, which is exact for integers up to this."""


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
"""What all images of a batch share: the bucket, and for clips the number of frames."""


def prompt_id(text: str, *, negative: bool = False, beside: str = "") -> str:
    """Return the sample_id of a validation prompt in the manifest of prompts.

    `beside` is the key of the caption with whose control images the prompt is read.
    """
    return f"{'negative ' if negative else ''}prompt{f' beside {beside}' if beside else ''}: {text}"


@dataclass(frozen=True, slots=True)
class Geometry:
    """What was done to an image between decoding and encoding, in integers.

    Every trainer's time ids can be derived from it. `original_size` is the size after EXIF rotation, `resized_size`
    the size before the crop, `target_size` the bucket. `crop_top_left` is the crop before mirroring, even if `flip` is
    set. `num_frames` is None for an image.
    """

    original_size: Size
    resized_size: Size
    crop_top_left: Crop
    target_size: Bucket
    flip: bool = False
    num_frames: int | None = None

    @property
    def seen_crop(self) -> Crop:
        """The crop in the image as it is encoded, after mirroring. Time ids use this one.

        kohya's sd-scripts swap left and right of a flipped image's crop (train_util.py, `get_crop_ltrb` for
        `flip_aug`); diffusers' scripts mirror the image before cropping it.
        """
        if not self.flip:
            return self.crop_top_left
        top, left = self.crop_top_left
        return Crop(top, self.resized_size.width - self.target_size.width - left)

    @property
    def extent(self) -> Extent:
        """What an image must share with all others in its batch."""
        return self.target_size if self.num_frames is None else ClipSize(*self.target_size, self.num_frames)

    def to_json(self) -> dict[str, Any]:
        """Return the geometry as a JSON object, sizes as lists of two. `num_frames` is omitted for an image."""
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
    """An item of a dataset that was left out, and why. `reason` is a `RefusalReason`."""

    sample_id: str
    path: str
    reason: str
    detail: str

    def to_json(self) -> dict[str, str]:
        """Return the refusal as a JSON object."""
        return {"sample_id": self.sample_id, "path": self.path, "reason": self.reason, "detail": self.detail}


@dataclass(frozen=True, slots=True)
class Record:
    """What an entry is (`identity`, which determines `key`) and how it was made (`provenance`). Both are JSON."""

    key: str
    kind: str
    identity: Json
    provenance: Json


@dataclass(frozen=True, slots=True)
class Entry:
    """A cached value: its record and its named CPU tensors.

    `ragged` names the fields whose first dimension varies between entries, such as the length of a caption.
    """

    record: Record
    tensors: Mapping[str, torch.Tensor]
    ragged: frozenset[str] = frozenset()

    @property
    def num_bytes(self) -> int:
        """Total size of the tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class Padding:
    """How a ragged field is padded in a batch: to `length` rows, or to the longest of the batch.

    Rows of `value` are added at this `side`, but before the last `num_last` rows of each entry. Raises ValueError for a
    length below 1, a negative `num_last` or an unknown side.
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
