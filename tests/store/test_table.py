"""Where entries lie, in memory: what a dict says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latentcache.store.layout import Column, Pack, PackRow, RowGroup
from latentcache.store.table import LocationTable

KEYS = [f"{start:016x}{7:048x}" for start in (0, 1, 7, 1 << 20, 1 << 40, 1 << 63, (1 << 64) - 1)]


def row_of(number, keys, dead=()):
    """The row of a pack with these keys: the first half are images of 3 bytes, the others texts of 5."""
    half = len(keys) // 2
    rest = len(keys) - half
    groups = [RowGroup("image", 0, half, (Column("x", "uint8", (3,), 0, half),))] if half else []
    groups += [RowGroup("text", half, rest, (Column("y", "uint8", (5,), 0, rest),))]
    pack = Pack(f"{number:032x}", 1000, tuple(groups))
    data = np.frombuffer(bytes.fromhex("".join(keys)), np.uint8).reshape(-1, 32)
    digests = np.arange(16 * len(keys), dtype=np.uint8).reshape(-1, 16)
    return PackRow(pack, data, digests, np.array([key not in dead for key in keys]))


steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "drop", "drop pack"]), st.lists(st.sampled_from(KEYS), min_size=1, unique=True)
    ),
    max_size=12,
)


@given(steps)
@settings(max_examples=40)
def test_it_says_what_a_dict_says(steps):
    table, model = LocationTable(), {}
    for number, (what, keys) in enumerate(steps):
        if what == "add":
            row = row_of(number, keys, dead=model)
            table.add([row])
            model |= {key: (row, at) for at, key in enumerate(keys) if row.live[at]}
        elif what == "drop":
            table.drop(keys * 2)
            model = {key: place for key, place in model.items() if key not in keys}
        elif model:
            gone = next(iter(model.values()))[0].pack.id
            table.drop_packs([gone])
            model = {key: place for key, place in model.items() if place[0].pack.id != gone}
        assert len(table) == len(model) and sorted(table.keys()) == sorted(model)
        assert table.find(KEYS) == model.keys()
        by_pack = {}
        for key, place in zip(KEYS * 2, table.look_up(KEYS * 2), strict=True):
            assert (place is None) == (key not in model)
            if place is not None:
                row, at = model[key]
                assert place.place == (row.pack.id, at) and place.digest == row.digests[at].tobytes()
                by_pack.setdefault(row.pack.id, {})[key] = place.place
        for pack in table.packs:
            found = table.entries_in(pack)
            assert {key: place.place for key, place in found.items()} == by_pack.get(pack, {})
        kinds = [row.pack.group_of(at).kind for row, at in model.values()]
        expected = {kind: (kinds.count(kind), kinds.count(kind) * size) for kind, size in (("image", 3), ("text", 5))}
        assert table.counts() == {kind: count for kind, count in expected.items() if count[0]}


def test_a_row_is_read_back_and_a_flip_of_any_byte_is_refused():
    row = row_of(1, KEYS[:3], dead=KEYS[1])
    row.reasons = {1: "a reason \u2026"}
    data = row.to_bytes()
    found = PackRow.from_bytes(row.pack.id, data)
    assert found.pack == row.pack and found.names() == KEYS[:3] and found.live.tolist() == [True, False, True]
    assert found.digests.tolist() == row.digests.tolist() and found.damaged() == {KEYS[1]: "a reason \u2026"}
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
        for damaged in (changed, data[:at]):
            with pytest.raises(ValueError, match="checksum"):
                PackRow.from_bytes(row.pack.id, damaged)
