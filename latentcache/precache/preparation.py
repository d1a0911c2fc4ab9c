"""Derives geometries, identities and keys from a dataset's images and texts.

An image, its control images, its mask and the masked image differ in these properties of their roles:

    role        policy                      encoding              geometry
    image       the dataset's               the config's          by the dataset's buckets
    control n   the dataset's               mean, no seed         by its own area, or aligned with the image
    mask        luma, or the alpha channel  none                  aligned with the image
    masked      the image's, and a mask     mean, no seed         the image's
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

from latentcache.config import BucketsConfig, DatasetConfig
from latentcache.dataset.bucket_rules import BucketRule, fit_like, is_alike
from latentcache.dataset.clips import num_frames_of_clip
from latentcache.dataset.images import mask_policy, preparation_policy, with_filter
from latentcache.dataset.row_table import PartRole, geometry_bytes
from latentcache.errors import ConfigError, ImageRefused
from latentcache.families.base import Family
from latentcache.identity import (
    ImageEncoding,
    ImageIdentity,
    MaskIdentity,
    Masking,
    Preparation,
    TextEncoding,
    TextIdentity,
    canonical_json,
    caption_digest,
    digest,
    key_of,
    keys_like,
)
from latentcache.precache.encodings import Encodings
from latentcache.precache.tasks import MASK_BATCH_SIZE
from latentcache.types import Crop, Geometry, Json, Kind, Size

CLIP_DECODER = "pillow-or-pyav"
"""Pillow reads animated images, PyAV reads videos. The bytes of a file decide."""

Controls = tuple[tuple[str, Preparation], ...]
"""The digest and preparation of each control image that the encoder reads with a text."""


@dataclass(frozen=True, slots=True)
class Role:
    """The role of one of a sample's images. A mask has neither an encoding nor a bucket rule.

    `file` is the number of the sample's file that it is made from: 0 for the image and its alpha channel, then the
    companions in order. For a masked image it is that of the mask. `part` is the kind of companion in a manifest; None
    for the image itself. If `lies_on_image`, it is resized and cropped like its image, and `rule` only gives the
    filter.
    """

    number: int
    file: int
    name: str
    part: PartRole | None
    policy: dict[str, Any]
    encoding: ImageEncoding | None
    rule: BucketRule | None
    lies_on_image: bool

    @property
    def kind(self) -> Kind:
        """The kind of its entries."""
        return "mask" if self.part == "mask" else "image"


@dataclass(frozen=True, slots=True)
class Shape:
    """What all entries of one role and geometry share. `image_key` maps a source digest to the entry's key.

    Entries of a `group` are encoded together, at most `group_size` at a time; each has `num_bytes`. `crop` is the index
    of the image's crop. `mask` is the shape of a masked image's mask: such keys depend on two sources, see
    `Preparations.key`. `column` is the geometry as a manifest stores it.
    """

    role: Role
    geometry: Geometry
    column: bytes
    image_key: Callable[[str], str]
    group: Hashable
    group_size: int
    num_bytes: int
    crop: int = 0
    mask: Shape | None = None


class Preparations:
    """Determines the entries of each image, clip, control image and mask of a dataset.

    Raises ConfigError if the bucket rule gives no bucket at all, or one whose sides the model cannot take, and for
    clips if the model takes none.
    """

    def __init__(self, dataset: DatasetConfig, encodings: Encodings, salt: str):
        self._dataset, self._encodings, self._salt = dataset, encodings, salt
        self.downscale = encodings.facts.downscale_factor
        if dataset.frames is not None and not encodings.family.has_clips:
            message = f"dataset {dataset.name} has frames, but models of {encodings.family.name} take no clips"
            raise ConfigError(f"{message}; remove frames", key="datasets.frames")
        if dataset.frames is None and encodings.image.condition:
            message = f"dataset {dataset.name} has no frames, but models of {encodings.family.name} take clips only"
            raise ConfigError(f"{message}; set frames, such as {{count: 81, fps: 16}}", key="datasets.frames")
        policy, rule = preparation_policy(dataset.images), BucketRule(dataset.buckets)
        self.roles = [Role(0, 0, "image", None, policy, encodings.image, rule, False)]
        # A control image is not a training target: diffusers' pipelines and the trainers use its posterior's mode.
        encoding = replace(encodings.image, output="mean", seed=0)
        for number, control in enumerate(dataset.control, 1):
            own, buckets = None, dataset.buckets
            if control.area is not None:
                sizes = BucketsConfig(area=control.area, step=buckets.step, max_aspect=buckets.max_aspect)
                own = BucketRule(sizes)
            role = Role(number, number, f"control {number}", "control", policy, encoding, own or rule, own is None)
            self.roles.append(role)
        self.inpaint = None if dataset.mask is None else dataset.mask.inpaint
        if dataset.mask is not None:
            number, file = len(self.roles), 0 if dataset.mask.alpha else len(self.roles)
            weights = mask_policy(policy, alpha=dataset.mask.alpha)
            self.roles.append(Role(number, file, "mask", "mask", weights, None, None, True))
            if self.inpaint is not None:
                role = Role(number + 1, file, "masked image", "masked image", policy, encoding, rule, True)
                self.roles.append(role)
        # Most samples share their sizes with others, so they share one value in memory.
        self._shapes = lru_cache(1 << 14)(self._shapes_of)

    def common(self) -> dict[str, Any]:
        """The image part of a manifest's `common`."""
        rule = self._dataset.frames
        policies = [with_filter(role.policy, role.rule.filters) if role.rule else role.policy for role in self.roles]
        parts: list[Json] = [
            {"name": role.name, "policy": policy}
            | ({} if role.rule else {"downscale": self.downscale})
            | ({"inpaint": self.inpaint} if role.part == "masked image" else {})
            for role, policy in zip(self.roles[1:], policies[1:], strict=True)
        ]
        return {
            "policy": policies[0],
            "buckets": self._dataset.buckets.model_dump(mode="json", exclude_defaults=True),
            **({"parts": parts} if parts else {}),
            **({} if rule is None else {"frames": {"fps": rule.fps, "start": rule.start}}),
        }

    def shapes(
        self, sizes: Sequence[Size], num_available: int | None, path: str, source: str | None = None
    ) -> tuple[Shape, ...]:
        """The entries of a sample: `sizes` are the upright sizes of the image and of its other roles.

        Each entry is followed by its mirrored copy if the dataset flips, then by further crops of the same role if
        `source`, the image's digest, is given. A file with `num_available` frames (`probe_clip`) gives clips. Raises
        ImageRefused, naming `path`, for an image without a bucket, and for a mask that cannot be aligned with its
        image.
        """
        first = self._shapes((*sizes,), num_available)
        if isinstance(first, ImageRefused):
            raise ImageRefused(path, first.reason, first.detail)
        if source is None or self._dataset.variations == 1:
            return first
        found = [first]
        for number, crop in enumerate(self._further_crops(source, first[0].geometry), 1):
            shapes = self._shapes((*sizes,), num_available, crop, number)
            assert not isinstance(shapes, ImageRefused)  # its sizes are those of the first crop
            found.append(shapes)
        return tuple(sorted(chain.from_iterable(found), key=lambda shape: shape.role.number))

    def _further_crops(self, source: str, geometry: Geometry) -> Iterator[Crop]:
        """The positions of the second and further crops of an image with this digest.

        Each depends only on the seed, the image and its index, so raising `variations` keeps the existing crops.
        """
        rows, columns = (was - now + 1 for was, now in zip(geometry.resized_size, geometry.target_size, strict=True))
        for number in range(1, self._dataset.variations):
            drawn = digest(canonical_json(["crop", self._dataset.variations_seed, source, number]))
            yield Crop(int(drawn[:16], 16) % rows, int(drawn[16:32], 16) % columns)

    def key(self, shape: Shape, image: str | None, source: str) -> str:
        """The key of an entry: see `identity_of`."""
        return key_of(self.identity_of(shape, image, source).to_json()) if shape.mask else shape.image_key(source)

    def identity_of(self, shape: Shape, image: str | None, source: str) -> ImageIdentity | MaskIdentity:
        """The identity of an entry. `source` is its file's digest; for a masked image it is the mask's."""
        if shape.mask is None or image is None or self.inpaint is None:
            return self.identity(shape.role, source, shape.geometry)
        identity = self.identity(shape.role, image, shape.geometry)
        preparation = self.identity(shape.mask.role, source, shape.mask.geometry).preparation
        assert isinstance(identity, ImageIdentity)
        return replace(identity, masking=Masking(source, preparation, self.inpaint))

    def identity(self, role: Role, source: str, geometry: Geometry) -> ImageIdentity | MaskIdentity:
        """The identity of an entry, but of a masked image without its mask: see `identity_of`."""
        if role.rule is None or role.encoding is None:
            return MaskIdentity(source, Preparation(**role.policy, geometry=geometry), self.downscale, self._salt)
        policy: dict[str, Any] = with_filter(role.policy, role.rule.resample(geometry))
        frames = self._dataset.frames
        if frames is not None and geometry.num_frames is not None:
            policy = {**policy, "fps": frames.fps, "start": frames.start, "decoder": CLIP_DECODER}
        return ImageIdentity(source, Preparation(**policy, geometry=geometry), role.encoding, self._salt)

    def _shapes_of(
        self, sizes: tuple[Size, ...], num_available: int | None, crop: Crop | None = None, number_of_crop: int = 0
    ) -> tuple[Shape, ...] | ImageRefused:
        images: list[Geometry | None] = [None, None] if self._dataset.flip else [None]
        found: list[Shape] = []
        for role, size in zip(self.roles, sizes, strict=False):  # a single image has no companions
            for number, image in enumerate(images):
                geometry = self._geometry(role, size, image, flip=number == 1)
                if geometry is None:
                    return _refusal(role, size, sizes[0])
                if image is None and crop is not None:  # the mirrored copy shows the same crop, whatever the rule
                    geometry = replace(geometry, crop_top_left=crop)
                if image is None and self._dataset.frames is not None and num_available is not None:
                    factor = self._encodings.facts.frames_factor
                    num_frames = num_frames_of_clip(num_available, self._dataset.frames, factor)
                    geometry = replace(geometry, num_frames=num_frames)
                if image is None and (geometry.num_frames or 1) == 1 and self._encodings.image.condition:
                    detail = f"{self._encodings.family.name} trains on clips, but it has 1 frame: use a longer video"
                    return ImageRefused("", "too-short", detail)
                images[number] = image or geometry
                # The mask's shapes were added just before, in the same order: one per mirrored or unmirrored image.
                mask = found[-len(images)] if role.part == "masked image" else None
                found.append(replace(self._shape(role, geometry), crop=number_of_crop, mask=mask))
        return tuple(found)

    def _geometry(self, role: Role, size: Size, image: Geometry | None, *, flip: bool) -> Geometry | None:
        """The geometry of an image, or of a companion of an image with the geometry `image`."""
        if image is not None and role.part == "masked image":
            return image
        if image is not None and role.lies_on_image:
            return fit_like(size, image) if role.rule or is_alike(size, image.original_size) else None
        assert role.rule is not None  # only a mask has none, and it lies on its image
        geometry, family = role.rule.geometry(size, flip=flip), self._encodings.family
        step = self.downscale * family.patch
        if geometry is not None and any(side % step for side in geometry.target_size):
            named = f"{role.rule}" if image is None else f"{role.name}, {role.rule}"
            message = f"{named} makes a bucket of {geometry.target_size}, but {family.name} models need sides that are "
            message += f"multiples of {step} pixels; change step, sizes or resolution accordingly"
            raise ConfigError(message, key="datasets.buckets")
        return geometry

    def _shape(self, role: Role, geometry: Geometry) -> Shape:
        key, column = keys_like(self.identity(role, "", geometry)), geometry_bytes(geometry)
        if role.encoding is None:
            num_bytes = math.prod(geometry.target_size) // self.downscale**2
            return Shape(role, geometry, column, key, "mask", MASK_BATCH_SIZE, num_bytes)
        output = role.encoding.output
        # Clips one at a time: a group of them would not fit into memory.
        group_size = self._encodings.image_group_size if geometry.num_frames is None else 1
        num_bytes = self._encodings.image_bytes(geometry, role.encoding)
        group = (geometry.extent, output, role.part == "masked image")  # masked images have a fourth channel
        return Shape(role, geometry, column, key, group, group_size, num_bytes)


