"""What a cache holds, and whether it is whole, for people and scripts: of a directory or of a service."""

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
"""Fewest digits that may stand for a key."""


@dataclass(frozen=True, slots=True)
class ManifestStatus:
    """One manifest: how many of its samples are complete, refused, or lack an entry."""

    name: str
    role: str
    num_samples: int
    num_refused: int
    num_lost: int
    num_unverified: int
    """Samples with an entry that was imported and not verified."""
    imported_from: str | None
    """The format that the manifest was imported from; None for what precache made."""
    num_cut: int | None = None
    """Samples with a caption that is longer than the text encoders read; None where the cache is elsewhere."""
    cut: tuple[str, ...] = ()
    """The sample_ids of the first of them."""


@dataclass(frozen=True, slots=True)
class Status(Report):
    """A cache as a whole. Precache re-encodes what was lost and what is damaged."""

    path: str
    store: dict[str, Any]
    num_unused: int
    """Entries that no manifest refers to: `prune` removes them."""
    num_damaged: int
    """Entries whose bytes are not those that were stored."""
    num_lost: int
    """Samples that lack an entry."""
    num_refused: int
    """Samples that cannot be used."""
    manifests: tuple[ManifestStatus, ...]

    def to_text(self) -> str:
        """The status for people."""
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
    """Count what the cache at `path` (see `LatentCache`) holds: by the index, manifests and records of texts."""
    store, manifests, location = opened(path)
    with store:
        captions = CutCaptions(store) if isinstance(store, DiskStore) else None
        return status_of(store, manifests, location, captions)


def opened(path: str | Path | CacheConfig) -> tuple[Store, Manifests, Path | str]:
    """A cache, for reading. Not by LatentCache, which imports torch: that takes longer than all that is done here."""
    options = path.remote_options() if isinstance(path, CacheConfig) else {}
    return open_cache(location_of(path), read_only=True, **options)


def status_of(
    store: Store, manifests: Manifests, path: Path | str | None, captions: CutCaptions | None = None
) -> Status:
    """Count what a store and manifests that are open hold; see `status`. `path` names them."""
    present, stats = set(store.keys()), store.stats()
    if isinstance(store, DiskStore) and stats.num_packs < len(store.table.packs):
        # Somebody removed files of packs that the index knows.
        gone = store.table.packs.keys() - store.directory.pack_sizes().keys()
        locations = zip(present, store.look_up([*present]), strict=True)
        present = {key for key, location in locations if location is not None and location.pack.id not in gone}
    unused, counted = set(present), []
    for manifest in filter(None, map(manifests.read, manifests.names())):  # one may be gone since it was listed
        rows, usable = manifest.rows, manifest.rows.usable()
        unused.difference_update(rows.entry_keys())
        cut = None
        if captions is not None and manifest.role != "prompts":
            cut = rows.usable_with("caption", captions.flags_of(rows.columns["caption/keys"]))
        lacking = rows.rows_with(set(rows.entry_keys(usable=True)) - present)
        counted.append(
            ManifestStatus(
                manifest.name,
                manifest.role,
                num_samples=len(rows),
                num_refused=len(rows.refusals),
                num_lost=len(np.intersect1d(lacking, usable)),
                num_unverified=len(rows.unverified()),
                imported_from=manifest.imported_from,
                num_cut=None if cut is None else len(cut),
                cut=() if cut is None else tuple(rows.row(number).sample_id for number in cut[:MAX_NAMED].tolist()),
            )
        )
    return Status(
        str(path),
        stats.to_json(),
        num_unused=len(unused),
        num_damaged=stats.num_damaged,
        num_lost=sum(manifest.num_lost for manifest in counted),
        num_refused=sum(manifest.num_refused for manifest in counted),
        manifests=tuple(counted),
    )


def show(path: str | Path | CacheConfig, key_or_sample: str) -> dict[str, Any]:
    """The record of one entry (by its key or at least 6 of its first digits), or of all entries of a sample.

    Raises StoreError when nothing, or more than one thing, goes by that name.
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
    """Read every entry: see `upkeep.verify`. Of a service the packs are fetched, and compared with their digests here.

    A cache that cannot be written is checked all the same; only the marks are missing then.
    """
    location, options = location_of(path), path.remote_options() if isinstance(path, CacheConfig) else {}
    if isinstance(location, Path) or kind_of(location) == "hub":
        disk, _, _ = open_cache(location, **options)
        assert isinstance(disk, DiskStore)
        with disk:
            return upkeep.verify(disk, subset=subset, progress=progress)
    from latentcache.remote.upkeep import verify as verify_far

    # Without the local tier: what is there is to be read.
    with open_transport(location, retry_s=options.get("retry_s", RETRY_S)) as transport:
        transport.check()
        return verify_far(transport, subset=subset, progress=progress)


def _whole_key(store: Store, prefix: str) -> str:
    if len(prefix) < MIN_PREFIX or set(prefix) - set("0123456789abcdef"):
        raise StoreError(
            f"{prefix!r} is no sample_id of this cache, and no key: give at least {MIN_PREFIX} hexadecimal digits"
        )
    found = [key for key in store.keys() if key.startswith(prefix)]
    if len(found) != 1:
        raise StoreError(
            f"{len(found)} keys start with {prefix!r}: give more digits, or look with `latentcache status`"
        )
    return found[0]


def _entry(store: Store, key: str) -> dict[str, Any]:
    try:
        record = store.record(key)
        fields = store.describe(key)
    except (EntryMissingError, EntryDamagedError) as error:
        return {"key": key, "error": str(error)}
    return entry_json(record, fields)


def entry_json(record: Record, fields: Description) -> dict[str, Any]:
    """An entry but for its tensors, as `show` and the page say it."""
    return {
        "key": record.key,
        "kind": record.kind,
        "fields": {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in fields.items()},
        "identity": dict(record.identity),
        "provenance": dict(record.provenance),
    }
