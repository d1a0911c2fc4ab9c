"""Images as files: with caption files next to them, or with captions in metadata.jsonl."""

from __future__ import annotations

import json
import logging
import os
import posixpath
import stat
from collections.abc import Iterator
from typing import Any

from typing_extensions import override

from latentcache.dataset.images import IMAGE_SUFFIXES
from latentcache.dataset.samples import (
    MAX_CAPTION_BYTES,
    CaptionError,
    Sample,
    SampleSource,
    Signature,
    captions_in_columns,
    captions_in_text,
    read_range,
    refuse_read,
    walk,
)
from latentcache.types import Refusal

METADATA = "metadata.jsonl"

_log = logging.getLogger(__name__)


def is_image(name: str) -> bool:
    """Whether the name has an image's suffix, of an accepted format or not."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def _signature(sample_id: str, path: str) -> Signature | Refusal:
    """The file's signature. Only a regular file has one: reading a named pipe would wait for ever."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        detail = "a link to nothing" if os.path.islink(path) else "there is no such file"
        return Refusal(sample_id, path, "missing", detail)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        return Refusal(sample_id, path, "unreadable", str(error))
    if not stat.S_ISREG(status.st_mode):
        return Refusal(sample_id, path, "unreadable", "not a regular file")
    return Signature.of(status)


def _read(sample: Sample) -> bytes:
    try:
        with open(sample.locator, "rb") as file:
            return file.read()
    except OSError as error:
        refuse_read(sample.path, error)


class CaptionFileSource(SampleSource):
    """A folder, recursive. The captions of `a/cat.jpg` are the lines of `a/cat.txt`.

    Files with an image's suffix are samples, also of formats that are refused later, so that the report names them.
    Hidden files and folders are skipped. `cat.jpg` and `cat.png` are two samples with the same captions. A caption
    file that cannot be read or is not UTF-8 refuses the sample.
    """

    def __init__(self, root: str, caption_extension: str):
        self._root, self._caption_extension = root, caption_extension

    @override
    def samples(self) -> Iterator[Sample | Refusal]:
        for found in walk(self._root):
            if isinstance(found, Refusal):
                yield found
                continue
            folder, names = found
            present = set(names)
            for name in filter(is_image, names):
                caption_name = os.path.splitext(name)[0] + self._caption_extension
                yield self._sample(folder, name, caption_name if caption_name in present else None)

    @override
    def read(self, sample: Sample) -> bytes:
        return _read(sample)

    def _sample(self, folder: str, name: str, caption_name: str | None) -> Sample | Refusal:
        sample_id = f"{folder}/{name}" if folder else name
        path = os.path.join(self._root, folder, name)
        signature = _signature(sample_id, path)
        if isinstance(signature, Refusal):
            return signature
        captions: tuple[str, ...] = ()
        if caption_name is not None:
            caption_path = os.path.join(self._root, folder, caption_name)
            caption_signature = _signature(sample_id, caption_path)
            if isinstance(caption_signature, Refusal):
                return caption_signature
            try:
                captions = captions_in_text(read_range(caption_path, 0, MAX_CAPTION_BYTES + 1))
            except CaptionError as error:
                return Refusal(sample_id, caption_path, "bad-caption", str(error))
            except OSError as error:
                return Refusal(sample_id, caption_path, "unreadable", f"caption file: {error.strerror}")
        return Sample.of(sample_id, path, captions, signature, path)


class ImageFolderSource(SampleSource):
    """Hugging Face's imagefolder: each `metadata.jsonl` names, by `file_name`, images below its own folder.

    As in `datasets`, the metadata decides what belongs to the dataset. Images that it does not name are left out, and
    their number is logged. Samples come in the order of the lines. A name outside the dataset's folder is refused.
    """

    def __init__(self, root: str, caption_columns: tuple[str, ...] | None):
        self._root, self._columns = root, caption_columns

    @override
    def samples(self) -> Iterator[Sample | Refusal]:
        num_images = num_listed = 0
        for found in walk(self._root):
            if isinstance(found, Refusal):
                yield found
                continue
            folder, names = found
            num_images += sum(map(is_image, names))
            if METADATA not in names:
                continue
            for item in self._listed(folder):
                num_listed += isinstance(item, Sample) or item.reason == "bad-caption"
                yield item
        if num_images > num_listed:
            _log.warning("%s: %d images are in no %s, and are left out", self._root, num_images - num_listed, METADATA)

    @override
    def read(self, sample: Sample) -> bytes:
        return _read(sample)

    def _listed(self, folder: str) -> Iterator[Sample | Refusal]:
        """The samples of the metadata file in `folder`."""
        path = os.path.join(self._root, folder, METADATA)
        name = f"{folder}/{METADATA}" if folder else METADATA
        try:
            # Read as bytes: text mode would end at the first line that is not UTF-8.
            with open(path, "rb") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield self._from_line(folder, f"{name}:{number}", f"{path}:{number}", line)
        except OSError as error:
            yield Refusal(name, path, "unreadable", error.strerror or str(error))

    def _from_line(self, folder: str, line_id: str, place: str, line: bytes) -> Sample | Refusal:
        """`line_id` and `place` name the line, for a refusal."""
        try:
            row: Any = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            return Refusal(line_id, place, "corrupt", f"not a JSON line: {error}")
        file_name = row.get("file_name") if isinstance(row, dict) else None
        if not isinstance(file_name, str) or not file_name:
            return Refusal(line_id, place, "corrupt", "it has no file_name")
        sample_id = posixpath.normpath(posixpath.join(folder, file_name))
        if posixpath.isabs(sample_id) or os.path.isabs(file_name) or sample_id.split("/")[0] == "..":
            return Refusal(line_id, place, "unreadable", f"file_name {file_name!r} leads out of the dataset's folder")
        path = os.path.join(self._root, sample_id)
        signature = _signature(sample_id, path)
        if isinstance(signature, Refusal):
            return signature
        try:
            captions = captions_in_columns(row, self._columns)
        except CaptionError as error:
            return Refusal(sample_id, place, "bad-caption", str(error))
        return Sample.of(sample_id, path, captions, signature, path)
