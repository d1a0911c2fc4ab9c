"""Verifying a cache that is elsewhere: every pack is fetched whole, and read here."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from latentcache.errors import PackError, RemoteError, StoreError
from latentcache.remote.object_errors import FORBIDDEN
from latentcache.remote.places import FarPlace, Place
from latentcache.store.exchange import problems_of
from latentcache.store.pack import read_pack_bytes
from latentcache.store.upkeep import VerifyReport


def verify_place(
    place: FarPlace,
    *,
    subset: tuple[int, int] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Fetch every pack and compare its entries with their digests and records, as `upkeep.verify` does on a disk.

    What does not fit is fetched once more: it may have been damaged on its way. A service is then asked for these
    entries, and with a writing token marks what is damaged. In a bucket an entry is damaged that is whole in none of
    its packs; it is marked, if that may be written. Then precache makes it again, or a push brings it. `subset` and
    `progress` are those of `upkeep.verify`.
    """
    part, num_parts = subset or (1, 1)
    if not 1 <= part <= num_parts:
        raise StoreError(f"subset {part}/{num_parts}: give n/t with 1 <= n <= t")
    known, live = place.damaged(), place.live()
    packs = sorted([pack for pack in place.packs() if int(pack[:8], 16) % num_parts == part - 1])
    suspects: dict[str, str] = {}
    unreadable, refused = dict[str, str](), dict[str, str]()
    checked, good = set[str](), set[str]()
    bytes_read = 0
    for number, pack in enumerate(packs, 1):
        try:
            keys, problems, num_bytes = _checked_pack(place, pack, unreadable)
        except RemoteError as error:
            refused[pack] = str(error)
            if error.status != FORBIDDEN or len(refused) == len(packs):  # of this pack alone, as of an archived one
                raise
            keys, problems, num_bytes = set(), {}, 0
        bytes_read += num_bytes
        checked |= keys
        good |= keys - problems.keys()
        suspects |= problems
        if progress is not None:
            progress(number, len(packs))
    if live is None:
        live = checked
        suspects = {key: problem for key, problem in suspects.items() if key not in good}
    elif subset is None:
        suspects |= dict.fromkeys(live - checked, "no pack that was fetched has it")
    return VerifyReport(
        num_entries=len(checked & live),
        num_packs=len(packs),
        bytes_read=bytes_read,
        damaged=place.confirmed({key: problem for key, problem in suspects.items() if key in live}, unreadable),
        known_damaged=known,
        unreadable=unreadable | refused,
        orphans=(),
    )


def _checked_pack(place: Place, pack: str, unreadable: dict[str, str]) -> tuple[set[str], dict[str, str], int]:
    """The keys of a pack, why entries are not what was stored, and the bytes that were fetched.

    Why the pack cannot be read is added to `unreadable`. Nothing of a pack that was compacted away meanwhile.
    """
    keys, problems, bytes_read = set[str](), dict[str, str](), 0
    for is_last in (False, True):
        try:
            data = place.read(pack)
        except FileNotFoundError:
            return set(), {}, bytes_read
        bytes_read += len(data)
        try:
            records = read_pack_bytes(data, pack)
        except PackError as error:
            if is_last:
                unreadable[pack] = str(error)
            continue
        keys, problems = set(records.row.names()), dict(problems_of(records, np.frombuffer(data, np.uint8)))
        if not problems:
            break
    return keys, problems, bytes_read
