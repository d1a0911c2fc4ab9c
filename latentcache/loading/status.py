"""Reports on what a cache holds and whether it is complete, for a directory, a bucket or a service."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from latentcache.config import RETRY_S, CacheConfig, location_of
from latentcache.dataset.manifest_folder import Manifests
from latentcache.errors import EntryDamagedError, EntryMissingError, StoreError
from latentcache.location import kind_of
from latentcache.remote.store import open_cache
from latentcache.remote.transport import open_transport
from latentcache.store import upkeep
from latentcache.store.base import Report, Store
from latentcache.store.cut_captions import CutCaptions
from latentcache.store.disk import DiskStore
from latentcache.store.entry import Description
from latentcache.store.upkeep import VerifyReport
from latentcache.types import Record
from latentcache.utils.progress import Progress
from latentcache.utils.wording import MAX_NAMED, cut_note

MIN_PREFIX = 6
"""Minimum length of an abbreviated key, in digits."""


@dataclass(frozen=True, slots=True)
class ManifestStatus:
    """One manifest, with counts of its samples that are refused, lack an entry, and so on."""

    name: str
    role: str
    num_samples: int
    num_refused: int
    num_lost: int
    num_unverified: int
    """Samples with an entry that was imported but not verified."""
    imported_from: str | None
    """The format that the manifest was imported from; None if precache made it."""
    num_cut: int | None = None
    """Samples with a caption that is longer than the text encoders read; None for a remote cache."""
    cut: tuple[str, ...] = ()
    """The first sample_ids of these."""


@dataclass(frozen=True, slots=True)
class Status(Report):
    """The state of a whole cache. Precache re-encodes what is lost or damaged."""

    path: str
    store: dict[str, Any]
    num_unused: int
    """Entries that no manifest refers to: `prune` removes them."""
    num_damaged: int
    """Entries whose bytes do not match their digest."""
    num_lost: int
    """Samples that lack an entry."""
    num_refused: int
    """Samples that cannot be used."""
    manifests: tuple[ManifestStatus, ...]

    def to_text(self) -> str:
        """The status in readable form."""
        entries = ", ".join(f"{count} {kind}" for kind, count in self.store["num_entries"].items())
        lines = [
            f"cache     {self.path}",
            f"entries   {entries or 'none'}; {self.num_unused} that no manifest refers to",
            f"packs     {self.store['num_packs']}, {self.store['file_bytes']:,} bytes",
            f"damaged   {self.num_damaged}",
        ]
        for manifest in self.manifests:
            line = (
                f"manifest  {manifest.name} ({manifest.role}): {manifest.num_samples} samples, "
                f"{manifest.num_refused} refused, {manifest.num_lost} lack an entry"
            )
            if manifest.imported_from is not None:
                line += f"; imported from {manifest.imported_from}, {manifest.num_unverified} unverified"
            lines.append(line)
            if manifest.num_cut:
                lines.append(f"          {cut_note(manifest.num_cut, manifest.cut)}")
        return "\n".join(lines)


def status(path: str | Path | CacheConfig) -> Status:
    """Count what the cache at `path` (see `LatentCache`) holds, from its index, manifests and records of texts."""
    store, manifests, location = opened(path)
    with store:
        captions = CutCaptions(store) if isinstance(store, DiskStore) else None
        return status_of(store, manifests, location, captions)


def opened(path: str | Path | CacheConfig) -> tuple[Store, Manifests, Path | str]:
    """Open a cache for reading, without LatentCache: importing torch would take longer than everything done here."""
    options = path.remote_options() if isinstance(path, CacheConfig) else {}
    return open_cache(location_of(path), read_only=True, **options)


def status_of(
    store: Store, manifests: Manifests, path: Path | str | None, captions: CutCaptions | None = None
) -> Status:
    """Count what an open store and its manifests hold; see `status`. `path` is for the report."""
    num_entries, stats, gone = sum(1 for _ in store.keys()), store.stats(), set[str]()
    if isinstance(store, DiskStore) and stats.num_packs < len(store.table.packs):
        # Pack files that are in the index were deleted from outside.
        gone = store.table.packs.keys() - store.directory.pack_sizes().keys()
        num_entries -= sum(num for pack, (num, _) in store.table.live_sizes().items() if pack in gone)

    def has(keys: np.ndarray) -> np.ndarray:
        if not gone:
            return store.has(keys)
        packs, places = store.places(keys)
        return np.asarray(np.array([*(pack not in gone for pack in packs), False])[places[:, 0]])

    used, counted = [np.zeros((0, 32), np.uint8)], []
    for manifest in filter(None, map(manifests.read, manifests.names())):  # a listed one may be gone by now
        rows = manifest.rows
        keys, cut = rows.entry_keys(), None
        used.append(keys[has(keys)])
        if captions is not None and manifest.role != "prompts":
            cut = rows.usable_with("caption", captions.flags(rows.columns["caption/keys"]))
        counted.append(
            ManifestStatus(
                manifest.name,
                manifest.role,
                num_samples=len(rows),
                num_refused=len(rows.refusals),
                num_lost=len(rows.lacking(has)),
                num_unverified=len(rows.unverified()),
                imported_from=manifest.imported_from,
                num_cut=None if cut is None else len(cut),
                cut=() if cut is None else tuple(rows.sample_ids.at(cut[:MAX_NAMED])),
            )
        )
    return Status(
        str(path),
        stats.to_json(),
        # Entries may have come since they were counted.
        num_unused=max(0, num_entries - len(np.unique(np.concatenate(used), axis=0))),
        num_damaged=stats.num_damaged,
        num_lost=sum(manifest.num_lost for manifest in counted),
        num_refused=sum(manifest.num_refused for manifest in counted),
        manifests=tuple(counted),
    )


def show(path: str | Path | CacheConfig, key_or_sample: str) -> dict[str, Any]:
    """The record of one entry, given its key or at least its first 6 digits, or of all entries of a sample.

    Raises StoreError if nothing, or more than one entry, matches.
    """
    store, manifests, _ = opened(path)
    with store:
        datasets = []
        for manifest in filter(None, map(manifests.read, manifests.names())):
            if row := manifest.rows.get(key_or_sample):
                shown = replace(row, captions=row.captions[:: manifest.variants])
                entries = [_entry(store, key) for key in shown.keys()]
                datasets.append({"dataset": manifest.name, **row.to_json(manifest.variants), "entries": entries})
        if datasets:
            return {"sample_id": key_or_sample, "datasets": datasets}
        return _entry(store, _whole_key(store, key_or_sample))


def verify(
    path: str | Path | CacheConfig, *, subset: tuple[int, int] | None = None, progress: Progress | None = None
) -> VerifyReport:
    """Read every entry; see `upkeep.verify`. The packs of a remote cache are fetched and checked here.

    A read-only cache is checked too, but damage is not marked in it.
    """
    location, options = location_of(path), path.remote_options() if isinstance(path, CacheConfig) else {}
    if isinstance(location, Path) or kind_of(location) == "hub":
        disk, _, _ = open_cache(location, **options)
        assert isinstance(disk, DiskStore)
        with disk:
            return upkeep.verify(disk, subset=subset, progress=progress)
    from latentcache.remote.upkeep import verify as verify_far

    # Without the local tier, to read the remote bytes.
    with open_transport(location, retry_s=options.get("retry_s", RETRY_S)) as transport:
        transport.check()
        return verify_far(transport, subset=subset, progress=progress)


def _whole_key(store: Store, prefix: str) -> str:
    if len(prefix) < MIN_PREFIX or set(prefix) - set("0123456789abcdef"):
        raise StoreError(
            f"{prefix!r} is neither a sample_id of this cache nor a key: give at least {MIN_PREFIX} hexadecimal digits"
        )
    found = [key for key in store.keys() if key.startswith(prefix)]
    if len(found) != 1:
        raise StoreError(f"{len(found)} keys start with {prefix!r}: give more digits, or see `latentcache status`")
    return found[0]


def _entry(store: Store, key: str) -> dict[str, Any]:
    try:
        record = store.record(key)
        fields = store.describe(key)
    except (EntryMissingError, EntryDamagedError) as error:
        return {"key": key, "error": str(error)}
    return entry_json(record, fields)


def entry_json(record: Record, fields: Description) -> dict[str, Any]:
    """An entry without its tensors, as `show` and the web page report it."""
    return {
        "key": record.key,
        "kind": record.kind,
        "fields": {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in fields.items()},
        "identity": dict(record.identity),
        "provenance": dict(record.provenance),
    }
