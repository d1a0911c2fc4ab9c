"""The cache's disk: which mount holds a path, network file systems by name, and the journal mode there."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

from latentcache.doctor.environment import FileSystem, check_filesystem, filesystem_of, filesystem_type

MOUNTS = """\
proc /proc proc rw,relatime 0 0
/dev/vda / ext4 rw,discard 0 0
tmpfs /mnt tmpfs rw,relatime 0 0
server:/export /mnt/data nfs4 rw,vers=4.2 0 0
me@host: /mnt/data/two\\040words fuse.sshfs rw 0 0
/dev/sda1 /home xfs rw 0 0
//server/home /home cifs rw 0 0
"""


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that psutil reads the mounts from; see proc(5)."""
    (tmp_path / "self").mkdir()
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    return tmp_path / "self" / "mounts"


@pytest.mark.skipif(not psutil.LINUX, reason="/proc is Linux's")
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", "ext4"),
        ("/var/cache", "ext4"),
        ("/mnt", "tmpfs"),
        ("/mnt/database", "tmpfs"),  # not below /mnt/data, although the text begins so
        ("/mnt/data/cache", "nfs4"),
        ("/mnt/data/two words/cache", "fuse.sshfs"),
        ("/home/me", "cifs"),  # the later of two mounts at one point covers the other
    ],
)
def test_the_mount_that_holds_a_path(mounts: Path, path: str, expected: str) -> None:
    mounts.write_text(MOUNTS)
    assert filesystem_type(Path(path)) == expected


@pytest.mark.skipif(not psutil.LINUX, reason="/proc is Linux's")
def test_no_mounts_no_answer(mounts: Path) -> None:
    assert filesystem_type(Path("/x")) is None, "there is no such file"
    mounts.write_text("")
    assert filesystem_type(Path("/x")) is None


@pytest.mark.skipif(shutil.which("stat") is None or not psutil.LINUX, reason="needs stat of GNU coreutils")
def test_a_real_path_agrees_with_the_operating_system(tmp_path: Path) -> None:
    system = filesystem_of(tmp_path / "not" / "there" / "yet")
    assert system.path == str(tmp_path.resolve()) and system.writable
    # stat(1) asks statfs(2), a different source; its name for the ext family is one for all of them.
    reported = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], check=True, capture_output=True, text=True).stdout
    assert system.filesystem is not None
    if reported.strip() == "ext2/ext3":
        assert system.filesystem in {"ext2", "ext3", "ext4"}
    else:
        assert system.filesystem in {reported.strip(), f"{reported.strip()}fs", reported.strip().removesuffix("fs")}
    space = os.statvfs(tmp_path)
    assert system.total_bytes == space.f_blocks * space.f_frsize
    assert 0 < system.free_bytes <= system.total_bytes


def system_of(kind: str | None, *, free_bytes: int = 10**12, writable: bool = True) -> FileSystem:
    return FileSystem("/c", kind, free_bytes=free_bytes, total_bytes=2 * 10**12, writable=writable)


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "9p", "fuse.sshfs", "fuse.juicefs"])
def test_network_file_systems_are_named(kind: str) -> None:
    finding = check_filesystem(system_of(kind))[0]
    assert finding.level == "warning" and kind in finding.found and "network" in finding.found
    assert "local disk" in finding.remedy
    assert system_of(kind).to_json()["network"] is True


@pytest.mark.parametrize(
    ("kind", "level", "says"),
    [
        ("ext4", "ok", "local"),
        ("xfs", "ok", "local"),
        ("fuseblk", "ok", "local"),
        ("tmpfs", "note", "memory"),
        ("overlay", "note", "container"),
        (None, "note", "does not report"),
    ],
)
def test_local_and_passing_file_systems(kind: str | None, level: str, says: str) -> None:
    findings = check_filesystem(system_of(kind))
    assert (findings[0].level, findings[1].level) == (level, "ok") and says in findings[0].found


def test_little_space_and_no_right_to_write_are_warnings() -> None:
    findings = check_filesystem(system_of("ext4", free_bytes=500_000_000, writable=False))
    warnings = {finding.subject: finding for finding in findings if finding.level == "warning"}
    assert set(warnings) == {"cache", "cache space"}
    assert "about 500 samples" in warnings["cache space"].found and "cannot be written" in warnings["cache"].found
    assert check_filesystem(system_of("ext4", free_bytes=10**9))[-1].level == "ok"
