"""The four readers: one suite over the same photos, then what is odd in each, and what others may have planted."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import tarfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from latentcache.config import SourceConfig
from latentcache.config_file import parse_config
from latentcache.dataset.samples import Sample, SampleSource
from latentcache.dataset.sources import open_source as open_configured
from latentcache.dataset.webdataset import members
from latentcache.errors import ConfigError, DatasetError, ImageRefused
from latentcache.types import Refusal

Captions = tuple[str, ...]
KINDS = get_args(SourceConfig.model_fields["kind"].annotation)

CAPTIONS = {"a": ("a cat",), "b": ("a dog", "a good dog"), "c": (), "d": ("ein Bär, 熊 🐻",), "e": ("last",)}
PHOTOS: dict[str, tuple[bytes, Captions]] = {
    name: (f"photo {name}".encode() * 100, captions) for name, captions in CAPTIONS.items()
}
IMAGE = PHOTOS["a"][0]
TOO_LONG = b"x" * ((1 << 20) + 1)
"""A caption file that is longer than any may be."""


def open_source(kind: str, path: str | Path, *, parts: dict[str, Any] | None = None, **settings: Any) -> SampleSource:
    """What a user's config with this source and these companions opens. Raises ConfigError and DatasetError."""
    source = {"kind": kind, "path": path, **settings}
    dataset = parse_config({"datasets": [{"name": "photos", "source": source, **(parts or {})}]}).datasets[0]
    return open_configured(dataset.source, dataset.part_files)


def listed(source: SampleSource) -> tuple[dict[str, Captions], dict[str, str]]:
    """The captions of each sample whose image can be read, and the reason of each refusal; both in their order."""
    captions, refused = {}, {}
    for item in source.samples():
        if isinstance(item, Refusal):
            refused[item.sample_id] = item.reason
            assert item.path and item.detail
            continue
        assert item.has_caption == (item.captions != ("",))
        try:
            assert source.read(item)
            captions[item.sample_id] = item.captions
        except ImageRefused as error:
            refused[item.sample_id] = error.reason
            assert error.path == item.path
    return captions, refused


def write(root: Path, images: str | Iterable[str], texts: dict[str, bytes] | None = None) -> None:
    """These images, which are all the same, and these texts."""
    names = images.split() if isinstance(images, str) else images
    for name, data in {**dict.fromkeys(names, IMAGE), **(texts or {})}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def metadata(root: Path, *lines: object) -> None:
    texts = [line if isinstance(line, bytes) else json.dumps(line, ensure_ascii=False).encode() for line in lines]
    write(root, (), {"metadata.jsonl": b"\n".join(texts)})


def add(tar: tarfile.TarFile, name: str, data: bytes = b"", **more: Any) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for field, value in more.items():
        setattr(member, field, value)
    tar.addfile(member, io.BytesIO(data))


