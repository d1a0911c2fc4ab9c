"""One training item of the user's dataset, and the functions that all readers of datasets share."""

from __future__ import annotations

import codecs
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from latentcache.dataset.images import IMAGE_SUFFIXES
from latentcache.errors import DatasetError, ImageRefused
from latentcache.types import Refusal, RefusalReason
from latentcache.utils.file_locks import READ_FLAGS

MAX_CAPTION_BYTES = 1 << 20
"""Largest caption file. A longer one is not taken for captions."""
MAX_ONE_CAPTION_BYTES = 1 << 14
"""Longest caption, in UTF-8. CLIP reads 227 tokens, and its tokenizer takes seconds and megabytes for a long text."""
MAX_IMAGE_BYTES = 1 << 30
"""Largest file of an image or a video, which is read as a whole: a TIFF of 100 megapixels with 16 bits a channel has
600 MB."""

SETTLED_NS = 2_000_000_000
"""A file that changed less than this long ago may change again without a new time stamp ("racy git")."""
_MAX_SHOWN = 20


def bad_caption(place: str, detail: str) -> ImageRefused:
    """The refusal of a sample whose caption at `place` cannot be used: a wrong caption is worse than none."""
    return ImageRefused(place, "bad-caption", detail)


def captions_in_text(data: bytes, place: str) -> tuple[str, ...]:
    """The captions of a caption file: UTF-8, with or without a byte order mark, one a line; empty lines are none.

    Raises ImageRefused, naming `place`.
    """
    if len(data) > MAX_CAPTION_BYTES:
        raise bad_caption(place, f"it has {len(data):,} bytes; a caption file may have {MAX_CAPTION_BYTES:,}")
    try:
        text = data.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        detail = f"it is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8"
        raise bad_caption(place, detail) from error
    # Not str.splitlines, which also splits at characters that may be part of a caption.
    return _stripped(text.replace("\r", "\n").split("\n"), place)


def captions_in_columns(row: Mapping[str, Any], columns: tuple[str, ...] | None, place: str) -> tuple[str, ...]:
    """The captions in a row's columns: a string is one caption, a list of strings several, None is none.

    Without `columns`: `text`, else `caption`. A column that the row lacks gives none. Raises ImageRefused, naming
    `place`.
    """
    if columns is None:
        columns = ("text",) if "text" in row else ("caption",)
    found: list[str] = []
    for column in columns:
        value = row.get(column)
        values = value if isinstance(value, list) else [value]
        for caption in values:
            if caption is not None and not isinstance(caption, str):
                kind = type(caption).__name__
                raise bad_caption(place, f"column {column!r} holds a {kind}; a caption is a string")
            found.append(caption or "")
    return _stripped(found, place)


class CaptionColumns:
    """The configured caption columns of a list of samples, of which each has to occur: a slip would train without text.

    `configured` None: those of `captions_in_columns`, which need not be there. `check` when the list has ended.
    """

    def __init__(self, configured: tuple[str, ...] | None):
        self._configured = configured
        self._missing = set(configured or ())
        self._there: list[str] = []
        """The columns of the first row, for the message."""

    def captions(self, row: Mapping[str, Any], place: str) -> tuple[str, ...]:
        """The captions in a row's columns. Raises ImageRefused, naming `place`."""
        self._missing.difference_update(row)
        self._there = self._there or sorted(row)[:_MAX_SHOWN]
        return captions_in_columns(row, self._configured, place)

    def check(self, path: str) -> None:
        """Raise DatasetError, naming `path`, for a column that no row has."""
        if self._missing and self._there:
            there = ", ".join(self._there)
            raise DatasetError(path, f"no sample has the caption column {min(self._missing)!r}, but: {there}")


def is_image(name: str) -> bool:
    """Whether the name has an image's suffix, of an accepted format or not, in small letters or capitals."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def is_hidden(name: str) -> bool:
    """Whether file managers hide it: `.git`, `.ipynb_checkpoints`, macOS's `._photo.jpg`."""
    return name.startswith(".")


def walk(root: str) -> Iterator[tuple[str, list[str]] | Refusal]:
    """(folder relative to `root`, its file names) for `root` and each folder below it: depth first, sorted by name.

    Hidden files and folders are skipped. Links to folders are followed, but a folder that is reached twice is read
    once, so that a loop of links ends. A folder that cannot be read is a Refusal, but for the root DatasetError.
    """
    seen: set[tuple[int, int]] = set()
    errors: list[OSError] = []
    for path, folders, names in os.walk(root, onerror=errors.append, followlinks=True):
        yield from _refused_folders(root, errors)
        try:
            status = os.stat(path)
        except OSError as error:  # it went since it was listed
            errors.append(error)
            folders.clear()
            continue
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        yield _below(root, path), sorted(name for name in names if not is_hidden(name))
    yield from _refused_folders(root, errors)


def _below(root: str, path: str) -> str:
    """A folder relative to the one that it is in, with `/`."""
    return path[len(root) :].replace(os.sep, "/").strip("/")


def _refused_folders(root: str, errors: list[OSError]) -> Iterator[Refusal]:
    """The folders that could not be listed, which are forgotten then."""
    while errors:
        error, path = errors[0], os.fspath(errors.pop(0).filename)
        if path == root:
            raise DatasetError(root, f"cannot be read: {error.strerror}") from error
        yield Refusal(_below(root, path), path, "unreadable", f"the folder cannot be read: {error.strerror}")


