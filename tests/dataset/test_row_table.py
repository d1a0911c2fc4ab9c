"""The rows of a manifest as columns: what is put in comes out, in its order, and by what readers look for."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latentcache.dataset.manifest import merged_rows
from latentcache.dataset.row_table import ROLES, Ref, Row, RowTable
from latentcache.identity import key_names
from latentcache.types import Crop, Geometry, Refusal, Size

TEXTS = st.text(st.characters(), max_size=8)
PATHS = TEXTS.map(lambda text: text.rstrip("\0"))
KEYS = st.binary(min_size=32, max_size=32).filter(any).map(bytes.hex)  # no digest is all zeros
SIDES = st.integers(1, 1 << 24)
SIZES = st.builds(Size, SIDES, SIDES)
TRUSTS = st.sampled_from(["verified", "unverified"])


@st.composite
def tables_of_rows(draw: st.DrawFn) -> dict[str, Row]:
    rows = {}
    for sample_id in draw(st.lists(TEXTS, unique=True, max_size=6)):
        twins, num_crops = draw(st.sampled_from([[False], [False, True]])), draw(st.integers(0, 3))
        roles = ["image", *draw(st.lists(st.sampled_from(ROLES[1:]), unique=True, max_size=3))]
        refs = []
        for role in sorted(roles, key=ROLES.index):
            for crop in range(num_crops):
                source = draw(KEYS) if role != "image" else ""
                for flip in twins:
                    geometry = Geometry(
                        draw(SIZES), draw(SIZES), draw(st.builds(Crop, SIDES, SIDES)), draw(SIZES), flip
                    )
                    refs.append(Ref(draw(KEYS), geometry, draw(TRUSTS), role, source, crop=crop))
        captions = draw(st.lists(st.builds(Ref.of_text, TEXTS, KEYS, TRUSTS), max_size=3))
        rows[sample_id] = Row(
            sample_id,
            draw(PATHS) + draw(st.sampled_from(["", sample_id])),
            draw(st.none() | KEYS),
            tuple(ref for ref in refs if ref.role == "image"),
            tuple(captions),
            draw(st.none() | st.builds(Refusal, TEXTS, TEXTS, TEXTS, TEXTS)),
            tuple(ref for ref in refs if ref.role != "image"),
        )
    return rows


def batched(numbers: list[int]) -> list[list[int]]:
    return [numbers[at : at + 4] for at in range(0, len(numbers), 4)]


@given(tables_of_rows(), TEXTS)
@settings(max_examples=40)
def test_it_is_the_mapping_that_it_was_made_of(rows: dict[str, Row], other: str) -> None:
    table = RowTable.of(rows)
    table.check()
    for found in (table, pickle.loads(pickle.dumps(table))):
        assert found == table == rows and rows == found and len(found) == len(rows)
        assert list(found.items()) == list(rows.items()), "in their order"
        assert found.get(other) == rows.get(other) and (other in found) == (other in rows)
    values, numbers = list(rows.values()), np.arange(len(rows))[::-1]
    assert [table.row(table.number(sample_id)) for sample_id in rows] == values
    assert set(table.entry_keys()) == {key for row in values for key in row.keys()}
    usable = [number for number, row in enumerate(values) if row.refusal is None]
    assert table.usable().tolist() == usable
    assert set(table.entry_keys(usable=True)) == {key for number in usable for key in values[number].keys()}
    assert table.unverified().tolist() == [number for number in usable if not values[number].is_verified]
    assert table.without_caption().tolist() == [
        number for number in usable if not any(ref.text for ref in values[number].captions)
    ]
    assert table.num_crops.tolist() == [1 + max((ref.crop for ref in row.images), default=0) for row in values]
    for flip in (False, True):
        crops = np.arange(len(values)) % 3
        places, counts = table.places(numbers, np.full(len(values), flip), crops)
        wanted = [
            [ref.key for ref in (*row.images, *row.parts) if (ref.geometry.flip, ref.crop) == (flip, crop)]
            for row, crop in zip(values[::-1], crops, strict=True)
        ]
        assert key_names(table.columns["image/keys"][places]) == [key for keys in wanted for key in keys]
        assert counts.tolist() == [*map(len, wanted)]
    shapes = [
        [[ROLES.index(ref.role), *ref.geometry.target_size, 0] for ref in (*row.images[:1], *row.parts_of())]
        for row in values
    ]
    for numbers in table.shapes(np.arange(len(values))).tolist():
        assert [shape for shape in batched(numbers) if any(shape)] == shapes.pop(0)


def make_row(number: int) -> Row:
    geometry = Geometry(Size(1024, 512 + number), Size(1024, 512), Crop(0, 0), Size(1024, 512))
    caption = Ref.of_text(f"photo number {number}", f"{number + 1:064x}")
    mask = Ref(f"{2**99 + number:064x}", geometry, role="mask", source="f" * 64)
    image = Ref(f"{2**98 + number:064x}", geometry)
    return Row(f"{number}.png", f"/photos/{number}.png", f"{number + 1:064x}", (image,), (caption,), parts=(mask,))


@pytest.mark.parametrize("key", ["", "a" * 63, "g" * 64])
def test_what_is_no_digest_is_refused(key: str) -> None:
    good = make_row(1)
    for changed in ({"images": (replace(good.images[0], key=key),)}, {"source": key}):
        with pytest.raises(ValueError, match="where 64 hexadecimal digits are needed"):
            RowTable.of([make_row(0), replace(good, **changed)])


def test_a_refusal_of_the_same_image_undoes_no_entry_in_a_merge() -> None:
    theirs = {row.sample_id: row for row in map(make_row, range(4))}
    refusal = Refusal("1.png", "/x", "encode", "NaN")
    other = replace(make_row(5), sample_id="0.png")
    same, changed = (
        replace(theirs[name], refusal=refusal, source=source)
        for name, source in (("1.png", theirs["1.png"].source), ("2.png", "f" * 64))
    )
    ours = {row.sample_id: row for row in (make_row(7), changed, same, other)}
    merged = merged_rows(RowTable.of(theirs), RowTable.of(ours))
    assert list(merged.values()) == [other, theirs["1.png"], changed, theirs["3.png"], make_row(7)]
    assert RowTable.of(theirs) != RowTable.of(ours) and RowTable.of(theirs) == RowTable.of(theirs)


def test_rows_are_found_by_the_keys_of_any_entry() -> None:
    table = RowTable.of(map(make_row, range(4)))
    for ref in make_row(3).refs():
        assert table.rows_with([ref.key, "e" * 64]) == [3]
    assert table.rows_with([make_row(2).captions[0].key, make_row(0).images[0].key]) == [0, 2]
    assert table.rows_with([]) == [] == table.rows_with(["e" * 64])


def test_rows_are_refused_afterwards() -> None:
    first, second = (Refusal(f"{number}", "/x", "encode", "NaN") for number in (0, 3))
    rows = [replace(make_row(4), refusal=first), *map(make_row, (1, 2, 3))]
    after = RowTable.of(rows).with_refusals({3: second})
    assert list(after.values()) == [*rows[:3], replace(rows[3], refusal=second)]