def write_tar(path: Path, contents: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in contents.items():
            add(tar, name, data)
    return path


def write_parquet(path: Path, columns: dict[str, Any], row_group_size: int = 2) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


def make_folder(root: Path) -> None:
    for name, (data, captions) in PHOTOS.items():
        text = {f"{name}.txt": "\n".join(captions).encode()} if captions else {}
        write(root, (), {f"{name}.png": data, **text})


def make_imagefolder(root: Path) -> None:
    write(root, (), {f"{name}.png": data for name, (data, _) in PHOTOS.items()})
    metadata(root, *({"file_name": f"{name}.png", "text": [*captions]} for name, (_, captions) in PHOTOS.items()))


def make_webdataset(root: Path) -> None:
    for shard, names in (("shard-0.tar", "abc"), ("shard-1.tar", "de")):
        images = {f"{name}.png": PHOTOS[name][0] for name in names}
        rows = {f"{name}.json": json.dumps({"caption": PHOTOS[name][1]}).encode() for name in names if PHOTOS[name][1]}
        write_tar(root / shard, images | rows)


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
        """Also in another process, from threads, and in any order."""
        wanted = [data for data, _ in PHOTOS.values()]
        for opened in (source, pickle.loads(pickle.dumps(source))):
            found: list[Any] = [*opened.samples()]
            assert [sample.sample_id for sample in found] == LAYOUTS[kind][1].split()
            assert [sample.captions for sample in found] == [captions or ("",) for _, captions in PHOTOS.values()]
            with ThreadPoolExecutor(8) as pool:
                assert list(pool.map(opened.read, [*found, *found[::-1]] * 20)) == [*wanted, *wanted[::-1]] * 20
        os.unlink(found[0].path.split("#")[0])
        with pytest.raises(ImageRefused, match=r"refused \(missing\)"):
            pickle.loads(pickle.dumps(source)).read(found[0])

    def test_what_is_not_there_is_an_error(self, kind: str, tmp_path: Path, source: SampleSource) -> None:
        with pytest.raises(DatasetError, match="does not exist"):
            open_source(kind, tmp_path / "nowhere")
        write(tmp_path, (), {"empty/notes.md": b"no images here"})
        with pytest.raises(DatasetError, match=r"holds no|has no"):
            listed(open_source(kind, tmp_path / "empty"))
        if kind != "folder":  # it trained with empty captions
            with pytest.raises(DatasetError, match=r"column 'captoin'; .*columns.*(text|caption)"):
                listed(open_source(kind, tmp_path, caption_columns=["captoin"]))


class TestFolder:
    def test_captions_pair_by_the_whole_stem_and_by_suffixes_in_capitals(self, tmp_path: Path) -> None:
        odd = {"new\nline.png", "ünïcode 熊.png", "u\u0308.png", "\u202egnp.png", "a b.png", os.fsdecode(b"\xe9.png")}
        write(tmp_path, odd)
        texts = {"aaa.bbb": b"bbb", "aaa": b"wrong", "cat": b"a cat"}
        texts = {f"{name}.txt": text for name, text in texts.items()}
        texts |= {"cat.Txt": b"wrong", "sub/cat.TXT": b"another cat", "Fox.TXT": b"no fox"}
        write(tmp_path, "aaa.bbb.png aaa.ccc.png cat.JPG cat.png fox.png sub/cat.png", texts)
        assert listed(open_source("folder", tmp_path))[0] == {
            "aaa.bbb.png": ("bbb",),
            "aaa.ccc.png": ("",),
            "cat.JPG": ("a cat",),
            "cat.png": ("a cat",),
            "fox.png": ("",),
            "sub/cat.png": ("another cat",),
            **dict.fromkeys(odd, ("",)),
        }

    @pytest.mark.parametrize(
        ("text", "captions"),
        [
            (b"  \n\t\n", ("",)),
            (b"\xef\xbb\xbfwith a mark\n", ("with a mark",)),
            (b"one\r\n\r\n  two  \r\n", ("one", "two")),
            (b"one\rtwo", ("one", "two")),
            ("a\u2028b\x0bc".encode(), ("a\u2028b\x0bc",)),
            (b"twice\ntwice", ("twice", "twice")),
            *((text, None) for text in (b"caf\xe9", "UTF-16".encode("utf-16"), TOO_LONG, b"x" * ((1 << 14) + 1))),
        ],
    )
    def test_captions_are_lines(self, tmp_path: Path, text: bytes, captions: Captions | None) -> None:
        """Without captions here the file cannot be used, and refuses its image alone."""
        write(tmp_path, "a.png b.png", {"a.caption": text})
        for more, wanted in (({}, captions), ({"caption_lines": "joined"}, captions and (" ".join(captions),))):
            source = open_source("folder", tmp_path, caption_extension=".caption", **more)
            found = {"b.png": ("",)} if wanted is None else {"a.png": wanted, "b.png": ("",)}
            assert listed(source) == (found, {"a.png": "bad-caption"} if wanted is None else {})
        assert captions or next(iter(source.samples())).path == str(tmp_path / "a.caption")

    def test_what_is_planted_is_refused_and_nothing_is_read_twice(self, tmp_path: Path) -> None:
        plants: dict[str, Callable[[Path], object]] = {
            "pipe": os.mkfifo,
            "loop": lambda path: path.symlink_to(path.name),
            "dangling": lambda path: path.symlink_to("nowhere"),
            "huge": lambda path: (path.touch(), os.truncate(path, (1 << 30) + 1)),
        }
        folder = tmp_path / "hostile"
        for name, plant in plants.items():
            write(folder, [f"captioned by {name}.png"])
            plant(folder / f"{name}.png")
            plant(folder / f"captioned by {name}.txt")
        write(tmp_path, "elsewhere/far.png")
        (folder / "loop of folders").symlink_to(folder)
        (folder / "linked").symlink_to(tmp_path / "elsewhere")
        captions, refused = listed(open_source("folder", folder))
        assert [*captions] == ["linked/far.png"]
        assert refused == {
            **{f"{name}.png": "missing" if name == "dangling" else "unreadable" for name in plants},
            **{f"captioned by {name}.png": "bad-caption" if name == "huge" else "unreadable" for name in plants},
        }


def test_a_folder_that_cannot_be_read_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a/1.png b/2.png c/3.png")
    for name in ("a/1.tar", "b/2.tar"):
        write_tar(tmp_path / name, {"x.png": IMAGE})
    scandir = os.scandir

    def refusing(path: str) -> Any:
        if path.endswith("b"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    captions, refused = listed(open_source("folder", tmp_path))
    assert ([*captions], refused) == (["a/1.png", "c/3.png"], {"b": "unreadable"})
    with pytest.raises(DatasetError, match=r"/b: the folder cannot be read: Permission denied"):
        open_source("webdataset", tmp_path)


class TestImageFolder:
    def test_each_folder_may_have_its_own_metadata(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        write(tmp_path, "a.png left-out.png train/b.png train/deep/c.png")
        metadata(tmp_path, {"file_name": "a.png", "text": "a"})
        metadata(tmp_path / "train", {"file_name": "deep/../deep/c.png", "text": "c"}, {"file_name": "./b.png"})
        captions, _ = listed(open_source("imagefolder", tmp_path))
        assert [*captions.items()] == [("a.png", ("a",)), ("train/deep/c.png", ("c",)), ("train/b.png", ("",))]
        assert "skipped 1 image not listed in any metadata.jsonl" in caplog.text

    @pytest.mark.parametrize(
        ("row", "columns", "captions"),
        [
            ({"text": "two\nlines", "caption": "c"}, None, ("two\nlines",)),
            ({"caption": "c"}, None, ("c",)),
            ({"text": None, "caption": "c"}, None, ("",)),
            ({"text": "t", "caption": "c"}, ("caption", "text"), ("c", "t")),
            ({"short": "s", "long": ["l", " ", None, "m "]}, ("short", "long"), ("s", "l", "m")),
        ],
    )
    def test_caption_columns(
        self, tmp_path: Path, row: dict[str, Any], columns: tuple[str, ...] | None, captions: Captions
    ) -> None:
        write(tmp_path, "a.png")
        metadata(tmp_path, {"file_name": "a.png"} | row)
        assert listed(open_source("imagefolder", tmp_path, caption_columns=columns))[0] == {"a.png": captions}

    def test_bad_lines_are_refused_by_number_and_the_rest_goes_on(self, tmp_path: Path) -> None:
        write(tmp_path, "secret.png root/a.png root/b.png root/c.png")
        metadata(
            tmp_path / "root",
            {"file_name": "a.png"},
            b"{broken",
            b"",
            b"[1]",
            {"text": "no name"},
            {"file_name": "gone.png"},
            {"file_name": "b.png", "text": 7},
            b'{"file_name": "\xff.png"}',
            b"[" * 100_000,
            # Names that lead out of the dataset.
            *(
                {"file_name": name}
                for name in ("../secret.png", "a/../../secret.png", f"{tmp_path}/secret.png", "b/../..")
            ),
            {"file_name": "c.png"},
        )
        captions, refused = listed(open_source("imagefolder", tmp_path / "root"))
        assert [*captions] == ["a.png", "c.png"]
        assert refused == {
            **{f"metadata.jsonl:{number}": "corrupt" for number in (2, 4, 5, 8, 9)},
            **{f"metadata.jsonl:{number}": "unreadable" for number in (10, 11, 12, 13)},
            "gone.png": "missing",
            "b.png": "bad-caption",
        }


def header(kind: bytes, size: int, rest: bytes = b"") -> bytes:
    """That of a member, or of the headers of the next one, of any size."""
    number = b"%011o\0" % size if 0 <= size < 8**11 else (size % (1 << 96)).to_bytes(12, "big")
    number = bytes([number[0] | (0x80 if not 0 <= size < 8**11 else 0)]) + number[1:]
    fields = b"odd.png".ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + number + b"00000000000\0"
    data = (fields + b" " * 8 + kind).ljust(257, b"\0") + b"ustar  \0"
    data = (data.ljust(386, b"\0") + rest).ljust(512, b"\0")
    return data[:148] + b"%06o\0 " % sum(data) + data[156:]


def extended(records: bytes) -> bytes:
    return header(tarfile.XHDTYPE, len(records)) + records.ljust(512, b"\0")


ODD_HEADERS = {
    # tarfile moves by the size in the header, here a negative one, and then has another size for the member.
    "leads back": header(b"S", -512, b"00000000000\0" * 2 + bytes(73) + b"00000000144\0"),
    "leads back, extended": extended(b"23 GNU.sparse.size=100\n") + header(b"0", -3 * 512),
    "a size below zero": extended(b"13 size=-512\n") + header(b"0", 0),
    "a huge size": extended(b"20 size=" + b"9" * 11 + b"\n") + header(b"0", 0),
    "an odd map": extended(b"22 GNU.sparse.map=x,y\n22 GNU.sparse.size=-1\n") + header(b"0", 0),
    "a name of a petabyte": header(tarfile.GNUTYPE_LONGNAME, 1 << 50),
    "an extended header of a petabyte": header(tarfile.XHDTYPE, 1 << 50),
    "headers of headers": extended(b"12 comment=x\n") * 5000,
}


class TestWebDataset:
    def test_what_is_in_a_tar(self, tmp_path: Path) -> None:
        texts = {"./dir.v1/x.TXT": b"x", "y.json": b'{"caption": "y"}', "apart.txt": b"apart", "cat.txt": b"a cat"}
        texts |= {"both.txt": b"t", "both.json": b'{"caption": "c", "tags": ["1"]}'}
        bad = {"latin.txt": b"\xff", "broken.json": b"{", "list.json": b"[]", "long.txt": TOO_LONG}
        bad_keys = [name.partition(".")[0] for name in bad]
        # Tars are sorted by name, so that the depth map comes before its image.
        depth = dict.fromkeys(("cat.depth.png", "dog.depth.png"), PHOTOS["b"][0])
        images = (*(f"{key}.png" for key in bad_keys), "./dir.v1/x.png", "y.png", "both.png", "apart.png", "cat.jpg")
        more = dict.fromkeys((*images, "again.png", "again.webp", "._hidden.png"), IMAGE)
        path = write_tar(tmp_path / "s.tar", texts | bad | depth | more)
        source = open_source("webdataset", path)
        captions, refused = listed(source)
        texts_of = {"dir.v1/x": "x", "y": "y", "apart": "apart", "cat": "a cat", "both": "t", "again": ""}
        assert captions == {f"s.tar/{key}": (text,) for key, text in texts_of.items()}
        assert refused == {
            **{f"s.tar/{key}": "bad-caption" for key in bad_keys},
            "s.tar/dog": "missing",
            "s.tar/again": "duplicate",
        }
        assert all(source.read(item) == IMAGE for item in source.samples() if isinstance(item, Sample))
        captions, _ = listed(open_source("webdataset", path, caption_columns=("caption", "tags")))
        assert captions["s.tar/both"] == ("c", "1"), "columns come first if they are configured"

    def test_odd_members(self, tmp_path: Path) -> None:
        kinds = {"sym": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "char": tarfile.CHRTYPE, "fifo": tarfile.FIFOTYPE}
        kinds |= {"sparse": tarfile.GNUTYPE_SPARSE, "other": b"Z"}
        odd = ("/etc/passwd.png", "../../up.png", "new\nline.png", "\udcff\udc80.png", "x" * 250 + ".png")
        with tarfile.open(tmp_path / "s.tar", "w", format=tarfile.PAX_FORMAT) as tar:
            for name in (*odd, "captions.png"):
                add(tar, name, IMAGE)
            for text in (b"one", b"two"):
                add(tar, "captions.txt", text)
            for name, kind in kinds.items():
                add(tar, f"{name}.png", type=kind, linkname="/etc/hostname")
        captions, refused = listed(open_source("webdataset", tmp_path / "s.tar"))
        assert len(captions) == len(odd)
        assert refused == {**{f"s.tar/{name}": "unreadable" for name in kinds}, "s.tar/captions": "bad-caption"}

    def test_one_tar_a_folder_and_a_glob(self, tmp_path: Path) -> None:
        make_webdataset(tmp_path)
        write_tar(tmp_path / "deep/er/x.tar", {"x.png": IMAGE})
        deep, own = ["deep/er/x.tar/x"], LAYOUTS["webdataset"][1].split()
        paths = {".": own + deep, "shard-1.tar": own[3:], "shard-?.tar": own, "**/*.tar": deep + own}
        for path, ids in paths.items():
            assert [*listed(open_source("webdataset", tmp_path / path))[0]] == ids
        for path, message in (("shard-{0..1}.tar", "glob"), ("other-*.tar", "holds no")):
            with pytest.raises(DatasetError, match=message):
                open_source("webdataset", tmp_path / path)

    def test_a_cut_tar_gives_what_is_whole_and_says_so(self, tmp_path: Path) -> None:
        contents = {f"{i}.{suffix}": data for i in range(4) for suffix, data in (("png", IMAGE), ("txt", b"caption"))}
        path = write_tar(tmp_path / "cut.tar", contents)
        write_tar(tmp_path / "z.tar", {"last.png": IMAGE})
        whole = path.read_bytes()
        with tarfile.open(path) as tar:
            end = max(member.offset_data + 512 for member in tar)
        for length in range(1, end, 97):
            path.write_bytes(whole[:length])
            captions, refused = listed(open_source("webdataset", tmp_path))
            assert [*captions] == [*(f"cut.tar/{i}" for i in range(len(captions) - 1)), "z.tar/last"]
            # Never an image whose caption was cut off.
            assert {*[*captions.values()][:-1]} <= {("caption",)}
            assert refused["cut.tar"] == "truncated"

    def test_a_damaged_header_in_the_middle_is_not_taken_for_the_end(self, tmp_path: Path) -> None:
        path = write_tar(tmp_path / "s.tar", {"a.png": IMAGE, "b.png": IMAGE, "c.png": IMAGE})
        data = bytearray(path.read_bytes())
        data[data.index(b"c.png") + 1] ^= 1
        path.write_bytes(data)
        found = listed(open_source("webdataset", path))
        assert found == ({"s.tar/a": ("",)}, {"s.tar/b": "truncated", "s.tar": "truncated"})

    @pytest.mark.parametrize("name", ODD_HEADERS)
    def test_odd_headers_end_the_tar(self, tmp_path: Path, name: str) -> None:
        path = write_tar(tmp_path / "s.tar", {"first.png": IMAGE})
        first = path.read_bytes()[: 512 + -(-len(IMAGE) // 512) * 512]
        path.write_bytes(first + ODD_HEADERS[name] + first + bytes(1024))
        items = [*open_source("webdataset", path).samples()]
        assert "truncated" in [item.reason for item in items if isinstance(item, Refusal)]
        assert "s.tar/first" in [item.sample_id for item in items]
        with pytest.raises(ImageRefused):
            assert len([*islice(members(str(path)), 100)]) < 100

    def test_a_compressed_tar_and_one_that_changes_are_refused(self, tmp_path: Path) -> None:
        path = write_tar(tmp_path / "s.tar", {"a.png": IMAGE})
        (tmp_path / "z.tar.gz").write_bytes(gzip.compress(path.read_bytes()))
        assert listed(open_source("webdataset", tmp_path)) == ({"s.tar/a": ("",)}, {"z.tar.gz": "truncated"})
        source = open_source("webdataset", path)
        [sample] = source.samples()
        write_tar(path, {"other.txt": b"x" * 5000, "a.png": IMAGE})
        with pytest.raises(ImageRefused, match=r"refused \(changed\)"):
            source.read(sample)  # type: ignore[arg-type]


class TestParquet:
    @pytest.mark.parametrize("kind_of_bytes", [pa.binary(), pa.large_binary(), pa.struct([("bytes", pa.binary())])])
    def test_kinds_of_image_columns(self, tmp_path: Path, kind_of_bytes: pa.DataType) -> None:
        value = {"bytes": IMAGE} if pa.types.is_struct(kind_of_bytes) else IMAGE
        columns = {"jpg": pa.array([value, None], kind_of_bytes), "caption": pa.array(["one", None])}
        file = write_parquet(tmp_path / "p.parquet", columns)
        found = listed(open_source("parquet", file, image_column="jpg"))
        assert found == ({"p.parquet#0": ("one",)}, {"p.parquet#1": "missing"})
        with pytest.raises(DatasetError, match=r"no column 'image'.*: jpg, caption"):
            listed(open_source("parquet", file))

    def test_a_bad_file_or_value_is_refused_and_the_rest_goes_on(self, tmp_path: Path) -> None:
        tables: dict[str, dict[str, Any]] = {
            "a": {"image": [IMAGE], "text": ["a"]},
            "another column": {"photo": [IMAGE]},
            "no columns": {},
            "no rows": {"image": pa.array([], pa.binary())},
            "sub/e": {"image": [IMAGE], "text": ["e"]},
        }
        captions: dict[str, Any] = {"number": [7], "bytes": [b"\xff"], "deep": [[[["x"]]]]}
        images = {"path": "a.png", "path in a struct": {"path": "a.png"}, "a number": 7, "a list": [IMAGE]}
        tables |= {name: {"image": [IMAGE], "text": texts} for name, texts in captions.items()}
        tables |= {name: {"image": [value]} for name, value in images.items()}
        for name, columns in tables.items():
            write_parquet(tmp_path / f"{name}.parquet", columns)
        (tmp_path / "b.parquet").write_bytes(b"PAR1 not really PAR1")
        twice = pa.Table.from_arrays([pa.array([IMAGE]), pa.array(["x"]), pa.array(["y"])], ["image", "text", "text"])
        pq.write_table(twice, tmp_path / "twice.parquet")
        found, refused = listed(open_source("parquet", tmp_path))
        assert found == {"a.parquet#0": ("a",), "sub/e.parquet#0": ("e",)}
        assert refused == {
            **{f"{name}.parquet#0": "bad-caption" for name in captions},
            **{f"{name}.parquet#0": "missing" for name in images},
            **{f"{name}.parquet": "unreadable" for name in ("another column", "no columns", "twice")},
            "b.parquet": "corrupt",
        }

    def test_damaged_pages_are_refused(self, tmp_path: Path) -> None:
        noise = [os.urandom(2000) for _ in range(4)]
        file = write_parquet(tmp_path / "p.parquet", {"image": noise, "text": [f"caption {i}" for i in range(4)]})
        source = open_source("parquet", file)
        found: list[Any] = [*source.samples()]
        start = pq.ParquetFile(file).metadata.row_group(1).column(0).data_page_offset
        data = bytearray(file.read_bytes())
        data[start : start + 60] = b"\xff" * 60
        file.write_bytes(data)
        assert source.read(found[0]) == noise[0]
        with pytest.raises(ImageRefused, match=r"refused \(corrupt\)"):
            source.read(found[2])


# Control images and masks


def put(root: Path, *names: str, seed: int = 1) -> list[bytes]:
    """Files of different bytes, and these."""
    images = {name: b"%d" % number for number, name in enumerate(names, seed)}
    write(root, (), images)
    return [*images.values()]


def parts_of(source: SampleSource) -> tuple[dict[str, list[bytes]], dict[str, tuple[str, str]]]:
    """What each sample's companions read as, and why the others are refused."""
    items = list(source.samples())
    refused = {item.sample_id: (item.reason, item.detail) for item in items if isinstance(item, Refusal)}
    found = [item for item in items if isinstance(item, Sample)]
    return {sample.sample_id: [source.read(part) for part in sample.parts] for sample in found}, refused


class TestCompanions:
    def test_a_folder_of_the_same_names_with_any_ending(self, tmp_path: Path) -> None:
        put(tmp_path / "after", "cat.png", "sub/dog.png", "sub/fox.png", "owl.png")
        # Of the cat the image's own ending comes first.
        cat, dog, *_ = put(tmp_path / "before", "cat.png", "sub/dog.webp", "cat.webp", "sub/fox.webp", "sub/fox.bmp")
        found, refused = parts_of(
            open_source("folder", tmp_path / "after", parts={"control": {"path": tmp_path / "before"}})
        )
        assert found == {"cat.png": [cat], "sub/dog.png": [dog]}
        missing = f"control 1: there is no image owl in {tmp_path / 'before'}; add it, or remove the sample"
        several = "control 1: there are several candidates, fox.bmp, fox.webp; keep one"
        assert refused == {"owl.png": ("missing", missing), "sub/fox.png": ("duplicate", several)}

    def test_a_folder_inside_the_images_own_and_numbered_names_hold_no_samples(self, tmp_path: Path) -> None:
        put(tmp_path, "cat.png", "photo_1.png")
        wanted = put(tmp_path, "control/cat.png", "cat_1.png", "cat_2.jpg", "cat-masklabel.png", seed=3)
        control = [{"path": tmp_path / "control"}, {"suffix": "_1"}, {"suffix": "_2"}]
        source = open_source("folder", tmp_path, parts={"control": control, "mask": {"suffix": "-masklabel"}})
        found, refused = parts_of(source)
        assert parts_of(pickle.loads(pickle.dumps(source))) == (found, refused), "other processes read them too"
        assert found == {"cat.png": wanted}
        # It ends like a companion, but there is no image that it would be one of.
        assert refused.keys() == {"photo_1.png"} and refused["photo_1.png"][0] == "missing"

    def test_metadata_names_the_files(self, tmp_path: Path) -> None:
        _, _, mask, control = put(tmp_path / "in", "a.png", "b.png", "masks/x.png", "y.png")
        metadata(
            tmp_path,
            {"file_name": "in/a.png", "mask": "in/masks/x.png", "edit": "in/y.png"},
            {"file_name": "in/b.png", "mask": "in/masks/x.png"},
            {"file_name": "in/y.png", "mask": "../../../x.png", "edit": "in/y.png"},
            {"file_name": "in/masks/x.png", "mask": "in/masks/z.png", "edit": "in/y.png"},
        )
        parts = {"control": {"column": "edit"}, "mask": {"column": "mask"}}
        found, refused = parts_of(open_source("imagefolder", tmp_path, parts=parts))
        assert found == {"in/a.png": [control, mask]}
        assert refused == {
            "in/b.png": ("missing", "control 1: its metadata has no 'edit'"),
            "in/y.png": ("unreadable", "mask: mask '../../../x.png' leads out of the dataset's folder"),
            "in/masks/x.png": ("missing", "mask: there is no such file"),
        }

    def test_members_of_a_tar(self, tmp_path: Path) -> None:
        names = "cat.png cat.control.png cat.Mask.png dog.png dog.control.png fox.png fox.mask.png fox.mask.webp"
        numbered = enumerate([*names.split(), "fox.control.png"])
        write_tar(tmp_path / "0.tar", {name: b"%d" % number for number, name in numbered})
        parts = {"control": {"column": "control"}, "mask": {"column": "mask"}}
        found, refused = parts_of(open_source("webdataset", tmp_path, parts=parts))
        assert found == {"0.tar/cat": [b"1", b"2"]}
        assert refused == {
            "0.tar/dog": ("missing", "mask: the key has no image member .mask"),
            "0.tar/fox": ("duplicate", "mask: the key has several, fox.mask.png, fox.mask.webp; keep one"),
        }

    def test_columns_of_a_table(self, tmp_path: Path) -> None:
        edits = [{"bytes": b"3", "path": "x"}, {"bytes": None, "path": "y"}]
        write_parquet(tmp_path / "0.parquet", {"image": [b"1", b"2"], "text": ["a", "b"], "edit": edits})
        source = open_source("parquet", tmp_path, parts={"control": {"column": "edit"}})
        first, second = (item for item in source.samples() if isinstance(item, Sample))
        assert source.read(first) == b"1" and [source.read(part) for part in first.parts] == [b"3"]
        with pytest.raises(ImageRefused, match="column 'edit' has no bytes in this row"):
            source.read(second.parts[0])
        with pytest.raises(DatasetError, match="has no column 'depth'"):
            parts_of(open_source("parquet", tmp_path, parts={"control": {"column": "depth"}}))

    @pytest.mark.parametrize(
        ("kind", "parts", "message"),
        [
            ("folder", {"control": {}}, "give path, suffix or column"),
            ("parquet", {"mask": {"suffix": "_m"}}, "cannot be used with a source of kind parquet; give column"),
            ("folder", {"control": [{"path": "c"}, {"path": "c", "area": 65536}]}, "are the same file"),
            ("webdataset", {"control": {"column": "M"}, "mask": {"column": "m"}}, "are the same file"),
            ("folder", {"mask": {"alpha": True, "suffix": "_1"}}, "leave out path, suffix and column"),
            ("folder", {"control": {"suffix": "/../x"}}, "leads to another folder"),
            ("folder", {"control": {"path": "photos"}}, "has the same folder and file names as the images"),
        ],
    )
    def test_what_names_no_part_is_refused(self, kind: str, parts: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            open_source(kind, "photos", parts=parts)

    def test_a_folder_that_is_not_there_is_one_error(self, tmp_path: Path) -> None:
        with pytest.raises(DatasetError, match=r"nowhere.*does not exist; .*path of mask"):
            open_source("folder", tmp_path, parts={"mask": {"path": tmp_path / "nowhere"}})
