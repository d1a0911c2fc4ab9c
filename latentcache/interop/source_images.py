"""The images and captions that a foreign cache was made from, as far as the user still has them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

from latentcache.config import ImagesConfig, SourceConfig
from latentcache.dataset.images import probe
from latentcache.dataset.samples import Sample
from latentcache.dataset.sources import open_source
from latentcache.errors import ForeignFileRefused
from latentcache.types import Refusal, Size

_SIZE_POLICY = ImagesConfig(animated="first-frame", max_aspect=float(1 << 20), min_side=1)
"""It refuses no image for its shape: only the size is read, and the other trainer accepted the image already."""


class SourceImages:
    """The samples of a folder, and further captions that are known, such as validation prompts.

    Foreign caches name files. Their names are looked up among the samples: a file outside the folder is never opened.
    `recorded_root` is where the folder was when the cache was made, if it was moved since. Without a folder there are
    no samples. Raises DatasetError if the folder cannot be read.
    """

    def __init__(
        self,
        folder: str | Path | None,
        *,
        caption_extension: str = ".txt",
        captions: Iterable[str] = (),
        recorded_root: str | None = None,
    ) -> None:
        roots = (None if folder is None else os.path.abspath(folder), recorded_root)
        self._roots = [path_parts(root) for root in roots if root is not None]
        self._samples: dict[str, Sample] = {}
        self._by_stem: dict[str, list[str]] = {}
        self.refusals: list[Refusal] = []
        """What cannot be used in the folder."""
        by_caption: dict[str, list[str]] = {caption: [] for caption in ("", *captions)}
        if folder is not None:
            self._source = open_source(SourceConfig(path=Path(folder), caption_extension=caption_extension))
            for sample in self._source.samples():
                if isinstance(sample, Refusal):
                    self.refusals.append(sample)
                    continue
                self._samples[sample.sample_id] = sample
                self._by_stem.setdefault(os.path.splitext(sample.sample_id)[0], []).append(sample.sample_id)
                for caption in sample.captions:
                    by_caption.setdefault(caption, []).append(sample.sample_id)
        self._by_caption = {caption: tuple(sample_ids) for caption, sample_ids in by_caption.items()}

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self._samples

    def __iter__(self) -> Iterator[str]:
        """All sample_ids, in the folder's order."""
        return iter(self._samples)

    def captions(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Each known caption once, with the samples that have it. The first is the empty one, also without samples."""
        yield from self._by_caption.items()

    def captions_of(self, sample_id: str) -> tuple[str, ...]:
        """The captions of a sample; () where it has no caption file."""
        sample = self._samples[sample_id]
        return sample.captions if sample.has_caption else ()

    def with_stem(self, stem: str) -> tuple[str, ...]:
        """The sample_ids that are this path with a suffix."""
        return tuple(self._by_stem.get(stem, ()))

    def path(self, sample_id: str) -> Path:
        """The file of a sample's image."""
        return Path(self._samples[sample_id].path)

    def size(self, sample_id: str) -> Size:
        """The size of a sample's image after the EXIF turn. Raises ImageRefused if it cannot be read."""
        sample = self._samples[sample_id]
        return probe(self._source.read(sample), sample.path, _SIZE_POLICY).size

    def find(self, recorded: str) -> str | None:
        """The sample that a foreign cache names by a path: relative, below the folder, or below `recorded_root`.

        None if there is no such sample. Equal file names alone are no proof: many folders have a `1.png`.
        """
        if recorded in self._samples:
            return recorded
        parts = path_parts(recorded)
        for root in self._roots:
            if parts[: len(root)] == root and (sample_id := "/".join(parts[len(root) :])) in self._samples:
                return sample_id
        return None


def path_parts(recorded: str) -> tuple[str, ...]:
    """The names in a path that some machine recorded, without its root or drive."""
    pure = PureWindowsPath(recorded) if "\\" in recorded else PurePosixPath(recorded)
    return pure.parts[1:] if pure.anchor else pure.parts


def sample_id_of(recorded: str, path: str | Path) -> str:
    """A sample_id for a recorded path that fits no sample: the path without its root.

    Raises ForeignFileRefused (with `path`, the file that names it) if it names nothing, or leads upwards.
    """
    parts = path_parts(recorded)
    if not parts or ".." in parts or "\0" in recorded or not _is_file_name(recorded):
        raise ForeignFileRefused(path, "corrupt", f"it names the image {recorded!r:.200}, which is no path of a file")
    return "/".join(parts)


def _is_file_name(text: str) -> bool:
    """Whether the file system can hold it: a pickle may hold half a surrogate pair."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True
