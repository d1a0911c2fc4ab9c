"""The four readers: one suite over the same photos, then what is odd in each."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import numpy as np
import odd_images
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from latentcache.config import Config, SourceConfig
from latentcache.config_file import parse_config
from latentcache.dataset.samples import Sample, SampleSource
from latentcache.dataset.sources import open_source as open_configured
from latentcache.errors import ConfigError, DatasetError, ImageRefused
from latentcache.precache.run import run_precache
from latentcache.types import Refusal

Captions = tuple[str, ...]
KINDS = get_args(SourceConfig.model_fields["kind"].annotation)

PHOTOS: dict[str, tuple[bytes, Captions]] = {
    name: (odd_images.png(odd_images.photo(20 + number, 30)), captions)
    for number, (name, captions) in enumerate(
        [("a", ("a cat",)), ("b", ("a dog", "a good dog")), ("c", ()), ("d", ("ein Bär, 熊 🐻",)), ("e", ("last",))]
    )
}
IMAGE = PHOTOS["a"][0]


def open_source(kind: str, path: str | Path, *, parts: dict[str, Any] | None = None, **settings: Any) -> SampleSource:
    """What a user's config with this source and these companions opens. Raises ConfigError and DatasetError."""
    source = {"kind": kind, "path": path, **settings}
    dataset = parse_config({"datasets": [{"name": "photos", "source": source, **(parts or {})}]}).datasets[0]
    return open_configured(dataset.source, dataset.part_files)


def samples(source: SampleSource) -> list[Sample]:
    items = list(source.samples())
    assert all(isinstance(item, Sample) for item in items), items
    return items


def refusals(source: SampleSource) -> list[tuple[str, str]]:
    return [(item.sample_id, item.reason) for item in source.samples() if isinstance(item, Refusal)]


def ids(source: SampleSource) -> list[str]:
    return [item.sample_id for item in source.samples() if isinstance(item, Sample)]


def write_tar(path: Path, members: dict[str, bytes], links: tuple[str, ...] = ()) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        for name in links:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/hostname"
            tar.addfile(member)
    return path


def write_parquet(path: Path, columns: dict[str, list], row_group_size: int = 2) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


def make_folder(root: Path) -> None:
    for name, (data, captions) in PHOTOS.items():
        (root / f"{name}.png").write_bytes(data)
        if captions:
            (root / f"{name}.txt").write_text("\n".join(captions) + "\n", encoding="utf-8")


def make_imagefolder(root: Path) -> None:
    lines = []
    for name, (data, captions) in PHOTOS.items():
        (root / f"{name}.png").write_bytes(data)
        text = {"text": captions[0] if len(captions) == 1 else list(captions)} if captions else {}
        lines.append(json.dumps({"file_name": f"{name}.png"} | text, ensure_ascii=False))
    (root / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")


def make_webdataset(root: Path) -> None:
    for shard, names in (("shard-0.tar", "abc"), ("shard-1.tar", "de")):
        images = {f"{name}.png": PHOTOS[name][0] for name in names}
        texts = {f"{name}.txt": "\n".join(PHOTOS[name][1]).encode() for name in names if PHOTOS[name][1]}
        write_tar(root / shard, images | texts)


def make_parquet(root: Path) -> None:
    for file, names in (("part-0.parquet", "abc"), ("part-1.parquet", "de")):
        images = [{"bytes": PHOTOS[name][0], "path": f"{name}.png"} for name in names]
        write_parquet(root / file, {"image": images, "text": [list(PHOTOS[name][1]) for name in names]})


LAYOUTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "folder": (make_folder, "a.png b.png c.png d.png e.png"),
    "imagefolder": (make_imagefolder, "a.png b.png c.png d.png e.png"),
    "webdataset": (make_webdataset, "shard-0.tar/a shard-0.tar/b shard-0.tar/c shard-1.tar/d shard-1.tar/e"),
    "parquet": (make_parquet, "part-0.parquet#0 part-0.parquet#1 part-0.parquet#2 part-1.parquet#0 part-1.parquet#1"),
}
"""What makes the layout of a kind, and the ids of its samples."""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def source(kind: str, tmp_path: Path) -> SampleSource:
    LAYOUTS[kind][0](tmp_path)
    return open_source(kind, tmp_path)


