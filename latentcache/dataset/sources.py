"""The user's dataset: `open_source` chooses the reader of its layout. Here are those of images that are files."""

from __future__ import annotations

import glob
import io
import json
import logging
import os
import posixpath
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

from typing_extensions import override

from latentcache.config import PartConfig, SourceConfig, part_names
from latentcache.dataset.archives import WebDatasetSource
from latentcache.dataset.part_files import PartFiles, name_below
from latentcache.dataset.samples import (
    MAX_CAPTION_BYTES,
    CaptionColumns,
    CaptionError,
    Sample,
    SampleSource,
    captions_in_text,
    is_image,
    is_image_suffix,
    open_file,
    read_image,
    read_small,
    signature_of,
    walk,
)
from latentcache.dataset.tables import ParquetSource
from latentcache.errors import ConfigError, DatasetError, ImageRefused
from latentcache.types import Refusal

METADATA = "metadata.jsonl"
MAX_LINE_BYTES = 8 << 20
"""Of a line of METADATA: captions of MAX_CAPTION_BYTES, escaped."""
# Compressed tars are found too, so that they are refused by name and not left out.
_TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_PARQUET_SUFFIXES = (".parquet",)
VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".webm", ".mkv")

_log = logging.getLogger(__name__)


def open_source(config: SourceConfig, parts: Sequence[PartConfig] = (), *, videos: bool = False) -> SampleSource:
    """The dataset at `config.path`: a folder; also a tar or a glob of tars, or a parquet file.

    Each sample has these `parts` too, or is a Refusal. With `videos` those in a folder are samples too. Raises
    ConfigError for a wrong `caption_extension` and for a part that would be the image itself, and DatasetError if
    nothing is at the path, it cannot be read, or it holds no images.
    """
    root = os.path.abspath(config.path)
    source: SampleSource
    if config.kind == "webdataset":
        source = WebDatasetSource(_files(root, _TAR_SUFFIXES), config.caption_columns, _columns_of(parts))
    elif config.kind == "parquet":
        files = _files(root, _PARQUET_SUFFIXES)
        source = ParquetSource(files, config.image_column, config.caption_columns, _columns_of(parts))
    else:
        source = _folder(root, config, PartFiles(root, parts), videos)
    if next(source.samples(), None) is None:
        raise DatasetError(root, f"holds no images for a source of kind {config.kind!r}")
    return source


def _columns_of(parts: Sequence[PartConfig]) -> tuple[tuple[str, str], ...]:
    """The name and the column of each part."""
    return tuple(zip(part_names(parts), (str(part.column) for part in parts), strict=True))


def _folder(root: str, config: SourceConfig, parts: PartFiles, videos: bool) -> SampleSource:
    if not os.path.isdir(root):
        raise DatasetError(root, "is not a folder" if os.path.exists(root) else "does not exist")
    if config.kind == "imagefolder":
        folders = (found for found in walk(root) if not isinstance(found, Refusal))
        if not any(METADATA in names for _, names in folders):
            raise DatasetError(root, f"has no {METADATA}; for caption files next to the images use kind 'folder'")
        return ImageFolderSource(root, config.caption_columns, parts)
    extension = config.caption_extension
    if not extension.startswith(".") or is_image(f"a{extension}"):
        raise ConfigError(f"caption_extension is {extension!r}; write it like '.txt'", key="source.caption_extension")
    joined = config.caption_lines == "joined"
    return CaptionFileSource(root, extension, joined=joined, parts=parts, videos=videos)


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
        # What is no file is refused by its name later.
        matches = sorted(file for file in glob.glob(path) if not os.path.isdir(file))
        files = [(os.path.relpath(file, base).replace(os.sep, "/"), file) for file in matches]
    elif "{" in path:
        raise DatasetError(path, "does not exist; braces are not expanded: write a glob such as shard-*.tar")
    else:
        raise DatasetError(path, "does not exist")
    if not files:
        raise DatasetError(path, f"holds no {suffixes[0]} files")
    return files


class _FileSource(SampleSource):
    """Images that are files in a folder, whose captions are found in its files."""

    def __init__(self, root: str, parts: PartFiles | None = None):
        self._root, self._prefix = root, os.path.join(root, "")
        self._parts = parts or PartFiles(root, ())

    @override
    def read(self, sample: Sample) -> bytes:
        return read_image(sample.locator)

    def _sample(
        self,
        sample_id: str,
        caption_place: str,
        read_captions: Callable[[], tuple[str, ...]],
        find_parts: Callable[[str], tuple[Sample, ...]],
    ) -> Sample | Refusal:
        """The sample with these captions and parts. `caption_place` says where captions are, if they are refused."""
        path = self._prefix + sample_id
        try:
            signature = signature_of(path)
            return Sample.of(sample_id, path, read_captions(), signature, path, find_parts(sample_id))
        except ImageRefused as error:
            return Refusal(sample_id, error.path, error.reason, error.detail)
        except CaptionError as error:
            return Refusal(sample_id, caption_place, "bad-caption", str(error))


