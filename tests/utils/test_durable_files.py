"""Whole files: replaced or left as they were, with the mode that the umask gives."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO

import pytest

from latentcache.errors import ReadOnlyError, StorageFullError, StoreError
from latentcache.utils import durable_files as files
from latentcache.utils.durable_files import regular_file, sealed_file, sweep_temporaries, write_all, write_sealed


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


def test_a_disk_that_fills_up_while_a_file_is_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, num_calls = os.write, 0

    def fill_up(fd: int, view: memoryview) -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, view[:8192])

    monkeypatch.setattr(os, "write", fill_up)
    with pytest.raises(StorageFullError), sealed_file(tmp_path / "file", 40_000) as fd:
        write_all(fd, bytes(40_000))
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
