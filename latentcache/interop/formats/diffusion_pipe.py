"""diffusion-pipe's latent cache for SDXL: shards of `torch.save` blobs, listed in a SQLite database.

`<dataset>/cache/sdxl/cache_<aspect>x<w>x<h>x<frames>/latents/` holds `metadata.db` with the tables
`items(shard, shard_index)` and `shard_<n>(offset, size)`, and the files `shard_<n>.bin`. A blob is a dict: `latents`
[4, h, w], one draw multiplied by the VAE's scaling factor, `mask`, `image_spec` [tar or None, absolute path], and
`caption`, a list. Text embeddings of SDXL are not cached, and no size or crop is recorded.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from latentcache.dataset.buckets import fit
from latentcache.dataset.samples import walk
from latentcache.errors import DatasetError, ForeignFileRefused
from latentcache.families.sdxl import SCALING_FACTOR
from latentcache.interop.items import ForeignImage, ForeignItem, bucket_of, item_or_refusal, refusal_of
from latentcache.interop.source_images import SourceImages, sample_id_of
from latentcache.interop.torch_files import MAX_FILE_BYTES, load_torch, opened, read_at, tensor_in
from latentcache.types import Refusal

DATABASE = "metadata.db"
NOTE_DERIVED = "sizes derived from the image: resized to cover the bucket, cropped in the middle"
NOTE_NO_IMAGE = "the image is not there: the bucket stands for its size, as where diffusion-pipe trains"
NOTE_MASK = "its mask is not imported"

_SHARD = re.compile(r"shard_(\d{1,6})")
_MAX_QUERY_S = 60.0
_MAX_ITEMS = 1 << 22
_MAX_TEXT_BYTES = 1 << 20


def read(root: str | Path, *, images: str | Path | None = None, recorded_root: str | None = None) -> DiffusionPipeCache:
    """All latent caches in and below `root`: the dataset's folder, its `cache`, or one `latents` folder.

    `images` is the images' folder. `recorded_root` is where it was when the cache was made, if it was moved since.
    Raises DatasetError if a folder cannot be read.
    """
    if not os.path.isdir(root):
        raise DatasetError(root, "is not a folder")
    return DiffusionPipeCache(os.path.abspath(root), SourceImages(images, recorded_root=recorded_root))


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
                raise ForeignFileRefused(path, "corrupt", "it has no table shard_<n>")
            for shard in shards:
                for offset, size in connection.execute(f"SELECT offset, size FROM shard_{shard} ORDER BY rowid"):
                    if type(offset) is not int or type(size) is not int or offset < 0 or size < 1:
                        raise ForeignFileRefused(path, "corrupt", f"shard {shard} has a blob at {offset!r} of {size!r}")
                    if len(rows) == _MAX_ITEMS:
                        raise ForeignFileRefused(path, "corrupt", f"it lists more than {_MAX_ITEMS:,} items")
                    rows.append((shard, offset, size))
    except sqlite3.Error as error:
        raise ForeignFileRefused(path, "corrupt", f"SQLite: {error}") from error
    return rows


class DiffusionPipeCache:
    """See `read`."""

    format = "diffusion-pipe"

    def __init__(self, root: str, images: SourceImages):
        self._root, self._images = root, images

    def items(self) -> Iterator[ForeignItem]:
        """Folder by folder, in the order of names; in each, shard by shard."""
        yield from self._images.refusals
        num_databases = 0
        for found in walk(self._root):
            if isinstance(found, Refusal):
                yield found
            elif DATABASE in found[1]:
                num_databases += 1
                yield from self._folder(os.path.join(self._root, found[0]))
        if not num_databases:
            yield Refusal("", self._root, "missing", f"there is no {DATABASE} in or below it")

    def _folder(self, folder: str) -> Iterator[ForeignItem]:
        path = os.path.join(folder, DATABASE)
        try:
            rows = _rows(path)
        except ForeignFileRefused as error:
            yield refusal_of("", error)
            return
        for number, (shard, offset, size) in enumerate(rows):
            shard_path = os.path.join(folder, f"shard_{shard}.bin")
            yield item_or_refusal(f"item {number}", self._item, shard_path, offset, size)

    def _item(self, shard_path: str, offset: int, size: int) -> ForeignImage:
        path = f"{shard_path}#{offset}"
        content = _blob(shard_path, path, offset, size)
        if not isinstance(content, dict):
            raise ForeignFileRefused(path, "corrupt", f"the blob holds a {type(content).__name__}; it must be a dict")
        latents = tensor_in(content.get("latents"), "latents", path, ndim=3)
        spec = content.get("image_spec")
        if not isinstance(spec, (list, tuple)) or len(spec) != 2 or not isinstance(spec[1], str):
            raise ForeignFileRefused(path, "corrupt", "its image_spec is not [tar or None, path]")
        archive, recorded = spec
        if archive is not None:
            raise ForeignFileRefused(path, "unsupported-format", f"its image is in the tar {archive!r:.200}")
        sample_id, bucket = self._images.find(recorded), bucket_of(latents)
        if sample_id is None:
            geometry, note, image = fit(bucket, bucket), NOTE_NO_IMAGE, None
            sample_id = sample_id_of(recorded, path)
        else:
            geometry, note = fit(self._images.size(sample_id), bucket), NOTE_DERIVED
            image = self._images.path(sample_id)
        if content.get("mask") is not None:
            note = f"{note}; {NOTE_MASK}"
        return ForeignImage(sample_id, path, image, latents, SCALING_FACTOR, "sample", geometry, note)


def _blob(path: str, name: str, offset: int, size: int) -> Any:
    """One blob of a shard; `name` stands for it in messages. Raises ForeignFileRefused."""
    with opened(path) as (fd, num_bytes):
        if size > MAX_FILE_BYTES or offset + size > num_bytes:
            reason = "corrupt" if size > MAX_FILE_BYTES else "truncated"
            raise ForeignFileRefused(name, reason, f"{size:,} bytes at {offset:,} of a shard of {num_bytes:,}")
        data = read_at(fd, offset, size)
    return load_torch(data, name)
