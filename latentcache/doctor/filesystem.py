"""The file system that a path lies on: its type, whether it is a network's, and the space left."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latentcache.doctor.diagnosis import Finding

MOUNTS = Path("/proc/self/mountinfo")  # Linux; see proc(5)
NETWORK_TYPES = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "davfs", "fhgfs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4"}
    | {"ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs"}
)
PASSING_TYPES = {
    "tmpfs": "is memory: the cache is gone after a restart",
    "ramfs": "is memory: the cache is gone after a restart",
    "overlay": "is a container's own layer: the cache is gone with the container",
}
LITTLE_BYTES = 1_000_000_000
"""An SDXL image of 1024x1024 with its caption takes about 1 MB in the cache, so this is a thousand samples."""


@dataclass(frozen=True, slots=True)
class FileSystem:
    """`path` is the folder, or its nearest parent that exists. `type` is None where the system does not tell."""

    path: Path
    type: str | None
    mounted_at: str | None
    free_bytes: int
    total_bytes: int
    writable: bool

    @property
    def is_network(self) -> bool | None:
        """Whether other hosts may write there too. FUSE counts: what is behind it cannot be seen. None: unknown."""
        if self.type is None:
            return None
        return self.type in NETWORK_TYPES or self.type.startswith("fuse.")

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "filesystem": self.type,
            "mounted_at": self.mounted_at,
            "network": self.is_network,
            "free_bytes": self.free_bytes,
            "total_bytes": self.total_bytes,
            "writable": self.writable,
        }


def filesystem_of(path: Path) -> FileSystem:
    """The file system of `path`; of its nearest parent that exists where it does not exist yet."""
    there = Path(os.path.realpath(path))
    while not there.exists():
        there = there.parent
    mount = mount_of(there, os.fsdecode(MOUNTS.read_bytes())) if MOUNTS.exists() else None
    kind, mounted_at = mount or (None, None)
    space = os.statvfs(there)
    return FileSystem(
        path=there,
        type=kind,
        mounted_at=mounted_at,
        free_bytes=space.f_bavail * space.f_frsize,
        total_bytes=space.f_blocks * space.f_frsize,
        writable=os.access(there, os.W_OK),
    )


def mount_of(path: Path, mountinfo: str) -> tuple[str, str] | None:
    """Type and mount point that hold a resolved path, from the text of /proc/self/mountinfo."""
    found: tuple[str, str] | None = None
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields, kinds = before.split(" "), after.split(" ")
        if not separator or len(fields) < 5:
            continue
        # The file writes blanks, tabs and newlines of a name as three octal digits.
        point = re.sub(r"\\([0-7]{3})", lambda digits: chr(int(digits[1], 8)), fields[4])
        # Of two mounts at one point the later one covers the other.
        if path.is_relative_to(point) and (found is None or len(point) >= len(found[1])):
            found = (kinds[0], point)
    return found


def check_filesystem(system: FileSystem, journal_mode: str | None = None) -> list[Finding]:
    """Findings about the cache's file system. `journal_mode` is that of the cache's index, `wal` or `delete`."""
    where = f"{system.path} on {system.type or 'an unknown type'}"
    if system.is_network and journal_mode == "wal":
        # https://www.sqlite.org/wal.html: "WAL does not work over a network filesystem".
        findings = [
            Finding(
                "error",
                "cache file system",
                f"{where}: a network file system, on which the index's journal mode wal does not work between hosts",
                "put the cache on a local disk (cache.path)",
            )
        ]
    elif system.is_network:
        findings = [
            Finding(
                "warning",
                "cache file system",
                f"{where}: a network file system: two hosts that write to one cache are not tested",
                "put the cache on a local disk, or let only one host write to it at a time",
            )
        ]
    elif system.type in PASSING_TYPES:
        findings = [
            Finding(
                "note",
                "cache file system",
                f"{where}, which {PASSING_TYPES[system.type]}",
                "name a folder on a disk or a volume if the cache is to stay (cache.path)",
            )
        ]
    elif system.type is None:
        findings = [Finding("note", "cache file system", f"{where}: this system does not tell")]
    else:
        findings = [Finding("ok", "cache file system", f"{where}, local")]
    free = f"{system.free_bytes / 1e9:.1f} GB free of {system.total_bytes / 1e9:.1f} GB"
    if not system.writable:
        findings.append(
            Finding(
                "warning", "cache", f"{system.path} cannot be written: the cache can only be read", "mend the rights"
            )
        )
    if system.free_bytes < LITTLE_BYTES:
        findings.append(
            Finding(
                "warning", "cache space", f"{free}: room for about {system.free_bytes // 10**6} samples", "free some"
            )
        )
    else:
        findings.append(Finding("ok", "cache space", free))
    return findings
