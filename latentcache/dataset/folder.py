"""Images in a folder, with caption files next to them or a metadata.jsonl, and their companions."""

from __future__ import annotations

import json
import logging
import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from typing_extensions import override

from latentcache.config import PartConfig, part_names
from latentcache.dataset.images import IMAGE_SUFFIXES
from latentcache.dataset.samples import (
    CaptionColumns,
    Sample,
    SampleSource,
    captions_at,
    is_hidden,
    is_image,
    read_image,
    refusal_of,
    signature_of,
    unreadable,
    walk,
)
from latentcache.errors import ConfigError, DatasetError, ImageRefused
from latentcache.types import Refusal
from latentcache.utils.wording import counted

METADATA = "metadata.jsonl"
VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".webm", ".mkv")
REMEMBERED_FOLDERS = 64
"""Size of the cache of folder listings: consecutive lines of METADATA may alternate between folders."""

_log = logging.getLogger(__name__)


def check_folder(path: str, setting: str) -> None:
    """Raise DatasetError, naming the setting, unless the path is a folder."""
    if not os.path.isdir(path):
        problem = "is not a folder" if os.path.exists(path) else "does not exist"
        raise DatasetError(path, f"{problem}; correct {setting}, which is relative to the current directory")


def check_extension(extension: str, key: str) -> None:
    """Raise ConfigError, naming the setting `key`, unless the extension can be that of caption files."""
    if not extension.startswith(".") or is_image(f"a{extension}"):
        raise ConfigError(f"caption_extension is {extension!r}; write it like '.txt'", key=key)