def _refusal(role: Role, size: Size, image: Size) -> ImageRefused:
    """Why an image of this size has no entry in this role. The size of the sample's image is `image`."""
    if role.encoding is None:
        detail = f"mask: it is {size}, but its image is {image}; save it with the proportions of the image"
        return ImageRefused("", "other-shape", detail)
    named = f"{role.rule} has no bucket for" if role.name == "image" else f"{role.name}: there is no bucket for"
    return ImageRefused("", "no-bucket", f"{named} an image of {size}: it is too small, or too elongated")


class TextKeys:
    """The identities and keys of texts with one encoding.

    `tokenizers` returns the model's tokenizers by name. It is called only if the family's template needs them.
    """

    def __init__(self, family: Family, tokenizers: Callable[[], Mapping[str, Any]], encoding: TextEncoding, salt: str):
        needs_tokenizers = family.template_needs_tokenizer and encoding.parts
        self.family, self._tokenizers = family, tokenizers() if needs_tokenizers else {}
        self._encoding, self._salt = encoding, salt
        self._key = keys_like(TextIdentity("", encoding, salt))

    def source(self, text: str) -> str:
        """The digest of a text as the tokenizer receives it. Raises ConfigError with `encode.text: none`."""
        if not self._encoding.parts:
            message = "encode.text is none, so no text is cached; set it to all, or encode texts live in the trainer"
            raise ConfigError(message, key="encode.text")
        return caption_digest(self.family.rendered(self._tokenizers, text))

    def key(self, text: str, controls: Controls = ()) -> str:
        """The key of a text, together with the control images that are read with it."""
        return key_of(self.identity(text, controls).to_json()) if controls else self._key(self.source(text))

    def identity(self, text: str, controls: Controls = ()) -> TextIdentity:
        """The identity of a text's entry."""
        return TextIdentity(self.source(text), self._encoding, self._salt, controls=controls)
