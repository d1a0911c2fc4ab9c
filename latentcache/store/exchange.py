"""Packs that come from elsewhere, which are checked whole."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from latentcache.errors import PackError, StoreBusyError
from latentcache.store.disk import DiskStore
from latentcache.store.layout import PackRow
from latentcache.store.pack import WholePack
from latentcache.utils.durable_files import sealed_file, write_all


def take_pack(
    store: DiskStore,
    pack: str,
    chunks: Iterable[bytes | memoryview],
    num_bytes: int,
    *,
    row: PackRow | None = None,
    replace: bool = False,
) -> int:
    """Write a pack that came from elsewhere, check it whole, and seal it. Returns how many entries are new.

    `chunks` are its bytes, and `num_bytes` says how many there should be, for the message of StorageFullError. Nothing
    is sealed unless each payload has its digest and each key follows from its record's identity: PackError. `row` is
    that of a pack that was checked. An error of `chunks` leaves nothing either. With `replace` it takes the place of a
    file that the index does not know. ReadOnlyError; StoreBusyError while upkeep works on the cache.
    """
    path = store.directory.new_pack_path(pack)
    with ExitStack() as held:
        try:
            with sealed_file(path, num_bytes, is_new=not replace) as fd:
                for part in chunks:
                    write_all(fd, part)
                row = row or _checked_row(path, WholePack.in_open_file(path, fd))
                # From here on upkeep must not see a pack that the index does not know.
                held.enter_context(store.lock("taking a pack", shared=True))
                if replace and _is_known(store, pack):
                    raise StoreBusyError(path, "another client sent this pack meanwhile; send it again")
        except FileExistsError:  # another one sent it meanwhile: what is there stays
            held.close()
            return take_sealed(store, pack)
        return store.catalog.seal(row)


def take_checked(store: DiskStore, whole: WholePack) -> int:
    """Write a pack that is in memory, and in which `WholePack.problems` found nothing, and seal it.

    Returns how many entries are new. Errors as for `take_pack`.
    """
    return take_pack(store, whole.row.pack.id, [whole.data.data], whole.data.size, row=whole.row)


def take_sealed(store: DiskStore, pack: str) -> int:
    """Take in a pack that lies in the cache, and that the index may not know: an error came between the two.

    Returns how many entries are new. Errors as for `take_pack`; FileNotFoundError: there is no such pack.
    """
    if _is_known(store, pack):
        return 0
    path = store.directory.pack_path(pack)
    with store.lock("taking a pack", shared=True):
        return store.catalog.seal(_checked_row(path, WholePack.in_file(path)))


def _is_known(store: DiskStore, pack: str) -> bool:
    with store.catalog.current() as table:
        return pack in table.packs


def _checked_row(path: Path, whole: WholePack) -> PackRow:
    """The row of a pack that is to lie at `path`. PackError unless every byte that counts is as it was."""
    for key, problem in whole.problems():
        raise PackError(path, f"entry {key}: {problem}")
    return whole.row
