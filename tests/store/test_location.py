"""A location's text: exact, strict, and shared where a million of them would repeat themselves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latentcache.store.base import DTYPES
from latentcache.store.location import Location, spec_of

shapes = st.lists(st.integers(1, 9999), max_size=4).map(tuple)
fields = st.dictionaries(
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,9}", fullmatch=True),
    st.tuples(st.sampled_from(sorted(DTYPES)), shapes),
    min_size=1,
    max_size=4,
)
locations = st.builds(
    lambda pack, digest, kind, description, start: Location(
        f"{pack:032x}", f"{digest:032x}", spec_of(kind, description), tuple(start + n for n in range(len(description)))
    ),
    st.integers(0, (1 << 128) - 1),
    st.integers(0, (1 << 128) - 1),
    st.sampled_from(["image", "text"]),
    fields,
    st.integers(0, 1 << 50),
)


@given(locations)
@settings(max_examples=100, deadline=None)
def test_the_text_is_read_back(location):
    found = Location.from_text(location.to_text())
    assert found == location and found.to_text() == location.to_text()
    assert found.spec is location.spec and found.pack == location.pack
    assert found.places == location.places
    assert found.num_bytes == sum(place.num_bytes for place in found.places.values())
    assert found.end == max(place.offset + place.num_bytes for place in found.places.values())


GOOD = spec_of("image", {"moments": ("float16", (4, 8, 8))})
TEXT = Location("0" * 32, "1" * 32, GOOD, (128,)).to_text()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0" * 32, "0" * 31),
        ("0" * 32, "../" * 10 + "00"),
        ("image", "sound"),
        ("float16", "complex64"),
        ("[4,8,8]", "[4,0,8]"),
        ("[4,8,8]", "[4,-8,8]"),
        ("[4,8,8]", f"[4,8,{10**18}]"),
        ("[4,8,8]", '"4"'),
        ("[4,8,8],128", "[4,8,8]"),
        ("[4,8,8],128", "[4,8,8],-1"),
        ("[4,8,8],128", "[4,8,8],1.5"),
        ("[4,8,8],128", "[4,8,8],128,128"),
        ("moments", "mo/ments"),
        ("moments", "mo],5]ments"),
        ('"moments":["float16",[4,8,8],128]', ""),
        ('"moments":["float16",[4,8,8],128]', '"moments":["float16",[4,8,8],1],"moments":["float16",[4,8,8],2]'),
        ('{"moments"', "[" * 10_000 + '{"moments"'),
    ],
)
def test_other_texts_are_refused(old, new):
    text = TEXT.replace(old, new)
    assert text != TEXT and Location.from_text(TEXT).offsets == (128,)
    with pytest.raises(ValueError, match=r"^not "):
        Location.from_text(text)


def test_equal_specs_are_one_object():
    assert spec_of("image", {"moments": ("float16", (4, 8, 8))}) is GOOD
    assert Location.from_text(TEXT).description is Location.from_text(TEXT.replace("1" * 32, "2" * 32)).description
