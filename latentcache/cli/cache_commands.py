"""The commands that describe and maintain a cache: status, show, verify, rebuild, prune, compact."""

from __future__ import annotations

import json
import os

from latentcache.cli.options import CACHE_DEFAULTS, OfCache, Switch, Target
from latentcache.cli.output import DONE, finish, finish_upkeep, print_result
from latentcache.errors import ConfigError, StoreError


def status(target: Target = None, /, *, options: OfCache = CACHE_DEFAULTS) -> int:
    """Entries, bytes, manifests and damage of the cache."""
    from latentcache.loading.status import status as describe

    found = describe(options.path(target))
    has_faults = bool(found.num_damaged or found.num_lost or found.num_refused)
    return finish(found, options.as_json, has_faults=has_faults)


def show(key_or_sample: str, target: Target = None, /, *, options: OfCache = CACHE_DEFAULTS) -> int:
    """The record of an entry, or those of a sample: what it was made from and by, and its fields.

    Args:
        key_or_sample: A key, its first digits (at least 6), or a sample_id.
    """
    from latentcache.loading.status import show as describe

    found = describe(options.path(target), key_or_sample)
    print_result(found, lambda: json.dumps(found, indent=2, ensure_ascii=False), options.as_json)
    return DONE


def verify(target: Target = None, /, *, subset: str | None = None, options: OfCache = CACHE_DEFAULTS) -> int:
    """Read every entry and compare it with its digest. Damaged entries become misses: precache encodes them again.

    Args:
        subset: n/t reads the n-th of t parts, e.g. 1/7 on Mondays.
    """
    from latentcache.store.disk import DiskStore
    from latentcache.store.upkeep import verify as verify_store
    from latentcache.utils.progress import default_progress

    path = options.path(target)
    progress = default_progress()

    def advance(done: int, total: int) -> None:
        if done == 1:
            progress.start("verify packs", total)
        progress.advance()

    # A cache that cannot be written is checked all the same; only the marks are missing then.
    with DiskStore(path, read_only=not os.access(path, os.W_OK), create=False) as store:
        report = verify_store(store, subset=_subset(subset), progress=advance)
    progress.finish()
    return finish_upkeep(report, options.as_json)


def rebuild(target: Target = None, /, *, options: OfCache = CACHE_DEFAULTS) -> int:
    """Rebuild the index from the packs."""
    from latentcache.store.upkeep import rebuild as rebuild_store

    return finish_upkeep(rebuild_store(options.path(target)), options.as_json)


def prune(
    target: Target = None,
    /,
    *,
    dry_run: Switch = False,
    unfinished: Switch = False,
    options: OfCache = CACHE_DEFAULTS,
) -> int:
    """Remove the entries that no manifest refers to.

    Args:
        dry_run: Report how many entries and bytes; remove nothing.
        unfinished: Also remove what runs that did not finish have encoded. Without it, prune waits until they have.
    """
    from latentcache.dataset.manifest import ManifestFolder
    from latentcache.store.upkeep import prune as prune_store

    path = options.path(target)
    manifests = ManifestFolder(path / "manifests")

    def keep() -> set[str]:
        if not manifests.names():
            # An unfinished first run has entries but no manifest yet: everything would go.
            raise StoreError(f"{path}: has no manifest, so prune would remove every entry; finish a precache run first")
        if manifests.unfinished() and not unfinished:
            runs = ", ".join(f"{name} (begun {begun})" for name, begun in manifests.unfinished().items())
            raise StoreError(
                f"{path}: not finished: {runs}. What was encoded for them is in no manifest yet, and would be removed: "
                "run precache again to finish, or give --unfinished to remove it"
            )
        return {key for name in manifests.names() if (manifest := manifests.read(name)) for key in manifest.keys()}

    return finish_upkeep(prune_store(path, keep, dry_run=dry_run), options.as_json)


def compact(target: Target = None, /, *, dry_run: Switch = False, options: OfCache = CACHE_DEFAULTS) -> int:
    """Rewrite packs that are small or mostly dead, and free their space.

    Args:
        dry_run: Report what would be rewritten; write nothing.
    """
    from latentcache.store.upkeep import compact as compact_store

    return finish_upkeep(compact_store(options.path(target), dry_run=dry_run), options.as_json)


def _subset(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    part, _, total = text.partition("/")
    if not (part.isdecimal() and total.isdecimal()):
        raise ConfigError(f"--subset is {text!r}; give n/t, e.g. 1/7")
    return int(part), int(total)