class CaptionFileSource(_FileSource):
    """A folder, recursive. The captions of `a/cat.jpg` are the lines of `a/cat.txt`; with `joined` they are one.

    Files with an image's suffix are samples, also of formats that are refused later, so that the report names them.
    Hidden files and folders are skipped. `cat.jpg` and `cat.png` are two samples with the same captions. A caption
    file that cannot be read or is not UTF-8 refuses the sample. With `videos` these are samples too.
    """

    def __init__(
        self,
        root: str,
        caption_extension: str,
        *,
        joined: bool = False,
        parts: PartFiles | None = None,
        videos: bool = False,
    ):
        super().__init__(root, parts)
        self._caption_extension, self._joined = caption_extension, joined
        self._suffixes = VIDEO_SUFFIXES if videos else ()

    @override
    def samples(self) -> Iterator[Sample | Refusal]:
        for found in walk(self._root):
            if isinstance(found, Refusal):
                yield found
            else:
                yield from self._samples_in(*found)

    def _samples_in(self, folder: str, names: list[str]) -> Iterator[Sample | Refusal]:
        present, prefix = set(names), f"{folder}/" if folder else ""
        for name in names:
            stem, suffix = os.path.splitext(name)
            is_sample = is_image_suffix(suffix) or suffix.lower() in self._suffixes
            if not is_sample or self._parts.is_part(prefix + name):
                continue
            caption_name = stem + self._caption_extension
            caption_path = f"{self._prefix}{prefix}{caption_name}"
            read_captions = partial(_captions_at, caption_path, self._joined) if caption_name in present else tuple
            yield self._sample(prefix + name, caption_path, read_captions, self._parts.of)


def _captions_at(path: str, joined: bool) -> tuple[str, ...]:
    try:
        captions = captions_in_text(read_small(path, MAX_CAPTION_BYTES + 1))
        return (" ".join(captions),) if joined and captions else captions
    except OSError as error:
        signature_of(path)  # of what is no file it says so
        raise ImageRefused(path, "unreadable", f"caption file: {error.strerror}") from error


class ImageFolderSource(_FileSource):
    """Hugging Face's imagefolder: each `metadata.jsonl` names, by `file_name`, images below its own folder.

    As in `datasets`, the metadata decides what belongs to the dataset. Images that it does not name are left out, and
    their number is logged. Samples come in the order of the lines. A name outside the dataset's folder is refused. A
    configured caption column that no line has is a DatasetError at the end.
    """

    def __init__(self, root: str, caption_columns: tuple[str, ...] | None, parts: PartFiles | None = None):
        super().__init__(root, parts)
        self._columns = caption_columns

    @override
    def samples(self) -> Iterator[Sample | Refusal]:
        images: set[str] = set()
        named: set[str] = set()
        columns = CaptionColumns(self._columns)
        for found in walk(self._root):
            if isinstance(found, Refusal):
                yield found
                continue
            names = (posixpath.join(found[0], name) for name in found[1] if is_image(name))
            images.update(name for name in names if not self._parts.is_part(name))
            yield from self._samples_in(*found, named, columns)
        if left_out := len(images - named):
            _log.warning("%s: %d images are in no %s, and are left out", self._root, left_out, METADATA)
        columns.check(os.path.join(self._root, METADATA))

    def _samples_in(
        self, folder: str, names: list[str], named: set[str], columns: CaptionColumns
    ) -> Iterator[Sample | Refusal]:
        """The samples of a folder's metadata. What it names is added to `named`."""
        if METADATA not in names:
            return
        path, name = os.path.join(self._root, folder, METADATA), posixpath.join(folder, METADATA)
        try:
            # Read as bytes: text mode would end at the first line that is not UTF-8.
            with io.BufferedReader(open_file(path)) as file:
                for number in count(1):
                    line_id, place, line = f"{name}:{number}", f"{path}:{number}", file.readline(MAX_LINE_BYTES + 1)
                    if len(line) > MAX_LINE_BYTES:
                        detail = f"the line has more than {MAX_LINE_BYTES:,} bytes; what follows is not read"
                        yield Refusal(line_id, place, "corrupt", detail)
                        return
                    if not line:
                        return
                    if line.strip():
                        yield self._from_line(folder, line_id, place, line, named, columns)
        except OSError as error:
            yield Refusal(name, path, "unreadable", error.strerror or str(error))

    def _from_line(
        self, folder: str, line_id: str, place: str, line: bytes, named: set[str], columns: CaptionColumns
    ) -> Sample | Refusal:
        """`line_id` and `place` name the line, for a refusal."""
        try:
            row: Any = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            return Refusal(line_id, place, "corrupt", f"not a JSON line: {error}")
        file_name = row.get("file_name") if isinstance(row, dict) else None
        if not isinstance(file_name, str) or not file_name:
            return Refusal(line_id, place, "corrupt", "it has no file_name")
        try:
            sample_id = name_below(folder, file_name)
        except ValueError as error:
            return Refusal(line_id, place, "unreadable", f"file_name {error}")
        named.add(sample_id)
        for column in self._parts.columns:
            with suppress(ValueError):  # the sample is refused for it
                named.add(name_below(folder, row.get(column)))
        find_parts = partial(self._parts.of, row=row, folder=folder)
        return self._sample(sample_id, place, partial(columns.captions, row), find_parts)
