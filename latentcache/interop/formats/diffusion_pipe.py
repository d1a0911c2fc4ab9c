"""diffusion-pipe's latent cache: shards of `torch.save` blobs, listed in a SQLite database.

`<dataset>/cache/<model>/cache_<aspect>x<w>x<h>x<frames>/latents/` holds `metadata.db` with the tables
`items(shard, shard_index)` and `shard_<n>(offset, size)`, and the files `shard_<n>.bin`. A blob is a dict: `latents`
[C, h, w], scaled, one draw; of Qwen-Image and Wan the mean, [C, F, h, w]; `mask`, None or [H, W] in pixels;
`image_spec` [tar or None, absolute path], and `caption`, a list. Text embeddings are elsewhere, and no size or crop is
recorded. (Read in diffusion-pipe 8f83dbf.)
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path, PurePath
from typing import Any, Literal
from urllib.parse import quote

from latentcache.dataset.buckets import fit
from latentcache.dataset.samples import walk
from latentcache.errors import DatasetError, ForeignFileRefused
from latentcache.families import family_named
from latentcache.interop.family_tensors import image_latents, keeps_padding, latent_mask
from latentcache.interop.foreign_family import chosen_family
from latentcache.interop.foreign_files import MAX_FILE_BYTES, corrupt, load_torch, opened, read_at, tensor_in
from latentcache.interop.readers import (
    ForeignImage,
    ForeignItem,
    SourceImages,
    bucket_of,
    refusing,
    sample_id_of,
    walked,
)
from latentcache.types import Refusal

DATABASE = "metadata.db"
ARCHITECTURES = {"sdxl": "sdxl", "flux": "flux", "chroma": "chroma", "qwen_image": "qwen-image", "wan": "wan"}
"""The model in a folder's name -> the family."""
NOTE_DERIVED = "sizes derived from the image: resized to cover the bucket, cropped in the middle"
NOTE_NO_IMAGE = "the image is not there: the bucket stands for its size, as where diffusion-pipe trains"
NOTE_MASK = "its mask was imported: means of pixels, where diffusion-pipe takes one pixel for each latent"

_SHARD = re.compile(r"shard_(\d{1,6})")
_MAX_QUERY_S = 60.0
_MAX_ITEMS = 1 << 22
_MAX_TEXT_BYTES = 1 << 20


def _rows(path: str) -> list[tuple[int, int, int]]:
    """(shard, offset, size) of every blob, in order. Raises ForeignFileRefused.

    The database is not trusted: nothing is written to it, no view, trigger or function in it is run, and the size of
    values and the time of a query are bounded.
    """
    for suffix in ("-wal", "-journal"):
        if os.path.lexists(path + suffix) and os.path.getsize(path + suffix):
            raise ForeignFileRefused(path, "unreadable", f"it has a {suffix} file: its writer runs, or was killed")
    with opened(path):
        pass  # it is a regular file, and readable
    rows: list[tuple[int, int, int]] = []
    try:
        # Without `immutable` SQLite makes files next to the database.
        with closing(sqlite3.connect(f"file:{quote(os.fsencode(path))}?mode=ro&immutable=1", uri=True)) as connection:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_TEXT_BYTES)
            for pragma in ("trusted_schema=OFF", "query_only=ON", "cell_size_check=ON", "mmap_size=0"):
                connection.execute(f"PRAGMA {pragma}")
            ends = time.monotonic() + _MAX_QUERY_S
            connection.set_progress_handler(lambda: time.monotonic() > ends, 10_000)
            tables = connection.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' AND sql LIKE 'CREATE TABLE%'"
            )
            shards = sorted(int(found[1]) for (name,) in tables if (found := _SHARD.fullmatch(str(name))))
            if not shards:
                raise corrupt(path, "it has no table shard_<n>")
            for shard in shards:
                for offset, size in connection.execute(f"SELECT offset, size FROM shard_{shard} ORDER BY rowid"):
                    if type(offset) is not int or type(size) is not int or offset < 0 or size < 1:
                        raise corrupt(path, f"shard {shard} has a blob at {offset!r} of {size!r}")
                    if len(rows) == _MAX_ITEMS:
                        raise corrupt(path, f"it lists more than {_MAX_ITEMS:,} items")
                    rows.append((shard, offset, size))
    except sqlite3.Error as error:
        raise corrupt(path, f"SQLite: {error}") from error
    return rows


