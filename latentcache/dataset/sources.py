"""Opens the user's dataset: `open_source` chooses the reader of its layout."""

from __future__ import annotations

import glob
import os

from latentcache.config import SourceConfig
from latentcache.dataset.archives import WebDatasetSource
from latentcache.dataset.folders import METADATA, CaptionFileSource, ImageFolderSource, is_image
from latentcache.dataset.samples import SampleSource, walk
from latentcache.dataset.tables import ParquetSource
from latentcache.errors import ConfigError, DatasetError
from latentcache.types import Refusal

# Compressed tars are found too, so that they are refused by name and not left out.
_TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_PARQUET_SUFFIXES = (".parquet",)


def open_source(config: SourceConfig) -> SampleSource:
    """The dataset at `config.path`: a folder; also a tar or a glob of tars, or a parquet file.

    Raises ConfigError for a wrong `caption_extension`, and DatasetError if nothing is at the path, it cannot be read,
    or it holds no images.
    """
    root = os.path.abspath(config.path)
    source: SampleSource
    if config.kind == "webdataset":
        source = WebDatasetSource(_files(root, _TAR_SUFFIXES), config.caption_columns)
    elif config.kind == "parquet":
        source = ParquetSource(_files(root, _PARQUET_SUFFIXES), config.image_column, config.caption_columns)
    else:
        source = _folder(root, config)
    if next(source.samples(), None) is None:
        raise DatasetError(root, f"holds no images for a source of kind {config.kind!r}")
    return source


def _folder(root: str, config: SourceConfig) -> SampleSource:
    if not os.path.isdir(root):
        raise DatasetError(root, "is not a folder" if os.path.exists(root) else "does not exist")
    if config.kind == "imagefolder":
        folders = (found for found in walk(root) if not isinstance(found, Refusal))
        if not any(METADATA in names for _, names in folders):
            raise DatasetError(root, f"has no {METADATA}; for caption files next to the images use kind 'folder'")
        return ImageFolderSource(root, config.caption_columns)
    extension = config.caption_extension
    if not extension.startswith(".") or is_image(f"a{extension}"):
        raise ConfigError(f"caption_extension is {extension!r}; write it like '.txt'", key="source.caption_extension")
    return CaptionFileSource(root, extension)


def _files(path: str, suffixes: tuple[str, ...]) -> list[tuple[str, str]]:
    """(name relative to the dataset, path) of the files with these suffixes: one file, a folder's, or a glob's."""
    if os.path.isdir(path):
        files = [
            (f"{folder}/{name}" if folder else name, os.path.join(path, folder, name))
            for folder, names in (found for found in walk(path) if not isinstance(found, Refusal))
            for name in names
            if name.lower().endswith(suffixes)
        ]
    elif os.path.exists(path):
        files = [(os.path.basename(path), path)]
    elif glob.has_magic(path):
        # Names start where the pattern does, so that they do not depend on what else matches.
        base = path
        while glob.has_magic(base):
            base = os.path.dirname(base)
        matches = sorted(file for file in glob.glob(path) if os.path.isfile(file))
        files = [(os.path.relpath(file, base).replace(os.sep, "/"), file) for file in matches]
    elif "{" in path:
        raise DatasetError(path, "does not exist; braces are not expanded: write a glob such as shard-*.tar")
    else:
        raise DatasetError(path, "does not exist")
    if not files:
        raise DatasetError(path, f"holds no {suffixes[0]} files")
    return files
