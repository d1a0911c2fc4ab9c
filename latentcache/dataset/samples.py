"""One training sample of the user's dataset, and helpers shared by all dataset readers."""

from __future__ import annotations

import codecs
import errno
import os
import posixpath
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from random import Random
from typing import Any, ClassVar, NamedTuple

import msgspec

from latentcache.config import CaptionsConfig
from latentcache.dataset.images import IMAGE_SUFFIXES
from latentcache.errors import DatasetError, ImageRefused
from latentcache.identity import seed_of
from latentcache.types import Refusal, RefusalReason
from latentcache.utils.file_locks import READ_FLAGS

MAX_CAPTION_BYTES = 1 << 20
"""Largest accepted caption file."""
MAX_ONE_CAPTION_BYTES = 1 << 14
"""Longest caption, in UTF-8. CLIP reads 227 tokens, and its tokenizer takes seconds and megabytes for a long text."""
MAX_IMAGE_BYTES = 1 << 30
"""Largest image or video file; files are read whole. A TIFF of 100 megapixels with 16 bits per channel has 600 MB."""

SETTLED_NS = 2_000_000_000
"""A file modified more recently than this may change again without a new timestamp (the "racy git" problem)."""
_MAX_SHOWN = 20


# Captions


def bad_caption(place: str, detail: str) -> ImageRefused:
    """The refusal of a sample whose caption at `place` is unusable: a wrong caption is worse than none."""
    return ImageRefused(place, "bad-caption", detail)


def captions_at(path: str, place: tuple[int, int] | None = None) -> tuple[str, ...]:
    """The captions of a file, or at (offset, bytes) in a tar: UTF-8 with or without a byte order mark, one per line.

    Empty lines are skipped. Raises OSError, and ImageRefused for an unusable caption.
    """
    data = caption_bytes(path, place)
    try:
        text = data.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        detail = f"it is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8"
        raise bad_caption(path, detail) from error
    # Not str.splitlines, which also splits at characters that can occur inside a caption.
    return _stripped(text.replace("\r", "\n").split("\n"), path)


def caption_bytes(path: str, place: tuple[int, int] | None = None) -> bytes:
    """The bytes of a caption file, or those at (offset, bytes) in a tar. Raises OSError and ImageRefused."""
    offset, num_bytes = place or (0, MAX_CAPTION_BYTES + 1)
    if len(data := read_range(path, offset, min(num_bytes, MAX_CAPTION_BYTES + 1))) > MAX_CAPTION_BYTES:
        raise bad_caption(path, f"it is longer than {MAX_CAPTION_BYTES:,} bytes, the limit for a caption file")
    return data


class CaptionColumns:
    """The caption columns of a dataset's rows: the `configured` ones, by default `text`, else `caption`.

    Each configured column must occur in some row, or a typo would train without text. Call `check` after the last row.
    """

    def __init__(self, configured: tuple[str, ...] | None):
        self._configured = configured
        self._missing = set(configured or ())
        self._there: list[str] = []
        """The columns of the first row, for the error message."""

    def captions(self, row: Mapping[str, Any], place: str) -> tuple[str, ...]:
        """The captions in a row. A column holds a string, a list of strings, or None for no caption.

        A missing column gives no caption. Raises ImageRefused, naming `place`.
        """
        self._missing.difference_update(row)
        self._there = self._there or sorted(row)[:_MAX_SHOWN]
        found: list[str] = []
        for column in self._configured or (("text",) if "text" in row else ("caption",)):
            value = row.get(column)
            for caption in value if isinstance(value, list) else [value]:
                if caption is not None and not isinstance(caption, str):
                    kind = type(caption).__name__
                    raise bad_caption(place, f"column {column!r} holds a {kind}; a caption must be a string")
                found.append(caption or "")
        return _stripped(found, place)

    def check(self, path: str) -> None:
        """Raise DatasetError, naming `path`, for a configured column that no row has."""
        if self._missing and self._there:
            there = ", ".join(self._there)
            raise DatasetError(path, f"no sample has the caption column {min(self._missing)!r}; columns found: {there}")


def _stripped(captions: Iterable[str], place: str) -> tuple[str, ...]:
    stripped = tuple([text for caption in captions if (text := caption.strip())])
    for caption in stripped:
        try:
            num_bytes = len(caption.encode())
        except UnicodeEncodeError as error:  # JSON can encode a lone surrogate; tokenizers cannot
            raise bad_caption(place, f"caption {caption!r:.80} is not Unicode text ({error.reason})") from error
        if num_bytes > MAX_ONE_CAPTION_BYTES:
            raise bad_caption(place, f"a caption has {num_bytes:,} bytes; the limit is {MAX_ONE_CAPTION_BYTES:,}")
    return stripped


