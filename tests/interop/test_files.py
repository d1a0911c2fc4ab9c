"""Files of others: what is read, what is refused, and that nothing in them runs."""

from __future__ import annotations

import gzip
import os
import pickle
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from helpers.foreign_files import Bomb, latents_of, rezipped, saved, write
from helpers.kohya_files import npz_of

from latentcache.errors import ForeignFileRefused
from latentcache.interop.files import MAX_FILE_BYTES, read_file, read_npz, read_torch, tensor_in

LATENTS = latents_of(0, 96, 64)
SAVED = saved(LATENTS)


@pytest.fixture
def load(tmp_path: Path) -> Any:
    return lambda data: read_torch(write(tmp_path / "f.pt", data))


def refused(reason: str, words: str):
    return pytest.raises(ForeignFileRefused, match=rf"f\.pt: refused \({reason}\): .*{words}")


def test_a_view_owns_its_memory_after_reading(load):
    view = torch.randn(2, 4, 8, 6)[1].transpose(1, 2)
    read = tensor_in(load(saved(view)), "latent", "f.pt", ndim=3)
    assert torch.equal(read, view)
    assert read.is_contiguous() and read.untyped_storage().nbytes() == read.numel() * 4


def test_code_in_a_pickle_is_not_run(tmp_path, load):
    for data in (saved({"latents": Bomb(tmp_path / "made")}), gzip.compress(saved(Bomb(tmp_path / "made")))):
        with refused("corrupt", "restricted reader: .*mkdir") as caught:
            load(data)
        assert "weights_only" not in str(caught.value)
    with refused("corrupt", "restricted reader: .*PurePosixPath") as caught:
        load(saved({"image_spec": [None, PurePosixPath("a.png")]}))
    assert "safe_globals" not in str(caught.value), "no advice to allow it"
    with refused("corrupt", "not a whole zip file"):
        load(pickle.dumps([1, 2]))
    assert not (tmp_path / "made").exists()


def test_a_compressed_file_is_refused_before_it_is_inflated(load):
    size = MAX_FILE_BYTES + 1
    with refused("corrupt", "it unpacks to .* are allowed"):
        load(rezipped(SAVED, {"data/0": bytes(size)}, zipfile.ZIP_DEFLATED))
    with refused("corrupt", "it unpacks to more than"):
        load(gzip.compress(bytes(1 << 20)) * 300)


def test_damage_of_the_values_is_found(load):
    data = bytearray(SAVED)
    data[data.find(LATENTS.numpy().tobytes()[:16]) + 5] ^= 1
    with refused("corrupt", "checksum"):
        load(bytes(data))
    with refused("corrupt", "zip"):
        load(SAVED[:-1000])
    with refused("corrupt", "gzip: EOFError"):
        load(gzip.compress(SAVED)[:-9])
    with refused("corrupt", "gzip"):
        load(gzip.compress(SAVED)[:-8] + bytes(8))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "it has no latent"),
        ("latent", "is a str"),
        (torch.nn.Parameter(LATENTS), "is a Parameter"),
        (torch.eye(3).to_sparse(), "plain tensor"),
        (torch.empty(3, device="meta"), "plain tensor"),
        (LATENTS.double(), "float64"),
        (LATENTS[0], "3 dimensions"),
        (LATENTS[:, :0], "3 dimensions"),
        (torch.zeros(1).expand(4, 1 << 20, 1 << 20), "more values than the file"),
    ],
    ids=["nothing", "text", "parameter", "sparse", "meta", "double", "flat", "empty", "expanded"],
)
def test_what_is_no_latent_is_refused(value: Any, words: str) -> None:
    with refused("corrupt", words):
        tensor_in(value, "latent", "f.pt", ndim=3)


def test_only_regular_files_within_bounds_are_read(tmp_path):
    path = write(tmp_path / "f", b"12345")
    assert read_file(path, 5) == b"12345"
    with pytest.raises(ForeignFileRefused, match="more than 4 bytes"):
        read_file(path, 4)
    os.mkfifo(tmp_path / "pipe")
    for name, reason in [("pipe", "unreadable"), ("none", "missing"), (".", "unreadable"), ("a\0b", "unreadable")]:
        with pytest.raises(ForeignFileRefused) as caught:
            read_file(tmp_path / name)
        assert caught.value.reason == reason
    with pytest.raises(ForeignFileRefused, match="empty"):
        read_file(write(tmp_path / "empty", b""))


def test_objects_in_arrays_are_not_unpickled(tmp_path: Path) -> None:
    path = write(tmp_path / "f.npz", npz_of({"latents": np.array([Bomb(tmp_path / "made")], dtype=object)}))
    with pytest.raises(ForeignFileRefused, match="allow_pickle=False"):
        read_npz(path)
    assert not (tmp_path / "made").exists()


def test_an_array_that_claims_less_than_its_bytes_is_compared_whole(tmp_path: Path) -> None:
    """numpy stops reading where the header says, and then nobody compares the checksum."""
    data = bytearray(npz_of({"latents": LATENTS.numpy()}))
    data[data.find(b"(4, 12, 8)") : data.find(b"(4, 12, 8)") + 10] = b"(4, 12, 7)"
    with pytest.raises(ForeignFileRefused, match="checksum"):
        read_npz(write(tmp_path / "f.npz", bytes(data)))
