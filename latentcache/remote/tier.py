"""Tier: an LRU cache of remote packs on this disk."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from latentcache.errors import RemoteError, StoreBusyError, StoreError
from latentcache.identity import digest
from latentcache.location import HUB
from latentcache.remote.transport import Transport
from latentcache.store.directory import KEEPS_MAPPED, pack_name, remove_unless_mapped
from latentcache.store.entry import PACK_SUFFIX
from latentcache.utils.durable_files import expanded
from latentcache.utils.locks import locked

NUM_THREADS = 4
"""Maximum number of concurrent fetches."""
MAX_AHEAD = 32
"""Upper bound for packs that are being prefetched: enough for a window of pack order and one more. Other packs are
fetched on their first read."""
_PART = ".part"
_LEFT_S = 3600.0  # half-written files of dead processes are removed after this time


def folder_of(url: str, local: str | Path | None = None) -> Path:
    """The local folder for the cache at `url`: under `local`, by default the user's cache folder (XDG)."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    root = (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "latentcache"
    return (root if local is None else expanded(local)) / digest(url.encode())[:16]


def snapshot(url: str, local: str | Path | None = None) -> Path:
    """Download a cache from the hub with huggingface_hub to a folder under `local`, and return its directory.

    Only what is missing or changed is downloaded. RemoteError if that fails.
    """
    from huggingface_hub import snapshot_download

    folder = folder_of(url, local) / "hub"
    repository, _, revision = url.removeprefix(HUB).partition("@")
    wanted = ["CACHE.json", "packs/**", "manifests/*"]
    try:
        found = snapshot_download(
            repository, repo_type="dataset", revision=revision or None, cache_dir=folder, allow_patterns=wanted
        )
    except Exception as error:  # includes errors of its HTTP library, which differs between releases
        step = "Check the name, the network, and the token (`hf auth login`). `hf upload` uploads a cache."
        raise RemoteError(url, f"cannot be downloaded: {type(error).__name__}: {error!s:.300}", step) from error
    return Path(found)