class DiffusionPipeCache:
    """All latent caches in and below `root`: the dataset's folder, its `cache`, or one `latents` folder.

    `images` is the images' folder. `recorded_root` is where it was when the cache was made, if it was moved since. The
    family follows from the folders' names. Raises DatasetError if a folder cannot be read, and ConfigError for a
    `family` that is not among those that are known here, and where it is not given and there are caches of several.
    """

    format = "diffusion-pipe"
    declaration = None

    def __init__(
        self,
        root: str | Path,
        *,
        images: str | Path | None = None,
        recorded_root: str | None = None,
        family: str | None = None,
    ):
        if not os.path.isdir(root):
            raise DatasetError(root, "is not a folder")
        self._root, self._images = os.path.abspath(root), SourceImages(images, recorded_root=recorded_root)
        folders = (found for found in walk(self._root) if not isinstance(found, Refusal))
        models = (_model(os.path.join(self._root, folder)) for folder, names in folders if DATABASE in names)
        self.family = chosen_family(family, set(filter(None, models)), ARCHITECTURES, self.format)
        self._family, self.keeps_padding = family_named(self.family), keeps_padding(self.family)

    def items(self) -> Iterator[ForeignItem]:
        """Folder by folder, in the order of names; in each, shard by shard."""
        yield from self._images.refusals
        is_empty = True
        for item in walked(self._root, self._folder):
            is_empty = False
            yield item
        if is_empty:
            yield Refusal("", self._root, "missing", f"there is no {DATABASE} with items in or below it")

    def _folder(self, folder: str, names: list[str]) -> Iterator[ForeignItem]:
        if DATABASE not in names:
            return
        path = os.path.join(self._root, folder)
        model = _model(path)
        if model is not None and ARCHITECTURES.get(model) != self.family:
            detail = f"it is of the model {model}, not of {self.family}"
            raise ForeignFileRefused(path, "unsupported-format", detail)
        for number, (shard, offset, size) in enumerate(_rows(os.path.join(path, DATABASE))):
            yield from refusing(f"item {number}", self._item(os.path.join(path, f"shard_{shard}.bin"), offset, size))

    def _item(self, shard_path: str, offset: int, size: int) -> Iterator[ForeignImage]:
        path = f"{shard_path}#{offset}"
        content = _blob(shard_path, path, offset, size)
        if not isinstance(content, dict):
            raise corrupt(path, f"the blob holds a {type(content).__name__}; it must be a dict")
        is_video = self._family.latent.is_video
        latents = image_latents(self._family, content.get("latents"), path, has_frames=is_video)
        spec = content.get("image_spec")
        if not isinstance(spec, (list, tuple)) or len(spec) != 2 or not isinstance(spec[1], str):
            raise corrupt(path, "its image_spec is not [tar or None, path]")
        archive, recorded = spec
        if archive is not None:
            raise ForeignFileRefused(path, "unsupported-format", f"its image is in the tar {archive!r:.200}")
        found, bucket = self._images.find(recorded), bucket_of(latents, self.family)
        image, image_size = self._images.image(found)
        note = NOTE_NO_IMAGE if image is None else NOTE_DERIVED
        mask = content.get("mask")
        if mask is not None:
            pixels = tensor_in(mask, "mask", path, ndim=2)
            note, mask = f"{note}; {NOTE_MASK}", latent_mask(pixels, latents, self._family.latent.downscale, path)
        sample_id, geometry = found or sample_id_of(recorded, path), fit(image_size or bucket, bucket)
        output: Literal["mean", "sample"] = "mean" if is_video else "sample"
        yield ForeignImage(sample_id, path, image, latents, True, output, geometry, note, mask)


read = DiffusionPipeCache


def _model(folder: str) -> str | None:
    """The model of a `latents` folder, by the folders above it; None where it lies elsewhere than diffusion-pipe's."""
    parts = PurePath(folder).parts
    return parts[-3] if parts[-4:-3] == ("cache",) else None


def _blob(path: str, name: str, offset: int, size: int) -> Any:
    """One blob of a shard; `name` stands for it in messages. Raises ForeignFileRefused."""
    with opened(path) as (fd, num_bytes):
        if size > MAX_FILE_BYTES or offset + size > num_bytes:
            reason = "corrupt" if size > MAX_FILE_BYTES else "truncated"
            raise ForeignFileRefused(name, reason, f"{size:,} bytes at {offset:,} of a shard of {num_bytes:,}")
        data = read_at(fd, offset, size)
    return load_torch(data, name)
