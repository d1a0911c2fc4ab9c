"""What `energon prepare` adds to WebDataset shards, as Megatron-Energon 7 reads it.

`<shard>.tar.idx` has the offset of each sample in the tar and the end of the last one, as uint64. The folder `.nv-meta`
has `.info.json` (samples of each shard), `split.yaml` (shards of each part), `dataset.yaml` (the class that reads them:
`CrudeWebdataset`, whose samples are the members by name) and `index.sqlite` (where each sample and member is).
"""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import uuid
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import yaml

from latentcache.interop.shards import ShardExport
from latentcache.utils.durable_files import make_folder, sync_folder, typed_errors

_FOLDER = ".nv-meta"
_TABLES = """
CREATE TABLE samples (tar_file_id INTEGER NOT NULL, sample_key TEXT NOT NULL UNIQUE, sample_index INTEGER NOT NULL,
    byte_offset INTEGER, byte_size INTEGER);
CREATE TABLE sample_parts (tar_file_id INTEGER, sample_index INTEGER, part_name TEXT, content_byte_offset INTEGER,
    content_byte_size INTEGER);
"""
_INDEXES = """
CREATE INDEX idx_samples_by_tar_and_idx ON samples(tar_file_id, sample_index);
CREATE INDEX idx_sample_parts_seq ON sample_parts(tar_file_id, sample_index, content_byte_offset);
CREATE INDEX idx_sample_parts_full ON sample_parts(tar_file_id, sample_index, part_name, content_byte_offset,
    content_byte_size);
"""


class EnergonIndex:
    """The metadata of an export, which grows shard by shard."""

    def __init__(self, run: ShardExport):
        self._run = run
        self._folder = run.folder / _FOLDER
        self._counts: dict[str, int] = {}

    def add(self, shard: str, samples: Sequence[tuple[str, int, Sequence[tuple[str, int, int]]]], end: int) -> None:
        """Add a tar that ends, but for its end mark, at byte `end`.

        `samples`: key, offset of the first header, and the members as (name without the key, offset, size).
        """
        number = len(self._counts)
        self._counts[shard] = len(samples)
        offsets = [*(start for _, start, _ in samples), end]
        self._run.write_small(f"{shard}.idx", struct.pack(f"<{len(offsets)}Q", *offsets))
        with typed_errors(self._database, 0):
            make_folder(self._folder)
        with closing(sqlite3.connect(self._database)) as database, database:
            if number == 0:
                database.executescript(_TABLES)
            database.executemany(
                "INSERT INTO samples VALUES (?, ?, ?, ?, ?)",
                (
                    (number, key, index, start, offsets[index + 1] - start)
                    for index, (key, start, _) in enumerate(samples)
                ),
            )
            database.executemany(
                "INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)",
                ((number, index, *part) for index, (_, _, parts) in enumerate(samples) for part in parts),
            )

    @property
    def _database(self) -> Path:
        """It becomes index.sqlite when it is whole."""
        return self._folder / "index.sqlite.tmp"

    def finish(self, role: str) -> None:
        """Write the small files, and the database to its name. All samples are of the part `train`, or of `val`."""
        with closing(sqlite3.connect(self._database)) as database, database:
            database.executescript(_INDEXES)
        with typed_errors(self._database, 0):
            os.rename(self._database, self._folder / "index.sqlite")
            sync_folder(self._folder)
            self._run.report.bytes_written += (self._folder / "index.sqlite").stat().st_size
        self._run.report.num_files += 1
        shards = list(self._counts)
        parts = (
            {"train": [], "val": shards, "test": []}
            if role == "validation"
            else {"train": shards, "val": [], "test": []}
        )
        reader = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
        split = {"split_parts": parts, "exclude": []}
        self._run.write_small(f"{_FOLDER}/index.uuid", str(uuid.uuid4()).encode())
        self._run.write_small(f"{_FOLDER}/dataset.yaml", yaml.safe_dump(reader, sort_keys=False).encode())
        self._run.write_small(f"{_FOLDER}/split.yaml", yaml.safe_dump(split, sort_keys=False).encode())
        self._run.write_small(f"{_FOLDER}/.info.json", json.dumps({"shard_counts": self._counts}, indent=2).encode())
