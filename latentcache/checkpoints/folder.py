"""A checkpoint on disk: a folder of safetensors files and one `checkpoint.json`, whole or not there.

`checkpoint.json` names each data file with its size and BLAKE3 digest, and holds a digest of itself. A new checkpoint
is written as a sibling folder, synced, and renamed. One that exists is replaced without a moment in which there is
none: the new data files are written next to the old ones, under names of their own, and the rename of
`checkpoint.json` decides. The old files are removed last. After a crash the folder holds the old checkpoint or the new
one; the next save removes what is left over.
"""

from __future__ import annotations

import fcntl
import glob
import json
import mmap
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from latentcache.errors import CheckpointError, StoreError
from latentcache.identity import digest
from latentcache.utils.durable_files import (
    TEMPORARY_SUFFIX,
    sweep_temporaries,
    sync_folder,
    write_sealed,
)

CHECKPOINT_FORMAT = 1
DOCUMENT = "checkpoint.json"
_DATA_FILE = re.compile(r"[a-z]+-[0-9a-f]{32}\.safetensors")


def write_checkpoint(folder: Path, document: Mapping[str, Any], data: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Write the tensors of each part (CPU, contiguous, none sharing memory) and the document that goes with them.

    CheckpointError: the folder is as it was. It may be missing, empty, or hold a checkpoint; anything else is refused.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if _holds_checkpoint(folder):
            _replace(folder, document, data)
        else:
            _create(folder, document, data)
    except (OSError, SafetensorError, StoreError) as error:
        num_bytes = sum(tensor.nbytes for tensors in data.values() for tensor in tensors.values())
        raise CheckpointError(
            folder, f"{num_bytes:,} bytes cannot be written: {error}. The folder is as it was."
        ) from error


def read_document(folder: Path) -> dict[str, Any]:
    """The document of a checkpoint, its digest compared. CheckpointError if there is none, or it is damaged."""
    path = folder / DOCUMENT
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(folder, f"holds no checkpoint: there is no {DOCUMENT}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"cannot be read: {error}; use an earlier checkpoint") from error
    found = document.get("format") if isinstance(document, dict) else None
    if found != CHECKPOINT_FORMAT:
        raise CheckpointError(path, f"has format {found!r}, this latentcache reads {CHECKPOINT_FORMAT}")
    if document.pop("digest", None) != digest(_json_bytes(document)):
        raise CheckpointError(path, "is damaged: its digest is another; use an earlier checkpoint")
    return document


def read_tensors(folder: Path, document: Mapping[str, Any], part: str) -> dict[str, torch.Tensor]:
    """The tensors of a part, on the CPU in memory of their own, after size and digest were compared."""
    entry = document["files"].get(part)
    if entry is None:
        return {}
    if not _DATA_FILE.fullmatch(entry["name"]):
        raise CheckpointError(folder / DOCUMENT, f"names the file {entry['name']!r}, which no checkpoint has")
    path = folder / entry["name"]
    try:
        found_bytes = path.stat().st_size
        if found_bytes != entry["num_bytes"]:
            detail = f"is damaged: {found_bytes:,} bytes, not {entry['num_bytes']:,}; use an earlier checkpoint"
            raise CheckpointError(path, detail)
        if file_digest(path) != entry["digest"]:
            raise CheckpointError(path, "is damaged: its digest is another; use an earlier checkpoint")
        with safe_open(path, framework="pt") as file:
            # A clone: the tensors that safetensors gives are views of the file.
            return {name: file.get_tensor(name).clone() for name in file.keys()}
    except FileNotFoundError as error:
        raise CheckpointError(path, "is gone: a newer save may have replaced the checkpoint; load again") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(path, f"cannot be read: {error}; use an earlier checkpoint") from error


def file_digest(path: Path) -> str:
    """BLAKE3 of a file that is not empty."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        view = memoryview(mapping)
        try:
            return digest(view)
        finally:
            view.release()


def _holds_checkpoint(folder: Path) -> bool:
    if folder.is_symlink():
        raise CheckpointError(folder, "is a link; name the folder itself")
    if not folder.exists():
        return False
    if not folder.is_dir():
        raise CheckpointError(folder, "is a file; name a folder")
    if (folder / DOCUMENT).is_file():
        return True
    if any(folder.iterdir()):
        raise CheckpointError(folder, f"holds files but no {DOCUMENT}; it is left as it is, name another folder")
    return False


def _create(folder: Path, document: Mapping[str, Any], data: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    _sweep_dead_siblings(folder)
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")
    temporary.mkdir()
    with _locked(temporary):
        try:
            sealed = {**document, "files": _write_data(temporary, data)}
            write_sealed(temporary / DOCUMENT, _sealed_bytes(sealed))
            temporary.rename(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    sync_folder(folder.parent)


def _replace(folder: Path, document: Mapping[str, Any], data: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    with _locked(folder):
        sweep_temporaries(folder)
        try:
            sealed = {**document, "files": _write_data(folder, data)}
            write_sealed(folder / DOCUMENT, _sealed_bytes(sealed))
        finally:
            # Also after an error: the files of the document that is there then stay, and no others.
            named = json.loads((folder / DOCUMENT).read_bytes()).get("files", {})
            keep = {entry["name"] for entry in named.values()}
            for name in os.listdir(folder):
                if _DATA_FILE.fullmatch(name) and name not in keep:
                    (folder / name).unlink(missing_ok=True)


def _write_data(folder: Path, data: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, dict[str, Any]]:
    files = {}
    for part, tensors in data.items():
        if not tensors:
            continue
        path = folder / f"{part}-{uuid.uuid4().hex}.safetensors"
        save_file(dict(tensors), path, metadata={"format": "pt"})
        # safetensors writes files that only their owner may read, and does not sync them.
        path.chmod(folder.stat().st_mode & 0o666)
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        files[part] = {"name": path.name, "num_bytes": path.stat().st_size, "digest": file_digest(path)}
    sync_folder(folder)
    return files


def _sealed_bytes(document: Mapping[str, Any]) -> bytes:
    document = {**document, "format": CHECKPOINT_FORMAT}
    return _json_bytes({**document, "digest": digest(_json_bytes(document))})


def _json_bytes(document: Mapping[str, Any]) -> bytes:
    # The order of keys is kept: a state_dict's is part of it. Reading and writing again gives the same bytes.
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. A writer that lives holds it, so that no other writer removes its files."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(folder, "another process is writing it; give each process its own folder") from error
        yield
    finally:
        with suppress(OSError):  # a fork has the same lock, and may live on
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _sweep_dead_siblings(folder: Path) -> None:
    """Remove what earlier writers of this folder left when they died. A writer that lives holds its folder's lock."""
    for path in folder.parent.glob(f".{glob.escape(folder.name)}.*{TEMPORARY_SUFFIX}"):
        if path.is_dir() and not path.is_symlink():
            # CheckpointError: its writer lives. FileNotFoundError: its writer has just renamed it.
            with suppress(CheckpointError, FileNotFoundError), _locked(path):
                shutil.rmtree(path)
