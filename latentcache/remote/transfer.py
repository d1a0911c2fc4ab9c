"""Transfers packs and manifests that one cache has and another lacks. Packs are copied whole, and keys do not change.

Everything is checked against its digests before it is written, and a manifest is written last, once all of its entries
are there. So after a crash the same command resumes the transfer with what is missing.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from typing_extensions import override

from latentcache.config import RETRY_S, location_of
from latentcache.dataset.manifest import Manifest, merged_rows
from latentcache.dataset.manifest_folder import ManifestFolder, Manifests, update_manifest
from latentcache.errors import (
    DatasetError,
    PackError,
    ReadOnlyError,
    RemoteError,
    StorageFullError,
    StoreBusyError,
    StoreError,
)
from latentcache.identity import key_names
from latentcache.location import kind_of
from latentcache.remote.index import FarIndex
from latentcache.remote.manifests import RemoteManifests
from latentcache.remote.tier import snapshot
from latentcache.remote.transport import (
    ANY_VERSION,
    Listed,
    Transport,
    in_threads,
    open_transport,
    packs_in,
    read_checked,
    removals_in,
)
from latentcache.store.base import Report
from latentcache.store.directory import pack_name
from latentcache.store.disk import DiskStore
from latentcache.store.pack import WholePack, map_pack
from latentcache.utils.progress import Progress

NUM_THREADS = 8
"""Maximum number of concurrent pack transfers. Each holds its pack in memory, some 64 MiB."""
REFUSED = {402, 403, 404, 409, 410, 413, 422, 451}
"""Statuses that concern one object, e.g. archived or forbidden. Others, e.g. 401 and 429, concern the whole store."""


@dataclass(slots=True)
class TransferReport(Report):
    """What was copied from `source` to `target` or, with `dry_run`, would be. `refused`: pack or manifest -> reason."""

    source: str
    target: str
    dry_run: bool
    num_packs: int = 0
    num_bytes: int = 0
    num_there: int = 0
    """Packs with nothing to copy: it is already there, or none of the chosen manifests needs it."""
    manifests: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing was refused at all."""
        return not self.refused

    def to_text(self) -> str:
        """The report as text for a terminal."""
        would = "would move " if self.dry_run else "moved      "
        lines = [
            f"{self.source} -> {self.target}",
            f"{would} {self.num_packs} packs, {self.num_bytes:,} bytes",
            f"there       {self.num_there} packs",
        ]
        lines.append(f"manifests   {', '.join(self.manifests) or 'none that differs'}")
        lines += [f"refused     {name}: {reason}" for name, reason in self.refused.items()]
        return "\n".join(lines)


class _Directory(Transport):
    """A cache directory as a transport, based on its index. With no store it is empty: the target of a dry run."""

    def __init__(self, path: Path, store: DiskStore | None):
        self.url, self._store = str(path), store

    @override
    def list(self, folder: str) -> dict[str, Listed]:
        if self._store is None or folder != "packs":
            return {}
        with self._store.current() as table:
            return {pack_name(pack): Listed(each.file_bytes) for pack, each in table.packs.items()}

    @override
    def read(self, name: str, start: int = 0, num_bytes: int | None = None) -> tuple[memoryview, str]:
        pack = Path(name).stem
        layout = None if self._store is None else self._store.table.packs.get(pack)
        if self._store is None or layout is None:
            raise FileNotFoundError(name)
        # Only as many bytes as the index lists: trailing garbage in the file is not sent.
        data = map_pack(self._store.directory.pack_path(pack), layout.file_bytes).data
        return data[start : None if num_bytes is None else start + num_bytes], ""

    @override
    def write(self, name: str, data: bytes | memoryview, *, version: str | None) -> bool:
        if self._store is None:
            raise ReadOnlyError(self.url)
        whole = WholePack.in_memory(Path(name).stem, data)
        self._store.take_pack(whole.row.pack.id, [whole.data.data], whole.data.size, row=whole.row)
        return True

    @override
    def find(self, keys: Sequence[str]) -> set[str]:
        return set() if self._store is None else self._store.find(keys)

    @override
    def close(self) -> None:
        if self._store is not None:
            self._store.close()