# Files


def is_image(name: str) -> bool:
    """Whether the name has an image suffix, of a supported format or not. Case is ignored."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def is_hidden(name: str) -> bool:
    """Whether the name is hidden: `.git`, `.ipynb_checkpoints`, macOS's `._photo.jpg`."""
    return name.startswith(".")


def walk(root: str) -> Iterator[tuple[str, list[str]] | Refusal]:
    """Yield (folder relative to `root`, its file names) for `root` and each folder below it: depth first, sorted.

    Hidden files and folders are skipped. Links to folders are followed, but each folder is read once, so loops of links
    end. An unreadable folder gives a Refusal; for the root itself, raises DatasetError.
    """
    seen, waiting = set[tuple[int, int]](), [""]
    while waiting:
        folder = waiting.pop()
        path = os.path.join(root, folder) if folder else root
        try:
            status = os.stat(path)
            _, folders, names = next(os.walk(path, onerror=_raise))
        except OSError as error:
            if not folder:
                raise DatasetError(root, f"cannot be read: {error.strerror}") from error
            yield Refusal(folder, path, "unreadable", f"the folder cannot be read: {error.strerror}")
            continue
        if (status.st_dev, status.st_ino) not in seen:
            seen.add((status.st_dev, status.st_ino))
            yield folder, sorted(name for name in names if not is_hidden(name))
            inner = sorted((name for name in folders if not is_hidden(name)), reverse=True)
            waiting += [posixpath.join(folder, name) for name in inner]


def _raise(error: OSError) -> None:
    raise error


def refusal_of(sample_id: str, path: str, error: ImageRefused | OSError) -> Refusal:
    """The Refusal for an error that was raised while reading the file at `path`."""
    refused = error if isinstance(error, ImageRefused) else unreadable(path, error)
    return Refusal(sample_id, path, refused.reason, refused.detail)


def unreadable(path: str, error: OSError) -> ImageRefused:
    """The refusal for an operating system error."""
    reason: RefusalReason = "missing" if isinstance(error, FileNotFoundError) else "unreadable"
    return ImageRefused(path, reason, error.strerror or str(error))


def read_image(path: str, file: str, offset: int = 0, num_bytes: int | None = None) -> bytes:
    """The bytes of an image: a whole file, or a range of a tar. Raises ImageRefused, naming `path`."""
    try:
        num_bytes = os.path.getsize(file) if num_bytes is None else num_bytes
        if num_bytes > MAX_IMAGE_BYTES:
            detail = f"it has {num_bytes:,} bytes; the limit is {MAX_IMAGE_BYTES:,}"
            raise ImageRefused(path, "unreadable", f"{detail}. Compress the image, or cut the video")
        return read_range(file, offset, num_bytes)
    except OSError as error:
        raise unreadable(path, error) from error


def read_range(path: str, offset: int, num_bytes: int) -> bytes:
    """Read a range of a regular file; fewer bytes at its end. Raises OSError. Thread-safe: each call opens the file."""
    # Not `open`, which takes twice as long: a dataset may have a million captions.
    fd = os.open(path, READ_FLAGS)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):  # a pipe would read as empty
            raise OSError(errno.EINVAL, "not a regular file", path)
        if offset:
            os.lseek(fd, offset, os.SEEK_SET)
        data, missing = b"", min(num_bytes, status.st_size - offset)
        while missing > 0 and (more := os.read(fd, missing)):
            data, missing = data + more, missing - len(more)
        return data
    finally:
        os.close(fd)


class Signature(NamedTuple):
    """Size, times and inode of the file with the bytes (the tar, not its member). If equal, the file is unchanged."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Signature:
        """The signature of a file with this status."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)

    def is_settled(self) -> bool:
        """Whether the last change is old enough that another one would show. If not, do not memoize the digest."""
        return time.time_ns() - max(self.mtime_ns, self.ctime_ns) > SETTLED_NS

    def to_text(self) -> str:
        """The four numbers, separated by spaces."""
        return f"{self.size} {self.mtime_ns} {self.ctime_ns} {self.inode}"


