"""What the rows of the index mean: `<key>` -> location, `pack:<id>` -> its sizes, `damaged:<key>` -> the reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from latentcache.errors import IndexDamagedError
from latentcache.store.base import is_key
from latentcache.store.location import PackSize, is_pack_id, parse_location
from latentcache.store.table import EntryTable, TableBuilder

PACK_PREFIX = "pack:"
DAMAGED_PREFIX = "damaged:"


@dataclass(slots=True)
class SortedRows:
    """Locations, as text, by key; sizes by pack; reasons by damaged key."""

    entries: dict[str, str] = field(default_factory=dict)
    packs: dict[str, PackSize] = field(default_factory=dict)
    markers: dict[str, str] = field(default_factory=dict)


def sort_rows(rows: Iterable[tuple[str, str]], path: Path) -> SortedRows:
    """Rows by their meaning. IndexDamagedError for one that has none; `path` is named in it."""
    found = SortedRows()
    for name, value in rows:
        if is_key(name):
            found.entries[name] = value
        elif name.startswith(DAMAGED_PREFIX):
            found.markers[name.removeprefix(DAMAGED_PREFIX)] = value
        elif name.startswith(PACK_PREFIX):
            pack = name.removeprefix(PACK_PREFIX)
            found.packs[pack] = _pack_size(pack, value, path)
        else:
            raise IndexDamagedError(path, f"row {name!r:.80} = {value!r:.80}")
    return found


def _pack_size(pack: str, text: str, path: Path) -> PackSize:
    try:
        if not is_pack_id(pack):
            raise ValueError(f"not a pack: {pack!r:.80}")
        return PackSize.from_text(text)
    except ValueError as error:
        raise IndexDamagedError(path, str(error)) from error


def read_table(
    pages: Iterable[list[tuple[str, str]]], path: Path
) -> tuple[EntryTable, dict[str, PackSize], dict[str, str]]:
    """All entries, packs and damage. IndexDamagedError as for `sort_rows`, and for what is no location."""
    builder, others = TableBuilder(), SortedRows()
    for page in pages:
        rows = sort_rows(page, path)
        try:
            builder.extend(list(rows.entries), map(parse_location, rows.entries.values()))
        except ValueError as error:
            raise IndexDamagedError(path, str(error)) from error
        others.packs |= rows.packs
        others.markers |= rows.markers
    return builder.build(), others.packs, others.markers
