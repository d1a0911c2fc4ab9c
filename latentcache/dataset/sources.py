"""The user's dataset: `open_source` chooses the reader of its layout."""

from __future__ import annotations

import glob
import os
import posixpath
from collections.abc import Sequence

from latentcache.config import PartConfig, SourceConfig, part_names
from latentcache.dataset.folder import CaptionFileSource, ImageFolderSource, PartFiles
from latentcache.dataset.parquet import ParquetSource
from latentcache.dataset.samples import SampleSource, is_image, walk
from latentcache.dataset.webdataset import SUFFIXES, WebDatasetSource
from latentcache.errors import ConfigError, DatasetError
from latentcache.types import Refusal


def open_source(config: SourceConfig, parts: Sequence[PartConfig] = (), *, videos: bool = False) -> SampleSource:
    """The dataset at `config.path`: a folder; also a tar or a glob of tars, or a parquet file.

    Each sample has these `parts` too, or is a Refusal. With `videos` those in a folder are samples too. The dataset is
    read by `samples` alone, which also finds out that it has none. Raises ConfigError for a wrong `caption_extension`
    and for a part that would be the image itself, and DatasetError if nothing of the kind is at the path.
    """
    root = os.path.abspath(config.path)
    if config.kind in ("webdataset", "parquet"):
        columns = [str(part.column) for part in parts]
        if config.kind == "parquet":
            return ParquetSource(_files(root, (".parquet",)), config.image_column, config.caption_columns, columns)
        companions = tuple(zip(part_names(parts), columns, strict=True))
        return WebDatasetSource(_files(root, SUFFIXES), config.caption_columns, companions)
    files = PartFiles(root, parts)
    if not os.path.isdir(root):
        problem = "is not a folder" if os.path.exists(root) else "does not exist"
        raise DatasetError(root, f"{problem}; correct source.path, which begins where the command runs")
    if config.kind == "imagefolder":
        return ImageFolderSource(root, config.caption_columns, files)
    extension = config.caption_extension
    if not extension.startswith(".") or is_image(f"a{extension}"):
        raise ConfigError(f"caption_extension is {extension!r}; write it like '.txt'", key="source.caption_extension")
    joined = config.caption_lines == "joined"
    return CaptionFileSource(root, extension, joined=joined, parts=files, videos=videos)


def _files(path: str, suffixes: tuple[str, ...]) -> list[tuple[str, str]]:
    """(name relative to the dataset, path) of the files with these suffixes: one file, a folder's, or a glob's."""
    if os.path.isdir(path):
        files = []
        for found in walk(path):
            if isinstance(found, Refusal):  # its files, and so their samples, would be left out without a word
                raise DatasetError(found.path, found.detail)
            names = (posixpath.join(found[0], name) for name in found[1] if name.lower().endswith(suffixes))
            files += [(name, os.path.join(path, name)) for name in names]
    elif os.path.exists(path):
        files = [(os.path.basename(path), path)]
    elif glob.has_magic(path):
        # Names start where the pattern does, so that they do not depend on what else matches.
        base = path
        while glob.has_magic(base):
            base = os.path.dirname(base)
        # What is no file is refused by its name later.
        matches = sorted(file for file in glob.glob(path, recursive=True) if not os.path.isdir(file))
        files = [(os.path.relpath(file, base).replace(os.sep, "/"), file) for file in matches]
    elif "{" in path:
        raise DatasetError(path, "does not exist; braces are not expanded: write a glob such as shard-*.tar")
    else:
        raise DatasetError(path, "does not exist; correct source.path, which begins where the command runs")
    if not files:
        raise DatasetError(path, f"holds no {suffixes[0]} files")
    return files
