"""Opens the user's dataset: `open_source` chooses the reader for its layout."""

from __future__ import annotations

import glob
import os
import posixpath
from collections.abc import Sequence

from latentcache.config import PartConfig, SourceConfig, part_names
from latentcache.dataset.folder import CaptionFileSource, ImageFolderSource, PartFiles, check_extension, check_folder
from latentcache.dataset.parquet import ParquetSource
from latentcache.dataset.samples import SampleSource, walk
from latentcache.dataset.webdataset import SUFFIXES, WebDatasetSource
from latentcache.errors import DatasetError
from latentcache.types import Refusal


def open_source(config: SourceConfig, parts: Sequence[PartConfig] = (), *, videos: bool = False) -> SampleSource:
    """Open the dataset at `config.path`: a folder, a file, or a glob of tar or parquet files.

    A sample that lacks one of the companions `parts` is a Refusal. With `videos`, video files in a folder are samples
    too. Nothing is read before `samples` is called, which also detects an empty dataset. Raises ConfigError for a bad
    `caption_extension` and for a companion that would be the image itself, and DatasetError if the path holds no such
    dataset.
    """
    root = os.path.abspath(config.path)
    if config.kind in ("webdataset", "parquet"):
        columns = [str(part.column) for part in parts]
        if config.kind == "parquet":
            return ParquetSource(_files(root, (".parquet",)), config.image_column, config.caption_columns, columns)
        companions = tuple(zip(part_names(parts), columns, strict=True))
        return WebDatasetSource(_files(root, SUFFIXES), config.caption_columns, companions)
    files = PartFiles(root, parts)
    check_folder(root, "source.path")
    if config.kind == "imagefolder":
        return ImageFolderSource(root, config.caption_columns, files)
    check_extension(config.caption_extension, "source.caption_extension")
    joined = config.caption_lines == "joined"
    return CaptionFileSource(root, config.caption_extension, joined=joined, parts=files, videos=videos)


def _files(path: str, suffixes: tuple[str, ...]) -> list[tuple[str, str]]:
    """(name relative to the dataset, path) of the files with these suffixes: a file, or those of a folder or glob."""
    if os.path.isdir(path):
        files = []
        for found in walk(path):
            if isinstance(found, Refusal):  # or its samples would be missing silently
                raise DatasetError(found.path, found.detail)
            names = (posixpath.join(found[0], name) for name in found[1] if name.lower().endswith(suffixes))
            files += [(name, os.path.join(path, name)) for name in names]
    elif os.path.exists(path):
        files = [(os.path.basename(path), path)]
    elif glob.has_magic(path):
        # Names are relative to the fixed part of the pattern, so they do not depend on what else matches.
        base = path
        while glob.has_magic(base):
            base = os.path.dirname(base)
        # Special files are refused by name later.
        matches = sorted(file for file in glob.glob(path, recursive=True) if not os.path.isdir(file))
        files = [(os.path.relpath(file, base).replace(os.sep, "/"), file) for file in matches]
    elif "{" in path:
        raise DatasetError(path, "does not exist; braces are not expanded: use a glob such as shard-*.tar")
    else:
        raise DatasetError(path, "does not exist; correct source.path, which is relative to the current directory")
    if not files:
        raise DatasetError(path, f"holds no {suffixes[0]} files")
    return files
