"""Manifests: whole or refused, replaced as a whole, readable by every user who may read the packs."""

from __future__ import annotations

import os
import resource
import signal
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.dataset.manifest import CaptionRef, ImageRef, Manifest, ManifestFolder, Row, prompts_name
from latentcache.errors import DatasetError, StorageFullError, StoreError
from latentcache.types import Crop, Geometry, Refusal, Size

GEOMETRY = Geometry(Size(100, 200), Size(64, 128), Crop(0, 3), Size(64, 120), True)


def manifest(*sample_ids: str, name: str = "photos") -> Manifest:
    rows = [
        Row(s, f"/x/{s}", "d" * 64, (ImageRef("a" * 64, GEOMETRY),), (CaptionRef(f"of {s}", "b" * 64),))
        for s in sample_ids
    ]
    rows.append(Row("bad", "/x/bad", None, (), (), Refusal("bad", "/x/bad", "empty", "0 bytes")))
    return Manifest(name, "train", 2, {"schema": 1, "salt": ""}, {row.sample_id: row for row in rows})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = ManifestFolder(tmp_path / "manifests")
    assert folder.names() == [] and folder.read("photos") is None
    folder.write(manifest("one", "two"))
    assert folder.names() == ["photos"] and folder.read("photos") == manifest("one", "two")
    folder.write(manifest("three"))
    assert folder.read("photos") == manifest("three")
    assert [path.name for path in folder.path.iterdir()] == ["photos.jsonl"]
    assert manifest("one").keys() == {"a" * 64, "b" * 64}


@given(st.lists(st.text(st.characters(), max_size=20), unique=True, max_size=5))
def test_any_names_and_captions_come_back(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> None:
    folder = ManifestFolder(tmp_path_factory.mktemp("manifests"))
    folder.write(manifest(*names))
    assert folder.read("photos") == manifest(*names)


def test_others_may_read_it(tmp_path: Path) -> None:
    """A cache is shared: the manifest must not be more private than the packs."""
    before = os.umask(0o022)
    try:
        folder = ManifestFolder(tmp_path)
        folder.write(manifest("one"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "photos.jsonl").stat().st_mode) == 0o644


@pytest.mark.parametrize(
    "content",
    [b"", b"{}\n", b"nonsense", b"[" * 100_000, b'{"format": 1}\n', b'{"format": 3}\n', b"\xff\xfe"],
    ids=["empty", "no-header", "no-json", "nested", "older", "newer", "no-text"],
)
def test_what_is_no_manifest_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "photos.jsonl").write_bytes(content)
    with pytest.raises(DatasetError, match=r"photos\.jsonl"):
        ManifestFolder(tmp_path).read("photos")


def test_a_manifest_that_was_cut_is_refused(tmp_path: Path) -> None:
    folder = ManifestFolder(tmp_path)
    folder.write(manifest("one", "two"))
    whole = (tmp_path / "photos.jsonl").read_bytes()
    for end in (len(whole) - 1, len(whole) // 2, whole.rindex(b"\n", 0, -1) + 1):
        (tmp_path / "photos.jsonl").write_bytes(whole[:end])
        with pytest.raises(DatasetError, match="not a whole manifest"):
            folder.read("photos")


def test_a_flipped_bit_gives_no_other_samples(tmp_path: Path) -> None:
    folder, file = ManifestFolder(tmp_path), tmp_path / "photos.jsonl"
    folder.write(manifest("one"))
    whole = file.read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            try:
                assert folder.read("photos") == manifest("one")
            except DatasetError as error:
                assert "photos.jsonl" in str(error)


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
    assert [path.name for path in tmp_path.iterdir()] == ["photos.jsonl"]


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "manifests").write_text("a file")
    with pytest.raises(StoreError, match="manifests"):
        ManifestFolder(tmp_path / "manifests").write(manifest("one"))


def test_prompts_are_kept_apart_by_what_encodes_them() -> None:
    common = {"schema": 1, "salt": "", "text_encoding": {"clip_skip": 0}, "image_encoding": {"output": "mean"}}
    name = prompts_name(common)
    assert prompts_name(common | {"image_encoding": {"output": "moments"}}) == name
    for change in ({"text_encoding": {"clip_skip": 1}}, {"salt": "x"}, {"schema": 2}):
        assert prompts_name(common | change) != name
