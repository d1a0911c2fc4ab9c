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


GEOMETRIES = st.builds(Geometry, SIZES, SIZES, st.builds(Crop, SIDES, SIDES), SIZES, st.booleans())
CROPS = st.integers(0, 2)


def some(strategy: st.SearchStrategy[Ref]) -> st.SearchStrategy[tuple[Ref, ...]]:
    return st.lists(strategy, max_size=4).map(tuple)


ROWS = st.lists(
    st.builds(
        Row,
        TEXTS,
        PATHS,
        st.none() | KEYS,
        some(st.builds(Ref, KEYS, GEOMETRIES, TRUSTS, st.just("image"), crop=CROPS)),
        some(st.builds(Ref.of_text, TEXTS, KEYS, TRUSTS)),
        st.none() | st.builds(Refusal, TEXTS, TEXTS, TEXTS, TEXTS),
        some(st.builds(Ref, KEYS, GEOMETRIES, TRUSTS, st.sampled_from(ROLES[1:]), KEYS, crop=CROPS)),
    ),
    unique_by=lambda row: row.sample_id,
    max_size=6,
)


@given(ROWS, TEXTS)
@settings(max_examples=40)
def test_it_is_the_mapping_that_it_was_made_of(made: list[Row], other: str) -> None:
    rows = {row.sample_id: row for row in made}
    # The path of every second sample ends with its id.
    rows |= {name: replace(row, path=row.path + name) for name, row in [*rows.items()][::2]}
    table = RowTable.of(rows)
    table.check()
    for found in (table, pickle.loads(pickle.dumps(table))):
        assert found == table == rows and rows == found and len(found) == len(rows)
        assert list(found.items()) == list(rows.items()), "in their order"
        assert found.get(other) == rows.get(other) and (other in found) == (other in rows)
    for usable in (False, True):
        keys = {key for row in rows.values() if not (usable and row.refusal) for key in row.keys()}
        assert set(table.entry_keys(usable=usable)) == keys
    numbers, crops = np.arange(len(rows))[::-1], np.arange(len(rows)) % 3
    for flip in (False, True):
        places, counts = table.places(numbers, np.full(len(rows), flip), crops)
        wanted = [
            [ref.key for ref in (*row.images, *row.parts) if (ref.geometry.flip, ref.crop) == (flip, crop)]
            for row, crop in zip([*rows.values()][::-1], crops, strict=True)
        ]
        assert key_names(table.columns["image/keys"][places]) == [key for keys in wanted for key in keys]
        assert counts.tolist() == [*map(len, wanted)]


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
