"""Manifests: whole or refused, replaced as a whole, readable by every user who may read the packs."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latentcache.dataset import row_table
from latentcache.dataset.manifest import MARK, Manifest, manifest_bytes, merged_rows, read_manifest
from latentcache.dataset.manifest_folder import LOCK, ManifestFolder
from latentcache.dataset.row_table import ROLES, Ref, Row, RowTable
from latentcache.errors import DatasetError
from latentcache.identity import key_names
from latentcache.types import MAX_SIDE, Crop, Geometry, Refusal, Size

COMMON = {"schema": 1, "salt": "", "text_encoding": {}}
GEOMETRY = Geometry(Size(100, 200), Size(64, 128), Crop(0, 3), Size(64, 120), True)


def manifest(*sample_ids: str, name: str = "photos") -> Manifest:
    rows = [
        Row(s, f"/x/{s}", "d" * 64, (Ref("a" * 64, GEOMETRY),), (Ref.of_text(f"of {s}", "b" * 64),)) for s in sample_ids
    ]
    rows[1:2] = [replace(row, parts=(Ref("c" * 64, GEOMETRY, "unverified", "mask", "e" * 64),)) for row in rows[1:2]]
    rows.append(Row("bad", "/x/bad", None, (), (), Refusal("bad", "/x/bad", "empty", "0 bytes")))
    return Manifest(name, "train", 2, COMMON, {row.sample_id: row for row in rows})


def _checked(written: Manifest) -> Manifest:
    """What comes from elsewhere, with a digest that fits."""
    return read_manifest(manifest_bytes(written), "photos", "it", whole_check=True)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = ManifestFolder(tmp_path / "manifests")
    assert folder.names() == [] and folder.read("photos") is None
    made = replace(manifest("one", "two", "\udcff"), variants=3, weights=(2, 0.5), loss_weight=0.25)
    for written in (made, manifest("three")):
        folder.write(written)
        assert folder.names() == ["photos"] and folder.read("photos") == written != manifest("one", "two", "\udcff")
    assert sorted(path.name for path in folder.path.iterdir()) == [LOCK, "photos.safetensors"]
    assert made.with_rows({"one": made.rows["one"]}) == replace(made, rows={"one": made.rows["one"]})
    assert manifest("one").keys() == {"a" * 64, "b" * 64}
    assert manifest("one", "two").keys() == {"a" * 64, "b" * 64, "c" * 64}
    folder.file("photos").rename(folder.file("other"))
    with pytest.raises(DatasetError, match=r"manifest 'photos', not 'other'"):
        folder.read("other")


def test_no_update_undoes_another(tmp_path: Path) -> None:
    """Two processes, and threads with folders of their own, add a sample each time."""
    num_updates = 15

    def work(who: str) -> None:
        folder = ManifestFolder(tmp_path / "manifests")

        def added(name: str) -> Manifest:
            found = folder.read("photos")
            time.sleep(0.002)
            rows = {} if found is None else found.rows
            return replace(manifest(), rows={**rows, **manifest(name).rows})

        for number in range(num_updates):
            folder.update(partial(added, f"{who}{number}"))

    if (child := os.fork()) == 0:
        work("child")
        os._exit(0)
    threads = [threading.Thread(target=work, args=(who,)) for who in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert os.waitpid(child, 0)[1] == 0
    found = ManifestFolder(tmp_path / "manifests").read("photos")
    assert found is not None and len(found.rows) == 3 * num_updates + 1


WHOLE = manifest_bytes(manifest("one", "two"))
NO_MANIFESTS = {
    "empty": b"",
    "no-head": b"nonsense",
    "nested": b"\x08" + b"[" * 100_000,
    "no-object": b"\x10\0\0\0\0\0\0\0[]              ",
    "no-text": b"\xff\xfe" * 20,
    "newer": WHOLE.replace(f'"{MARK}": "5"'.encode(), f'"{MARK}": "6"'.encode()),
    "head-of-a-terabyte": (1 << 40).to_bytes(8, "little") + WHOLE[8:],
    **{f"cut-at-{end}": WHOLE[:end] for end in (len(WHOLE) - 1, len(WHOLE) // 2, 100, 7)},
}


@pytest.mark.parametrize("content", NO_MANIFESTS.values(), ids=NO_MANIFESTS)
def test_what_is_no_manifest_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "photos.safetensors").write_bytes(content)
    with pytest.raises(DatasetError, match=r"photos\.safetensors: is not a valid manifest") as caught:
        ManifestFolder(tmp_path).read("photos")
    if content is NO_MANIFESTS["newer"]:
        assert "format is '6', but this version reads 5" in str(caught.value)


HEADERS: dict[str, dict[str, Any]] = {
    **{f"repeats that are {value!r}": {"repeats": value} for value in ("2", -1, None)},
    "weights below zero": {"weights": (1.0, -1.0)},
    "a loss_weight that is no number": {"loss_weight": float("nan")},
    "another role": {"role": "test"},
    "no text_encoding in common": {"common": {"schema": 1, "salt": ""}},
    "a rule of scaling that a newer version has": {"common": COMMON | {"scaling": {"rule": "log"}}},
}


@pytest.mark.parametrize("changes", HEADERS.values(), ids=HEADERS)
def test_a_header_with_other_values_is_refused_though_its_digest_fits(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = ManifestFolder(tmp_path)
    folder.write(replace(manifest("one"), **changes))
    with pytest.raises(DatasetError, match=r"photos\.safetensors: is not a valid .*latentcache precache CONFIG"):
        folder.read("photos")


BARE = replace(manifest("one").rows["one"], images=())
CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "sample 'one' is listed twice": {"rows": {"one": manifest("one").rows["one"], "two": manifest("one").rows["one"]}},
    "sample 'one' has no image, and no refusal": {"rows": {"one": BARE}},
    "captions of sample 'one' is not a multiple of 3": {"variants": 3},
    "a caption has no key": {"rows": {"one": replace(BARE, captions=(Ref.of_text("a", ""),))}},
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_what_comes_from_elsewhere_contradicts_itself_nowhere(message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        _checked(replace(manifest("one"), **CONTRADICTIONS[message]))


def test_what_comes_from_elsewhere_is_read_where_it_is_whole() -> None:
    assert _checked(manifest("one", "two", "\udcff")) == manifest("one", "two", "\udcff")
    prompts = replace(manifest(), rows={"one": BARE}, role="prompts")
    assert _checked(prompts) == prompts, "prompts have no images"


def put(at: Any, value: Any) -> Callable[[np.ndarray], np.ndarray]:
    def changed(column: np.ndarray) -> np.ndarray:
        column = column.copy()
        column[at] = value
        return column

    return changed


ODD_COLUMNS: list[tuple[str, Callable[[np.ndarray], np.ndarray | None]]] = [
    *(("sample_id/offsets", put(*odd)) for odd in ((0, 1), (1, 8), (1, -5))),
    *(("image/geometry", put((0, at), side)) for at, side in ((0, 0), (4, -1), (8, -1), (9, 2), (1, MAX_SIDE + 1))),
    *(("image/offsets", put(-1, 2**30)), ("caption/text/offsets", put(-1, 0)), ("refusal/values", put(0, ord("7")))),
    *(("image/unverified", put(0, 2)), ("caption/unverified", put(0, 9))),
    *(("image/role", put(0, 99)), ("image/crop", put(0, -1))),
    # Bytes that are no text, or begin within a character.
    *(("sample_id/values", put(0, 0xFF)), ("sample_id/values", put(slice(2, 4), [0xC3, 0xA4]))),
    ("caption/text/values", put(2, 0xC3)),
    *(("image/keys", lambda column: column[:, :16]), ("image/keys", lambda column: column.astype(np.int32))),
    *((name, lambda column: column[:-1]) for name in ("source", "path/offsets", "image/keys", "caption/unverified")),
    ("image/role", lambda column: None),
]
"""Columns and what changes them to what no writer makes."""


@pytest.mark.parametrize(("name", "change"), ODD_COLUMNS)
def test_odd_columns_from_elsewhere_are_refused(name: str, change: Callable[[np.ndarray], np.ndarray | None]) -> None:
    written = manifest("one", "two")
    columns = {**written.rows.columns, name: change(written.rows.columns[name])}
    table = RowTable({each: np.ascontiguousarray(found) for each, found in columns.items() if found is not None})
    with pytest.raises(DatasetError, match=r"it: is not a valid manifest: .*latentcache precache CONFIG"):
        _checked(replace(written, rows=table))


def test_a_flipped_bit_gives_no_other_samples() -> None:
    whole = manifest_bytes(manifest("one"))
    for place in range(len(whole)):
        data = whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]
        try:
            assert read_manifest(data, "photos", "it") == manifest("one")
        except DatasetError as error:
            assert str(error).startswith("it: ")


# The rows as columns


TRUSTS: tuple[Any, ...] = ("verified", "unverified")


def drawn(number: int, role: str = "image", *, crop: int = 0, flip: bool = False) -> Ref:
    geometry = Geometry(Size(number, MAX_SIDE), Size(7, number), Crop(0, number), Size(9, MAX_SIDE), flip)
    source = "" if role == "image" else f"{number + 1:064x}"
    return Ref(f"{number:064x}", geometry, TRUSTS[number % 2], role, source, crop=crop)


TEXTS = ("", "a\0b", "\ud83d half", "ü熊" * 50)
PLACES = [(crop, flip) for crop in range(3) for flip in (False, True)]
ROWS = [
    Row(
        f"{text}{number}",
        text,
        None if number == 2 else f"{number + 1:064x}",
        tuple(drawn(10 * number + at, crop=crop, flip=flip) for at, (crop, flip) in enumerate(PLACES[:number], 1)),
        tuple(Ref.of_text(each, f"{number + 70:064x}", TRUSTS[number % 2]) for each in TEXTS[:number]),
        Refusal(text, "/x", text, "") if number % 3 == 0 else None,
        tuple(drawn(100 + number, role, crop=number % 3, flip=number > 4) for role in ROLES[1 : 2 * number]),
    )
    for number, text in enumerate([*TEXTS, *TEXTS])
]


def test_a_table_is_the_mapping_that_it_was_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_table, "_CHUNK", 3)
    # The path of every second sample ends with its id.
    rows = {row.sample_id: replace(row, path=row.path + row.sample_id * (at % 2)) for at, row in enumerate(ROWS)}
    table = RowTable.of(rows)
    table.check()
    for found in (table, pickle.loads(pickle.dumps(table))):
        assert found == table == rows and rows == found and len(found) == len(rows)
        assert list(found.items()) == list(rows.items()), "in their order"
        assert found.get("other") is None and "other" not in found
    for usable in (False, True):
        keys = {key for row in rows.values() if not (usable and row.refusal) for key in row.keys()}
        assert set(key_names(table.entry_keys(usable=usable))) == keys
    numbers, crops = np.arange(len(rows))[::-1], np.arange(len(rows)) % 3
    for flip in (False, True):
        places, counts = table.places(numbers, np.full(len(rows), flip), crops)
        wanted = [
            [ref.key for ref in (*row.images, *row.parts) if (ref.geometry.flip, ref.crop) == (flip, crop)]
            for row, crop in zip([*rows.values()][::-1], crops, strict=True)
        ]
        assert key_names(table.columns["image/keys"][places]) == [key for keys in wanted for key in keys]
        assert counts.tolist() == [*map(len, wanted)]


@pytest.mark.parametrize("key", ["", "a" * 63, "g" * 64])
def test_what_is_no_digest_is_refused(key: str) -> None:
    good = manifest("one").rows["one"]
    for changed in ({"images": (replace(good.images[0], key=key),)}, {"source": key}):
        with pytest.raises(ValueError, match="expected 64 lower-case hexadecimal digits"):
            RowTable.of([replace(good, **changed)])


def test_a_refusal_of_the_same_image_undoes_no_entry_in_a_merge() -> None:
    theirs, refusal = dict(manifest("0", "1", "2").rows), Refusal("1", "/x", "encode", "NaN")
    other, new = (replace(theirs["2"], sample_id=sample_id, path="/y") for sample_id in ("0", "new"))
    same, changed = replace(theirs["1"], refusal=refusal), replace(theirs["2"], refusal=refusal, source="f" * 64)
    ours = {row.sample_id: row for row in (new, changed, same, other)}
    merged = merged_rows(RowTable.of(theirs), RowTable.of(ours))
    assert list(merged.values()) == [other, theirs["1"], changed, theirs["bad"], new]