def refusal_of(sample_id: str, path: str, error: ImageRefused | OSError) -> Refusal:
    """The Refusal for what was raised while the file at `path` was read."""
    if isinstance(error, ImageRefused):
        return Refusal(sample_id, path, error.reason, error.detail)
    return Refusal(sample_id, path, "unreadable", error.strerror or str(error))


def refuse_read(path: str, error: OSError) -> NoReturn:
    """The ImageRefused for an error of the operating system."""
    reason: RefusalReason = "missing" if isinstance(error, FileNotFoundError) else "unreadable"
    raise ImageRefused(path, reason, error.strerror or str(error)) from error


def read_image(path: str) -> bytes:
    """The bytes of an image's file. Raises ImageRefused."""
    try:
        if (num_bytes := os.path.getsize(path)) > MAX_IMAGE_BYTES:
            raise ImageRefused(path, "unreadable", too_large(num_bytes))
        return read_range(path, 0, num_bytes)
    except OSError as error:
        refuse_read(path, error)


def too_large(num_bytes: int) -> str:
    """The detail of a refusal of an image or a video with so many bytes."""
    return f"it has {num_bytes:,} bytes; {MAX_IMAGE_BYTES:,} are allowed. Save an image compressed, cut a video"


def read_range(path: str, offset: int, num_bytes: int) -> bytes:
    """Bytes of a file; fewer where it ends. OSError. By a handle of its own, so that threads do not meet."""
    with open(path, "rb", opener=lambda name, _: os.open(name, READ_FLAGS)) as file:  # a pipe is not waited for
        file.seek(offset)
        return file.read(max(0, min(num_bytes, os.fstat(file.fileno()).st_size - offset)))


def _stripped(captions: Iterable[str], place: str) -> tuple[str, ...]:
    stripped = tuple(caption.strip() for caption in captions if caption.strip())
    for caption in stripped:
        try:
            num_bytes = len(caption.encode())
        except UnicodeEncodeError as error:  # JSON can hold half of a surrogate pair; tokenizers cannot
            raise bad_caption(place, f"caption {caption!r:.80} is not Unicode text ({error.reason})") from error
        if num_bytes > MAX_ONE_CAPTION_BYTES:
            raise bad_caption(place, f"a caption has {num_bytes:,} bytes; {MAX_ONE_CAPTION_BYTES:,} are allowed")
    return stripped


@dataclass(frozen=True, slots=True)
class Signature:
    """Size, times and inode of the file that has the bytes (the tar, not its member). Equal: the file is unchanged."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Signature:
        """The signature of a file with this status."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)

    def is_settled(self) -> bool:
        """Whether the file changed so long ago that another change shows. Until then its digest must not be kept."""
        return time.time_ns() - max(self.mtime_ns, self.ctime_ns) > SETTLED_NS

    def to_text(self) -> str:
        """The four numbers, with spaces between them."""
        return f"{self.size} {self.mtime_ns} {self.ctime_ns} {self.inode}"


def signature_of(path: str) -> Signature:
    """The file's signature. Raises ImageRefused. Only a regular file has one: reading a named pipe waits for ever."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        detail = "a link to nothing" if os.path.islink(path) else "there is no such file"
        raise ImageRefused(path, "missing", detail) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ImageRefused(path, "unreadable", str(error)) from error
    if not stat.S_ISREG(status.st_mode):
        raise ImageRefused(path, "unreadable", "not a regular file")
    return Signature.of(status)


@dataclass(frozen=True, slots=True)
class Sample:
    """One training item: where its image's bytes are, and its captions.

    `sample_id` is the image's path relative to the dataset's root with `/`, `<tar>/<key>`, or `<file>#<row>`. `path`
    is for people: the real path, with `#member` or `#row`. `captions` are stripped and never empty: a missing caption
    is `("",)`. `locator` belongs to the source that made it; with a signature it is the
    file that has the bytes, or a tuple of it and a place in it. `parts` are its control images and its mask, in the
    order of the config, each a sample without captions that the same source reads.
    """

    sample_id: str
    path: str
    captions: tuple[str, ...] = ("",)
    signature: Signature | None = None
    locator: Any = None
    parts: tuple[Sample, ...] = ()

    @property
    def has_caption(self) -> bool:
        """Whether there is a caption that is not empty."""
        return self.captions != ("",)

    def is_unchanged(self) -> bool:
        """Whether its file, which has a signature, is still the one that was listed. ImageRefused where it is gone."""
        file = self.locator if isinstance(self.locator, str) else self.locator[0]
        return signature_of(file) == self.signature


class SampleSource(Protocol):
    """A dataset as the user keeps it. Both methods may be called from several threads."""

    def samples(self) -> Iterator[Sample | Refusal]:
        """All samples, in the same order each time. What cannot be used is a Refusal, and never ends the iteration.

        Raises DatasetError at the end if there was nothing at all.
        """
        ...

    def read(self, sample: Sample) -> bytes:
        """The bytes of the sample's image. Raises ImageRefused."""
        ...


def not_empty(items: Iterator[Sample | Refusal], path: str, kind: str) -> Iterator[Sample | Refusal]:
    """These items of a dataset at `path`. Raises DatasetError at their end if there were none."""
    is_empty = True
    for item in items:
        is_empty = False
        yield item
    if is_empty:
        raise DatasetError(path, f"holds no images for a source of kind {kind!r}")
