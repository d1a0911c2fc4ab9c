"""What the exports to all formats share: reading samples, writing files, and reporting."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypedDict

import torch

from latentcache.dataset.images import IMAGE_SUFFIXES
from latentcache.dataset.row_table import PartRole, Row
from latentcache.errors import EntryDamagedError, EntryMissingError, StoreError
from latentcache.families import DEFAULT, family_named
from latentcache.families.scaling import latents_from_moments
from latentcache.interop.readers import check_family
from latentcache.interop.reports import ExportReport
from latentcache.loading.cache import LatentCache
from latentcache.types import Entry, Geometry, Refusal
from latentcache.utils.durable_files import make_folder, sealed_file, typed_errors, write_all
from latentcache.utils.progress import Progress

NOTE_FIRST_CAPTION = "several captions: only the first was exported"


class ExportOptions(TypedDict, total=False):
    """Options that every format takes."""

    overwrite: bool
    """Replace existing files. By default they are kept and listed as skipped."""
    progress: Progress | None


@dataclass(frozen=True, slots=True)
class ExportSample:
    """One sample to export.

    `latents` and, if the dataset has flips, `flipped` are [C, (F,) h, w]: unscaled, float32, on the CPU, the mean of
    stored moments. `geometry` and the stored `entry` are those of `latents`. `captions` are texts and their entries;
    the text is None if the import did not find the caption. `stem` is the sample_id without the suffix of an image.
    `parts` has the latents of the control images, or the mask, for each role that the export takes.
    """

    row: Row
    stem: PurePosixPath
    geometry: Geometry
    latents: torch.Tensor
    flipped: torch.Tensor | None
    captions: tuple[tuple[str | None, Entry], ...]
    entry: Entry
    parts: Mapping[PartRole, Sequence[torch.Tensor]]


class Export:
    """One export of the manifest `name`: yields its samples, writes files, and keeps the report.

    `families` are those that the format supports, and `takes` the roles of further parts (masks, control images) that
    it can hold. Raises StoreError if there is no such manifest or it holds prompts, and ConfigError for another family.
    """

    def __init__(
        self,
        format_name: str,
        cache: LatentCache,
        name: str,
        folder: str | Path,
        options: ExportOptions,
        *,
        families: Collection[str],
        takes: Collection[PartRole],
    ):
        self.report = ExportReport(format_name, name, path=str(folder))
        self._cache, self._takes = cache, takes
        self._overwrite = options.get("overwrite", False)
        self._progress = options.get("progress") or Progress()
        self._written: set[tuple[int, ...]] = set()
        """Written files, by inode and device: names that differ by case may name one file."""
        self.manifest = cache.manifest(name)
        self.scaling = cache.scaling(self.manifest)
        family = str(self.manifest.common.get("family", DEFAULT))
        self.family = family_named(check_family(family, families, format_name))

    def skip(self, row: Row, reason: str, detail: str, path: Path | None = None) -> None:
        """Report a sample as skipped, or only its file at `path`."""
        self.report.skipped.append(Refusal(row.sample_id, str(path or row.path), reason, detail))

    def samples(self) -> Iterator[ExportSample]:
        """Yield the samples, one in memory at a time. Those that cannot be exported are listed in the report.

        Raises SampleError before the first one if any is an unverified import and the cache was opened without
        `unverified`.
        """
        cache, manifest = self._cache, self.manifest
        cache.samples(manifest.name).check(manifest.rows.usable())
        self.report.skipped += manifest.rows.refusals.values()
        self._progress.start(f"export {manifest.name}", len(manifest.rows))
        try:
            for row in manifest.rows.values():
                if row.refusal is None and (sample := self._sample(row)) is not None:
                    yield sample
                self._progress.advance()
        finally:
            self._progress.finish()

    def _sample(self, row: Row) -> ExportSample | None:
        """The sample of a row. If it cannot be exported, it is reported and None is returned."""
        if (what := _not_text(row)) is not None:
            self.skip(row, "unreadable", f"{what} is not UTF-8")
            return None
        stem = PurePosixPath(row.sample_id)
        if stem.is_absolute() or ".." in stem.parts or "\0" in row.sample_id or not stem.name:
            self.skip(row, "unreadable", "its sample_id is not a path inside the folder")
            return None
        if names := ", ".join(dict.fromkeys(ref.role for ref in row.parts if ref.part not in self._takes)):
            self.skip(row, "has-parts", f"it has {names}, which the format cannot hold")
            return None
        try:
            images = {
                ref.geometry.flip: (ref.geometry, self._cache.get(ref.key)) for ref in row.images if ref.crop == 0
            }
            captions = [(caption.text, self._cache.get(caption.key)) for caption in row.captions if caption.key]
            companions = [(ref.part, self._cache.get(ref.key)) for ref in row.parts_of()]
        except (EntryMissingError, EntryDamagedError) as error:
            self.report.num_unread += 1
            self.skip(row, "missing" if isinstance(error, EntryMissingError) else "corrupt", str(error))
            return None
        if any(ref.crop for ref in row.images):
            self.report.note("several crops: only the first was exported")
        geometry, entry = images[False]
        return ExportSample(
            row=row,
            stem=stem.with_suffix("") if stem.suffix.lower() in IMAGE_SUFFIXES else stem,
            geometry=geometry,
            latents=_latents_of(entry),
            flipped=_latents_of(images[True][1]) if True in images else None,
            # Without a source an import did not find the caption, and the manifest holds "" in its place.
            captions=tuple(
                (None if entry.record.identity.get("source", "") is None else text, entry) for text, entry in captions
            ),
            entry=entry,
            parts={role: [_latents_of(made) for part, made in companions if part == role] for role in self._takes},
        )

    def write(self, path: Path, data: bytes, sample: ExportSample) -> bool:
        """Write one file of `sample` atomically.

        If it exists already or its name is too long, this is reported and False is returned. Raises ReadOnlyError,
        StorageFullError or StoreError.
        """
        is_taken = os.path.exists(path) and path.stat()[1:3] in self._written
        if is_taken or (os.path.exists(path) and not self._overwrite):
            detail = "another sample has this file" if is_taken else "it exists already: give --overwrite"
            self.skip(sample.row, "duplicate", detail, path)
            return False
        try:
            with self.sealed(path, len(data)) as fd:
                write_all(fd, data)
        except StoreError as error:
            if getattr(error.__cause__, "errno", None) != errno.ENAMETOOLONG:
                raise
            detail = f"its name has {len(path.name)} characters, too many for this file system"
            self.skip(sample.row, "unreadable", detail, path)
            return False
        self._written.add(path.stat()[1:3])
        return True

    @contextmanager
    def sealed(self, path: Path, num_bytes: int) -> Iterator[int]:
        """Yield the descriptor of a new file, which appears at `path` only if the block succeeds.

        `num_bytes` is its expected size, for messages. Raises what `write` raises.
        """
        with typed_errors(path.parent, num_bytes):
            make_folder(path.parent)
        with sealed_file(path, num_bytes) as fd:
            yield fd
            self.report.bytes_written += os.fstat(fd).st_size
        self.report.num_files += 1


def _latents_of(entry: Entry) -> torch.Tensor:
    """Latents [C, (F,) h, w] in float32, the mean if the entry holds moments; or a mask as it is."""
    if "mask" in entry.tensors:
        return entry.tensors["mask"]
    if "latents" in entry.tensors:
        return entry.tensors["latents"].float()
    return latents_from_moments(entry.tensors["moments"][None].float())[0]


def _not_text(row: Row) -> str | None:
    """The first text of a row that is not valid Unicode (a lone surrogate, as from a broken archive), or None."""
    what = "its name"
    try:
        os.fsencode(row.sample_id)
        what = "a caption"
        for caption in row.captions:
            caption.text.encode()
    except UnicodeEncodeError:
        return what
    return None
