"""torch.save files of others: what is read, what is refused, and that nothing in them runs."""

from __future__ import annotations

import gzip
import io
import os
import zipfile
from collections import OrderedDict
from pathlib import Path, PurePosixPath

import pytest
import torch
from helpers.foreign_files import Bomb, damaged, latents_of, rezipped, saved, write
from hypothesis import given, settings
from hypothesis import strategies as st

from latentcache.errors import ForeignFileRefused
from latentcache.interop.foreign_files import gunzip, load_torch, opened, read_file, tensor_in

LATENTS = latents_of(0, 96, 64)
SAVED = saved(LATENTS)


def refused(reason: str, words: str):
    return pytest.raises(ForeignFileRefused, match=rf"^f\.pt: refused \({reason}\): .*{words}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_saved_tensor_is_read_exactly(dtype):
    latents = LATENTS.to(dtype)
    assert torch.equal(tensor_in(load_torch(saved(latents), "f.pt"), "latent", "f.pt", ndim=3), latents)


def test_a_view_owns_its_memory_after_reading():
    view = torch.randn(2, 4, 8, 6)[1].transpose(1, 2)
    read = tensor_in(load_torch(saved(view), "f.pt"), "latent", "f.pt", ndim=3)
    assert torch.equal(read, view)
    assert read.is_contiguous() and read.untyped_storage().nbytes() == read.numel() * 4


def test_code_in_a_pickle_is_not_run(tmp_path):
    with refused("corrupt", "restricted reader: .*mkdir") as caught:
        load_torch(saved({"latents": Bomb(tmp_path / "made")}), "f.pt")
    assert "weights_only" not in str(caught.value)
    assert not (tmp_path / "made").exists()


def test_a_class_beyond_tensors_and_plain_data_is_refused_without_advice_to_allow_it():
    with refused("corrupt", "restricted reader: .*PurePosixPath") as caught:
        load_torch(saved({"image_spec": [None, PurePosixPath("a.png")]}), "f.pt")
    assert "safe_globals" not in str(caught.value)


def test_a_plain_pickle_is_refused():
    import pickle

    with refused("corrupt", "which no torch.save file does"):
        load_torch(pickle.dumps([1, 2]), "f.pt")


def test_a_compressed_file_is_refused_before_it_is_inflated():
    bomb = rezipped(SAVED, {"data/0": bytes(1 << 24)}, zipfile.ZIP_DEFLATED)
    assert len(bomb) < 1 << 16
    with refused("corrupt", "is compressed"):
        load_torch(bomb, "f.pt")


def test_a_flipped_bit_of_the_values_is_found():
    data = bytearray(SAVED)
    data[data.find(LATENTS.numpy().tobytes()[:16]) + 5] ^= 1
    with refused("corrupt", "checksum"):
        load_torch(bytes(data), "f.pt")


def test_a_storage_that_is_smaller_than_the_pickle_says_is_refused():
    with refused("corrupt", ""):
        load_torch(rezipped(SAVED, {"data/0": bytes(64)}), "f.pt")


def test_a_cut_file_is_truncated():
    with refused("truncated", "zip"):
        load_torch(SAVED[:-1000], "f.pt")


def test_a_member_that_begins_beyond_the_file_is_refused():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"")
        archive.infolist()[0].header_offset = 1 << 63  # what the directory then says
    with refused("corrupt", "zip"):
        load_torch(buffer.getvalue(), "f.pt")


def test_few_bytes_that_pretend_to_be_many_values_are_refused():
    huge = saved(torch.zeros(1).expand(4, 1 << 20, 1 << 20))
    with refused("corrupt", "more values than the file"):
        tensor_in(load_torch(huge, "f.pt"), "latent", "f.pt", ndim=3)


