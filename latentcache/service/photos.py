"""The photos that a cache was made from, where their files are on this machine: shown, and compared with their digest.

Only what decodes as an image leaves this module, as WebP: never the bytes of a file.
"""

from __future__ import annotations

import os
import stat
import threading
from dataclasses import dataclass
from typing import Literal

from latentcache.config import ImagesConfig
from latentcache.dataset.images import decode
from latentcache.dataset.manifest_row import Row
from latentcache.errors import ImageRefused, RequestRefused, StoreError
from latentcache.identity import digest
from latentcache.service.thumbnails import webp_of

MAX_PHOTO_BYTES = 1 << 28
"""Of a photo's file; a larger one is not shown."""
PHOTO_SIDE = 1024
"""The longer side of a photo that is shown, in pixels, at most."""
_ANY_IMAGE = ImagesConfig(animated="first-frame", max_aspect=1e6, min_side=1)

_decoding = threading.Semaphore(2)
"""Photos are decoded two at a time: one of 100 megapixels takes 300 MB meanwhile."""

PhotoState = Literal["same", "changed", "unreadable", "not shown"]


@dataclass(frozen=True, slots=True)
class Photo:
    """What became of a sample's photo. `same`: its file has the bytes that were encoded."""

    state: PhotoState
    detail: str

    @property
    def is_shown(self) -> bool:
        """Whether there is a picture of it."""
        return self.state in ("same", "changed")


def examine_photo(row: Row) -> Photo:
    """Compare the photo's file with the digest in the manifest. It is read as a whole."""
    try:
        data = _read(row.path)
    except StoreError as error:
        return Photo("unreadable", str(error))
    if row.source is None or digest(data) == row.source:
        return Photo("same", "the file has the bytes that were encoded")
    return Photo("changed", "the file has other bytes than those that were encoded: precache encodes it again")


def photo_webp(row: Row) -> bytes:
    """The photo upright, in sRGB, at most PHOTO_SIDE pixels high and wide. RequestRefused if it cannot be shown."""
    try:
        with _decoding:
            return webp_of(decode(_read(row.path), row.path, _ANY_IMAGE), PHOTO_SIDE)
    except ImageRefused as error:
        # Not its detail: that may have bytes of a file that is no photo.
        raise RequestRefused(f"{row.path}: cannot be shown: {error.reason}", status=404) from error
    except StoreError as error:
        raise RequestRefused(str(error), status=404) from error


def _read(path: str) -> bytes:
    """The bytes of a regular file. A pipe or a device is never waited for."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_PHOTO_BYTES:
            raise StoreError(f"{path}: is no regular file of at most {MAX_PHOTO_BYTES:,} bytes")
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            return file.read(MAX_PHOTO_BYTES)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise StoreError(f"{path}: cannot be read on this machine: {reason}") from error
