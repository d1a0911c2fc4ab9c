"""Images that are files of a folder, with caption files next to them or a metadata.jsonl, and their companions."""

from __future__ import annotations

import json
import logging
import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import chain
from typing import Any

from typing_extensions import override

from latentcache.config import PartConfig, part_names
from latentcache.dataset.images import IMAGE_SUFFIXES
from latentcache.dataset.samples import (
    MAX_CAPTION_BYTES,
    CaptionColumns,
    Sample,
    SampleSource,
    captions_in_text,
    is_hidden,
    is_image,
    not_empty,
    read_image,
    read_range,
    refusal_of,
    refuse_read,
    signature_of,
    walk,
)
from latentcache.errors import ConfigError, DatasetError, ImageRefused
from latentcache.types import Refusal

METADATA = "metadata.jsonl"
VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".webm", ".mkv")
REMEMBERED_FOLDERS = 64
"""Whose names are kept: lines of METADATA may lead from one folder to another and back."""

_log = logging.getLogger(__name__)


class PartFiles:
    """The further parts of samples that are image files below `root`.

    ConfigError where a part is the image itself, and DatasetError where its folder is not there.

    A part of `a/cat.jpg` lies in the same subfolder of its own folder, with any ending of an image: `a/cat_1.png`. If
    several do, it is the one with the image's own ending.
    """

    def __init__(self, root: str, parts: Sequence[PartConfig]):
        self._root, self._parts = root, tuple(parts)
        self._folders = [root if part.path is None else os.path.abspath(part.path) for part in parts]
        self._names = part_names(self._parts)
        self.columns = tuple(part.column for part in parts if part.column is not None)
        """The columns of metadata that name files of parts."""
        self._images_in = lru_cache(REMEMBERED_FOLDERS)(_images_in)
        for name, part, folder in zip(self._names, self._parts, self._folders, strict=True):
            if folder == root and not part.suffix and part.column is None:
                message = f"{name} is in the folder of the images, and has their names; give it a suffix"
                raise ConfigError(message, key=name.split()[0])
            if part.path is not None and not os.path.isdir(folder):  # else each sample would be refused for it
                problem = "is not a folder" if os.path.exists(folder) else "does not exist"
                raise DatasetError(folder, f"{problem}; correct path of {name}, which begins where the command runs")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._root, self._parts)  # another process has no use for the names

    def is_part(self, sample_id: str) -> bool:
        """Whether an image of the dataset's folder is a part of others, and so no sample."""
        if not self._parts:
            return False
        stem = os.path.splitext(sample_id)[0]
        for part, folder in zip(self._parts, self._folders, strict=True):
            if part.column is not None:
                continue
            inner = os.path.join(folder, "")
            if folder == self._root:
                # Of what ends so, but has no image that it is a part of, a sample is refused by name.
                where, base = os.path.split(os.path.join(self._root, stem.removesuffix(part.suffix)))
                if stem.endswith(part.suffix) and base in self._images_in(where):
                    return True
            elif not self._root.startswith(inner) and os.path.join(self._root, sample_id).startswith(inner):
                return True
        return False

    def of(self, sample_id: str, row: Mapping[str, Any] | None = None, folder: str = "") -> tuple[Sample, ...]:
        """The parts of a sample, each as a sample without captions. `row` is its metadata, which lies in `folder`.

        Raises ImageRefused, naming the part, for one that is not there.
        """
        found = []
        for name, part, place in zip(self._names, self._parts, self._folders, strict=True):
            if part.column is None:
                path = self._file(name, place, part.suffix, sample_id)
            else:
                path = self._listed(name, sample_id, (row or {}).get(part.column), part.column, folder)
            try:
                signature = signature_of(path)
            except ImageRefused as refused:
                raise ImageRefused(path, refused.reason, f"{name}: {refused.detail}") from refused
            found.append(Sample(sample_id, path, signature=signature, locator=path))
        return tuple(found)

    def _file(self, name: str, place: str, suffix: str, sample_id: str) -> str:
        folder, base = os.path.split(sample_id)
        stem, ending = os.path.splitext(base)
        where, stem = os.path.join(place, folder), stem + suffix
        present = self._images_in(where).get(stem, [])
        if stem + ending in present:
            return os.path.join(where, stem + ending)
        if len(present) == 1:
            return os.path.join(where, present[0])
        path = os.path.join(where, stem + ending)
        if present:
            detail = f"{name}: the folder has several, {', '.join(present)}; keep one"
            raise ImageRefused(path, "duplicate", detail)
        raise ImageRefused(
            path, "missing", f"{name}: there is no image {stem} in {where}; add it, or remove the sample"
        )

    def _listed(self, name: str, sample_id: str, value: Any, column: str, folder: str) -> str:
        path = os.path.join(self._root, sample_id)
        if value is None:
            raise ImageRefused(path, "missing", f"{name}: its metadata has no {column!r}")
        try:
            return os.path.join(self._root, name_below(folder, value))
        except ValueError as error:
            raise ImageRefused(path, "unreadable", f"{name}: {column} {error}") from error


def _images_in(folder: str) -> dict[str, list[str]]:
    """The names of a folder's images, by what they are without their endings. Raises ImageRefused."""
    found: dict[str, list[str]] = {}
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        names = []
    except OSError as error:
        refuse_read(folder, error)
    for each in names:
        if is_image(each) and not is_hidden(each):
            found.setdefault(os.path.splitext(each)[0], []).append(each)
    return found


