"""Whole files: replaced or left as they were, with the mode that the umask gives."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from latentcache.errors import StoreError, UnsafeStoreError
from latentcache.utils.durable_files import read_small_file, sealed_file, sweep_temporaries, write_all, write_sealed


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
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


def test_a_small_file_is_read_and_a_large_one_refused(tmp_path: Path) -> None:
    write_sealed(tmp_path / "file", b"data")
    assert read_small_file(tmp_path / "file", 4, "x") == b"data"
    with pytest.raises(UnsafeStoreError, match="more than 3 bytes"):
        read_small_file(tmp_path / "file", 3, "x")
    with pytest.raises(FileNotFoundError):
        read_small_file(tmp_path / "none", 3, "x")
    with pytest.raises(StoreError, match="cannot be read now"):
        read_small_file(tmp_path, 3, "x")


def test_what_dead_writers_left_is_swept_and_what_others_write_stays(tmp_path: Path) -> None:
    (tmp_path / ".dead.tmp").write_bytes(b"half")
    with sealed_file(tmp_path / "alive", 4) as fd:
        sweep_temporaries(tmp_path)
        assert not (tmp_path / ".dead.tmp").exists()
        write_all(fd, b"data")
    assert os.listdir(tmp_path) == ["alive"]


def test_a_file_that_cannot_be_looked_at_is_not_left_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(Path, "exists", Mock(side_effect=OSError(errno.EIO, "the disk fails")))
    with pytest.raises(StoreError, match="the disk fails"):
        write_sealed(tmp_path / "file", b"data")
    assert os.listdir("/proc/self/fd") == before and os.listdir(tmp_path) == []
