"""The user's data -> samples, whatever its layout: `open_source` chooses the reader."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from latentcache.dataset.archives import WebDatasetSource
from latentcache.dataset.folders import METADATA, FolderSource, ImageFolderSource, is_image
from latentcache.dataset.samples import Sample, Signature, Source, walk
from latentcache.dataset.tables import ParquetSource
from latentcache.errors import ConfigError, DatasetError
from latentcache.types import Refusal

__all__ = ["KINDS", "Sample", "Signature", "Source", "open_source"]

KINDS = ("folder", "imagefolder", "webdataset", "parquet")

# Compressed tars are found too, so that they are refused by name and not left out.
_TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_PARQUET_SUFFIXES = (".parquet",)


def open_source(
    kind: str,
    path: str | Path,
    *,
    caption_extension: str = ".txt",
    caption_columns: Sequence[str] | None = None,
    image_column: str = "image",
) -> Source:
    """The dataset at `path`: a folder; for `webdataset` also a tar or a glob of tars; for `parquet` also a file.

    `caption_extension` is for `folder`; `caption_columns` for all others, by default `text`, else `caption`;
    `image_column` for `parquet`. Raises ConfigError for a wrong setting, and DatasetError if nothing is at `path`, it
    cannot be read, or it holds no images.
    """
    if kind not in KINDS:
        raise ConfigError(f"source.kind is {kind!r}; use one of {', '.join(KINDS)}", key="source.kind")
    if isinstance(caption_columns, str) or (caption_columns is not None and not caption_columns):
        raise ConfigError(
            f"caption_columns is {caption_columns!r}; give a list of columns, or leave it out",
            key="source.caption_columns",
        )
    columns = None if caption_columns is None else tuple(caption_columns)
    root = os.path.abspath(path)
    source: Source
    if kind == "webdataset":
        source = WebDatasetSource(_files(root, _TAR_SUFFIXES), columns)
    elif kind == "parquet":
        source = ParquetSource(_files(root, _PARQUET_SUFFIXES), image_column, columns)
    else:
        source = _folder(kind, root, caption_extension, columns)
    if next(source.samples(), None) is None:
        raise DatasetError(root, f"holds no images for a source of kind {kind!r}")
    return source


def _folder(kind: str, root: str, caption_extension: str, columns: tuple[str, ...] | None) -> Source:
    if not os.path.isdir(root):
        raise DatasetError(root, "is not a folder" if os.path.exists(root) else "does not exist")
    if kind == "imagefolder":
        folders = (found for found in walk(root) if not isinstance(found, Refusal))
        if not any(METADATA in names for _, names in folders):
            raise DatasetError(root, f"has no {METADATA}; for caption files beside the images use kind 'folder'")
        return ImageFolderSource(root, columns)
    if not caption_extension.startswith(".") or is_image(f"a{caption_extension}"):
        raise ConfigError(
            f"caption_extension is {caption_extension!r}; write it like '.txt'", key="source.caption_extension"
        )
    return FolderSource(root, caption_extension)


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
