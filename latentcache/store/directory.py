"""A cache directory: what lies where in it, and whether it is one."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from latentcache.errors import ReadOnlyError, SchemaError, StoreError, UnsafeStoreError
from latentcache.store.entry import PACK_SUFFIX, is_pack_id
from latentcache.utils.durable_files import (
    expanded,
    make_folder,
    read_small_file,
    remove_whole,
    sweep_temporaries,
    sync_folder,
    system_errors,
    typed_errors,
    write_sealed,
)

SCHEMA = 2
"""Version of the directory's layout."""
MARK = "CACHE.json"
_ABOUT_TO_GO = "*.removed-*"
_MAX_MARK_BYTES = 1 << 12
KEEPS_MAPPED = os.name == "nt"
"""Whether the system refuses to remove a file that a process has mapped."""
NOTED_S = 3600.0
"""The use of a pack is noted with this precision, in seconds: many processes may begin to read it at once."""


class CacheDirectory:
    """`CACHE.json` (the schema), `packs/<xx>/<pack>.safetensors`, `index/`, `manifests/`, and `upkeep.lock`.

    StoreError: there is no such directory (and `create` is false), or it holds something else. SchemaError: another
    format. UnsafeStoreError: `CACHE.json` is damaged. ReadOnlyError: it cannot be written, and `read_only` is false.
    """

    def __init__(self, path: str | os.PathLike[str], *, create: bool = True, read_only: bool = False):
        self.path = expanded(path).absolute()
        self.packs = self.path / "packs"
        self.index = self.path / "index"
        self.manifests = self.path / "manifests"
        self.lock = self.path / "upkeep.lock"
        self.readers = self.path / "readers.lock"
        self.claims = self.path / "claims.lock"
        mark = self.path / MARK
        if not os.path.lexists(mark):
            self._make(create=create and not read_only)
        check_mark(read_small_file(mark, _MAX_MARK_BYTES, "open the cache again"), mark, self.path)
        if not read_only and not os.access(self.path, os.W_OK):
            raise ReadOnlyError(self.path, "the cache cannot be written; open it with read_only=True to read it")

    def _make(self, *, create: bool) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise StoreError(f"{self.path}: is not a directory; a cache is one")
        # A process that makes the same cache at this moment has a temporary file there.
        names = [n for n in os.listdir(self.path) if not n.startswith(f".{MARK}.")] if self.path.is_dir() else []
        if names and not os.path.lexists(self.path / MARK):
            raise StoreError(
                f"{self.path}: is not a cache (it has no {MARK}) and is not empty: it holds {min(names)!r}. Name a "
                f"cache, or a new one; to one that lost its {MARK} give it again: {mark_bytes().decode()}"
            )
        if not create:
            raise StoreError(f"{self.path}: there is no cache here. `latentcache precache` makes one; check the path.")
        with typed_errors(self.path, 0):
            make_folder(self.path)
        write_sealed(self.path / MARK, mark_bytes())

    def pack_path(self, pack: str) -> Path:
        """Where a pack lies. `pack` is an id; UnsafeStoreError for anything that could be a path."""
        return self.path / pack_name(pack)

    def new_pack_path(self, pack: str) -> Path:
        """Where a pack lies, in a folder that is made if need be."""
        path = self.pack_path(pack)
        with typed_errors(path, 0):
            make_folder(self.packs)
            path.parent.mkdir(exist_ok=True)
            # Each time: the process that made the folder may have ended before this.
            sync_folder(self.packs)
        return path

    def note_use(self, pack: str) -> None:
        """Note in the mtime of a pack's file that a process begins to read it, at most once in NOTED_S.

        Nothing else changes a pack, so that `prune` knows by it which were used the longest ago. Where the file may not
        be changed nothing is noted.
        """
        path = self.pack_path(pack)
        with suppress(OSError):
            if time.time() - path.stat().st_mtime >= NOTED_S:
                os.utime(path)

    def last_use(self, pack: str) -> float:
        """When a process last began to read the pack (seconds since 1970), to NOTED_S; 0 if its file is not there."""
        try:
            return self.pack_path(pack).stat().st_mtime
        except OSError:
            return 0.0

    def pack_sizes(self) -> dict[str, int]:
        """Bytes of each pack's file, by id. StoreError if a folder of packs cannot be listed now."""
        sizes = {}
        with system_errors(self.packs):
            for folder in self._pack_folders():
                with os.scandir(folder) as entries:
                    for entry in entries:
                        pack = entry.name.removesuffix(PACK_SUFFIX)
                        if entry.name != pack and is_pack_id(pack) and pack[:2] == folder.name and entry.is_file():
                            with suppress(FileNotFoundError):  # compacted away since it was listed
                                sizes[pack] = entry.stat().st_size
        return sizes

    def remove_pack(self, pack: str) -> bool:
        """Delete a pack's file, if it is there. False if that must wait: Windows removes no file that is mapped."""
        path = self.pack_path(pack)
        with typed_errors(path, 0):
            is_gone = remove_unless_mapped(path)
            if path.parent.exists():
                sync_folder(path.parent)
        return is_gone

    def sweep(self) -> None:
        """Remove what dead writers left half written, or were about to remove."""
        for leftover in self.path.glob(_ABOUT_TO_GO):
            with suppress(StoreError):  # another process may remove it too
                remove_whole(leftover)
        folders = [folder for folder in (self.manifests, self.index) if folder.is_dir()]
        for folder in (self.path, *folders, *self._pack_folders()):
            sweep_temporaries(folder)

    def _pack_folders(self) -> list[Path]:
        if not os.path.lexists(self.packs):
            return []
        with system_errors(self.packs), os.scandir(self.packs) as entries:
            return [self.packs / entry.name for entry in entries if len(entry.name) == 2 and entry.is_dir()]


def remove_unless_mapped(path: Path) -> bool:
    """Remove a file, if it is there. False if that must wait: Windows removes no file that is mapped."""
    try:
        path.unlink(missing_ok=True)
    except PermissionError:
        if not KEEPS_MAPPED:
            raise
        return False
    return True


def pack_name(pack: str) -> str:
    """Where a pack lies in a cache, also in a bucket. `pack` is an id; UnsafeStoreError for what could be a path."""
    if not is_pack_id(pack):
        raise UnsafeStoreError("packs", f"{pack!r:.80} is not the name of a pack")
    return f"packs/{pack[:2]}/{pack}{PACK_SUFFIX}"


def mark_bytes() -> bytes:
    """What `CACHE.json` holds."""
    return json.dumps({"format": "latentcache", "schema": SCHEMA}).encode()


def check_mark(text: bytes, mark: Path | str, path: Path | str) -> None:
    """SchemaError if `text`, which lies at `mark`, is that of another format; UnsafeStoreError if it is damaged."""
    try:
        value = json.loads(text)
        found, is_whole = value["schema"], value["format"] == "latentcache" and type(value["schema"]) is int
    except (ValueError, LookupError, TypeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise UnsafeStoreError(mark, f"is damaged: it is {text!r:.200}. Write into it: {mark_bytes().decode()}")
    if found != SCHEMA:
        raise SchemaError(path, found, SCHEMA)
