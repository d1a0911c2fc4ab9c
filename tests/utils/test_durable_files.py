"""Whole files: replaced or left as they were, with the mode that the umask gives."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from pathlib import Path
from typing import BinaryIO

import pytest

from latentcache.errors import ReadOnlyError, StorageFullError, StoreError
from latentcache.utils import durable_files as files
from latentcache.utils.durable_files import regular_file, sealed_file, sweep_temporaries, write_past_cache, write_sealed


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_file_is_written_whole_with_the_mode_of_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        for data in (b"first", b"second, longer", b""):
            write_sealed(tmp_path / "file", data)
            assert (tmp_path / "file").read_bytes() == data
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(("number", "expected"), [(28, StorageFullError), (13, ReadOnlyError)])
def test_a_refused_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[Exception]
) -> None:
    write_sealed(tmp_path / "file", b"old")

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(expected):
        write_sealed(tmp_path / "file", b"new")
    monkeypatch.undo()
    assert (tmp_path / "file").read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_a_sweep_of_what_cannot_be_listed_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert sweep_temporaries(tmp_path / "none") == 0
    assert "not searched" in caplog.text


def parts_of(data: bytes, length: int) -> list[bytes]:
    return [data[start : start + length] for start in range(0, len(data), length)]


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 8191, 8192, 8193, 50_000])
@pytest.mark.parametrize("length", [1000, 8192, 20_000])
def test_what_is_written_past_the_cache_is_what_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int, length: int
) -> None:
    monkeypatch.setattr(files, "_STAGING_BYTES", 8192)
    data = random.Random(num_bytes).randbytes(num_bytes)
    with sealed_file(tmp_path / "file", num_bytes) as fd:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        write_past_cache(fd, parts_of(data, length))
        assert fcntl.fcntl(fd, fcntl.F_GETFL) == flags
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize("refused_call", [1, 2, 3])
def test_a_file_system_that_refuses_direct_writes_gets_plain_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused_call: int
) -> None:
    """The write that is refused has written a part already: nothing may be there twice, and nothing be left out."""
    monkeypatch.setattr(files, "_STAGING_BYTES", 8192)
    real, num_calls = os.write, 0

    def refuse(fd: int, view: memoryview) -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls == refused_call:
            return real(fd, view[:4096])
        if num_calls == refused_call + 1:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, view)

    monkeypatch.setattr(os, "write", refuse)
    data = random.Random(0).randbytes(40_000)
    with sealed_file(tmp_path / "file", len(data)) as fd:
        write_past_cache(fd, parts_of(data, 3000))
    assert num_calls > refused_call and (tmp_path / "file").read_bytes() == data


def test_without_direct_writes_all_is_written_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def refuse(fd: int, command: int, *arguments: int) -> int:
        if command == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))  # as tmpfs does
        return real(fd, command, *arguments)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    data = random.Random(0).randbytes(40_000)
    with sealed_file(tmp_path / "file", len(data)) as fd:
        write_past_cache(fd, parts_of(data, 3000))
    assert (tmp_path / "file").read_bytes() == data


def test_a_disk_that_fills_up_while_a_file_is_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_STAGING_BYTES", 8192)
    real, num_calls = os.write, 0

    def fill_up(fd: int, view: memoryview) -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, view)

    monkeypatch.setattr(os, "write", fill_up)
    with pytest.raises(StorageFullError), sealed_file(tmp_path / "file", 40_000) as fd:
        write_past_cache(fd, [bytes(40_000)])
    assert num_calls == 3 and os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_file_whose_kind_cannot_be_asked_for_is_closed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """`open` asks for it by a call of its own, and leaves the descriptor open when that is refused."""
    path, opened = tmp_path / "file", []
    path.write_bytes(b"data")

    def refuse(fd: int, mode: str) -> BinaryIO:
        opened.append(fd)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, "open", refuse, raising=False)
    with pytest.raises(StoreError, match="file: cannot be read now"), regular_file(path, 100):
        pass
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])
    monkeypatch.undo()
    with regular_file(path, 100) as file:
        assert file.read() == b"data"
