"""The layout of a cache directory, and the checks that a directory is a cache."""

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
"""Whether the system refuses to remove a file while a process has it mapped."""
NOTED_S = 3600.0
"""Resolution in seconds of a pack's last use, so that many processes that start at once do not all update it."""


class CacheDirectory:
    """`CACHE.json` (the schema), `packs/<xx>/<pack>.safetensors`, `index/`, `manifests/`, and `upkeep.lock`.

    StoreError: there is no cache (and `create` is false), or the directory holds something else. SchemaError: another
    format. UnsafeStoreError: `CACHE.json` is damaged. ReadOnlyError: it is not writable, and `read_only` is false.
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
            raise ReadOnlyError(self.path, "this user cannot write to the cache; open it with read_only=True to read")

    def _make(self, *, create: bool) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise StoreError(f"{self.path}: is not a directory; give the path of a cache directory or of a new one")
        # Another process that is creating the same cache has a temporary file there.
        names = [n for n in os.listdir(self.path) if not n.startswith(f".{MARK}.")] if self.path.is_dir() else []
        if names and not os.path.lexists(self.path / MARK):
            raise StoreError(
                f"{self.path}: is not a cache (it has no {MARK}) and is not empty: it holds {min(names)!r}. Give "
                f"another path, or if it is a cache that lost its {MARK}, restore that as {mark_bytes().decode()}"
            )
        if not create:
            raise StoreError(f"{self.path}: there is no cache here. Check the path; `latentcache precache` makes one.")
        with typed_errors(self.path, 0):
            make_folder(self.path)
        write_sealed(self.path / MARK, mark_bytes())

    def pack_path(self, pack: str) -> Path:
        """The path of the pack with this id. UnsafeStoreError unless it is a pack id, since it becomes a path."""
        return self.path / pack_name(pack)

    def new_pack_path(self, pack: str) -> Path:
        """Like `pack_path`, and create the folder if needed."""
        path = self.pack_path(pack)
        with typed_errors(path, 0):
            make_folder(self.packs)
            path.parent.mkdir(exist_ok=True)
            # Always: the process that created the folder may have died before syncing.
            sync_folder(self.packs)
        return path

    def note_use(self, pack: str) -> None:
        """Record in the mtime of a pack's file that a process starts to read it, at most once in NOTED_S.

        Nothing else changes that mtime, so `prune` finds the least recently used packs by it. A no-op if the file may
        not be changed.
        """
        path = self.pack_path(pack)
        with suppress(OSError):
            if time.time() - path.stat().st_mtime >= NOTED_S:
                os.utime(path)

    def last_use(self, pack: str) -> float:
        """When a process last started to read the pack (Unix time, to within NOTED_S); 0 if its file is missing."""
        try:
            return self.pack_path(pack).stat().st_mtime
        except OSError:
            return 0.0

    def pack_sizes(self) -> dict[str, int]:
        """The file size of each pack, by id. StoreError if a folder of packs cannot be listed now."""
        sizes = {}
        with system_errors(self.packs):
            for folder in self._pack_folders():
                with os.scandir(folder) as entries:
                    for entry in entries:
                        pack = entry.name.removesuffix(PACK_SUFFIX)
                        if entry.name != pack and is_pack_id(pack) and pack[:2] == folder.name and entry.is_file():
                            with suppress(FileNotFoundError):  # compacted away after it was listed
                                sizes[pack] = entry.stat().st_size
        return sizes

    def remove_pack(self, pack: str) -> bool:
        """Delete a pack's file if it exists. False if that must wait, because Windows keeps mapped files."""
        path = self.pack_path(pack)
        with typed_errors(path, 0):
            is_gone = remove_unless_mapped(path)
            if path.parent.exists():
                sync_folder(path.parent)
        return is_gone

    def sweep(self) -> None:
        """Remove half-written files and unfinished removals of dead writers."""
        for leftover in self.path.glob(_ABOUT_TO_GO):
            with suppress(StoreError):  # another process may be removing it too
                remove_whole(leftover)
        folders = [folder for folder in (self.manifests, self.index) if folder.is_dir()]
        for folder in (self.path, *folders, *self._pack_folders()):
            sweep_temporaries(folder)

    def _pack_folders(self) -> list[Path]:
        # Not `exists`, which says no where the system refuses to look: all packs would count as missing.
        with system_errors(self.packs), suppress(FileNotFoundError), os.scandir(self.packs) as entries:
            return [self.packs / entry.name for entry in entries if len(entry.name) == 2 and entry.is_dir()]
        return []


def remove_unless_mapped(path: Path) -> bool:
    """Remove a file if it exists. False if that must wait, because Windows keeps mapped files."""
    try:
        path.unlink(missing_ok=True)
    except PermissionError:
        if not KEEPS_MAPPED:
            raise
        return False
    return True


def pack_name(pack: str) -> str:
    """The relative path of a pack in a cache directory or bucket. UnsafeStoreError unless `pack` is a pack id."""
    if not is_pack_id(pack):
        raise UnsafeStoreError("packs", f"{pack!r:.80} is not a pack id (32 lowercase hexadecimal digits)")
    return f"packs/{pack[:2]}/{pack}{PACK_SUFFIX}"


def mark_bytes() -> bytes:
    """The content of `CACHE.json`."""
    return json.dumps({"format": "latentcache", "schema": SCHEMA}).encode()


def check_mark(text: bytes, mark: Path | str, path: Path | str) -> None:
    """Check the content `text` of the file `mark`. SchemaError for another format, UnsafeStoreError for damage."""
    try:
        value = json.loads(text)
        found, is_whole = value["schema"], value["format"] == "latentcache" and type(value["schema"]) is int
    except (ValueError, LookupError, TypeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise UnsafeStoreError(mark, f"is damaged: it holds {text!r:.200}. Replace it by {mark_bytes().decode()}")
    if found != SCHEMA:
        raise SchemaError(path, found, SCHEMA)
