"""Whole files: replaced or left as they were, with the mode that the umask gives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from latentcache.errors import ReadOnlyError, StorageFullError
from latentcache.files import sweep_temporaries, write_sealed


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
    assert "not looked through" in caplog.text
