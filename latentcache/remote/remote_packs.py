"""The packs of a service, fetched whole: reading every byte of a cache over the network."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from latentcache.errors import PackError, StoreError
from latentcache.remote.http import understood
from latentcache.remote.remote_store import RemoteStore
from latentcache.store.base import is_pack_id
from latentcache.store.pack import read_pack_bytes, verified_arrays
from latentcache.store.upkeep import VerifyReport

_MISSING = 404


def pack_sizes(store: RemoteStore) -> dict[str, int]:
    """Bytes of each pack of the service, by id."""
    with understood(store.http.request("GET", "packs")) as document:
        return {each["id"]: int(each["num_bytes"]) for each in document["packs"] if is_pack_id(each["id"])}


def verify_service(
    store: RemoteStore, *, subset: tuple[int, int] | None = None, progress: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Fetch every pack and compare its entries with their digests and records, as `upkeep.verify` does on a disk.

    With a writing token damaged entries are removed from the service, so that precache makes them again. `subset` and
    `progress` are those of `upkeep.verify`.
    """
    part, num_parts = subset or (1, 1)
    if not 1 <= part <= num_parts:
        raise StoreError(f"subset {part}/{num_parts}: give n/t with 1 <= n <= t")
    known, live = store.damaged(), set(store.keys())
    packs = sorted([pack for pack in pack_sizes(store) if int(pack[:8], 16) % num_parts == part - 1])
    damaged: dict[str, str] = {}
    unreadable: dict[str, str] = {}
    checked, good = set[str](), set[str]()
    bytes_read = 0
    for number, pack in enumerate(packs, 1):
        answer = store.http.request("GET", f"packs/{pack}", also=[_MISSING])
        if answer.status != _MISSING:  # else it was compacted away meanwhile
            bytes_read += len(answer.data)
            try:
                keys, problems = _problems(answer.data, pack)
                checked |= keys & live
                good |= keys - problems.keys()
                damaged |= problems
            except PackError as error:
                unreadable[pack] = str(error)
        if progress is not None:
            progress(number, len(packs))
    # A pack may have an entry that lies in another one too, or that was removed.
    damaged = {key: problem for key, problem in damaged.items() if key in live and key not in good}
    if subset is None:
        lost = live - checked - store.damaged().keys()
        damaged |= dict.fromkeys(lost & store.find(lost), "no pack that can be read has it")
    if damaged and not store.read_only:
        store.remove(damaged)
    return VerifyReport(
        num_entries=len(checked),
        num_packs=len(packs),
        bytes_read=bytes_read,
        damaged=damaged,
        known_damaged=known,
        unreadable=unreadable,
        orphans=(),
    )


def _problems(data: bytes, pack: str) -> tuple[set[str], dict[str, str]]:
    """The keys of a pack, and why entries are not what was stored. PackError."""
    records = read_pack_bytes(data, pack)
    whole = np.frombuffer(data, np.uint8)
    names = records.row.names()
    problems = {}
    for row, key in enumerate(names):
        found = verified_arrays(whole, key, records.row.location(row))
        if isinstance(found, str):
            problems[key] = found
        try:
            records.record(row)
        except ValueError as error:
            problems[key] = str(error)
    return set(names), problems