class TestAllSources:
    def test_the_same_photos_and_captions(self, kind: str, source: SampleSource) -> None:
        found = samples(source)
        assert [sample.sample_id for sample in found] == LAYOUTS[kind][1].split()
        for sample, (data, captions) in zip(found, PHOTOS.values(), strict=True):
            assert source.read(sample) == data
            assert sample.captions == (captions or ("",))
            assert sample.has_caption == bool(captions)

    def test_reading_in_any_order_from_threads(self, source: SampleSource) -> None:
        found = samples(source)
        wanted = [data for data, _ in PHOTOS.values()]
        with ThreadPoolExecutor(8) as pool:
            for shift in range(len(found)):
                order = (list(range(shift, len(found))) + list(range(shift))) * 10
                assert list(pool.map(source.read, [found[i] for i in order])) == [wanted[i] for i in order]

    def test_a_vanished_file_is_refused_as_missing(self, source: SampleSource) -> None:
        sample = samples(source)[0]
        os.unlink(sample.path.split("#")[0])
        with pytest.raises(ImageRefused) as caught:
            source.read(sample)
        assert caught.value.reason == "missing" and caught.value.path == sample.path

    def test_a_missing_root_and_an_empty_one_are_errors(self, kind: str, tmp_path: Path) -> None:
        with pytest.raises(DatasetError, match="does not exist"):
            open_source(kind, tmp_path / "nowhere")
        (tmp_path / "notes.md").write_text("no images here")
        with pytest.raises(DatasetError, match=r"holds no|has no"):
            list(open_source(kind, tmp_path).samples())


# --- folder ----------------------------------------------------------------------------------------------------------


