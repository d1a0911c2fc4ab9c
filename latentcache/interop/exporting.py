"""Samples of a cache as other trainers' formats need them, and the files that are written of them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from latentcache.dataset.images import IMAGE_SUFFIXES
from latentcache.dataset.manifest import ImageRef
from latentcache.errors import EntryDamagedError, EntryMissingError, StoreError
from latentcache.identity import digest
from latentcache.interop.reports import ExportReport
from latentcache.loading.cache import LatentCache
from latentcache.models.vae import latents_from_moments
from latentcache.types import Geometry, Refusal
from latentcache.utils.durable_files import typed_errors, write_sealed


@dataclass(frozen=True, slots=True)
class ExportCaption:
    """One caption: `prompt_embeds` [T, D] and `pooled_prompt_embeds` [P], as they are stored."""

    text: str
    prompt_embeds: torch.Tensor
    pooled_prompt_embeds: torch.Tensor


@dataclass(frozen=True, slots=True)
class ExportSample:
    """One sample: `latents` and, if the dataset flips, `flipped` [C, h, w]: unscaled, float32, on the CPU.

    `geometry` is that of `latents`; that of `flipped` differs in `flip` alone. `stem` is the path of its files below
    the folder of an export: the sample_id without an image's suffix.
    """

    sample_id: str
    stem: PurePosixPath
    path: str
    geometry: Geometry
    latents: torch.Tensor
    flipped: torch.Tensor | None
    captions: tuple[ExportCaption, ...]


def export_samples(
    cache: LatentCache, name: str, report: ExportReport, *, seed: int | None = None
) -> Iterator[ExportSample]:
    """The samples of the manifest `name`, one in memory at a time; what cannot be exported is listed in the report.

    Moments give their mean, or with `seed` one draw for each entry, which the seed and the entry determine. Raises
    SampleError, before the first sample, if one was imported and is unverified, unless `cache` was opened with
    `unverified`; and StoreError if there is no such manifest, or it holds prompts.
    """
    manifest = cache.manifest(name)
    cache.samples.scaling(manifest)
    rows = [row for row in manifest.rows.values() if row.refusal is None]
    for row in rows:
        cache.samples.check_trust(manifest, row)
    report.skipped += [row.refusal for row in manifest.rows.values() if row.refusal is not None]
    for row in rows:
        stem = _stem(row.sample_id)
        if stem is None:
            detail = "its sample_id leads out of the folder"
            report.skipped.append(Refusal(row.sample_id, row.path, "unreadable", detail))
            continue
        try:
            images = {ref.geometry.flip: (ref, _latents(cache, ref, seed, report)) for ref in row.images}
            captions = []
            for caption in row.captions:
                tensors = cache.get(caption.key).tensors
                captions.append(ExportCaption(caption.text, tensors["prompt_embeds"], tensors["pooled_prompt_embeds"]))
        except EntryMissingError as error:
            report.skipped.append(Refusal(row.sample_id, row.path, "missing", str(error)))
            continue
        except EntryDamagedError as error:
            report.skipped.append(Refusal(row.sample_id, row.path, "corrupt", str(error)))
            continue
        ref, latents = images[False]
        flipped = images[True][1] if True in images else None
        yield ExportSample(row.sample_id, stem, row.path, ref.geometry, latents, flipped, tuple(captions))


def _stem(sample_id: str) -> PurePosixPath | None:
    """The `ExportSample.stem`; None if it leads out of the folder."""
    pure = PurePosixPath(sample_id)
    if pure.is_absolute() or ".." in pure.parts or "\0" in sample_id or not pure.name:
        return None
    return pure.with_suffix("") if pure.suffix.lower() in IMAGE_SUFFIXES else pure


def _latents(cache: LatentCache, ref: ImageRef, seed: int | None, report: ExportReport) -> torch.Tensor:
    tensors = cache.get(ref.key).tensors
    if "latents" in tensors:
        if seed is not None:
            report.note("latents are stored, not moments: they are exported as they are, without a draw")
        return tensors["latents"].float()
    generator = None
    if seed is not None:
        generator = torch.Generator().manual_seed(int(digest(f"{seed} {ref.key}".encode())[:15], 16))
    return latents_from_moments(tensors["moments"][None].float(), generator)[0]


class ExportFiles:
    """Writes the files of one export and counts them in its report."""

    def __init__(self, report: ExportReport, *, overwrite: bool):
        self._report, self._overwrite = report, overwrite
        self._written: set[Path] = set()

    def __contains__(self, path: Path) -> bool:
        return path in self._written

    def write(self, path: Path, data: bytes, sample: ExportSample) -> bool:
        """Write one file of `sample`, whole or not at all.

        False, and a refusal in the report, if the file exists already or its name is too long. Raises ReadOnlyError,
        StorageFullError or StoreError.
        """
        if path in self._written or (os.path.exists(path) and not self._overwrite):
            reason = "another sample has this file" if path in self._written else "it exists already: give --overwrite"
            self._report.skipped.append(Refusal(sample.sample_id, str(path), "duplicate", reason))
            return False
        try:
            with typed_errors(path, len(data)):
                path.parent.mkdir(parents=True, exist_ok=True)
            write_sealed(path, data)
        except StoreError as error:
            if getattr(error.__cause__, "errno", None) != errno.ENAMETOOLONG:
                raise
            detail = f"its name is too long for a file here: {len(path.name)} characters"
            self._report.skipped.append(Refusal(sample.sample_id, str(path), "unreadable", detail))
            return False
        self._written.add(path)
        self._report.num_files += 1
        self._report.bytes_written += len(data)
        return True
