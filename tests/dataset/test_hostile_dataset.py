"""A dataset that somebody else prepared: what is wrong in it is refused by name, soon, and the rest goes on."""

from __future__ import annotations

import io
import os
import resource
import shutil
import tarfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.photo_files import write_photo
from PIL import Image

from latentcache.config import SourceConfig
from latentcache.dataset.samples import SampleSource
from latentcache.dataset.sources import open_source
from latentcache.dataset.webdataset import members
from latentcache.errors import ImageRefused
from latentcache.loading.cache import LatentCache
from latentcache.precache.run import run_precache
from latentcache.types import Refusal


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    """What asks for eight gigabytes is a MemoryError, so that the machine survives it."""
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, limits)


def png(number: int = 0) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(number).integers(0, 256, (48, 48, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def source_of(path: Path, kind: str = "folder", **more: Any) -> SampleSource:
    return open_source(SourceConfig(kind=kind, path=path, **more))


def found(source: SampleSource) -> tuple[list[str], dict[str, str]]:
    """The ids of the samples whose image can be read, and the reason of each refusal."""
    ids, refused = [], {}
    for item in source.samples():
        if isinstance(item, Refusal):
            refused[item.sample_id] = item.reason
            assert item.path and item.detail
            continue
        try:
            assert source.read(item)
            ids.append(item.sample_id)
        except ImageRefused as error:
            refused[item.sample_id] = error.reason
    return ids, refused


def sparse(path: Path, start: bytes = b"") -> None:
    """A file of 200 GB that takes no space."""
    with path.open("wb") as file:
        file.write(start)
        file.truncate(200 << 30)


PLANTS: dict[str, tuple[Callable[[Path], object], str, str | None]] = {
    "pipe": (os.mkfifo, "unreadable", "unreadable"),
    "loop": (lambda path: path.symlink_to(path.name), "unreadable", "unreadable"),
    "sparse": (sparse, "unreadable", "bad-caption"),
    "empty": (lambda path: path.touch(), "empty", None),
    "noise": (lambda path: path.write_bytes(np.random.default_rng(0).bytes(5000)), "not-an-image", "bad-caption"),
    "deep JSON": (lambda path: path.write_bytes(b"[" * 100_000), "not-an-image", "bad-caption"),
}
"""What may lie where a file is expected, and the reason of the refusal where it is an image, or a caption."""


def test_one_bad_file_never_stops_a_run(tmp_path: Path, make_config: Callable[..., Any]) -> None:
    folder, expected = tmp_path / "hostile", {}
    write_photo(folder / "good.png", 0, (80, 144))
    for number, (what, (plant, as_image, as_caption)) in enumerate(PLANTS.items(), 1):
        write_photo(folder / f"captioned by {what}.png", number, (80, 144))
        plant(folder / f"{what}.png")
        plant(folder / f"captioned by {what}.txt")
        expected |= {f"{what}.png": as_image, f"captioned by {what}.png": as_caption}
    sparse(folder / "sparse image.png", png())
    expected["sparse image.png"] = "unreadable"
    good = png()
    for name, data, reason in (("cut.png", good[: len(good) // 2], "truncated"), ("a.jpg", good, "wrong-suffix")):
        (folder / name).write_bytes(data)
        expected[name] = reason
    os.link(folder / "good.png", folder / "second name.png")
    (folder / "loop of folders").symlink_to(folder)
    write_photo(tmp_path / "elsewhere" / "far.png", 99, (80, 144))
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "dangling.png").symlink_to("nowhere.png")
    expected["dangling.png"] = "missing"
    config = make_config(**{"datasets.0.source": {"kind": "folder", "path": folder}})
    report = run_precache(config)
    refused = {name: reason for name, reason in expected.items() if reason is not None}
    assert {refusal.sample_id: refusal.reason for refusal in report.refused} == refused
    assert all(refusal.path and "None" not in refusal.detail for refusal in report.refused)
    with LatentCache(config.cache.path, read_only=True) as cache:
        assert cache.sample_ids() == ["captioned by empty.png", "good.png", "second name.png", "linked/far.png"]


def test_a_folder_that_goes_while_it_is_listed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        write_photo(tmp_path / name / "photo.png", 0, (80, 144))
    stat = os.stat

    def removing(path: Any, **options: Any) -> os.stat_result:
        if os.fspath(path) == str(tmp_path / "b"):
            shutil.rmtree(tmp_path / "b", ignore_errors=True)
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", removing)
    assert found(source_of(tmp_path)) == (["a/photo.png", "c/photo.png"], {"b": "unreadable"})


# Tars ----------------------------------------------------------------------------------------------------------------


def add(tar: tarfile.TarFile, name: str, data: bytes = b"", **more: Any) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for field, value in more.items():
        setattr(member, field, value)
    tar.addfile(member, io.BytesIO(data))


def test_kinds_of_members(tmp_path: Path) -> None:
    kinds = {"sym": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "char": tarfile.CHRTYPE, "fifo": tarfile.FIFOTYPE}
    kinds |= {"sparse": tarfile.GNUTYPE_SPARSE, "other": b"Z"}
    with tarfile.open(tmp_path / "s.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for name in ("/etc/passwd.png", "../../up.png", "new\nline.png", "\udcff\udc80.png", "x" * 250 + ".png"):
            add(tar, name, png())
        for name, kind in kinds.items():
            add(tar, f"{name}.png", type=kind, linkname="/etc/hostname")
        for name in ("captions.png", "captions.txt", "captions.txt"):
            add(tar, name, png())
    ids, refused = found(source_of(tmp_path / "s.tar", "webdataset"))
    assert len(ids) == 5 and refused == {
        **{f"s.tar/{name}": "unreadable" for name in kinds},
        "s.tar/captions": "bad-caption",
    }


@pytest.mark.parametrize(
    "headers",
    [{"size": "-512"}, {"size": "1e9999"}, {"size": "9" * 30}, {"GNU.sparse.map": "x,y", "GNU.sparse.size": "-1"}],
)
def test_headers_with_odd_numbers(tmp_path: Path, headers: dict[str, str]) -> None:
    with tarfile.open(tmp_path / "s.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        add(tar, "first.png", png())
        add(tar, "odd.png", png(), pax_headers=headers)
    ids, refused = found(source_of(tmp_path / "s.tar", "webdataset"))
    assert refused and "s.tar/first" in {*ids, *refused}


@pytest.mark.parametrize("is_pax", [False, True])
def test_a_sparse_member_whose_header_leads_back_ends_the_tar(tmp_path: Path, is_pax: bool) -> None:
    """tarfile moves by the size in the header, here a negative one, and then has another size for the member."""

    def header(kind: bytes, size: int, rest: bytes = b"") -> bytes:
        number = size.to_bytes(12, "big", signed=True) if size < 0 else b"%011o\0" % size
        fields = b"odd.png".ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + number + b"00000000000\0"
        data = (fields + b" " * 8 + kind).ljust(257, b"\0") + b"ustar  \0"
        data = (data.ljust(386, b"\0") + rest).ljust(512, b"\0")
        return data[:148] + b"%06o\0 " % sum(data) + data[156:]

    if is_pax:
        records = b"23 GNU.sparse.size=100\n"
        tar = header(b"x", len(records)) + records.ljust(512, b"\0") + header(b"0", -3 * 512)
    else:  # an entry of the map, whether there are more, and the size of the whole
        tar = header(b"S", -512, b"00000000000\0" * 2 + bytes(73) + b"00000000144\0")
    (tmp_path / "s.tar").write_bytes(tar + bytes(1024))
    with pytest.raises(ImageRefused):
        assert len([*islice(members(str(tmp_path / "s.tar")), 100)]) < 100


def header(kind: bytes, num_bytes: int) -> bytes:
    """That of a member, or of the headers of the next one, of any size."""
    member = tarfile.TarInfo("odd.png")
    member.type, member.size = kind, num_bytes
    return member.tobuf(tarfile.GNU_FORMAT)


HEADERS = {
    "a name of 100 GB": header(tarfile.GNUTYPE_LONGNAME, 100 << 30),
    "an extended header of 100 GB": header(tarfile.XHDTYPE, 100 << 30),
    "headers of headers": (header(tarfile.XHDTYPE, 512) + b"12 comment=x\n".ljust(512, b"\0")) * 5000,
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_ask_for_too_much(tmp_path: Path, name: str) -> None:
    path = tmp_path / "s.tar"
    with tarfile.open(path, "w") as tar:
        add(tar, "first.png", png())
    first = path.read_bytes()[: 512 + -(-len(png()) // 512) * 512]
    path.write_bytes(first + HEADERS[name] + first + bytes(1024))
    _, refused = found(source_of(path, "webdataset"))
    assert "truncated" in refused.values()


# Tables --------------------------------------------------------------------------------------------------------------


def test_odd_captions_and_names_in_a_table(tmp_path: Path) -> None:
    odd: dict[str, Any] = {"numbers": [1.5], "bytes": [b"\xff"], "deep": [[[["x"]]]]}
    for name, texts in odd.items():
        pq.write_table(pa.table({"image": [png()], "text": texts}), tmp_path / f"{name}.parquet")
    pq.write_table(pa.table({"image": pa.array([], pa.binary())}), tmp_path / "no rows.parquet")
    pq.write_table(pa.table({}), tmp_path / "no columns.parquet")
    columns = [pa.array([png()]), pa.array(["x"]), pa.array(["y"])]
    pq.write_table(pa.Table.from_arrays(columns, ["image", "text", "text"]), tmp_path / "twice.parquet")
    pq.write_table(pa.table({"image": [png()], "text": ["x"]}), tmp_path / "a good one.parquet")
    ids, refused = found(source_of(tmp_path, "parquet"))
    assert ids == ["a good one.parquet#0"]
    assert refused == {
        **{f"{name}.parquet#0": "bad-caption" for name in odd},
        "no columns.parquet": "unreadable",
        "twice.parquet": "unreadable",
    }