@pytest.mark.parametrize(
    ("pickled", "words"),
    [
        (b"\x80\x02cbuiltins\nbytearray\n\x8a\x05" + (1 << 32).to_bytes(5, "little") + b"\x85R.", "a bytearray"),
        (b"\x80\x02](" + b"]" * (5 << 20) + b"e.", "its pickle has 5,242,886 bytes"),
    ],
    ids=["bytearray", "lists"],
)
def test_few_bytes_that_become_much_memory_are_refused(pickled, words):
    data = rezipped(saved({"a": torch.ones(4)}), {"data.pkl": pickled})
    for named in (data, data.replace(b"/data.pkl", b"/DATA.PKL")):
        with pytest.raises(ForeignFileRefused, match=words):
            load_torch(named, "f.pt")


def test_a_list_that_holds_itself_is_read():
    endless: list[object] = [LATENTS]
    endless.append(endless)
    assert torch.equal(load_torch(saved(endless), "f.pt")[0], LATENTS)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "is a NoneType"),
        ([1.0], "is a list"),
        (torch.nn.Parameter(LATENTS), "is a Parameter"),
        (LATENTS.double(), "float64"),
        (LATENTS[0], "3 dimensions"),
        (LATENTS[:, :0], "3 dimensions"),
    ],
    ids=["nothing", "list", "parameter", "double", "flat", "empty"],
)
def test_what_is_no_latent_is_refused(value, words):
    with refused("corrupt", words):
        tensor_in(value, "latent", "f.pt", ndim=3)


def test_a_sparse_tensor_is_refused():
    with refused("corrupt", "sparse"):
        load_torch(saved(OrderedDict(latents=torch.eye(3).to_sparse())), "f.pt")


def test_gzip_is_bounded():
    assert gunzip(gzip.compress(SAVED), "f.pt") == SAVED
    with refused("corrupt", "more than 1,000 bytes"):
        gunzip(gzip.compress(bytes(1 << 24)), "f.pt", 1000)
    with refused("truncated", "ends early"):
        gunzip(gzip.compress(SAVED)[:-9], "f.pt")
    with refused("corrupt", "gzip"):
        gunzip(gzip.compress(SAVED)[:-8] + bytes(8), "f.pt")


def test_only_regular_files_within_bounds_are_read(tmp_path):
    path = write(tmp_path / "f", b"12345")
    assert read_file(path, 5) == b"12345"
    with pytest.raises(ForeignFileRefused, match="5 bytes; such a file has 4"):
        read_file(path, 4)
    os.mkfifo(tmp_path / "pipe")
    for name, reason in [("pipe", "unreadable"), ("none", "missing"), (".", "unreadable"), ("a\0b", "unreadable")]:
        with pytest.raises(ForeignFileRefused) as caught:
            read_file(tmp_path / name)
        assert caught.value.reason == reason
    with pytest.raises(ForeignFileRefused, match="empty"):
        read_file(write(tmp_path / "empty", b""))


def test_no_descriptor_stays_open(tmp_path):
    path = write(tmp_path / "f", b"1")
    with opened(path) as (fd, num_bytes):
        assert num_bytes == 1
    with pytest.raises(OSError):
        os.fstat(fd)


@settings(max_examples=150, deadline=None)
@given(data=damaged(SAVED))
def test_damage_is_refused_or_harmless(data):
    try:
        read = tensor_in(load_torch(data, "f.pt"), "latent", "f.pt", ndim=3)
    except ForeignFileRefused:
        return
    # Some bytes of a zip have no meaning, and those of its directory can be repaired by chance: never the values.
    assert read.shape == LATENTS.shape and read.dtype == LATENTS.dtype
    assert torch.equal(read, LATENTS)


PICKLED = zipfile.ZipFile(io.BytesIO(SAVED)).read("archive/data.pkl")


@settings(max_examples=150, deadline=None)
@given(pickled=damaged(PICKLED), values=st.binary(max_size=64))
def test_a_hostile_pickle_with_right_checksums_raises_nothing_else(pickled, values):
    data = rezipped(SAVED, {"data.pkl": pickled, "data/0": values})
    try:
        tensor_in(load_torch(data, Path("f.pt")), "latent", "f.pt", ndim=3)
    except ForeignFileRefused as error:
        assert error.reason == "corrupt"
