"""The rows of a manifest as columns: what is put in comes out, in its order, and takes little memory."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.dataset.manifest import merged_rows
from latentcache.dataset.row_table import ROLES, Ref, Row, RowTable, RowTableBuilder, hex_of
from latentcache.types import Crop, Geometry, Refusal, Size

TEXTS = st.text(st.characters(), max_size=8)
KEYS = st.binary(min_size=32, max_size=32).filter(any).map(bytes.hex)  # no digest is all zeros
SIDES = st.integers(1, 1 << 24)
SIZES = st.builds(Size, SIDES, SIDES)
GEOMETRIES = st.builds(Geometry, SIZES, SIZES, st.builds(Crop, SIDES, SIDES), SIZES, st.booleans())
TRUSTS = st.sampled_from(["verified", "unverified"])


@st.composite
def tables_of_rows(draw: st.DrawFn) -> dict[str, Row]:
    rows = {}
    for sample_id in draw(st.lists(TEXTS, unique=True, max_size=6)):
        num_crops, flips = draw(st.integers(0, 3)), draw(st.sampled_from([[False], [False, True]]))
        images = [turned(draw(st.builds(Ref, KEYS, GEOMETRIES, TRUSTS)), flip) for flip in flips * num_crops]
        captions = draw(st.lists(st.builds(Ref.of_text, TEXTS, KEYS, TRUSTS), max_size=3))
        roles = st.sampled_from(["control", "mask"])
        parts = draw(st.lists(st.builds(Ref, KEYS, GEOMETRIES, TRUSTS, roles, KEYS), max_size=3))
        if num_crops > 1:  # each has as many entries as the image; what was imported may lack some
            parts = [turned(part, flip) for part in parts for flip in flips * num_crops]
        refusal = draw(st.none() | st.builds(Refusal, TEXTS, TEXTS, TEXTS, TEXTS))
        path = draw(st.sampled_from([f"/a/{sample_id}", f"/b/{sample_id}", f"{sample_id}#1", sample_id]) | TEXTS)
        source = draw(st.none() | KEYS)
        rows[sample_id] = Row(sample_id, path, source, tuple(images), tuple(captions), refusal, tuple(parts))
    return rows


def turned(ref: Any, flip: bool) -> Any:
    return replace(ref, geometry=replace(ref.geometry, flip=flip))


def keys_of(table: RowTable, name: str, places: Sequence[int] | np.ndarray) -> list[str]:
    return hex_of(table.columns[f"{name}/keys"][np.array(places, np.int64)])


@given(tables_of_rows(), TEXTS)
def test_it_is_the_mapping_that_it_was_made_of(rows: dict[str, Row], other: str) -> None:
    table = RowTable.of(rows)
    for found in (table, pickle.loads(pickle.dumps(table)), RowTable.of(table)):
        assert found == rows and rows == found and len(found) == len(rows)
        assert list(found) == list(rows) and list(found.items()) == list(rows.items())
        assert [found.row(number) for number in range(len(rows))] == list(found.values()) == list(rows.values())
        assert [found.number(sample_id) for sample_id in rows] == list(range(len(rows)))
        assert found.get(other) == rows.get(other) and (other in found) == (other in rows)
    assert {**table, other: None} == {**rows, other: None}
    assert table.rows(1, 99) == list(rows.values())[1:] and table.rows(99, 100) == []
    assert set(table.entry_keys()) == {key for row in rows.values() for key in row.keys()}
    values = list(rows.values())
    assert table.usable().tolist() == [number for number, row in enumerate(values) if row.refusal is None]
    assert table.unverified().tolist() == [number for number, row in enumerate(values) if not row.is_verified]
    numbers = np.arange(len(values))[::-1]
    assert table.numbers([*rows, other]).tolist() == [
        *range(len(rows)),
        list(rows).index(other) if other in rows else -1,
    ]
    assert table.sample_ids.take(numbers) == list(rows)[::-1]
    assert table.num_crops(numbers).tolist() == [row.num_crops for row in values[::-1]]
    for flip, crop in itertools.product((False, True), range(3)):
        flips, crops = np.full(len(values), flip), np.full(len(values), crop)
        images = table.image_places(numbers, flips, crops).tolist()
        alike = [[ref.key for ref in row.images_of(crop) if ref.geometry.flip == flip] for row in values[::-1]]
        assert [[] if at < 0 else keys_of(table, "image", [at]) for at in images] == alike
        if crop == 0:
            assert table.image_places(numbers, flips).tolist() == images
        places, counts = table.part_places(numbers, flips, crops % table.num_crops(numbers))
        wanted_parts = [
            [ref for _, ref in row.named_parts(flip=flip, crop=crop % row.num_crops)] for row in values[::-1]
        ]
        assert counts.tolist() == [*map(len, wanted_parts)]
        parts = [ref for refs in wanted_parts for ref in refs]
        assert keys_of(table, "part", places) == [ref.key for ref in parts]
        shapes = [[ROLES.index(ref.role), *ref.geometry.target_size] for ref in parts]
        assert table.part_shapes(places).tolist() == shapes
    starts, ends = table.ranges("caption", numbers)
    texts = [keys_of(table, "caption", range(*each)) for each in zip(starts.tolist(), ends.tolist(), strict=True)]
    assert texts == [[ref.key for ref in row.captions] for row in values[::-1]]
    for name in ("resized_size", "target_size"):
        wanted = [list(getattr(row.images[0].geometry, name)) if row.images else [0, 0] for row in values]
        assert table.first_sizes(name).tolist() == wanted


@given(tables_of_rows(), tables_of_rows())
def test_two_are_merged_and_compared_as_mappings_are(theirs: dict[str, Row], ours: dict[str, Row]) -> None:
    expected = dict(theirs)
    for name, row in ours.items():
        was = theirs.get(name)
        keeps = was is not None and row.refusal is not None and was.refusal is None and row.source == was.source
        expected[name] = was if was is not None and keeps else row
    found = merged_rows(RowTable.of(theirs), RowTable.of(ours))
    assert list(found.items()) == list(expected.items()) == list(merged_rows(theirs, ours).items())
    table = RowTable.of(theirs)
    assert (table == RowTable.of(ours)) == (list(theirs.items()) == list(ours.items())) and table != list(theirs)


def make_row(number: int) -> Row:
    """A sample of a folder, as `scripts/bench_scale.py` makes them."""
    name = f"{number // 1000:04d}/{number}.png"
    geometry = Geometry(Size(1024, 512 + number), Size(1024, 512), Crop(0, 0), Size(1024, 512))  # each has its own
    caption = Ref.of_text(f"photo number {number}, of a grey wall in the evening", f"{number:064x}")
    return Row(name, f"/data/photos/{name}", f"{number:064x}", (Ref(f"{-number % 9**9:064x}", geometry),), (caption,))


def make_pair(number: int) -> Row:
    """As `make_row`, with a control image."""
    row = make_row(number)
    return replace(row, parts=(Ref(f"{2**99 + number:064x}", row.images[0].geometry, role="control", source="f" * 64),))


@pytest.mark.parametrize("key", ["", "a" * 63, "A" * 64, "g" * 64, " a" + "a" * 62, "a" * 65, "\u0661" * 64])
@pytest.mark.parametrize("where", ["images", "captions", "source", "parts"])
def test_what_is_no_digest_is_refused(where: str, key: str) -> None:
    builder, good = RowTableBuilder(), make_pair(1)
    if (where, key) == ("captions", ""):
        key = "0" * 63  # a caption that is not encoded has no key
    value = key if where == "source" else (replace(getattr(good, where)[0], key=key),)
    with pytest.raises(ValueError, match="where 64 hexadecimal digits are needed"):
        builder.add([make_row(0), replace(good, **{where: value})])


def test_rows_are_found_by_the_keys_of_any_entry() -> None:
    table = RowTable.from_rows([make_row(0), make_pair(1), make_row(2), make_pair(3)])
    pair = make_pair(3)
    for key in (pair.images[0].key, pair.captions[0].key, pair.parts[0].key):
        assert table.rows_with([key, "e" * 64]) == [3]
    assert table.rows_with([make_row(2).captions[0].key, make_row(0).images[0].key]) == [0, 2]
    assert table.rows_with([]) == [] == table.rows_with(["e" * 64])


def test_the_last_row_of_an_image_is_found_by_its_digest() -> None:
    rows = [make_row(0), replace(make_row(1), source="a" * 64), replace(make_row(2), source="a" * 64)]
    rows.append(replace(make_row(3), source=None))
    table = RowTable.from_rows(rows)
    assert table.row_of_source("a" * 64) == rows[2] and table.row_of_source("b" * 64) is None
    assert table.row_of_source("0" * 64) is None, "an unknown source is no image's"


def test_rows_are_refused_afterwards() -> None:
    first, second = (Refusal(f"{number}", "/x", "encode", "NaN") for number in (0, 3))
    rows = [replace(make_row(4), refusal=first), *map(make_pair, (1, 2, 3))]
    before = RowTable.from_rows(rows)
    after = before.with_refusals({3: second})
    assert dict(after) == {row.sample_id: row for row in (*rows[:3], replace(rows[3], refusal=second))}
    assert set(after.entry_keys(usable=True)) == {key for row in rows[1:3] for key in row.keys()}
    assert set(before.entry_keys(usable=True)) == {key for row in rows[1:] for key in row.keys()}
