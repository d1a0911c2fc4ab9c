"""WebDataset: tar files whose members belong to one sample if their names are equal up to the first dot.

An export has `shard-000000.tar` and so on with `<number>.json`, `<number>.latents.npy`, `<number>.prompt_embeds.npy`
and `<number>.pooled_prompt_embeds.npy`; further captions have `prompt_embeds_1.npy`, flipped latents
`latents_flipped.npy`. Energon's metadata are next to them, and `latentcache.json` says what the numbers are. An import
reads any such tars of which a declaration says what their members are.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from latentcache.dataset.archives import TarDamage, TarHeaders
from latentcache.dataset.samples import MAX_CAPTION_BYTES, MAX_NAME_CHARS
from latentcache.errors import ForeignFileRefused
from latentcache.interop.declaration import read_declaration
from latentcache.interop.declared_samples import declared_items
from latentcache.interop.foreign_files import MAX_FILE_BYTES, corrupt, npy_array, npy_bytes, read_at, tensor_in
from latentcache.interop.formats.energon import EnergonIndex
from latentcache.interop.readers import ForeignItem, SourceImages, refusing, walked
from latentcache.interop.reports import ExportReport
from latentcache.interop.shards import ShardExport, ShardRow
from latentcache.loading.cache import LatentCache
from latentcache.types import Refusal
from latentcache.utils.progress import Progress

_FIELDS = {
    "latents": "latents.npy",
    "prompt_embeds": "prompt_embeds.npy",
    "pooled_prompt_embeds": "pooled_prompt_embeds.npy",
    "sample_id": "sample_id",
    "caption": "captions",
    "geometry": "geometry",
}
_MAX_MEMBERS = 4096
"""Of one sample."""
_MAX_JSON_BYTES = 4 << 20
"""Captions of MAX_CAPTION_BYTES have up to six times as many in JSON's ASCII; ours have fewer."""


