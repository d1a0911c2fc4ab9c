"""Reading foreign files: what is read, what is refused, and that nothing in them is executed."""

from __future__ import annotations

import gzip
import io
import os
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from helpers.kohya_files import npz_of

from latentcache.errors import ForeignFileRefused
from latentcache.interop import readers
from latentcache.interop.readers import SourceImages, read_file, read_npz, read_torch, tensor_in


def saved(content: Any) -> bytes:
    """The bytes that torch.save writes."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


LATENTS = torch.randn(4, 12, 8, generator=torch.Generator().manual_seed(0))
SAVED = saved(LATENTS)
NPZ = npz_of({"latents": LATENTS.numpy()})
LIMIT = 1 << 16
"""Instead of 256 MB."""


class Bomb:
    """Creates a directory when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("made",)


@pytest.mark.parametrize(
    ("read", "data", "words"),
    [
        (read_torch, saved({"latents": Bomb()}), "restricted reader: .*mkdir"),
        (read_torch, gzip.compress(saved(Bomb())), "restricted reader: .*mkdir"),
        (read_torch, saved({"image_spec": [None, PurePosixPath("a.png")]}), "restricted reader: .*PurePosixPath"),
        (read_torch, pickle.dumps([1, 2]), "not a whole zip file"),
        (read_npz, npz_of({"latents": np.array([Bomb()], dtype=object)}), "allow_pickle=False"),
        (read_torch, saved(torch.zeros(LIMIT)), "it unpacks to .* are allowed"),
        (read_torch, gzip.compress(bytes(LIMIT + 1)), "it unpacks to more than"),
        # numpy stops reading where the header says, before the checksum is compared.
        (read_npz, NPZ.replace(b"(4, 12, 8)", b"(4, 12, 7)"), "checksum"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_hostile_or_damaged_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Any, data: bytes, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(readers, "MAX_FILE_BYTES", LIMIT)
    with pytest.raises(ForeignFileRefused, match=rf"f\.pt: refused \(corrupt\): .*{words}") as caught:
        read(write(tmp_path / "f.pt", data))
    assert not Path("made").exists()
    assert "weights_only" not in str(caught.value) and "safe_globals" not in str(caught.value), "no advice to allow it"


@pytest.mark.parametrize(
    ("read", "whole"), [(read_npz, NPZ), (read_torch, SAVED), (read_torch, gzip.compress(SAVED, mtime=0))]
)
def test_a_damaged_file_is_refused_or_read_as_it_was(tmp_path: Path, read: Any, whole: bytes) -> None:
    """Some bytes of a zip have no effect, but never those of values. Most places are in the headers at both ends."""
    expected = read(write(tmp_path / "f.pt", whole))
    ends = {*range(0, 200, 7), *range(len(whole) - 500, len(whole), 7)}
    for at in sorted(ends | {*range(0, len(whole), 97)}):
        for damaged in (whole[:at], whole[:at] + b"\xa5\x5a" + whole[at + 2 :]):
            try:
                found = read(write(tmp_path / "f.pt", damaged))
            except ForeignFileRefused:
                continue
            assert torch.equal(found["latents"], expected["latents"]) if read is read_npz else found.equal(expected), at


def test_a_view_owns_its_memory_after_reading(tmp_path: Path) -> None:
    view = torch.randn(2, 4, 8, 6)[1].transpose(1, 2)
    read = tensor_in(read_torch(write(tmp_path / "f.pt", saved(view))), "latent", "f.pt", ndim=3)
    assert torch.equal(read, view)
    assert read.is_contiguous() and read.untyped_storage().nbytes() == read.numel() * 4


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "it has no latent"),
        (torch.nn.Parameter(LATENTS), "is a Parameter"),
        (torch.eye(3).to_sparse(), "plain tensor"),
        (torch.empty(3, device="meta"), "plain tensor"),
        (LATENTS.double(), "float64"),
        (LATENTS[0], "3 dimensions"),
        (torch.zeros(1).expand(4, 1 << 20, 1 << 20), "more values than the file"),
    ],
    ids=["nothing", "parameter", "sparse", "meta", "double", "flat", "expanded"],
)
def test_what_is_no_latent_is_refused(value: Any, words: str) -> None:
    with pytest.raises(ForeignFileRefused, match=words):
        tensor_in(value, "latent", "f.pt", ndim=3)


def test_only_regular_files_within_bounds_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "f", b"12345")
    assert read_file(path, 5) == b"12345"
    with pytest.raises(ForeignFileRefused, match="more than 4 bytes"):
        read_file(path, 4)
    os.mkfifo(tmp_path / "pipe")
    write(tmp_path / "empty", b"")
    for name, reason in [("pipe", "unreadable"), ("none", "missing"), ("a\0b", "unreadable"), ("empty", "empty")]:
        with pytest.raises(ForeignFileRefused) as caught:
            read_file(tmp_path / name)
        assert caught.value.reason == reason


def test_the_home_directory_of_an_image_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/cat.png").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert SourceImages("~/photos").of_stem("cat", tmp_path / "cat.npz") == ["cat.png"]
