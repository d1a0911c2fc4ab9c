"""Control images and masks of samples, in each layout; and those that are not there."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from helpers.photo_files import write_photo

from latentcache.config import Config
from latentcache.config_file import parse_config
from latentcache.dataset.samples import Sample, SampleSource
from latentcache.dataset.sources import open_source
from latentcache.errors import ConfigError, DatasetError, ImageRefused
from latentcache.types import Refusal


def png(seed: int) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(np.full((16, 16, 3), seed, np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def put(path: Path, seed: int) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(seed))
    return png(seed)


def config_of(source: dict[str, Any], **parts: Any) -> Config:
    return parse_config({"datasets": [{"name": "pairs", "source": source, **parts}]})


def opened(source: dict[str, Any], **parts: Any) -> SampleSource:
    [dataset] = config_of(source, **parts).datasets
    return open_source(dataset.source, dataset.part_files)


def read(source: SampleSource) -> tuple[dict[str, list[bytes]], dict[str, tuple[str, str]]]:
    """What each sample's parts read as, and what is refused of the others."""
    found, refused = {}, {}
    for item in source.samples():
        if isinstance(item, Refusal):
            refused[item.sample_id] = item.reason, item.detail
        else:
            assert isinstance(item, Sample)
            found[item.sample_id] = [source.read(part) for part in item.parts]
    return found, refused


def test_a_folder_of_the_same_names_with_any_ending(tmp_path: Path) -> None:
    for name in ("cat.png", "sub/dog.png", "sub/fox.png", "owl.png"):
        put(tmp_path / "after" / name, 1)
    cat, dog = put(tmp_path / "before/cat.png", 2), put(tmp_path / "before/sub/dog.webp", 3)
    put(tmp_path / "before/cat.webp", 9)  # the image's own ending comes first
    put(tmp_path / "before/sub/fox.webp", 9), put(tmp_path / "before/sub/fox.bmp", 9)
    source = opened({"path": tmp_path / "after"}, control={"path": tmp_path / "before"})
    found, refused = read(source)
    assert found == {"cat.png": [cat], "sub/dog.png": [dog]}
    assert refused["owl.png"] == (
        "missing",
        f"control 1: there is no image owl in {tmp_path / 'before'}; add it, or remove the sample",
    )
    reason, detail = refused["sub/fox.png"]
    assert reason == "duplicate" and "control 1: the folder has several, fox.bmp, fox.webp" in detail


def test_a_folder_inside_the_images_own_and_numbered_names_hold_no_samples(tmp_path: Path) -> None:
    put(tmp_path / "cat.png", 1)
    inner, first, second, mask = (
        put(tmp_path / name, seed)
        for seed, name in enumerate(("control/cat.png", "cat_1.png", "cat_2.jpg", "cat-masklabel.png"), 2)
    )
    parts = [{"path": tmp_path / "control"}, {"suffix": "_1"}, {"suffix": "_2"}]
    source = opened({"path": tmp_path}, control=parts, mask={"suffix": "-masklabel"})
    found, refused = read(source)
    assert read(pickle.loads(pickle.dumps(source))) == (found, refused), "other processes read them too"
    assert found == {"cat.png": [inner, first, second, mask]} and refused == {}


