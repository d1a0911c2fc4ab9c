"""Manifests: whole or refused, replaced as a whole, readable by every user who may read the packs."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latentcache.dataset.manifest import MARK, Manifest, manifest_bytes, read_manifest
from latentcache.dataset.manifest_folder import LOCK, ManifestFolder
from latentcache.dataset.row_table import Ref, Row, RowTable
from latentcache.errors import DatasetError, StorageFullError
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


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = ManifestFolder(tmp_path / "manifests")
    assert folder.names() == [] and folder.read("photos") is None
    folder.write(manifest("one", "two"))
    assert folder.names() == ["photos"] and folder.read("photos") == manifest("one", "two")
    folder.write(manifest("three"))
    assert folder.read("photos") == manifest("three")
    assert sorted(path.name for path in folder.path.iterdir()) == [LOCK, "photos.safetensors"]
    assert manifest("one").keys() == {"a" * 64, "b" * 64}
    assert manifest("one", "two").keys() == {"a" * 64, "b" * 64, "c" * 64}


def test_what_a_manifest_says_of_drawing_and_of_the_loss_is_kept(tmp_path: Path) -> None:
    folder = ManifestFolder(tmp_path)
    made = replace(manifest("one", "two"), variants=3, weights=(2, 0.5), loss_weight=0.25)
    folder.write(made)
    found = folder.read("photos")
    assert found == made and found != manifest("one", "two")
    assert found.with_rows({"one": found.rows["one"]}) == replace(made, rows={"one": found.rows["one"]})
    with pytest.raises(DatasetError, match=r"captions of sample 'one' are no multiple of its 3 variants"):
        _checked(made)


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
    with pytest.raises(DatasetError, match=r"photos\.safetensors: is no manifest") as caught:
        ManifestFolder(tmp_path).read("photos")
    if content is NO_MANIFESTS["newer"]:
        assert "manifest format '6', but this version reads 5" in str(caught.value)


def common(**changes: Any) -> dict[str, Any]:
    return {**COMMON, **changes}


HEADERS: dict[str, dict[str, Any]] = {
    **{f"repeats that are {value!r}": {"repeats": value} for value in ("2", -1, None)},
    "weights below zero": {"weights": (1.0, -1.0)},
    "a loss_weight that is no number": {"loss_weight": float("nan")},
    "another role": {"role": "test"},
    "no text_encoding in common": {"common": {"schema": 1, "salt": ""}},
    "a rule of scaling that a newer version has": {"common": common(scaling={"rule": "log"})},
}


@pytest.mark.parametrize("changes", HEADERS.values(), ids=HEADERS)
def test_a_header_with_other_values_is_refused_though_its_digest_fits(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = ManifestFolder(tmp_path)
    folder.write(replace(manifest("one"), **changes))
    with pytest.raises(DatasetError, match=r"photos\.safetensors: is no manifest: .*latentcache precache CONFIG"):
        folder.read("photos")


def test_a_manifest_under_another_name_is_refused(tmp_path: Path) -> None:
    folder = ManifestFolder(tmp_path)
    folder.write(manifest("one"))
    (tmp_path / "photos.safetensors").rename(tmp_path / "other.safetensors")
    with pytest.raises(DatasetError, match=r"manifest 'photos'.*is 'other'"):
        folder.read("other")


def _checked(written: Manifest) -> Manifest:
    """What comes from elsewhere, with a digest that fits."""
    return read_manifest(manifest_bytes(written), "photos", "it", whole_check=True)


def test_what_comes_from_elsewhere_lists_no_sample_twice() -> None:
    row = manifest("one").rows["one"]
    with pytest.raises(DatasetError, match="sample 'one' is listed twice"):
        _checked(replace(manifest(), rows={"one": row, "two": row}))


def test_what_comes_from_elsewhere_has_an_image_or_a_refusal_for_each_sample() -> None:
    bare = {"one": replace(manifest("one").rows["one"], images=())}
    with pytest.raises(DatasetError, match="sample 'one' has no image, and no refusal"):
        _checked(replace(manifest(), rows=bare))
    assert _checked(replace(manifest(), rows=bare, role="prompts")).rows == bare
    assert _checked(manifest("one", "two", "\udcff")) == manifest("one", "two", "\udcff")


ODD_VALUES = [
    *(("sample_id/offsets", 0, 1), ("image/offsets", -1, 2**30), ("caption/text/offsets", -1, 0)),
    *(("sample_id/offsets", 1, 8), ("sample_id/offsets", 1, -5), ("refusal/values", 0, ord("7"))),
    *(("image/geometry", (0, at), value) for at, value in ((0, 0), (4, -1), (8, -1), (9, 2), (1, MAX_SIDE + 1))),
    *(("image/unverified", 0, 2), ("caption/unverified", 0, 9), ("image/role", 0, 99), ("image/crop", 0, -1)),
    *(("sample_id/values", 0, 0xFF), ("caption/text/values", 2, 0xC3), ("sample_id/values", slice(2, 4), [0xC3, 0xA4])),
]
"""Columns, places and what may not be there; of texts, bytes that are no text, or begin within a character."""
ODD_COLUMNS: list[tuple[str, Callable[[np.ndarray], np.ndarray]]] = [
    ("image/keys", lambda column: column[:, :16]),
    ("image/keys", lambda column: column.astype(np.int32)),
    *((name, lambda column: column[:-1]) for name in ("source", "path/offsets", "image/keys", "caption/unverified")),
]


def _refused(name: str, column: np.ndarray | None) -> None:
    """What comes from elsewhere with this column, or without it, is refused, though its digest fits."""
    written = manifest("one", "two")
    columns = {**written.rows.columns, name: column}
    table = RowTable({each: np.ascontiguousarray(found) for each, found in columns.items() if found is not None})
    with pytest.raises(DatasetError, match=r"it: is no manifest: .*latentcache precache CONFIG"):
        _checked(replace(written, rows=table))


@pytest.mark.parametrize(("name", "at", "value"), ODD_VALUES)
def test_odd_values_from_elsewhere_are_refused(name: str, at: Any, value: Any) -> None:
    column = manifest("one", "two").rows.columns[name].copy()
    column[at] = value
    _refused(name, column)


@pytest.mark.parametrize(("name", "change"), ODD_COLUMNS)
def test_odd_columns_from_elsewhere_are_refused(name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    _refused(name, change(manifest("one", "two").rows.columns[name]))


def test_a_missing_column_is_refused() -> None:
    _refused("image/role", None)


def test_a_flipped_bit_gives_no_other_samples() -> None:
    whole = manifest_bytes(manifest("one"))
    for place in range(len(whole)):
        data = whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]
        try:
            assert read_manifest(data, "photos", "it") == manifest("one")
        except DatasetError as error:
            assert str(error).startswith("it: ")


def test_runs_that_began_are_listed_until_they_are_done(tmp_path: Path) -> None:
    folder = ManifestFolder(tmp_path / "manifests")
    assert folder.unfinished() == {}
    folder.begin("photos")
    folder.begin("other")
    assert list(folder.unfinished()) == ["other", "photos"] and folder.names() == []
    folder.write(manifest("one"))
    assert list(folder.unfinished()) == ["other"]


def test_a_full_disk_leaves_the_old_manifest(tmp_path: Path) -> None:
    folder = ManifestFolder(tmp_path)
    folder.write(manifest("one"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(StorageFullError, match="no space left"):
            folder.write(manifest(*map(str, range(1000))))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert folder.read("photos") == manifest("one")
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, "photos.safetensors"]