class End:
    """One end of a transfer: the packs and manifests of a cache, reached through a transport."""

    def __init__(self, transport: Transport, manifests: Manifests):
        self.name, self.manifests, self.transport = transport.url, manifests, transport
        self.is_here = isinstance(transport, _Directory)
        self.index = FarIndex(transport)

    @staticmethod
    def open(location: str | Path, *, is_target: bool = False, dry_run: bool = False, source: str = "") -> End:
        """Open the cache at a directory or URL. `is_target`: it receives packs from `source`.

        StoreError if it is not a cache and cannot become one. ReadOnlyError for a target that is not writable.
        """
        found = location_of(location)
        is_written = is_target and not dry_run
        if not isinstance(found, Path) and kind_of(found) == "hub":
            if is_target:
                raise ReadOnlyError(found, "the hub cannot be pushed to; upload a cache's directory with `hf upload`")
            found = snapshot(found)
        if isinstance(found, Path):
            is_new = not found.exists() or (found.is_dir() and not any(found.iterdir()))
            is_made = not (is_target and dry_run and is_new)
            store = DiskStore(found, read_only=not is_written, create=is_target) if is_made else None
            return End(_Directory(found, store), ManifestFolder(found / "manifests", source=source))
        transport = open_transport(found, retry_s=RETRY_S)
        if is_written:
            transport.check_writable()
            transport.check_compares()
        if is_written or not is_target:  # the target of a dry run need not exist yet
            transport.check(create=is_written)
        return End(transport, RemoteManifests(transport, read_only=not is_written, source=source))

    def packs(self) -> tuple[dict[str, int], Set[str]]:
        """The size of each current pack, by id, and the packs listed for removal. Brings the index up to date."""
        if self.index.sizes:  # otherwise it was not loaded yet
            self.index.refresh()
        leaving = removals_in(self.transport).keys()  # first: the packs that replace these are then among the packs
        return {pack: listed.num_bytes for pack, listed in packs_in(self.transport).items()}, leaving

    def keys_of(self, pack: str, num_bytes: int) -> Sequence[str]:
        """The keys of a pack's entries; for a directory, only those in its index. FileNotFoundError; PackError."""
        keys = self.index.row(pack, num_bytes).names()
        return list(self.index.find(keys)) if self.is_here else keys

    def send(self, whole: WholePack) -> None:
        """Store a pack atomically. The caller has verified it."""
        self.transport.write(pack_name(whole.row.pack.id), whole.data.data, version=ANY_VERSION)
        if not self.is_here:
            self.index.add(whole.row)