def test_metadata_names_the_files(tmp_path: Path) -> None:
    put(tmp_path / "in/a.png", 1)
    put(tmp_path / "in/b.png", 1)
    mask, control = put(tmp_path / "in/masks/x.png", 2), put(tmp_path / "in/y.png", 3)
    rows = [
        {"file_name": "a.png", "text": "a", "mask": "masks/x.png", "edit": "y.png"},
        {"file_name": "b.png", "text": "b", "mask": "masks/x.png"},
        {"file_name": "y.png", "text": "y", "mask": "../../../x.png", "edit": "y.png"},
        {"file_name": "a.png", "text": "again", "mask": "masks/z.png", "edit": "y.png"},
    ]
    (tmp_path / "in/metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = opened({"kind": "imagefolder", "path": tmp_path}, control={"column": "edit"}, mask={"column": "mask"})
    items = list(source.samples())
    assert isinstance(items[0], Sample) and [source.read(part) for part in items[0].parts] == [control, mask]
    found = [(item.sample_id, item.reason, item.detail) for item in items if isinstance(item, Refusal)]
    assert found == [
        ("in/b.png", "missing", "control 1: its metadata has no 'edit'"),
        ("in/y.png", "unreadable", "mask: mask '../../../x.png' leads out of the dataset's folder"),
        ("in/a.png", "missing", "mask: there is no such file"),
    ]


def test_members_of_a_tar(tmp_path: Path) -> None:
    members = [
        *(("cat.png", 1), ("cat.control.png", 2), ("cat.Mask.png", 3), ("dog.png", 1), ("dog.control.png", 2)),
        *(("fox.png", 1), ("fox.mask.png", 2), ("fox.mask.webp", 3), ("fox.control.png", 4)),
    ]
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for name, seed in members:
            member = tarfile.TarInfo(name)
            member.size = len(png(seed))
            tar.addfile(member, io.BytesIO(png(seed)))
    parts: dict[str, Any] = {"control": {"column": "control"}, "mask": {"column": "mask"}}
    found, refused = read(opened({"kind": "webdataset", "path": tmp_path}, **parts))
    assert found == {"0.tar/cat": [png(2), png(3)]}
    assert refused == {
        "0.tar/dog": ("missing", "mask: its key has no member .mask of an image"),
        "0.tar/fox": ("duplicate", "mask: its key has several: fox.mask.png, fox.mask.webp"),
    }


def test_columns_of_a_table(tmp_path: Path) -> None:
    columns = {
        "image": [png(1), png(2)],
        "text": ["a", "b"],
        "edit": [{"bytes": png(3), "path": "x"}, {"bytes": None, "path": "y"}],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "0.parquet")
    source = opened({"kind": "parquet", "path": tmp_path}, control={"column": "edit"})
    first, second = source.samples()
    assert isinstance(first, Sample) and [source.read(part) for part in first.parts] == [png(3)]
    assert source.read(first) == png(1) and isinstance(second, Sample)
    with pytest.raises(ImageRefused, match="column 'edit' has no bytes in this row"):
        source.read(second.parts[0])
    with pytest.raises(DatasetError, match="has no column 'depth'"):
        read(opened({"kind": "parquet", "path": tmp_path}, control={"column": "depth"}))


@pytest.mark.parametrize(
    ("source", "parts", "message"),
    [
        ({}, {"control": {}}, "give path, suffix or column"),
        ({"kind": "parquet"}, {"mask": {"suffix": "_m"}}, "no settings for a source of kind parquet; give column"),
        ({}, {"control": [{"suffix": "_1"}, {"suffix": "_1"}]}, "are the same file"),
        ({}, {"control": [{"path": "c"}, {"path": "c", "area": 65536}]}, "are the same file"),
        ({"kind": "webdataset"}, {"control": {"column": "M"}, "mask": {"column": "m"}}, "are the same file"),
        ({}, {"mask": {"alpha": True, "suffix": "_1"}}, "leave out path, suffix and column"),
        ({}, {"control": {"suffix": "/../x"}}, "leads to another folder"),
    ],
)
def test_what_names_no_part_is_refused(source: dict[str, Any], parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of({"path": "photos", **source}, **parts)


def test_a_control_that_would_be_the_image_itself_is_refused(tmp_path: Path) -> None:
    write_photo(tmp_path / "a.png", 1)
    with pytest.raises(ConfigError, match="control 1 is in the folder of the images, and has their names"):
        opened({"path": tmp_path}, control={"path": tmp_path})


def test_a_folder_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    write_photo(tmp_path / "photos" / "a.png", 1)
    with pytest.raises(DatasetError, match=r"nowhere.*does not exist; correct path of mask"):
        opened({"path": tmp_path / "photos"}, mask={"path": tmp_path / "nowhere"})


def test_an_image_whose_name_ends_like_a_part_is_a_sample_where_there_is_no_other(tmp_path: Path) -> None:
    for number, name in enumerate(("cat.png", "cat_1.png", "photo_1.png")):
        put(tmp_path / name, number)
    found, refused = read(opened({"path": tmp_path}, control={"suffix": "_1"}))
    assert found == {"cat.png": [png(1)]}
    assert refused.keys() == {"photo_1.png"} and refused["photo_1.png"][0] == "missing"