def name_below(folder: str, file_name: Any) -> str:
    """The file that a line of metadata in `folder` names, relative to the dataset. ValueError saying what is wrong."""
    if not isinstance(file_name, str) or not file_name:
        raise ValueError(f"is {file_name!r:.80}; a file name is needed")
    name = posixpath.normpath(posixpath.join(folder, file_name))
    if posixpath.isabs(name) or os.path.isabs(file_name) or name.split("/")[0] == "..":
        raise ValueError(f"{file_name!r} leads out of the dataset's folder")
    return name


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
        read_captions: Callable[[], tuple[str, ...]],
        row: Mapping[str, Any] | None = None,
        folder: str = "",
    ) -> Sample | Refusal:
        """The sample with these captions, and with the companions that `row` names, its metadata in `folder`."""
        path = self._prefix + sample_id
        try:
            signature, captions = signature_of(path), read_captions() or ("",)
            return Sample(sample_id, path, captions, signature, path, self._parts.of(sample_id, row, folder))
        except ImageRefused as error:
            return refusal_of(sample_id, error.path, error)


class CaptionFileSource(_FileSource):
    """A folder, recursive. The captions of `a/cat.jpg` are the lines of `a/cat.txt`; with `joined` they are one.

    Files with an image's suffix are samples, also of formats that are refused later, so that the report names them.
    Suffixes may be in capitals, those of captions too. Hidden files and folders are skipped. `cat.jpg` and `cat.png`
    are two samples with the same captions. A caption file that cannot be read or is not UTF-8 refuses the sample. With
    `videos` these are samples too.
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
        self._suffixes = IMAGE_SUFFIXES.union(VIDEO_SUFFIXES if videos else ())

    @override
    def samples(self) -> Iterator[Sample | Refusal]:
        listed = ([each] if isinstance(each, Refusal) else self._samples_in(*each) for each in walk(self._root))
        return not_empty(chain.from_iterable(listed), self._root, "folder")

    def _samples_in(self, folder: str, names: list[str]) -> Iterator[Sample | Refusal]:
        prefix, caption_of = f"{folder}/" if folder else "", self._caption_files(names)
        for name in names:
            stem, suffix = os.path.splitext(name)
            if suffix.lower() not in self._suffixes or self._parts.is_part(prefix + name):
                continue
            caption_path = f"{self._prefix}{prefix}{caption_of.get(stem, '')}"
            read_captions = partial(_captions_at, caption_path, self._joined) if stem in caption_of else tuple
            yield self._sample(prefix + name, read_captions)

    def _caption_files(self, names: list[str]) -> dict[str, str]:
        """The names of caption files by their stems. `cat.TXT` is one, unless there is a `cat.txt`."""
        extension, found = self._caption_extension, dict[str, str]()
        for name in names:
            stem, suffix = name[: -len(extension)], name[-len(extension) :]
            if suffix == extension or (suffix.lower() == extension.lower() and stem not in found):
                found[stem] = name
        return found


def _captions_at(path: str, joined: bool) -> tuple[str, ...]:
    try:
        captions = captions_in_text(read_range(path, 0, MAX_CAPTION_BYTES + 1), path)
        return (" ".join(captions),) if joined and captions else captions
    except OSError as error:
        raise ImageRefused(path, "unreadable", f"caption file: {error.strerror or error}") from error


class ImageFolderSource(_FileSource):
    """Hugging Face's imagefolder: each `metadata.jsonl` names, by `file_name`, images below its own folder.

    As in `datasets`, the metadata decides what belongs to the dataset. Images that it does not name are left out, and
    their number is logged. Samples come in the order of the lines. A name outside the dataset's folder is refused.
    DatasetError at the end for a folder without METADATA, and for a configured caption column that no line has.
    """

    def __init__(self, root: str, caption_columns: tuple[str, ...] | None, parts: PartFiles | None = None):
        super().__init__(root, parts)
        self._columns = caption_columns

    @override
    def samples(self) -> Iterator[Sample | Refusal]:
        return not_empty(self._samples(), self._root, "imagefolder")

    def _samples(self) -> Iterator[Sample | Refusal]:
        images: set[str] = set()
        named: set[str] = set()
        columns, has_metadata = CaptionColumns(self._columns), False
        for found in walk(self._root):
            if isinstance(found, Refusal):
                yield found
                continue
            folder, names = found
            paths = (posixpath.join(folder, name) for name in names if is_image(name))
            images.update(path for path in paths if not self._parts.is_part(path))
            if METADATA in names:
                has_metadata = True
                yield from self._samples_in(folder, named, columns)
        if not has_metadata:
            message = f"has no {METADATA}; for caption files next to the images use kind 'folder'"
            raise DatasetError(self._root, message)
        if left_out := len(images - named):
            _log.warning("%s: %d images are in no %s, and are left out", self._root, left_out, METADATA)
        columns.check(os.path.join(self._root, METADATA))

    def _samples_in(self, folder: str, named: set[str], columns: CaptionColumns) -> Iterator[Sample | Refusal]:
        """The samples of a folder's metadata. What it names is added to `named`."""
        path, name = os.path.join(self._root, folder, METADATA), posixpath.join(folder, METADATA)
        try:
            # Read as bytes: text mode would end at the first line that is not UTF-8.
            with open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield self._from_line(folder, f"{name}:{number}", f"{path}:{number}", line, named, columns)
        except OSError as error:
            yield refusal_of(name, path, error)

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
        return self._sample(sample_id, partial(columns.captions, row, place), row, folder)
