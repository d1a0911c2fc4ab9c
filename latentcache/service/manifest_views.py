"""The manifests as the page reads them: once, until their file changes."""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from latentcache.config import PROMPTS_PREFIX
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.dataset.manifest_row import Row
from latentcache.dataset.row_table import RowTable
from latentcache.errors import RequestRefused, StoreError
from latentcache.types import Size

MAX_VIEWED_BYTES = 1 << 30
"""The most that files have whose views stay in memory. One view stays, however large it is."""


@dataclass(frozen=True, slots=True)
class FileState:
    """What changes when a manifest's file is replaced. `mtime_ns` is when it was written."""

    inode: int
    num_bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class ManifestView:
    """A whole manifest, and what is counted of its rows once."""

    manifest: Manifest
    state: FileState

    @property
    def rows(self) -> RowTable:
        """Its samples."""
        return self.manifest.rows

    @property
    def name(self) -> str:
        """The dataset's name."""
        return self.manifest.name

    @cached_property
    def buckets(self) -> Counter[Size]:
        """How many samples lie in each bucket."""
        return self._counted("target_size")

    @cached_property
    def original_sizes(self) -> Counter[Size]:
        """How many photos have each size."""
        return self._counted("original_size")

    def _counted(self, name: Literal["original_size", "target_size"]) -> Counter[Size]:
        sizes, counts = np.unique(self.rows.first_sizes(name), axis=0, return_counts=True)
        pairs = zip(sizes.tolist(), counts.tolist(), strict=True)
        return Counter({Size(*size): count for size, count in pairs if size[0]})

    def page(self, offset: int, limit: int, search: str) -> tuple[int, list[Row]]:
        """How many samples there are, and `limit` of them from number `offset` on.

        With `search` only those count whose id or one of whose captions has this text, in upper or lower case.
        """
        needle = search.casefold()
        if not needle:
            return len(self.rows), self.rows.rows(offset, offset + limit)
        total, found = 0, []
        for row in self.rows.values():
            if any(needle in text.casefold() for text in (row.sample_id, *(ref.text for ref in row.captions))):
                if offset <= total < offset + limit:
                    found.append(row)
                total += 1
        return total, found


class ManifestViews:
    """Views of the manifests in a folder. Threads share it. Those that were used last stay in memory."""

    def __init__(self, manifests: ManifestFolder):
        self.manifests = manifests
        self._views = OrderedDict[str, ManifestView]()
        self._lock = threading.Lock()

    def dataset_names(self) -> list[str]:
        """Names of the manifests that hold samples, not prompts."""
        return [name for name in self.manifests.names() if not name.startswith(PROMPTS_PREFIX)]

    def state(self, name: str) -> FileState:
        """The state of a manifest's file now. RequestRefused if there is none of this name."""
        # The name comes from a request: only what the folder lists may become a path.
        if name not in self.manifests.names():
            raise _unknown(name, self.dataset_names())
        try:
            status = os.stat(self.manifests.file(name), follow_symlinks=False)
        except OSError as error:
            raise StoreError(f"manifest {name}: cannot be read now: {error.strerror}; try again") from error
        return FileState(status.st_ino, status.st_size, status.st_mtime_ns)

    def view(self, name: str) -> ManifestView:
        """The whole manifest: a fraction of a second for a million samples, at once if it is in memory.

        DatasetError, StoreError.
        """
        with self._lock:  # one thread reads, others wait for it
            view, state = self._views.get(name), self.state(name)
            if view is None or view.state != state:
                manifest = self.manifests.read(name)
                if manifest is None:
                    raise _unknown(name, self.dataset_names())
                view = self._views[name] = ManifestView(manifest, state)
            self._views.move_to_end(name)
            num_bytes = sum(each.state.num_bytes for each in self._views.values())
            while num_bytes > MAX_VIEWED_BYTES and len(self._views) > 1:
                num_bytes -= self._views.popitem(last=False)[1].state.num_bytes
            return view

    def page(self, name: str, offset: int, limit: int, search: str) -> tuple[int, list[Row]]:
        """See `ManifestView.page`."""
        return self.view(name).page(offset, limit, search)


def _unknown(name: str, known: list[str]) -> RequestRefused:
    there = ", ".join(known) or "none yet: run latentcache precache"
    return RequestRefused(f"no dataset {name!r:.100}; there are: {there}", status=404)
