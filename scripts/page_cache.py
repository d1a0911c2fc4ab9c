"""The system's page cache: which pages of a file lie in it, and how to drop them."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np


def drop(paths: Iterable[Path]) -> None:
    """Drop files from the page cache. They must not be mapped."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_pages(path: Path) -> np.ndarray:
    """Of each page of a file whether it lies in the page cache: bool [pages]. OSError where the system does not say.

    `mincore` says it without reading: a read with RWF_NOWAIT begins to read what is not there, and sometimes finds it.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        pages = np.zeros(-(-len(memory) // mmap.PAGESIZE), np.uint8)
        start = ctypes.c_void_p(np.frombuffer(memory, np.uint8).ctypes.data)
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        if mincore(start, ctypes.c_size_t(len(memory)), ctypes.c_void_p(pages.ctypes.data)):
            raise OSError(ctypes.get_errno(), "mincore failed", str(path))
    return (pages & 1).astype(bool)
