"""The manifests as the page reads them: heads each time, whole ones once until their file changes."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import numpy as np

from latentcache.config import PROMPTS_PREFIX
from latentcache.dataset.manifest import REMEDY, Manifest
from latentcache.dataset.manifest_folder import MAX_BYTES, ManifestFolder
from latentcache.dataset.manifest_row import Row, parse_line
from latentcache.dataset.row_table import RowTable, RowTableBuilder
from latentcache.errors import RequestRefused, StoreError
from latentcache.types import Size
from latentcache.utils.durable_files import regular_file

HEAD_ROWS = 64
MAX_VIEWED_BYTES = 1 << 30
"""Of the files whose views stay in memory, which take about as much. One view stays, however large it is."""
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
    """A whole manifest, and what is counted of its rows once."""

    manifest: Manifest
    rows: RowTable
    state: FileState

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
    """Views of the manifests in a folder. Threads share it; a view takes some 250 bytes a sample, once it is needed.

    Those that were used last stay in memory.
    """

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
                tuple(_rows_of(lines)),
                state,
            )
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            # The reader of whole manifests says what is wrong with it.
            view = self.view(name)
            found = view.manifest
            rows = tuple(view.rows.rows(0, HEAD_ROWS))
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
                view = self._views[name] = ManifestView(manifest, RowTable.of(manifest.rows), state)
            self._views.move_to_end(name)
            num_bytes = sum(each.state.num_bytes for each in self._views.values())
            while num_bytes > MAX_VIEWED_BYTES and len(self._views) > 1:
                num_bytes -= self._views.popitem(last=False)[1].state.num_bytes
            return view

    def page(self, name: str, offset: int, limit: int, search: str) -> tuple[int, list[Row]]:
        """As `ManifestView.page`."""
        return self.view(name).page(offset, limit, search)


def _rows_of(lines: list[bytes]) -> list[Row]:
    builder = RowTableBuilder()
    builder.add_lines([parse_line(line) for line in lines])
    return builder.finish().rows(0, len(lines))


def _unknown(name: str, known: list[str]) -> RequestRefused:
    there = ", ".join(known) or "none yet: run latentcache precache"
    return RequestRefused(f"no dataset {name!r:.100}; there are: {there}", status=404)