def signature_of(path: str) -> Signature:
    """The file's signature. Raises ImageRefused, also for anything but a regular file: reading a pipe would block."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        detail = "a broken link" if os.path.islink(path) else "there is no such file"
        raise ImageRefused(path, "missing", detail) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ImageRefused(path, "unreadable", str(error)) from error
    if not stat.S_ISREG(status.st_mode):
        raise ImageRefused(path, "unreadable", "not a regular file")
    return Signature.of(status)


# Samples


class Sample(msgspec.Struct, frozen=True, gc=False):  # a third of a dataclass's time; a plan makes millions
    """One training sample: where its image's bytes are, and its captions.

    `sample_id` is the image's path relative to the dataset's root with `/`, `<tar>/<key>`, or `<file>#<row>`. `path` is
    for display: the real path, with `#member` or `#row`. `captions` are stripped and never empty: a missing caption is
    `("",)`. `locator` is private to the source; if there is a signature, it is the path of the file with the bytes, or
    a tuple that begins with it. `parts` are the control images, then the mask, in the order of the config. Each is a
    sample without captions that the same source reads.
    """

    sample_id: str
    path: str
    captions: tuple[str, ...] = ("",)
    signature: Signature | None = None
    locator: Any = None
    parts: tuple[Sample, ...] = ()

    @property
    def has_caption(self) -> bool:
        """Whether any caption is not empty."""
        return self.captions != ("",)

    def is_unchanged(self) -> bool:
        """Whether the file is still as listed; needs a signature. Raises ImageRefused if the file is gone."""
        file = self.locator if isinstance(self.locator, str) else self.locator[0]
        return signature_of(file) == self.signature


class SampleSource:
    """A dataset of this `kind` at this `path`, in the user's own layout. Thread-safe."""

    kind: ClassVar[str] = ""
    has_unique_ids: ClassVar[bool] = False
    """Whether the layout rules out duplicate sample ids."""
    path = ""

    def samples(self) -> Iterator[Sample | Refusal]:
        """Iterate over all samples, always in the same order. An unusable one is a Refusal and does not end iteration.

        Raises DatasetError at the end if there was no sample at all.
        """
        is_empty = True
        for item in self._listed():
            is_empty = False
            yield item
        if is_empty:
            raise DatasetError(self.path, f"holds no images for a source of kind {self.kind!r}")

    def _listed(self) -> Iterator[Sample | Refusal]:
        """The items of `samples`; each kind of source overrides this."""
        return iter(())

    def read(self, sample: Sample) -> bytes:
        """The bytes of the sample's image. Raises ImageRefused."""
        raise NotImplementedError


# Caption variants, following sd-scripts' `process_caption` as of 48d368f: the same random draws give the same text


def variants_of(caption: str, rule: CaptionsConfig) -> tuple[str, ...]:
    """The `rule.variants` variants of a caption, the first of which is the caption itself.

    Raising `rule.variants` keeps the existing variants: each depends only on the caption, its index and the other
    settings.
    """
    if rule.variants == 1:
        return (caption,)
    # Python guarantees that an integer seeds the same stream in all versions.
    first = seed_of(rule.seed, caption)
    return (caption, *(varied(caption, rule, Random(first + number)) for number in range(1, rule.variants)))


def varied(caption: str, rule: CaptionsConfig, stream: Random) -> str:
    """The caption with tags shuffled and dropped according to the random stream.

    Without shuffling or dropping, only the secondary separator is replaced. Otherwise the tags are joined by a comma
    and a space, whatever the separator is.
    """
    if rule.shuffle or rule.drop:
        first, moved, last = _split(caption, rule)
        if rule.shuffle:
            stream.shuffle(moved)
        if rule.drop:  # after the shuffle, from the same stream
            moved = [tag for tag in moved if stream.random() >= rule.drop]
        caption = ", ".join([*first, *moved, *last])
    if rule.secondary_separator:
        caption = caption.replace(rule.secondary_separator, rule.separator)
    return caption


def _split(caption: str, rule: CaptionsConfig) -> tuple[list[str], list[str], list[str]]:
    """Split a caption into the tags that stay first, the tags that move, and the tags that stay last.

    As in sd-scripts, empty tags are kept unless `keep_separator` is in the caption.
    """
    if rule.keep_separator and rule.keep_separator in caption:
        # Everything after the second separator, further separators included, belongs to the last tags.
        parts = [*caption.split(rule.keep_separator, 2), ""][:3]
        first, moved, last = ([tag for tag in _tags(part, rule) if tag] for part in parts)
        return first, moved, last
    tags = _tags(caption, rule)
    return tags[: rule.keep], tags[rule.keep :], []


def _tags(text: str, rule: CaptionsConfig) -> list[str]:
    return [tag.strip() for tag in text.strip().split(rule.separator)]
