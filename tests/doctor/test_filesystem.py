"""The cache's disk: which mount holds a path, network file systems by name, and the journal mode there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from latentcache.doctor.filesystem import FileSystem, check_filesystem, filesystem_of, mount_of

MOUNTINFO = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
30 27 0:30 / /mnt rw,relatime shared:1 - tmpfs tmpfs rw
31 30 0:41 / /mnt/data rw,relatime shared:2 master:3 - nfs4 server:/export rw,vers=4.2
32 31 0:42 / /mnt/data/two\\040words rw - fuse.sshfs me@host: rw
33 27 0:43 / /home rw - xfs /dev/sda1 rw
34 27 0:44 / /home rw - cifs //server/home rw
a line that is not one
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", ("ext4", "/")),
        ("/var/cache", ("ext4", "/")),
        ("/mnt", ("tmpfs", "/mnt")),
        ("/mnt/database", ("tmpfs", "/mnt")),  # not below /mnt/data, although the text begins so
        ("/mnt/data/cache", ("nfs4", "/mnt/data")),
        ("/mnt/data/two words/cache", ("fuse.sshfs", "/mnt/data/two words")),
        ("/home/me", ("cifs", "/home")),  # the later of two mounts at one point covers the other
    ],
)
def test_the_mount_that_holds_a_path(path: str, expected: tuple[str, str]) -> None:
    assert mount_of(Path(path), MOUNTINFO) == expected


def test_no_mounts_no_answer() -> None:
    assert mount_of(Path("/x"), "") is None


@pytest.mark.skipif(not Path("/proc/self/mountinfo").exists(), reason="only Linux tells the type of a file system")
def test_a_real_path_agrees_with_the_operating_system(tmp_path: Path) -> None:
    system = filesystem_of(tmp_path / "not" / "there" / "yet")
    assert system.path == tmp_path.resolve() and system.writable
    # stat(1) asks statfs(2), a different source; its name for the ext family is one for all of them.
    told = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], check=True, capture_output=True, text=True).stdout
    assert system.type is not None
    if told.strip() == "ext2/ext3":
        assert system.type in {"ext2", "ext3", "ext4"}
    else:
        assert system.type in {told.strip(), f"{told.strip()}fs", told.strip().removesuffix("fs")}
    space = os.statvfs(tmp_path)
    assert system.total_bytes == space.f_blocks * space.f_frsize
    assert 0 < system.free_bytes <= system.total_bytes
    assert os.path.ismount(system.mounted_at or "")


def system_of(kind: str | None, *, free_bytes: int = 10**12, writable: bool = True) -> FileSystem:
    return FileSystem(Path("/c"), kind, "/", free_bytes=free_bytes, total_bytes=2 * 10**12, writable=writable)


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "9p", "fuse.sshfs", "fuse.juicefs"])
def test_network_file_systems_are_named(kind: str) -> None:
    for mode, level in (("wal", "error"), ("delete", "warning"), (None, "warning")):
        finding = check_filesystem(system_of(kind), mode)[0]
        assert finding.level == level and kind in finding.found and "network" in finding.found
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
        (None, "note", "does not tell"),
    ],
)
def test_local_and_passing_file_systems(kind: str | None, level: str, says: str) -> None:
    findings = check_filesystem(system_of(kind), "wal")
    assert (findings[0].level, findings[1].level) == (level, "ok") and says in findings[0].found


def test_little_space_and_no_right_to_write_are_warnings() -> None:
    findings = check_filesystem(system_of("ext4", free_bytes=500_000_000, writable=False))
    warnings = {finding.subject: finding for finding in findings if finding.level == "warning"}
    assert set(warnings) == {"cache", "cache space"}
    assert "about 500 samples" in warnings["cache space"].found and "cannot be written" in warnings["cache"].found
    assert check_filesystem(system_of("ext4", free_bytes=10**9))[-1].level == "ok"
