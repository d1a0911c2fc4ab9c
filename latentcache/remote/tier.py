"""Tier: whole packs of caches that are elsewhere, on this disk. The longest unused go."""

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
"""Packs on their way at once."""
MAX_AHEAD = 32
"""The most packs that may be on their way ahead of their use: a window of pack order and one more. Any others are
fetched when they are read."""
_PART = ".part"
_LEFT_S = 3600.0  # what a dead process left half written is removed after this


def folder_of(url: str, local: str | Path | None = None) -> Path:
    """Where this disk keeps what is of the cache at `url`: below `local`, or the user's cache folder (XDG)."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    root = (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "latentcache"
    return (root if local is None else expanded(local)) / digest(url.encode())[:16]


def snapshot(url: str, local: str | Path | None = None) -> Path:
    """The directory of a cache on the hub, for reading: huggingface_hub fetches what is not here, below `local`.

    RemoteError: it cannot be had.
    """
    from huggingface_hub import snapshot_download

    folder = folder_of(url, local) / "hub"
    repository, _, revision = url.removeprefix(HUB).partition("@")
    wanted = ["CACHE.json", "packs/**", "manifests/*"]
    try:
        found = snapshot_download(
            repository, repo_type="dataset", revision=revision or None, cache_dir=folder, allow_patterns=wanted
        )
    except Exception as error:  # also those of the HTTP library below it, which is another one with each release
        step = "Check the name, the network, and the token (`hf auth login`); `hf upload` puts a cache there."
        raise RemoteError(url, f"cannot be fetched: {type(error).__name__}: {error!s:.300}", step) from error
    return Path(found)


class Tier:
    """Whole packs in a folder below `local`, fetched from `transport` when they are wanted. Processes may share it.

    A pack comes under another name and is renamed, so that one that is here is whole; nothing is synced, since what a
    crash leaves damaged fails its digests and is fetched again. Where the packs have more than `max_bytes` those go
    that were not used for the longest time, by their mtime. `release` is called with packs whose files this process
    should let go. StoreError if nothing can be kept there.
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
        """Where a pack lies if it is here."""
        return self._packs / pack[:2] / f"{pack}{PACK_SUFFIX}"

    def has(self, pack: str) -> bool:
        """Whether a pack is here."""
        return self.path(pack).exists()

    def packs(self) -> set[str]:
        """The packs that are here."""
        return {path.stem for path, _ in self._files()}

    def bring(self, packs: Iterable[str]) -> None:
        """Fetch those of the packs that are not here, and note that all are used. One that is gone is left out.

        RemoteError, and StoreError if the disk does not take it.
        """
        if missing := self._missing(packs):
            for future in [self._fetch_soon(pack) for pack in missing]:
                future.result()

    def bring_soon(self, packs: Iterable[str]) -> None:
        """Begin to fetch those of the packs that are not here, as far as there is room. It waits for nothing."""
        for pack in self._missing(packs):
            if len(self._coming) < MAX_AHEAD:
                self._fetch_soon(pack)

    def _missing(self, packs: Iterable[str]) -> list[str]:
        """Note that packs are used. Returns those that are not here."""
        if self._pid != os.getpid():
            self._begin()  # a fork has none of the threads
        missing = list[str]()
        for pack in packs:
            try:
                os.utime(self.path(pack))
            except OSError:  # another user's: then it is the one who notes
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
        """Fetch a pack that is not here; `again`: also one that is, because it came damaged, or is damaged here."""
        path = self.path(pack)
        # Few files for many packs: two that begin alike wait for each other now and then.
        with locked(self._locks / f"{pack[:2]}.lock", "fetching a pack", shared=False, wait=True):
            if again or not path.exists():
                with suppress(FileNotFoundError):  # it is gone there: who reads it looks where its entries are now
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
                    path.rename(path.with_suffix(f".{uuid.uuid4().hex[:8]}{_PART}"))  # swept when nobody has it mapped
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise _not_kept(path, error) from error

    # Room

    def _make_room(self, wanted: str) -> None:
        """Remove the longest unused packs until the others have at most `max_bytes`; the one that is wanted stays."""
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
            return  # another process makes room

    def _remove(self, path: Path) -> bool:
        """Remove a pack's file. False if that must wait: Windows removes no file that is mapped."""
        self._release([path.stem])  # before: this process may have mapped it
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
        """Remove packs that are gone there."""
        for pack in packs:
            with suppress(StoreError):
                self._remove(self.path(pack))

    def _sweep(self) -> None:
        for path in self._packs.glob(f"*/*{_PART}"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _LEFT_S:
                    path.unlink()

    def close(self) -> None:
        """End what is on its way; what has come stays."""
        if self._pid == os.getpid() and self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None


def _not_kept(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{path}: a pack that is to be read cannot be kept here: {error.strerror or error}. Free some space, bound it "
        "by cache.local_max_bytes, or give another folder as cache.local"
    )