class Tier:
    """Whole packs in a folder under `local`, fetched from `transport` on demand. Processes may share it.

    A pack is written under another name and renamed, so it is never incomplete. Nothing is synced: a pack that a crash
    damages fails its digests and is fetched again. When the packs exceed `max_bytes`, the least recently used ones, by
    mtime, are evicted. `release` is called with packs whose files this process must unmap. StoreError if the folder
    cannot be written.
    """

    def __init__(
        self,
        transport: Transport,
        local: str | Path | None = None,
        max_bytes: int | None = None,
        release: Callable[[Iterable[str]], None] = lambda packs: None,
    ):
        folder = folder_of(transport.url, local)
        self._transport, self._max_bytes, self._release = transport, max_bytes, release
        self._packs, self._locks = folder / "packs", folder / "locks"
        try:
            self._packs.mkdir(parents=True, exist_ok=True)
            self._locks.mkdir(exist_ok=True)
        except OSError as error:
            raise _not_kept(folder, error) from error
        self._begin()
        self._sweep()

    def _begin(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._coming: dict[str, Future[None]] = {}

    def path(self, pack: str) -> Path:
        """The local path of a pack, whether or not it is here."""
        return self._packs / pack[:2] / f"{pack}{PACK_SUFFIX}"

    def has(self, pack: str) -> bool:
        """Whether a pack is on this disk."""
        return self.path(pack).exists()

    def packs(self) -> set[str]:
        """The ids of the packs on this disk."""
        return {path.stem for path, _ in self._files()}

    def bring(self, packs: Iterable[str]) -> None:
        """Fetch the packs that are missing here, and record that all of them are used. Deleted packs are skipped.

        RemoteError; StoreError if the disk refuses the write.
        """
        if missing := self._missing(packs):
            for future in [self._fetch_soon(pack) for pack in missing]:
                future.result()

    def bring_soon(self, packs: Iterable[str]) -> None:
        """Start fetching missing packs in the background, up to MAX_AHEAD at once. Does not block."""
        for pack in self._missing(packs):
            if len(self._coming) < MAX_AHEAD:
                self._fetch_soon(pack)

    def _missing(self, packs: Iterable[str]) -> list[str]:
        """Record that packs are used, and return those that are missing here."""
        if self._pid != os.getpid():
            self._begin()  # a fork does not have the threads
        missing = list[str]()
        for pack in packs:
            try:
                os.utime(self.path(pack))
            except OSError:  # the pack is missing, or another user owns it and records its use
                if not self.has(pack):
                    missing.append(pack)
        return missing

    def _fetch_soon(self, pack: str) -> Future[None]:
        with self._lock:
            found = self._coming.get(pack)
            if found is None:
                if self._executor is None:
                    self._executor = ThreadPoolExecutor(NUM_THREADS, "latentcache-fetch")
                found = self._coming[pack] = self._executor.submit(self.fetch, pack)
                found.add_done_callback(lambda future: self._coming.pop(pack, None))
            return found

    def fetch(self, pack: str, *, again: bool = False) -> None:
        """Fetch a pack unless it is here; with `again` in any case, because it is damaged."""
        path = self.path(pack)
        # One lock file for many packs: two with the same prefix may wait for each other.
        with locked(self._locks / f"{pack[:2]}.lock", "fetching a pack", shared=False, wait=True):
            if again or not path.exists():
                with suppress(FileNotFoundError):  # deleted remotely: the reader looks up where its entries are now
                    self._write(path, self._transport.read(pack_name(pack))[0])
                    self._release([pack])
        self._make_room(pack)

    def _write(self, path: Path, data: memoryview) -> None:
        temporary = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}{_PART}")
        try:
            path.parent.mkdir(exist_ok=True)
            try:
                temporary.write_bytes(data)
                if KEEPS_MAPPED and path.exists():
                    path.rename(path.with_suffix(f".{uuid.uuid4().hex[:8]}{_PART}"))  # swept once no process maps it
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise _not_kept(path, error) from error

    # Eviction

    def _make_room(self, wanted: str) -> None:
        """Evict the least recently used packs, except `wanted`, until the rest fits `max_bytes`."""
        if self._max_bytes is None:
            return
        try:
            with locked(self._locks / "room.lock", "making room", shared=False):
                files = sorted(self._files(), key=lambda file: file[1].st_mtime_ns)
                num_bytes = sum(status.st_size for _, status in files)
                for path, status in files:
                    if num_bytes <= self._max_bytes:
                        break
                    if path.stem != wanted and self._remove(path):
                        num_bytes -= status.st_size
        except StoreBusyError:
            return  # another process is making room

    def _remove(self, path: Path) -> bool:
        """Delete a pack's file. False if that must wait, because Windows keeps mapped files."""
        self._release([path.stem])  # first, because this process may have it mapped
        try:
            return remove_unless_mapped(path)
        except OSError as error:
            raise _not_kept(path, error) from error

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        found = []
        for path in self._packs.glob(f"*/*{PACK_SUFFIX}"):
            with suppress(FileNotFoundError):
                found.append((path, path.stat()))
        return found

    def remove(self, packs: Collection[str]) -> None:
        """Delete packs that were deleted remotely."""
        for pack in packs:
            with suppress(StoreError):
                self._remove(self.path(pack))

    def _sweep(self) -> None:
        for path in self._packs.glob(f"*/*{_PART}"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _LEFT_S:
                    path.unlink()

    def close(self) -> None:
        """Cancel pending fetches. Packs that are here stay."""
        if self._pid == os.getpid() and self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None


def _not_kept(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{path}: cannot write a pack to the local tier: {error.strerror or error}. Free some space, limit the tier "
        "with cache.local_max_bytes, or set cache.local to another folder"
    )