class Move:
    """A transfer in one direction. A manifest that the target has too is merged (`merged`) unless `replace` is set."""

    def __init__(self, source: End, target: End, *, dry_run: bool = False, replace: bool = False):
        self.source, self.target, self.dry_run, self.replace = source, target, dry_run, replace
        self.report = TransferReport(source.name, target.name, dry_run)
        self._there: dict[str, int] = {}
        self._vanished: list[str] = []  # the packs that were gone, compacted perhaps, since they were last listed
        self._lost: dict[str, set[str]] = {}  # the damaged entries of each pack that was refused

    def run(self, names: Sequence[str] = (), progress: Progress | None = None) -> TransferReport:
        """Copy packs, then manifests: all of them, or the manifests `names` and what they need.

        Refusals are listed in the report; errors that concern a whole cache are raised.
        """
        progress = progress or Progress()
        manifests = self._manifests(names)
        wanted = {key for manifest in manifests for key in manifest.keys()} if names else None
        seen, is_whole = set[str](), False
        while not is_whole:
            # After reading the manifests: the entries that they name were sealed before they were written.
            (packs, leaving), (self._there, dying) = self.source.packs(), self.target.packs()
            # Entries of leaving packs are in other packs too, or reported missing below.
            staying = packs.keys() - leaving - seen
            new = sorted(staying - (self._there.keys() - dying))
            seen, self._vanished = seen | staying, []
            self.report.num_there += len(staying) - len(new)
            progress.start("move packs", len(new))
            for pack, num_bytes in self._moved(new, packs, wanted):
                self.report.num_there += num_bytes == 0 and pack not in self.report.refused
                progress.advance()
            progress.finish()
            is_whole, self.report.num_there = not self._vanished, self.report.num_there - len(self._vanished)
        for manifest in manifests:
            try:
                self._move_manifest(manifest)
            except DatasetError as error:
                self.report.refused[manifest.name] = str(error)
        for pack, lost in self._lost.items():
            if self.target.index.find(lost) == lost:  # another pack supplied them
                self.report.refused.pop(pack, None)
        return self.report

    # Packs

    def _moved(
        self, chosen: Collection[str], sizes: dict[str, int], wanted: Collection[str] | None
    ) -> Iterator[tuple[str, int]]:
        """Copy these packs concurrently and count what was sent. Yields each pack with the result of `_move`."""
        for pack, num_bytes in in_threads(partial(self._move, sizes, wanted), chosen, NUM_THREADS):
            self.report.num_packs += num_bytes > 0
            self.report.num_bytes += num_bytes
            yield pack, num_bytes

    def _move(self, sizes: dict[str, int], wanted: Collection[str] | None, pack: str) -> int:
        """Copy the wanted entries of a pack that the target lacks. Errors that would affect other packs too are raised.

        Returns the number of bytes sent: 0 if nothing was needed, or if the pack was refused.
        """
        try:
            keys = self.source.keys_of(pack, sizes[pack])
            if wanted is not None:
                keys = [key for key in keys if key in wanted]
            missing = set(keys) - self.target.index.find(keys)
            if not missing or self.dry_run:
                return sizes[pack] if missing else 0
            return self._send(pack, missing)
        except (StorageFullError, ReadOnlyError, StoreBusyError):
            raise
        except FileNotFoundError:
            self._vanished.append(pack)
        except StoreError as error:
            # Concerns only this pack: it is archived, for instance, or was found damaged.
            is_refused = isinstance(error, RemoteError) and error.url == self.source.name and error.status in REFUSED
            if isinstance(error, RemoteError) and not is_refused and error.kind != PackError.__name__:
                raise
            self.report.refused[pack] = str(error)
        return 0

    def _send(self, pack: str, missing: set[str]) -> int:
        """Send a pack whole, or the missing entries in a new one if some are damaged or the pack's id is taken."""
        whole, problems = read_checked(self.source.transport, pack)
        if not problems and pack not in self._there:
            self.target.send(whole)
            return whole.data.size
        if lost := missing & problems.keys():
            self._lost[pack], key = lost, min(lost)
            others = f" and {len(problems) - 1} others" if len(problems) > 1 else ""
            self.report.refused[pack] = (
                f"entry {key}{others}: {problems[key]}. The rest of the pack was sent. Run `latentcache verify "
                f"{self.source.name}`, then `latentcache precache CONFIG` or a push from a cache that has the entry"
            )
        if missing == lost:
            return 0
        row, copy = whole.part(missing - lost)
        self.target.send(WholePack.in_memory(row.pack.id, copy))
        return len(copy)

    # Manifests

    def _manifests(self, names: Sequence[str]) -> list[Manifest]:
        """The source's manifests. The target gets a note for each one that will change."""
        found = []
        for name in names or self.source.manifests.names():
            try:
                manifest = self.source.manifests.read(name)
                if manifest is not None:
                    if self._changed(manifest) is not None and not self.dry_run:
                        self.target.manifests.begin(name)
                    found.append(manifest)
            except DatasetError as error:
                self.report.refused[name] = str(error)
        return found

    def _changed(self, manifest: Manifest) -> Manifest | None:
        """The manifest that the target should have, or None if it has it already. DatasetError if they do not merge."""
        try:
            theirs = self.target.manifests.read(manifest.name)
        except DatasetError:
            if not self.replace:
                raise
            theirs = None
        if theirs == manifest:
            return None
        new = manifest if theirs is None or self.replace else merged(theirs, manifest)
        return None if new == theirs else new

    def _move_manifest(self, manifest: Manifest) -> None:
        """Write the manifest to the target, once all of its entries are there. DatasetError if it is refused."""
        if not self.dry_run:
            self._there, _ = self.target.packs()  # packs may have been removed meanwhile
        keys = set(key_names(manifest.rows.entry_keys(usable=True)))  # refused samples need not have entries
        missing = keys - self.target.index.find(keys)
        if self.dry_run:  # after `find`, the source's table also has the entries of leaving packs
            missing -= self.source.index.find(missing) | self.source.index.table.find(list(missing))
        elif missing:
            sizes, _ = self.source.packs()
            for _ in self._moved(sorted(sizes), sizes, missing):
                pass
            missing = keys - self.target.index.find(keys)
        if missing:
            rows = (row for row in manifest.rows.values() if row.refusal is None)
            row = next(row for row in rows if not missing.isdisjoint(row.keys()))
            raise DatasetError(
                f"{self.source.name}, manifest {manifest.name}",
                f"{len(missing):,} of its entries are missing both here and at {self.target.name}, e.g. one of sample "
                f"{row.sample_id!r:.120}. Run `latentcache precache CONFIG`, then the same command again",
            )
        made: Manifest | None = self._changed(manifest) if self.dry_run else None

        def make() -> Manifest | None:
            nonlocal made
            made = self._changed(manifest)
            return made

        if not self.dry_run:
            update_manifest(self.target.manifests, make)
        if made is not None:
            self.report.manifests.append(manifest.name)
        elif not self.dry_run:
            self.target.manifests.end(manifest.name)


