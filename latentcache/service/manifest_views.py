"""The manifests as the page reads them: heads each time, whole ones once until their file changes."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from latentcache.config import PROMPTS_PREFIX
from latentcache.dataset.manifest import MAX_BYTES, REMEDY, Manifest, ManifestFolder, Row
from latentcache.errors import RequestRefused, StoreError
from latentcache.types import Size
from latentcache.utils.durable_files import regular_file

HEAD_ROWS = 64
_MAX_LINE_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class FileState:
    """What changes when a manifest's file is replaced. `mtime_ns` is when it was written."""

    inode: int
    num_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class ManifestHead:
    """What the first lines of a manifest say, not compared with its digest: to be shown, and for nothing else.

    `rows` are the first HEAD_ROWS of its `num_samples`.
    """

    name: str
    role: str
    num_samples: int
    repeats: int
    common: Mapping[str, Any]
    rows: tuple[Row, ...]
    state: FileState

    @property
    def imported_from(self) -> str | None:
        """The format of the foreign cache that it was imported from; None for a manifest of precache."""
        imported = self.common.get("imported")
        return None if imported is None else imported["format"]


@dataclass(frozen=True)
class ManifestView:
    """A whole manifest, its rows in their order, and what is counted of them once."""

    manifest: Manifest
    rows: tuple[Row, ...]
    state: FileState

    @property
    def name(self) -> str:
        """The dataset's name."""
        return self.manifest.name

    @cached_property
    def buckets(self) -> Counter[Size]:
        """How many samples lie in each bucket."""
        return Counter(row.images[0].geometry.target_size for row in self.rows if row.images)

    @cached_property
    def original_sizes(self) -> Counter[Size]:
        """How many photos have each size."""
        return Counter(row.images[0].geometry.original_size for row in self.rows if row.images)

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """The number of each sample's row."""
        return {row.sample_id: number for number, row in enumerate(self.rows)}


class ManifestViews:
    """Views of the manifests in a folder. Threads share it; a view takes about 1 KB a sample, once it is needed."""

    def __init__(self, manifests: ManifestFolder):
        self.manifests = manifests
        self._views: dict[str, ManifestView] = {}
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
            status = os.stat(self.manifests.path / f"{name}.jsonl", follow_symlinks=False)
        except OSError as error:
            raise StoreError(f"manifest {name}: cannot be read now: {error.strerror}; try again") from error
        return FileState(status.st_ino, status.st_size, status.st_mtime_ns)

    def head(self, name: str) -> ManifestHead:
        """The first lines, in milliseconds however long the manifest is. DatasetError, StoreError."""
        state = self.state(name)
        try:
            with regular_file(self.manifests.path / f"{name}.jsonl", MAX_BYTES, REMEDY) as file:
                header, *lines = islice(iter(lambda: file.readline(_MAX_LINE_BYTES), b""), HEAD_ROWS + 1)
            header = json.loads(header)
            return ManifestHead(
                name,
                str(header["role"]),
                int(header["num_samples"]),
                int(header["repeats"]),
                header["common"],
                tuple(Row.from_json(json.loads(line)) for line in lines),
                state,
            )
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            # The reader of whole manifests says what is wrong with it.
            view = self.view(name)
            found = view.manifest
            rows = view.rows[:HEAD_ROWS]
            return ManifestHead(name, found.role, len(view.rows), found.repeats, found.common, rows, view.state)

    def known(self, name: str) -> ManifestView | None:
        """The view if it is in memory and still that of the file."""
        view = self._views.get(name)
        return view if view is not None and view.state == self.state(name) else None

    def view(self, name: str) -> ManifestView:
        """The whole manifest: seconds for a hundred thousand samples, at once if it is in memory.

        DatasetError, StoreError.
        """
        with self._lock:  # one thread reads, others wait for it
            view = self.known(name)
            if view is None:
                state = self.state(name)
                manifest = self.manifests.read(name)
                if manifest is None:
                    raise _unknown(name, self.dataset_names())
                view = self._views[name] = ManifestView(manifest, tuple(manifest.rows.values()), state)
            return view


def _unknown(name: str, known: list[str]) -> RequestRefused:
    there = ", ".join(known) or "none yet: run latentcache precache"
    return RequestRefused(f"no dataset {name!r:.100}; there are: {there}", status=404)