def write(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(IMAGE)


class TestFolder:
    def test_captions_pair_by_the_whole_stem(self, tmp_path: Path) -> None:
        write(tmp_path, "aaa.bbb.png", "aaa.ccc.png", "cat.png", "cat.jpg", "sub/cat.png")
        (tmp_path / "aaa.bbb.txt").write_text("bbb")
        (tmp_path / "aaa.txt").write_text("wrong")
        (tmp_path / "cat.txt").write_text("cat")
        found = {sample.sample_id: sample.captions for sample in samples(open_source("folder", tmp_path))}
        assert found == {
            "aaa.bbb.png": ("bbb",),
            "aaa.ccc.png": ("",),
            "cat.jpg": ("cat",),
            "cat.png": ("cat",),
            "sub/cat.png": ("",),
        }

    def test_suffixes_may_be_in_capitals(self, tmp_path: Path) -> None:
        """`cat.TXT` was not found: the image trained without its caption."""
        write(tmp_path, "cat.JPG", "dog.png", "fox.png")
        for name, text in {"cat.TXT": "a cat", "dog.Txt": "wrong", "dog.txt": "a dog", "Fox.TXT": "no fox"}.items():
            (tmp_path / name).write_text(text)
        found = {sample.sample_id: sample.captions for sample in samples(open_source("folder", tmp_path))}
        assert found == {"cat.JPG": ("a cat",), "dog.png": ("a dog",), "fox.png": ("",)}
        write_tar(tmp_path / "s.tar", {"cat.JPG": IMAGE, "cat.TXT": b"a cat"})
        [sample] = samples(open_source("webdataset", tmp_path / "s.tar"))
        assert sample.captions == ("a cat",)

    @pytest.mark.parametrize(
        ("text", "captions"),
        [
            (b"", ("",)),
            (b"  \n\t\n", ("",)),
            (b"\xef\xbb\xbfwith a mark\n", ("with a mark",)),
            (b"one\r\n\r\n  two  \r\n", ("one", "two")),
            (b"one\rtwo", ("one", "two")),
            ("a\u2028b\x0bc".encode(), ("a\u2028b\x0bc",)),
            (b"twice\ntwice", ("twice", "twice")),
        ],
    )
    def test_caption_files(self, tmp_path: Path, text: bytes, captions: Captions) -> None:
        write(tmp_path, "a.png")
        (tmp_path / "a.caption").write_bytes(text)
        (sample,) = samples(open_source("folder", tmp_path, caption_extension=".caption"))
        assert sample.captions == captions
        assert sample.has_caption == (captions != ("",))

    @pytest.mark.parametrize("text", [b"caf\xe9", "UTF-16".encode("utf-16"), b"x" * (1 << 20) + b"x"])
    def test_a_caption_file_that_cannot_be_used_refuses_its_image_alone(self, tmp_path: Path, text: bytes) -> None:
        write(tmp_path, "a.png", "b.png")
        (tmp_path / "a.txt").write_bytes(text)
        source = open_source("folder", tmp_path)
        assert refusals(source) == [("a.png", "bad-caption")]
        assert ids(source) == ["b.png"]
        (refusal,) = [item for item in source.samples() if isinstance(item, Refusal)]
        assert refusal.path == str(tmp_path / "a.txt")

    def test_odd_names_survive(self, tmp_path: Path) -> None:
        names = [
            "new\nline.png",
            "ünïcode 熊.png",
            "u\u0308.png",
            "\u202egnp.png",
            "a b.png",
            os.fsdecode(b"latin-\xe9.png"),
        ]
        write(tmp_path, *names)
        found = samples(source := open_source("folder", tmp_path))
        assert {sample.sample_id for sample in found} == {*names}
        assert all(source.read(sample) == IMAGE for sample in found)


# --- imagefolder -----------------------------------------------------------------------------------------------------


def metadata(root: Path, *lines: object) -> None:
    root.mkdir(parents=True, exist_ok=True)
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    (root / "metadata.jsonl").write_bytes(b"\n".join(texts))


class TestImageFolder:
    def test_each_folder_may_have_its_own_metadata(self, tmp_path: Path) -> None:
        write(tmp_path, "a.png", "train/b.png", "train/deep/c.png")
        metadata(tmp_path, {"file_name": "a.png", "text": "a"})
        metadata(tmp_path / "train", {"file_name": "deep/../deep/c.png", "text": "c"}, {"file_name": "./b.png"})
        source = open_source("imagefolder", tmp_path)
        assert ids(source) == ["a.png", "train/deep/c.png", "train/b.png"]

    @pytest.mark.parametrize(
        ("row", "columns", "captions"),
        [
            ({"text": "t", "caption": "c"}, None, ("t",)),
            ({"caption": "c"}, None, ("c",)),
            ({"text": None, "caption": "c"}, None, ("",)),
            ({"text": "t", "caption": "c"}, ("caption", "text"), ("c", "t")),
            ({"short": "s", "long": ["l", " ", None, "m "]}, ("short", "long"), ("s", "l", "m")),
            ({"text": "two\nlines"}, None, ("two\nlines",)),
        ],
    )
    def test_caption_columns(
        self, tmp_path: Path, row: dict, columns: tuple[str, ...] | None, captions: Captions
    ) -> None:
        write(tmp_path, "a.png")
        metadata(tmp_path, {"file_name": "a.png"} | row)
        (sample,) = samples(open_source("imagefolder", tmp_path, caption_columns=columns))
        assert sample.captions == captions and sample.has_caption == (captions != ("",))

    def test_bad_lines_are_refused_by_number_and_the_rest_goes_on(self, tmp_path: Path) -> None:
        write(tmp_path, "a.png", "b.png", "c.png")
        metadata(
            tmp_path,
            {"file_name": "a.png"},
            b"{broken",
            b"",
            b"[1]",
            {"text": "no name"},
            {"file_name": "gone.png"},
            {"file_name": "b.png", "text": 7},
            b'{"file_name": "\xff.png"}',
            b"[" * 100_000,
            {"file_name": "c.png"},
        )
        source = open_source("imagefolder", tmp_path)
        assert ids(source) == ["a.png", "c.png"]
        assert refusals(source) == [
            ("metadata.jsonl:2", "corrupt"),
            ("metadata.jsonl:4", "corrupt"),
            ("metadata.jsonl:5", "corrupt"),
            ("gone.png", "missing"),
            ("b.png", "bad-caption"),
            ("metadata.jsonl:8", "corrupt"),
            ("metadata.jsonl:9", "corrupt"),
        ]

    @pytest.mark.parametrize("name", ["../secret.png", "a/../../secret.png", "/etc/hostname", "..", "b/../.."])
    def test_names_that_lead_out_of_the_dataset_are_refused(self, tmp_path: Path, name: str) -> None:
        write(tmp_path, "secret.png", "root/a.png")
        metadata(tmp_path / "root", {"file_name": name}, {"file_name": str(tmp_path / "secret.png")})
        source = open_source("imagefolder", tmp_path / "root")
        assert refusals(source) == [("metadata.jsonl:1", "unreadable"), ("metadata.jsonl:2", "unreadable")]
        assert ids(source) == []


# --- webdataset ------------------------------------------------------------------------------------------------------


class TestWebDataset:
    def test_keys_end_at_the_first_dot_of_the_file_name(self, tmp_path: Path) -> None:
        members = {"./dir.v1/x.png": IMAGE, "./dir.v1/x.txt": b"x", "y.png": IMAGE, "y.json": b'{"caption": "y"}'}
        write_tar(tmp_path / "s.tar", members)
        found = samples(open_source("webdataset", tmp_path))
        assert [(sample.sample_id, sample.captions) for sample in found] == [
            ("s.tar/dir.v1/x", ("x",)),
            ("s.tar/y", ("y",)),
        ]

    def test_members_of_a_key_may_be_apart(self, tmp_path: Path) -> None:
        write_tar(tmp_path / "s.tar", {"a.txt": b"a", "b.png": IMAGE, "a.png": IMAGE, "b.txt": b"b"})
        found = samples(open_source("webdataset", tmp_path))
        assert [(sample.sample_id, sample.captions) for sample in found] == [("s.tar/a", ("a",)), ("s.tar/b", ("b",))]

    def test_the_image_is_the_member_with_nothing_before_its_suffix(self, tmp_path: Path) -> None:
        """Tars are sorted by name: the depth map comes first."""
        depth = PHOTOS["b"][0]
        members = {"cat.depth.png": depth, "cat.jpg": IMAGE, "cat.txt": b"a cat", "dog.depth.png": depth}
        write_tar(tmp_path / "s.tar", members)
        source = open_source("webdataset", tmp_path)
        [sample, refusal] = source.samples()
        assert isinstance(sample, Sample) and source.read(sample) == IMAGE and sample.captions == ("a cat",)
        assert isinstance(refusal, Refusal) and (refusal.sample_id, refusal.reason) == ("s.tar/dog", "missing")
        assert refusal.path.endswith("#dog.depth.png") and "name the column" in refusal.detail

    @pytest.mark.parametrize(("columns", "captions"), [(None, ("t",)), (("caption", "tags"), ("c", "1"))])
    def test_json_comes_first_if_columns_are_configured(
        self, tmp_path: Path, columns: tuple[str, ...] | None, captions: Captions
    ) -> None:
        members = {"a.png": IMAGE, "a.txt": b"t", "a.json": b'{"caption": "c", "tags": ["1"]}'}
        write_tar(tmp_path / "s.tar", members)
        (sample,) = samples(open_source("webdataset", tmp_path, caption_columns=columns))
        assert sample.captions == captions

    def test_one_tar_a_folder_and_a_glob(self, tmp_path: Path) -> None:
        make_webdataset(tmp_path)
        write_tar(tmp_path / "deep/er/x.tar", {"x.png": IMAGE})
        assert len(ids(open_source("webdataset", tmp_path))) == 6
        assert ids(open_source("webdataset", tmp_path / "shard-1.tar")) == ["shard-1.tar/d", "shard-1.tar/e"]
        assert len(ids(open_source("webdataset", tmp_path / "shard-*.tar"))) == 5
        assert ids(open_source("webdataset", tmp_path / "**/*.tar"))[0] == "deep/er/x.tar/x"
        with pytest.raises(DatasetError, match="glob"):
            open_source("webdataset", tmp_path / "shard-{0..1}.tar")
        with pytest.raises(DatasetError, match="holds no"):
            open_source("webdataset", tmp_path / "other-*.tar")

    def test_a_folder_of_tars_that_cannot_be_read_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its tars were left out without a word."""
        for name in ("a/1.tar", "b/2.tar"):
            write_tar(tmp_path / name, {"x.png": IMAGE})
        scandir = os.scandir

        def refusing(path: str) -> Any:
            if path.endswith("b"):
                raise PermissionError(13, "Permission denied", path)
            return scandir(path)

        monkeypatch.setattr(os, "scandir", refusing)
        with pytest.raises(DatasetError, match=r"/b: the folder cannot be read: Permission denied"):
            open_source("webdataset", tmp_path)

    def test_bad_members_are_refused_and_the_rest_goes_on(self, tmp_path: Path) -> None:
        texts = {"b.txt": b"\xff", "c.json": b"{", "d.json": b"[]", "f.txt": b"x" * (1 << 20) + b"x"}
        images = dict.fromkeys(("a.png", "a.webp", "b.png", "c.png", "d.png", "f.png", "g.png", "._g.png"), IMAGE)
        source = open_source("webdataset", write_tar(tmp_path / "s.tar", images | texts, links=("e.png",)))
        assert ids(source) == ["s.tar/a", "s.tar/g"]
        assert refusals(source) == [
            ("s.tar/a", "duplicate"),
            *((f"s.tar/{name}", "bad-caption") for name in "bcdf"),
            ("s.tar/e", "unreadable"),
        ]

    def test_a_cut_tar_gives_what_is_whole_and_says_so(self, tmp_path: Path) -> None:
        members = {f"{i}.{suffix}": data for i in range(4) for suffix, data in (("png", IMAGE), ("txt", b"caption"))}
        whole = write_tar(tmp_path / "whole.tar", members).read_bytes()
        write_tar(tmp_path / "z.tar", {"last.png": IMAGE})
        with tarfile.open(tmp_path / "whole.tar") as tar:
            end = max(member.offset_data + 512 for member in tar)
        cut = tmp_path / "cut.tar"
        (tmp_path / "whole.tar").unlink()
        for length in range(1, end, 97):
            cut.write_bytes(whole[:length])
            items = list(open_source("webdataset", tmp_path).samples())
            found = [item for item in items if isinstance(item, Sample)]
            refused = [item for item in items if isinstance(item, Refusal)]
            assert found[-1].sample_id == "z.tar/last"
            assert [sample.sample_id for sample in found[:-1]] == [f"cut.tar/{i}" for i in range(len(found) - 1)]
            # Never an image whose caption was cut off.
            assert all(sample.captions == ("caption",) for sample in found[:-1])
            assert refused[-1].sample_id == "cut.tar" and refused[-1].reason == "truncated"

    def test_a_damaged_header_in_the_middle_is_not_taken_for_the_end(self, tmp_path: Path) -> None:
        path = write_tar(tmp_path / "s.tar", {"a.png": IMAGE, "b.png": IMAGE, "c.png": IMAGE})
        data = bytearray(path.read_bytes())
        data[data.index(b"c.png") + 1] ^= 1
        path.write_bytes(data)
        source = open_source("webdataset", path)
        assert ids(source) == ["s.tar/a"]
        assert refusals(source) == [("s.tar/b", "truncated"), ("s.tar", "truncated")]

    def test_a_compressed_tar_is_refused_by_name(self, tmp_path: Path) -> None:
        path = write_tar(tmp_path / "s.tar", {"a.png": IMAGE})
        (tmp_path / "z.tar.gz").write_bytes(gzip.compress(path.read_bytes()))
        source = open_source("webdataset", tmp_path)
        assert ids(source) == ["s.tar/a"] and refusals(source) == [("z.tar.gz", "truncated")]

    def test_a_tar_that_changes_is_refused(self, tmp_path: Path) -> None:
        path = write_tar(tmp_path / "s.tar", {"a.png": IMAGE})
        source = open_source("webdataset", path)
        (sample,) = samples(source)
        write_tar(path, {"other.txt": b"x" * 5000, "a.png": IMAGE})
        with pytest.raises(ImageRefused) as caught:
            source.read(sample)
        assert caught.value.reason == "changed"

    @given(data=st.data())
    @settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_damaged_tars_never_raise(self, tmp_path: Path, data: st.DataObject) -> None:
        path = tmp_path / "s.tar"
        long = "long/" * 30
        mutated = bytearray(write_tar(path, {"a.png": IMAGE, f"{long}b.png": b"1", f"{long}b.txt": b"b"}).read_bytes())
        for _ in range(data.draw(st.integers(1, 8))):
            at = data.draw(st.integers(0, len(mutated) // 3 * 2))
            mutated[at] = data.draw(st.integers(0, 255))
        path.write_bytes(mutated)
        try:
            source = open_source("webdataset", path)
        except DatasetError:
            return
        for item in source.samples():
            if isinstance(item, Sample):
                source.read(item)


# --- parquet ---------------------------------------------------------------------------------------------------------


class TestParquet:
    @pytest.mark.parametrize("kind_of_bytes", [pa.binary(), pa.large_binary(), pa.struct([("bytes", pa.binary())])])
    def test_kinds_of_image_columns(self, tmp_path: Path, kind_of_bytes: pa.DataType) -> None:
        value = {"bytes": IMAGE} if pa.types.is_struct(kind_of_bytes) else IMAGE
        columns = {"jpg": pa.array([value, None], kind_of_bytes), "caption": pa.array(["one", None])}
        file = write_parquet(tmp_path / "p.parquet", columns)
        source = open_source("parquet", file, image_column="jpg")
        first, second = samples(source)
        assert (first.captions, second.captions) == (("one",), ("",))
        assert source.read(first) == IMAGE
        with pytest.raises(ImageRefused) as caught:
            source.read(second)
        assert caught.value.reason == "missing"

    @pytest.mark.parametrize(
        ("columns", "options", "message"),
        [
            ({"photo": [IMAGE]}, {}, "no column 'image', but: photo"),
            ({"image": [IMAGE], "text": ["t"]}, {"caption_columns": ["captoin"]}, "no column 'captoin'"),
        ],
    )
    def test_wrong_columns_are_errors(self, tmp_path: Path, columns: dict, options: dict, message: str) -> None:
        write_parquet(tmp_path / "p.parquet", columns)
        with pytest.raises(DatasetError, match=message):
            list(open_source("parquet", tmp_path, **options).samples())

    def test_a_bad_file_or_caption_is_refused_and_the_rest_goes_on(self, tmp_path: Path) -> None:
        write_parquet(tmp_path / "a.parquet", {"image": [IMAGE], "text": ["a"]})
        (tmp_path / "b.parquet").write_bytes(b"PAR1 not really PAR1")
        write_parquet(tmp_path / "c.parquet", {"photo": [IMAGE]})
        write_parquet(tmp_path / "d.parquet", {"image": [IMAGE], "text": [7]})
        write_parquet(tmp_path / "sub/e.parquet", {"image": [IMAGE], "text": ["e"]})
        source = open_source("parquet", tmp_path)
        assert ids(source) == ["a.parquet#0", "sub/e.parquet#0"]
        assert refusals(source) == [
            ("b.parquet", "corrupt"),
            ("c.parquet", "unreadable"),
            ("d.parquet#0", "bad-caption"),
        ]

    @pytest.mark.parametrize("value", ["a.png", {"path": "a.png"}, 7, [IMAGE]])
    def test_what_is_no_image_is_refused(self, tmp_path: Path, value: Any) -> None:
        source = open_source("parquet", write_parquet(tmp_path / "p.parquet", {"image": [value]}))
        with pytest.raises(ImageRefused, match=r"column 'image' .*, where an encoded image is needed"):
            source.read(samples(source)[0])

    def test_damaged_pages_are_refused(self, tmp_path: Path) -> None:
        noise = [os.urandom(2000) for _ in range(4)]
        file = write_parquet(tmp_path / "p.parquet", {"image": noise, "text": [f"caption {i}" for i in range(4)]})
        source = open_source("parquet", file)
        found = samples(source)
        start = pq.ParquetFile(file).metadata.row_group(1).column(0).data_page_offset
        data = bytearray(file.read_bytes())
        data[start : start + 60] = b"\xff" * 60
        file.write_bytes(data)
        assert source.read(found[0]) == noise[0]
        with pytest.raises(ImageRefused) as caught:
            source.read(found[2])
        assert caught.value.reason == "corrupt"


def test_the_lines_of_a_caption_file_may_be_one_caption(tmp_path: Path) -> None:
    write(tmp_path, "a.png", "b.png", "c.png")
    (tmp_path / "a.txt").write_bytes(b"a red car,\r\n\r\n  in the rain\n")
    (tmp_path / "b.txt").write_text("\n \n")
    found = samples(open_source("folder", tmp_path, caption_lines="joined"))
    captions = {sample.sample_id: sample.captions for sample in found}
    assert captions == {"a.png": ("a red car, in the rain",), "b.png": ("",), "c.png": ("",)}


@pytest.mark.parametrize("kind", ["imagefolder", "webdataset", "parquet"])
def test_a_caption_column_that_no_sample_has_ends_the_run(
    make_config: Callable[..., Config], tmp_path: Path, kind: str
) -> None:
    """It trained with empty captions."""
    folder = tmp_path / kind
    folder.mkdir()
    rows = [{"caption": "a cat", "score": 1}, {"caption": "a dog", "score": 2}]
    if kind == "imagefolder":
        write(folder, "0.png", "1.png")
        metadata(folder, *[{"file_name": f"{number}.png"} | row for number, row in enumerate(rows)])
    elif kind == "webdataset":
        members = {f"{number}.json": json.dumps(row).encode() for number, row in enumerate(rows)}
        write_tar(folder / "s.tar", members | {f"{number}.png": IMAGE for number in range(2)})
    else:
        write_parquet(folder / "t.parquet", {"image": [{"bytes": IMAGE}] * 2, "caption": ["a cat", "a dog"]})
    config = make_config(**{"datasets.0.source": {"kind": kind, "path": folder, "caption_columns": ["captoin"]}})
    with pytest.raises(DatasetError, match=r"column 'captoin', but: .*caption"):
        run_precache(config)


# --- control images and masks ----------------------------------------------------------------------------------------


def png(seed: int) -> bytes:
    return odd_images.png(np.full((16, 16, 3), seed, np.uint8))


def put(path: Path, seed: int) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(seed))
    return png(seed)


def parts_of(source: SampleSource) -> tuple[dict[str, list[bytes]], dict[str, tuple[str, str]]]:
    """What each sample's companions read as, and why the others are refused."""
    items = list(source.samples())
    refused = {item.sample_id: (item.reason, item.detail) for item in items if isinstance(item, Refusal)}
    found = [item for item in items if isinstance(item, Sample)]
    return {sample.sample_id: [source.read(part) for part in sample.parts] for sample in found}, refused


class TestCompanions:
    def test_a_folder_of_the_same_names_with_any_ending(self, tmp_path: Path) -> None:
        for name in ("cat.png", "sub/dog.png", "sub/fox.png", "owl.png"):
            put(tmp_path / "after" / name, 1)
        cat, dog = put(tmp_path / "before/cat.png", 2), put(tmp_path / "before/sub/dog.webp", 3)
        put(tmp_path / "before/cat.webp", 9)  # the image's own ending comes first
        put(tmp_path / "before/sub/fox.webp", 9), put(tmp_path / "before/sub/fox.bmp", 9)
        source = open_source("folder", tmp_path / "after", parts={"control": {"path": tmp_path / "before"}})
        found, refused = parts_of(source)
        assert found == {"cat.png": [cat], "sub/dog.png": [dog]}
        assert refused == {
            "owl.png": (
                "missing",
                f"control 1: there is no image owl in {tmp_path / 'before'}; add it, or remove the sample",
            ),
            "sub/fox.png": ("duplicate", "control 1: the folder has several, fox.bmp, fox.webp; keep one"),
        }

    def test_a_folder_inside_the_images_own_and_numbered_names_hold_no_samples(self, tmp_path: Path) -> None:
        put(tmp_path / "cat.png", 1), put(tmp_path / "photo_1.png", 9)
        files = ("control/cat.png", "cat_1.png", "cat_2.jpg", "cat-masklabel.png")
        wanted = [put(tmp_path / name, seed) for seed, name in enumerate(files, 2)]
        control = [{"path": tmp_path / "control"}, {"suffix": "_1"}, {"suffix": "_2"}]
        source = open_source("folder", tmp_path, parts={"control": control, "mask": {"suffix": "-masklabel"}})
        found, refused = parts_of(source)
        assert parts_of(pickle.loads(pickle.dumps(source))) == (found, refused), "other processes read them too"
        assert found == {"cat.png": wanted}
        # It ends like a companion, but there is no image that it would be one of.
        assert refused.keys() == {"photo_1.png"} and refused["photo_1.png"][0] == "missing"

    def test_metadata_names_the_files(self, tmp_path: Path) -> None:
        put(tmp_path / "in/a.png", 1), put(tmp_path / "in/b.png", 1)
        mask, control = put(tmp_path / "in/masks/x.png", 2), put(tmp_path / "in/y.png", 3)
        metadata(
            tmp_path,
            {"file_name": "in/a.png", "mask": "in/masks/x.png", "edit": "in/y.png"},
            {"file_name": "in/b.png", "mask": "in/masks/x.png"},
            {"file_name": "in/y.png", "mask": "../../../x.png", "edit": "in/y.png"},
            {"file_name": "in/./a.png", "mask": "in/masks/z.png", "edit": "in/y.png"},
        )
        parts = {"control": {"column": "edit"}, "mask": {"column": "mask"}}
        source = open_source("imagefolder", tmp_path, parts=parts)
        first, *others = source.samples()
        assert isinstance(first, Sample) and [source.read(part) for part in first.parts] == [control, mask]
        assert [(item.sample_id, item.reason, item.detail) for item in others if isinstance(item, Refusal)] == [
            ("in/b.png", "missing", "control 1: its metadata has no 'edit'"),
            ("in/y.png", "unreadable", "mask: mask '../../../x.png' leads out of the dataset's folder"),
            ("in/a.png", "missing", "mask: there is no such file"),
        ]

    def test_members_of_a_tar(self, tmp_path: Path) -> None:
        names = "cat.png cat.control.png cat.Mask.png dog.png dog.control.png fox.png fox.mask.png fox.mask.webp"
        write_tar(tmp_path / "0.tar", {name: png(seed) for seed, name in enumerate(f"{names} fox.control.png".split())})
        parts = {"control": {"column": "control"}, "mask": {"column": "mask"}}
        found, refused = parts_of(open_source("webdataset", tmp_path, parts=parts))
        assert found == {"0.tar/cat": [png(1), png(2)]}
        assert refused == {
            "0.tar/dog": ("missing", "mask: its key has no member .mask of an image"),
            "0.tar/fox": ("duplicate", "mask: its key has several: fox.mask.png, fox.mask.webp"),
        }

    def test_columns_of_a_table(self, tmp_path: Path) -> None:
        edits = [{"bytes": png(3), "path": "x"}, {"bytes": None, "path": "y"}]
        write_parquet(tmp_path / "0.parquet", {"image": [png(1), png(2)], "text": ["a", "b"], "edit": edits})
        source = open_source("parquet", tmp_path, parts={"control": {"column": "edit"}})
        first, second = samples(source)
        assert source.read(first) == png(1) and [source.read(part) for part in first.parts] == [png(3)]
        with pytest.raises(ImageRefused, match="column 'edit' has no bytes in this row"):
            source.read(second.parts[0])
        with pytest.raises(DatasetError, match="has no column 'depth'"):
            parts_of(open_source("parquet", tmp_path, parts={"control": {"column": "depth"}}))

    @pytest.mark.parametrize(
        ("kind", "parts", "message"),
        [
            ("folder", {"control": {}}, "give path, suffix or column"),
            ("parquet", {"mask": {"suffix": "_m"}}, "no settings for a source of kind parquet; give column"),
            ("folder", {"control": [{"path": "c"}, {"path": "c", "area": 65536}]}, "are the same file"),
            ("webdataset", {"control": {"column": "M"}, "mask": {"column": "m"}}, "are the same file"),
            ("folder", {"mask": {"alpha": True, "suffix": "_1"}}, "leave out path, suffix and column"),
            ("folder", {"control": {"suffix": "/../x"}}, "leads to another folder"),
            ("folder", {"control": {"path": "photos"}}, "is in the folder of the images, and has their names"),
        ],
    )
    def test_what_names_no_part_is_refused(self, kind: str, parts: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            open_source(kind, "photos", parts=parts)

    def test_a_folder_that_is_not_there_is_one_error(self, tmp_path: Path) -> None:
        with pytest.raises(DatasetError, match=r"nowhere.*does not exist; correct path of mask"):
            open_source("folder", tmp_path, parts={"mask": {"path": tmp_path / "nowhere"}})
