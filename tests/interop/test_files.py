"""Files of others: what is read, what is refused, and that nothing in them runs."""

from __future__ import annotations

import gzip
import os
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from helpers.foreign_files import latents_of, saved, write
from helpers.kohya_files import npz_of

from latentcache.errors import ForeignFileRefused
from latentcache.interop import files
from latentcache.interop.files import read_file, read_npz, read_torch, tensor_in

LATENTS = latents_of(0, 96, 64)
SAVED = saved(LATENTS)
NPZ = npz_of({"latents": LATENTS.numpy()})
LIMIT = 1 << 16
"""In place of 256 MB."""


class Bomb:
    """Unpickled, it makes a directory in the working one."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("made",)


def flipped(data: bytes, part: bytes) -> bytes:
    """The file with another byte where this part of it begins."""
    at = data.index(part)
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


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
        (read_torch, flipped(SAVED, LATENTS.numpy().tobytes()[:16]), "checksum"),
        (read_torch, SAVED[:-1000], "zip"),
        (read_torch, gzip.compress(SAVED)[:-9], "gzip: EOFError"),
        (read_torch, gzip.compress(SAVED)[:-8] + bytes(8), "gzip"),
        # numpy stops reading where the header says, and then nobody compares the checksum.
        (read_npz, NPZ.replace(b"(4, 12, 8)", b"(4, 12, 7)"), "checksum"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_hostile_or_damaged_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Any, data: bytes, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "MAX_FILE_BYTES", LIMIT)
    with pytest.raises(ForeignFileRefused, match=rf"f\.pt: refused \(corrupt\): .*{words}") as caught:
        read(write(tmp_path / "f.pt", data))
    assert not Path("made").exists()
    assert "weights_only" not in str(caught.value) and "safe_globals" not in str(caught.value), "no advice to allow it"


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
        (LATENTS[:, :0], "3 dimensions"),
        (torch.zeros(1).expand(4, 1 << 20, 1 << 20), "more values than the file"),
    ],
    ids=["nothing", "parameter", "sparse", "meta", "double", "flat", "empty", "expanded"],
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
