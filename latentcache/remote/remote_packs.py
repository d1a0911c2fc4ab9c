"""The packs of a service, fetched whole: reading every byte of a cache over the network."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from latentcache.errors import EntryDamagedError, EntryMissingError, PackError, RemoteError, StoreError
from latentcache.remote.http import understood
from latentcache.remote.remote_store import RemoteStore
from latentcache.store.base import is_pack_id
from latentcache.store.exchange import problems_of
from latentcache.store.pack import read_pack_bytes
from latentcache.store.upkeep import VerifyReport

_MISSING = 404
_SUSPECTS = 1024  # in one request: the service reads each before it answers
_CHECK_S = 300.0


def verify_service(
    store: RemoteStore, *, subset: tuple[int, int] | None = None, progress: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Fetch every pack and compare its entries with their digests and records, as `upkeep.verify` does on a disk.

    What does not fit is fetched once more: it may have been damaged on its way. With a writing token the service then
    checks these entries on its own disk, and its verdict counts: it marks what is damaged there, so that precache makes
    it again. `subset` and `progress` are those of `upkeep.verify`.
    """
    part, num_parts = subset or (1, 1)
    if not 1 <= part <= num_parts:
        raise StoreError(f"subset {part}/{num_parts}: give n/t with 1 <= n <= t")
    known, live = store.damaged(), set(store.keys())
    packs = sorted([pack for pack in _packs(store) if int(pack[:8], 16) % num_parts == part - 1])
    suspects: dict[str, str] = {}
    unreadable: dict[str, str] = {}
    checked = set[str]()
    bytes_read = 0
    for number, pack in enumerate(packs, 1):
        keys, problems, num_bytes = _checked_pack(store, pack, unreadable)
        bytes_read += num_bytes
        checked |= keys & live
        suspects |= {key: problem for key, problem in problems.items() if key in live}
        if progress is not None:
            progress(number, len(packs))
    if subset is None:
        suspects |= dict.fromkeys(live - checked, "no pack that was fetched has it")
    return VerifyReport(
        num_entries=len(checked),
        num_packs=len(packs),
        bytes_read=bytes_read,
        damaged=_confirmed(store, suspects),
        known_damaged=known,
        unreadable=unreadable,
        orphans=(),
    )


def _packs(store: RemoteStore) -> list[str]:
    with understood(store.http.request("GET", "packs")) as document:
        return [each["id"] for each in document["packs"] if is_pack_id(each["id"])]


def _checked_pack(store: RemoteStore, pack: str, unreadable: dict[str, str]) -> tuple[set[str], dict[str, str], int]:
    """The keys of a pack, why entries are not what was stored, and the bytes that were fetched.

    Why the pack cannot be read is added to `unreadable`. Nothing of a pack that was compacted away meanwhile.
    """
    keys, problems, bytes_read = set[str](), dict[str, str](), 0
    for is_last in (False, True):
        answer = store.http.request("GET", f"packs/{pack}", also=[_MISSING])
        if answer.status == _MISSING:
            return set(), {}, bytes_read
        bytes_read += len(answer.data)
        try:
            keys, problems = _problems(answer.data, pack)
        except PackError as error:
            if is_last:
                unreadable[pack] = str(error)
            continue
        if not problems:
            break
    return keys, problems, bytes_read


def _confirmed(store: RemoteStore, suspects: Mapping[str, str]) -> dict[str, str]:
    """Those of the suspects that are damaged: an entry may lie in another pack too, be removed, or have moved."""
    damaged: dict[str, str] = {}
    keys = sorted(suspects)
    for chunk in (keys[start : start + _SUSPECTS] for start in range(0, len(keys), _SUSPECTS)):
        if store.read_only:
            damaged |= {key: suspects[key] for key in chunk if not _is_readable(store, key)}
            continue
        answer = store.http.request("POST", "verify", document={"keys": chunk}, answer_s=_CHECK_S)
        with understood(answer) as document:
            damaged |= {str(key): str(reason) for key, reason in document["damaged"].items()}
    return damaged


def _is_readable(store: RemoteStore, key: str) -> bool:
    """Whether an entry that is there can be read. One that was removed meanwhile is not damaged."""
    try:
        store.fetch([key])
    except EntryMissingError:
        return True
    except (EntryDamagedError, RemoteError):
        return False
    return True


def _problems(data: bytes, pack: str) -> tuple[set[str], dict[str, str]]:
    """The keys of a pack, and why entries are not what was stored. PackError."""
    records = read_pack_bytes(data, pack)
    return set(records.row.names()), dict(problems_of(records, np.frombuffer(data, np.uint8)))
