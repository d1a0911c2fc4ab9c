"""The file system that a path lies on: its type, whether it is a network's, and the space left."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from latentcache.doctor.diagnosis import Finding

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
    """`path` is the folder, or its nearest parent that exists. `type` is None where the system does not report it."""

    path: Path
    type: str | None
    mounted_at: str | None
    free_bytes: int
    total_bytes: int
    writable: bool

    @property
    def is_network(self) -> bool | None:
        """Whether other hosts may write there too. FUSE counts, as it may serve anything. None: unknown."""
        if self.type is None:
            return None
        return self.type in NETWORK_TYPES or self.type.startswith("fuse.")

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values: the fields, and `network`."""
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
    kind, mounted_at = mount_of(there) or (None, None)
    space = psutil.disk_usage(os.fspath(there))
    return FileSystem(there, kind, mounted_at, space.free, space.total, writable=os.access(there, os.W_OK))


def mount_of(path: Path) -> tuple[str, str] | None:
    """Type and mount point that hold a resolved path; None where the system does not list its mounts.

    psutil lists the mounts; it does not say which of them a path is on.
    """
    try:
        mounts = psutil.disk_partitions(all=True)
    except OSError:  # e.g. no /proc
        return None
    found: tuple[str, str] | None = None
    for mount in mounts:
        # Of two mounts at one point the later one covers the other.
        if path.is_relative_to(mount.mountpoint) and (found is None or len(mount.mountpoint) >= len(found[1])):
            found = (mount.fstype, mount.mountpoint)
    return found


def check_filesystem(system: FileSystem, journal_mode: str | None = None) -> list[Finding]:
    """Findings about the cache's file system. `journal_mode` is that of the cache's index, `wal` or `delete`."""
    findings = [_check_type(system, journal_mode)]
    if not system.writable:
        found = f"{system.path} cannot be written: the cache can only be read"
        findings.append(Finding("warning", "cache", found, "change its permissions"))
    free = f"{system.free_bytes / 1e9:.1f} GB free of {system.total_bytes / 1e9:.1f} GB"
    if system.free_bytes < LITTLE_BYTES:
        found = f"{free}: room for about {system.free_bytes // 10**6} samples"
        findings.append(Finding("warning", "cache space", found, "free some"))
    else:
        findings.append(Finding("ok", "cache space", free))
    return findings


def _check_type(system: FileSystem, journal_mode: str | None) -> Finding:
    subject, where = "cache file system", f"{system.path} on {system.type or 'an unknown type'}"
    if system.is_network and journal_mode == "wal":
        # https://www.sqlite.org/wal.html: "WAL does not work over a network filesystem".
        found = f"{where}: a network file system, on which the index's journal mode wal does not work between hosts"
        return Finding("error", subject, found, "put the cache on a local disk (cache.path)")
    if system.is_network:
        found = f"{where}: a network file system: two hosts that write to one cache are not tested"
        remedy = "put the cache on a local disk, or let only one host write to it at a time"
        return Finding("warning", subject, found, remedy)
    if system.type in PASSING_TYPES:
        remedy = "name a folder on a disk or a volume if the cache is to stay (cache.path)"
        return Finding("note", subject, f"{where}, which {PASSING_TYPES[system.type]}", remedy)
    if system.type is None:
        return Finding("note", subject, f"{where}: this system does not report it")
    return Finding("ok", subject, f"{where}, local")
