"""The image that a foreign file is of, where the file has its name without suffix, and says its size."""

from __future__ import annotations

from pathlib import Path

from latentcache.errors import ForeignFileRefused
from latentcache.interop.readers import SourceImages
from latentcache.types import Size

NOTE_NO_IMAGE = "no image found: the sample_id has no suffix"
NOTE_TURNED = "{} does not turn images as EXIF says: this latent is of the image lying on its side"


def matched_image(
    images: SourceImages, base: str, size: Size, path: str | Path, trainer: str
) -> tuple[str, Path | None, str | None]:
    """The sample_id of a latent of an image of this size, its file, and a note.

    `base` is its sample_id without suffix: that is returned where there is no such image. The `trainer` takes sizes as
    files have them, before the EXIF turn. Raises ForeignFileRefused (with `path`) for an image of another size, and
    where several images fit, and ImageRefused.
    """
    upright = {sample_id: images.size(sample_id) for sample_id in images.with_stem(base)}
    if not upright:
        return base, None, NOTE_NO_IMAGE
    note = None
    fitting = [sample_id for sample_id in upright if upright[sample_id] == size]
    if not fitting:
        fitting = [sample_id for sample_id in upright if upright[sample_id] == Size(size.width, size.height)]
        note = NOTE_TURNED.format(trainer)
    if not fitting:
        met = ", ".join(f"{sample_id} is {size}" for sample_id, size in upright.items())
        raise ForeignFileRefused(path, "changed", f"it is of an image of {size}, but {met}: it was replaced")
    if len(fitting) > 1:
        names = " and ".join(fitting)
        raise ForeignFileRefused(path, "duplicate", f"{names} share this file, so it is of only one of them")
    return fitting[0], images.path(fitting[0]), note
