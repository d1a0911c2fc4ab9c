"""Samples of other people's shards -> latents and texts, as a declaration says where they have what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

import msgspec
import torch

from latentcache.dataset.buckets import fit
from latentcache.dataset.samples import CaptionError, captions_in_columns
from latentcache.errors import ForeignFileRefused
from latentcache.families import family_named
from latentcache.interop.declaration import Declaration, FieldNames
from latentcache.interop.foreign_files import corrupt
from latentcache.interop.readers import (
    ForeignImage,
    ForeignItem,
    ForeignText,
    SourceImages,
    bucket_of,
    pixel_pair,
    sample_id_of,
)
from latentcache.types import Geometry, Size

NOTE_DERIVED = "crop derived: the image was resized to cover the bucket, and cropped in the middle"
NOTE_NO_SIZE = "no size of the image is stated: that of its bucket stands for it"


class ShardSample(Protocol):
    """One sample of a shard. `path` is for messages, and `name` is its id where none is stated.

    A field that it lacks is None; one that cannot be read raises ForeignFileRefused.
    """

    @property
    def path(self) -> str:
        """The shard and the sample in it."""

    @property
    def name(self) -> str:
        """The path below the folder."""

    def value(self, field: str) -> Any:
        """A text, a number or a JSON document."""

    def tensor(self, field: str, ndim: int | None) -> torch.Tensor | None:
        """Floating point, on the CPU, of this many dimensions, or of 2 or 3; None also for one without values."""


def numbered(field: str, suffix: object) -> str:
    """The field of a further tensor: `latents_flipped.npy` for `latents.npy`."""
    stem, dot, extension = field.partition(".")
    return f"{stem}_{suffix}{dot}{extension}"


def declared_items(sample: ShardSample, declaration: Declaration, images: SourceImages) -> Iterator[ForeignItem]:
    """The latents of one sample, and its texts. Raises ForeignFileRefused or ImageRefused for what cannot be used."""
    names = declaration.fields
    stated = None if names.sample_id is None else sample.value(names.sample_id)
    recorded = str(sample.name if stated is None else stated)
    # An image that is there has its own name, which may hold what separates names elsewhere.
    sample_id = images.find(recorded) or sample_id_of(recorded, sample.path)
    ndim = 4 if family_named(declaration.family).latent.is_video else 3
    latents = sample.tensor(names.latents, ndim)
    if latents is None:
        raise ForeignFileRefused(sample.path, "missing", f"it has no {names.latents}")
    image_path, size = images.image(images.find(sample_id))
    geometry, note = _geometry(sample, declaration, latents, size)
    image = ForeignImage(
        sample_id=sample_id,
        path=sample.path,
        image_path=image_path,
        latents=latents,
        is_scaled=declaration.scaled,
        output=declaration.output,
        geometry=geometry,
        note=note,
    )
    yield image
    flipped = sample.tensor(numbered(names.latents, "flipped"), ndim)
    if flipped is not None:
        stated = None if names.geometry is None else sample.value(numbered(names.geometry, "flipped"))
        mirrored = fit(geometry.original_size, geometry.target_size, flip=True)
        mirrored = replace(mirrored, num_frames=geometry.num_frames)
        yield replace(
            image, latents=flipped, geometry=mirrored if stated is None else _parsed(stated, sample.path), note=note
        )
    if names.prompt_embeds is not None:
        yield from _texts(sample, sample_id, names, names.prompt_embeds)


def _texts(sample: ShardSample, sample_id: str, names: FieldNames, embeds_field: str) -> Iterator[ForeignText]:
    given = [field for field in (embeds_field, names.pooled_prompt_embeds) if field is not None]
    for number, caption in enumerate(_captions(sample, names.caption)):
        fields = [numbered(field, number) if number else field for field in given]
        tensors = [sample.tensor(field, None if field is fields[0] else 1) for field in fields]
        embeds, pooled = tensors[0], tensors[1] if len(tensors) > 1 else None
        if embeds is None or any(tensor is None for tensor in tensors):
            raise ForeignFileRefused(sample.path, "missing", f"it has no {' and no '.join(fields)} for a caption")
        yield ForeignText((sample_id,), sample.path, caption, embeds, pooled)


def _captions(sample: ShardSample, field: str | None) -> list[str | None]:
    value = None if field is None else sample.value(field)
    try:
        captions_in_columns({"caption": value}, ("caption",))
    except CaptionError as error:
        raise ForeignFileRefused(sample.path, "bad-caption", str(error)) from error
    return value if isinstance(value, list) else [value]


def _geometry(
    sample: ShardSample, declaration: Declaration, latents: torch.Tensor, size: Size | None
) -> tuple[Geometry, str | None]:
    """The geometry of the latents, and what of it was derived. `size` is that of the image, where it is there."""
    names, note = declaration.fields, None
    bucket = _bucket_of(latents, declaration)
    if names.geometry is not None and (stated := sample.value(names.geometry)) is not None:
        geometry = _parsed(stated, sample.path)
    else:
        original, note = size or bucket, NOTE_DERIVED if size else NOTE_NO_SIZE
        if names.original_size is not None:
            sides = pixel_pair([sample.value(name) for name in names.original_size], 1)
            if sides is None:
                raise corrupt(sample.path, f"its {' and '.join(names.original_size)} are no size in pixels")
            original, note = Size(*sides), NOTE_DERIVED
        geometry = fit(original, bucket)
    if size is not None and size != geometry.original_size:
        detail = f"the image is {size} now (upright), but one of {geometry.original_size} was cached"
        raise ForeignFileRefused(sample.path, "changed", detail)
    return geometry, note


def _bucket_of(latents: torch.Tensor, declaration: Declaration) -> Size:
    """The bucket of latents as they are in the file: scaled ones may be patches of 2x2."""
    bucket = bucket_of(latents, declaration.family)
    is_patched = declaration.scaled and declaration.rule == "batch_norm"
    return Size(2 * bucket.height, 2 * bucket.width) if is_patched else bucket


def _parsed(value: Any, path: str) -> Geometry:
    try:
        return msgspec.convert(value, Geometry)  # the import checks the bounds
    except ValueError as error:
        raise corrupt(path, f"its geometry is none: {error!r:.200}") from error