def export(
    cache: LatentCache,
    name: str,
    folder: str | Path,
    *,
    scaled: bool = False,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 256 << 20,
    seed: int | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Write the manifest `name` as WebDataset shards to the new `folder`, with the metadata that Energon needs.

    Latents are the mean of the moments, or with `seed` a draw. See `ShardExport` for the rest.
    """
    run = ShardExport(
        "webdataset",
        cache,
        name,
        folder,
        scaled=scaled,
        dtype=dtype,
        shard_bytes=shard_bytes,
        seed=seed,
        progress=progress,
    )
    index = EnergonIndex(run)
    for number, rows in enumerate(run.shards()):
        shard = f"shard-{number:06}.tar"
        with run.sealed(shard) as file, tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            samples = [_add(tar, row) for row in rows]
            end = tar.offset
        index.add(shard, samples, end)
    if run.num_samples:
        index.finish(run.manifest.role)
        run.finish(_FIELDS)
    return run.report


def _add(tar: tarfile.TarFile, row: ShardRow) -> tuple[str, int, list[tuple[str, int, int]]]:
    """Add a sample's members: its key, its offset, and its members as `EnergonIndex.add` takes them."""
    key, start, parts = f"{row.number:09}", tar.offset, []
    members = {"json": json.dumps(row.values).encode()}
    members |= {f"{field}.npy": npy_bytes(array) for field, array in row.tensors.items()}
    for part, data in members.items():
        member = tarfile.TarInfo(f"{key}.{part}")
        member.size = len(data)
        parts.append((part, tar.offset + tarfile.BLOCKSIZE, len(data)))
        tar.addfile(member, io.BytesIO(data))
    tar.members = []  # type: ignore[attr-defined]  # tarfile would keep them all, a kilobyte each
    return key, start, parts


class WebDatasetCache:
    """The latents in the tars in and below the folder `root`. `declaration`: see `read_declaration`.

    `images` is the folder of the images, if they are still there: an entry then knows its image, and can be verified.
    Raises ConfigError for a declaration that is missing or wrong, and DatasetError for a folder that cannot be read.
    """

    format = "webdataset"

    def __init__(self, root: str | Path, *, declaration: Path | None = None, images: str | Path | None = None):
        self._root = os.path.abspath(root)
        self.declaration = read_declaration(declaration, Path(root))
        self.family, self.keeps_padding = self.declaration.family, self.declaration.keeps_padding
        self._images = SourceImages(images)

    def items(self) -> Iterator[ForeignItem]:
        """Tar by tar, sample by sample: the latent, the flipped one, then the texts."""
        yield from self._images.refusals
        yield from walked(self._root, self._tars)

    def _tars(self, folder: str, names: list[str]) -> Iterator[ForeignItem]:
        for name in names:
            if name.endswith(".tar"):
                yield from self._tar(os.path.join(folder, name))

    def _tar(self, name: str) -> Iterator[ForeignItem]:
        path = os.path.join(self._root, name)
        try:
            with TarHeaders(path) as file:
                yield from self._samples(file, TarSample(name, path, file.fileno()))
        except OSError as error:
            yield Refusal(name, path, "unreadable", error.strerror or str(error))

    def _samples(self, file: TarHeaders, group: TarSample) -> Iterator[ForeignItem]:
        """The items of the samples of a tar. Members of a sample follow one another, as WebDataset needs it."""
        try:
            for member in file.members():
                key, _, part = _split(member.name)
                if member.isdir() or not part:
                    continue
                if key != group.key:
                    yield from self._items(group)
                    group = group.next(key)
                group.add(part, member)
            if (rest := file.rest()) is not None:
                yield Refusal(group.shard, group.tar, "corrupt", rest)
        except TarDamage as damage:
            detail = f"{damage.detail}; its last sample is left out, which may be cut"
            yield Refusal(f"{group.shard}/{group.key}", group.path, damage.reason, detail)
            return
        yield from self._items(group)

    def _items(self, group: TarSample) -> Iterator[ForeignItem]:
        if group.problem is not None:
            yield Refusal(group.name, group.path, *group.problem)
        elif group.members:
            yield from refusing(group.name, declared_items(group, self.declaration, self._images))


read = WebDatasetCache


def _split(name: str) -> tuple[str, str, str]:
    """The key, a dot, and the rest of a member's name, as webdataset splits it."""
    folder, slash, base = name.removeprefix("./").rpartition("/")
    stem, dot, part = base.partition(".")
    return folder + slash + stem, dot, part if stem else ""


class TarSample:
    """The members of one sample of a tar: see `ShardSample`. `shard` is the tar's path below the folder."""

    def __init__(self, shard: str, tar: str, fd: int, key: str = ""):
        self.shard, self.tar, self.key = shard, tar, key
        self.path, self.name = f"{tar}#{key}", f"{shard}/{key}"
        self.problem: tuple[str, str] | None = None
        """Reason and detail, if the sample is refused."""
        self.members: dict[str, tuple[int, int]] = {}
        """Name without the key -> offset and size."""
        self._fd = fd
        self._document: dict[str, Any] | None = None

    def next(self, key: str) -> TarSample:
        """An empty sample of the same tar."""
        return TarSample(self.shard, self.tar, self._fd, key)

    def add(self, part: str, member: tarfile.TarInfo) -> None:
        """Note a member."""
        if len(member.name) > MAX_NAME_CHARS:
            self.problem = "corrupt", f"a member's name has {len(member.name):,} characters"
        elif not member.isreg() or member.issparse():
            self.problem = "unreadable", f"its {part} is not a regular member of the tar"
        elif part in self.members:
            self.problem = "duplicate", f"the tar has two members {member.name}"
        elif len(self.members) == _MAX_MEMBERS:
            self.problem = "corrupt", f"it has more than {_MAX_MEMBERS:,} members"
        else:
            self.members[part] = member.offset_data, member.size

    def value(self, field: str) -> Any:
        """What the json has by this name; without that, the text of the member."""
        if self._document is None:
            self._document = self._json() if "json" in self.members else {}
        if field in self._document or field not in self.members:
            return self._document.get(field)
        try:
            return self._bytes(field, MAX_CAPTION_BYTES).decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise corrupt(self.path, f"its {field} is not UTF-8") from error

    def tensor(self, field: str, ndim: int | None) -> torch.Tensor | None:
        """The array of a member that is an npy file."""
        if field not in self.members:
            return None
        if field.rpartition(".")[2] != "npy":
            raise ForeignFileRefused(
                self.path, "unsupported-format", f"its {field} is no npy file: nothing else is read"
            )
        array = npy_array(self._bytes(field, MAX_FILE_BYTES), field, self.path)
        return tensor_in(torch.from_numpy(array), field, self.path, ndim=ndim) if array.size else None

    def _json(self) -> dict[str, Any]:
        try:
            value = json.loads(self._bytes("json", _MAX_JSON_BYTES))
        except (ValueError, RecursionError) as error:
            raise corrupt(self.path, f"its json cannot be read: {error}") from error
        if not isinstance(value, dict):
            raise corrupt(self.path, f"its json holds a {type(value).__name__}; an object is needed")
        return value

    def _bytes(self, part: str, max_bytes: int) -> bytes:
        offset, num_bytes = self.members[part]
        if num_bytes > max_bytes:
            raise corrupt(self.path, f"its {part} has {num_bytes:,} bytes; {max_bytes:,} are allowed")
        data = read_at(self._fd, offset, num_bytes)
        if len(data) < num_bytes:
            raise ForeignFileRefused(self.path, "truncated", f"the tar ends inside its {part}")
        return data
