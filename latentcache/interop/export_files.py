"""The files of an export: written whole or not at all, and never over what is there without being told to."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from latentcache.errors import StoreError
from latentcache.interop.exporting import ExportSample
from latentcache.interop.reports import ExportReport
from latentcache.types import Refusal
from latentcache.utils.durable_files import typed_errors, write_sealed


class WrittenFiles:
    """Writes the files of one export and counts them in its report."""

    def __init__(self, report: ExportReport, *, overwrite: bool):
        self._report, self._overwrite = report, overwrite
        self._written: set[Path] = set()

    def __contains__(self, path: Path) -> bool:
        return path in self._written

    def write(self, path: Path, data: bytes, sample: ExportSample) -> bool:
        """Write one file of `sample`; False, and a line in the report, if another sample or another program did.

        So for a name that is too long. Raises ReadOnlyError, StorageFullError or StoreError.
        """
        if path in self._written or (os.path.exists(path) and not self._overwrite):
            who = "another sample has this file" if path in self._written else "it is there already: give --overwrite"
            self._report.skipped.append(Refusal(sample.sample_id, str(path), "duplicate", who))
            return False
        try:
            with typed_errors(path, len(data)):
                path.parent.mkdir(parents=True, exist_ok=True)
            write_sealed(path, data)
        except StoreError as error:
            if getattr(error.__cause__, "errno", None) != errno.ENAMETOOLONG:
                raise
            detail = f"its name is too long for a file here: {len(path.name)} characters"
            self._report.skipped.append(Refusal(sample.sample_id, str(path), "unreadable", detail))
            return False
        self._written.add(path)
        self._report.num_files += 1
        self._report.bytes_written += len(data)
        return True