class PartFiles:
    """Finds the companions of samples below `root` that are image files: control images and masks.

    A companion of `a/cat.jpg` is in the same subfolder of its own folder, with any image suffix: `a/cat_1.png`. Of
    several, the one with the image's own suffix is used.

    Raises ConfigError if a companion would be the image itself, and DatasetError if its folder does not exist.
    """

    def __init__(self, root: str, parts: Sequence[PartConfig]):
        self._root, self._configs = root, tuple(parts)
        folders = [root if part.path is None else os.path.abspath(part.path) for part in parts]
        self._parts = [*zip(part_names(parts), self._configs, folders, strict=True)]
        self.columns = tuple(part.column for part in parts if part.column is not None)
        """The metadata columns that name companion files."""
        self._images_in = lru_cache(REMEMBERED_FOLDERS)(_images_in)
        for name, part, folder in self._parts:
            if folder == root and not part.suffix and part.column is None:
                message = f"{name} has the same folder and file names as the images; give it a suffix"
                raise ConfigError(message, key=name.split()[0])
            if part.path is not None:  # else every sample would be refused
                check_folder(folder, f"the path of {name}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._root, self._configs)  # without the cached listings

    def is_part(self, sample_id: str) -> bool:
        """Whether an image in the dataset's folder is a companion of other images, and so not a sample."""
        for _, part, folder in self._parts:
            path = os.path.join(self._root, sample_id)
            if part.column is None and folder == self._root:
                # An image with the suffix but without a main image counts as a sample, which is then refused by name.
                stem = os.path.splitext(path)[0]
                where, base = os.path.split(stem.removesuffix(part.suffix))
                if stem.endswith(part.suffix) and base in self._images_in(where):
                    return True
            elif part.column is None:
                inner = os.path.join(folder, "")
                if path.startswith(inner) and not self._root.startswith(inner):
                    return True
        return False

    def of(self, sample_id: str, row: Mapping[str, Any], folder: str) -> tuple[Sample, ...]:
        """The companions of a sample, each as a sample without captions. `row` is its metadata, found in `folder`.

        Raises ImageRefused, naming the companion, for a missing one.
        """
        found = []
        for name, part, place in self._parts:
            path = os.path.join(self._root, sample_id)
            try:
                if part.column is None:
                    path = self._file(place, part.suffix, sample_id)
                elif row.get(part.column) is None:
                    raise ImageRefused(path, "missing", f"its metadata has no {part.column!r}")
                else:
                    path = os.path.join(self._root, name_below(folder, row[part.column]))
                found.append(Sample(sample_id, path, signature=signature_of(path), locator=path))
            except ValueError as error:
                raise ImageRefused(path, "unreadable", f"{name}: {part.column} {error}") from error
            except ImageRefused as refused:
                raise ImageRefused(refused.path, refused.reason, f"{name}: {refused.detail}") from refused
        return tuple(found)

    def _file(self, place: str, suffix: str, sample_id: str) -> str:
        """The path of the companion below `place` with the image's name. Raises ImageRefused."""
        where, base = os.path.split(os.path.join(place, sample_id))
        stem, ending = os.path.splitext(base)
        path = os.path.join(where, stem + suffix + ending)
        present = self._images_in(where).get(stem + suffix, [])
        if stem + suffix + ending in present:
            return path
        if len(present) > 1:
            raise ImageRefused(path, "duplicate", f"there are several candidates, {', '.join(present)}; keep one")
        if not present:
            detail = f"there is no image {stem}{suffix} in {where}; add it, or remove the sample"
            raise ImageRefused(path, "missing", detail)
        return os.path.join(where, present[0])


def _images_in(folder: str) -> dict[str, list[str]]:
    """The names of a folder's images, grouped by the name without its suffix. Raises ImageRefused."""
    found: dict[str, list[str]] = {}
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        names = []
    except OSError as error:
        raise unreadable(folder, error) from error
    for each in names:
        if is_image(each) and not is_hidden(each):
            found.setdefault(os.path.splitext(each)[0], []).append(each)
    return found


def name_below(folder: str, file_name: Any) -> str:
    """The path, relative to the dataset, of a file named by metadata in `folder`. Raises ValueError for a bad name."""
    if not isinstance(file_name, str) or not file_name:
        raise ValueError(f"is {file_name!r:.80}; expected a file name")
    name = posixpath.normpath(posixpath.join(folder, file_name))
    if posixpath.isabs(name) or os.path.isabs(file_name) or name.split("/")[0] == "..":
        raise ValueError(f"{file_name!r} leads out of the dataset's folder")
    return name


class _FileSource(SampleSource):
    """A source whose images are files in a folder."""

    def __init__(self, root: str, parts: PartFiles | None = None):
        self.path, self._prefix = root, os.path.join(root, "")
        self._parts = parts or PartFiles(root, ())

    @override
    def read(self, sample: Sample) -> bytes:
        return read_image(sample.path, sample.locator)

    def _sample(
        self,
        sample_id: str,
        read_captions: Callable[[], tuple[str, ...]],
        row: Mapping[str, Any],
        folder: str,
    ) -> Sample | Refusal:
        """The sample with these captions, and with the companions named by its metadata `row`, found in `folder`."""
        path = self._prefix + sample_id
        try:
            signature, captions = signature_of(path), read_captions() or ("",)
            return Sample(sample_id, path, captions, signature, path, self._parts.of(sample_id, row, folder))
        except ImageRefused as error:
            return refusal_of(sample_id, error.path, error)


class CaptionFileSource(_FileSource):
    """A folder, read recursively. The lines of `a/cat.txt` are the captions of `a/cat.jpg`; `joined` makes them one.

    Every file with an image suffix is a sample, even in an unsupported format, so that the report names it. With
    `videos`, video files are samples too. The case of suffixes is ignored. Hidden files and folders are skipped.
    `cat.jpg` and `cat.png` are two samples with the same captions. A caption file that is unreadable or not UTF-8
    refuses the sample.
    """

    kind = "folder"
    has_unique_ids = True

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
    def _listed(self) -> Iterator[Sample | Refusal]:
        for found in walk(self.path):
            if isinstance(found, Refusal):
                yield found
                continue
            folder, names = found
            caption_of = self._caption_files(names)
            inner = posixpath.join(folder, "")
            for name in names:
                stem, dot, ending = name.rpartition(".")
                sample_id = inner + name
                if (dot + ending).lower() in self._suffixes and not self._parts.is_part(sample_id):
                    caption = caption_of.get(stem)
                    path = None if caption is None else self._prefix + inner + caption
                    yield self._sample(sample_id, partial(self._captions, path), {}, folder)

    def _caption_files(self, names: list[str]) -> dict[str, str]:
        """Stem -> name of its caption file. `cat.TXT` is used only if there is no `cat.txt`."""
        extension, found = self._caption_extension, dict[str, str]()
        for name in names:
            stem, suffix = name[: -len(extension)], name[-len(extension) :]
            if suffix == extension or (suffix.lower() == extension.lower() and stem not in found):
                found[stem] = name
        return found

    def _captions(self, path: str | None) -> tuple[str, ...]:
        if path is None:
            return ()
        try:
            captions = captions_at(path)
        except OSError as error:
            raise ImageRefused(path, "unreadable", f"caption file: {error.strerror or error}") from error
        return (" ".join(captions),) if self._joined and captions else captions


class ImageFolderSource(_FileSource):
    """Hugging Face's imagefolder: the `file_name` of each line in a `metadata.jsonl` names an image below its folder.

    As in `datasets`, only images listed in the metadata belong to the dataset; the number of others is logged. Samples
    come in the order of the lines. A path outside the dataset's folder is refused. Raises DatasetError at the end for
    a folder without METADATA, and for a configured caption column that no line has.
    """

    kind = "imagefolder"

    def __init__(self, root: str, caption_columns: tuple[str, ...] | None, parts: PartFiles | None = None):
        super().__init__(root, parts)
        self._columns = caption_columns

    @override
    def _listed(self) -> Iterator[Sample | Refusal]:
        images: set[str] = set()
        named: set[str] = set()
        columns, has_metadata = CaptionColumns(self._columns), False
        for found in walk(self.path):
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
            message = f"has no {METADATA}; for caption files next to the images, use kind 'folder'"
            raise DatasetError(self.path, message)
        if left_out := len(images - named):
            _log.warning("%s: skipped %s not listed in any %s", self.path, counted(left_out, "image"), METADATA)
        columns.check(self._prefix + METADATA)

    def _samples_in(self, folder: str, named: set[str], columns: CaptionColumns) -> Iterator[Sample | Refusal]:
        """The samples in a folder's metadata. Adds the paths of their files to `named`."""
        name = posixpath.join(folder, METADATA)
        try:
            # Read as bytes: text mode would stop at the first line that is not UTF-8.
            with open(self._prefix + name, "rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield self._from_line(folder, f"{name}:{number}", line, named, columns)
        except OSError as error:
            yield refusal_of(name, self._prefix + name, error)

    def _from_line(
        self, folder: str, line_id: str, line: bytes, named: set[str], columns: CaptionColumns
    ) -> Sample | Refusal:
        """The sample in one line, which a refusal names by `line_id`."""
        place = self._prefix + line_id
        try:
            row: Any = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            return Refusal(line_id, place, "corrupt", f"the line is not JSON: {error}")
        if not isinstance(row, dict) or not row.get("file_name"):
            return Refusal(line_id, place, "corrupt", "the line has no file_name")
        try:
            sample_id = name_below(folder, row["file_name"])
        except ValueError as error:
            return Refusal(line_id, place, "unreadable", f"file_name {error}")
        named.add(sample_id)
        for column in self._parts.columns:
            with suppress(ValueError):  # the sample is refused for it
                named.add(name_below(folder, row.get(column)))
        return self._sample(sample_id, partial(columns.captions, row, place), row, folder)
