"""Finds the files of a sample's further parts: control images and masks that are files of their own."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from latentcache.config import PartConfig, part_names
from latentcache.dataset.samples import Sample, is_hidden, is_image, refuse_read, signature_of
from latentcache.errors import ConfigError, ImageRefused

REMEMBERED_FOLDERS = 64
"""Whose names are kept: lines of metadata may lead from one folder to another and back."""


class PartFiles:
    """The further parts of samples that are image files below `root`. ConfigError where a part is the image itself.

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
                if stem.endswith(part.suffix) and self._has_image(stem.removesuffix(part.suffix)):
                    return True
            elif not self._root.startswith(inner) and os.path.join(self._root, sample_id).startswith(inner):
                return True
        return False

    def _has_image(self, stem: str) -> bool:
        folder, base = os.path.split(os.path.join(self._root, stem))
        return base in self._images_in(folder)

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