def merged(theirs: Manifest, ours: Manifest) -> Manifest:
    """Merge two manifests. For a sample in both, ours wins, unless we refused what they encoded from the same image.

    DatasetError if they differ in role, encoding or another setting of the whole manifest.
    """
    parts = {"role": "role", "repeats": "repeats", "common": "encoding", "variants": "number of variants"}
    parts |= {"weights": "weights of captions", "loss_weight": "loss_weight"}
    differ = [label for name, label in parts.items() if getattr(theirs, name) != getattr(ours, name)]
    if differ:
        raise DatasetError(
            f"manifest {ours.name}",
            f"the target's manifest has another {' and another '.join(differ)}, so they cannot be merged. Use "
            "--replace to overwrite it with this one",
        )
    return theirs.with_rows(merged_rows(theirs.rows, ours.rows))


def transfer(
    source: str | Path,
    target: str | Path,
    *,
    manifests: Sequence[str] = (),
    replace: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> TransferReport:
    """Copy what `source` has and `target` lacks: everything, or what these `manifests` need. See `End.open`.

    StoreError if `source` lacks one of the manifests, before `target` is created.
    """
    first = End.open(source)
    with first.transport:
        known = first.manifests.names() if manifests else []
        if unknown := sorted(set(manifests) - set(known)):
            there = ", ".join(known) or "none"
            raise StoreError(f"{first.name}: has no manifest {unknown[0]!r}; there are: {there}")
        read = os.path.abspath(first.name) if first.is_here else first.name
        second = End.open(target, is_target=True, dry_run=dry_run, source=read)
        with second.transport:
            return Move(first, second, dry_run=dry_run, replace=replace).run(manifests, progress)
