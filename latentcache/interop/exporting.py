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


class Export:
    """One export of the manifest `name` to the files of a format: gives the samples, writes files, and reports.

    Moments give their mean, or with `seed` one draw for each entry, which the seed and the entry determine. Files that
    exist are left alone, and listed, unless `overwrite`.
    """

    def __init__(
        self,
        format_name: str,
        cache: LatentCache,
        name: str,
        folder: str | Path,
        *,
        seed: int | None = None,
        overwrite: bool = False,
    ):
        self.report = ExportReport(format_name, name, path=str(folder))
        self._cache, self._seed, self._overwrite = cache, seed, overwrite
        self._written: set[Path] = set()

    def __contains__(self, path: Path) -> bool:
        """Whether this file was written."""
        return path in self._written

    def skip(self, sample_id: str, path: str | Path, reason: str, detail: str) -> None:
        """Report what is not exported."""
        self.report.skipped.append(Refusal(sample_id, str(path), reason, detail))

    def samples(self) -> Iterator[ExportSample]:
        """The samples, one in memory at a time; what cannot be exported is listed in the report.

        Raises SampleError, before the first sample, if one was imported and is unverified, unless the cache was opened
        with `unverified`; and StoreError if there is no such manifest, or it holds prompts.
        """
        cache, manifest = self._cache, self._cache.manifest(self.report.name)
        cache.scaling(manifest)
        rows = [row for row in manifest.rows.values() if row.refusal is None]
        for row in rows:
            cache.check_trust(manifest, row)
        self.report.skipped += [row.refusal for row in manifest.rows.values() if row.refusal is not None]
        for row in rows:
            stem = PurePosixPath(row.sample_id)
            if stem.is_absolute() or ".." in stem.parts or "\0" in row.sample_id or not stem.name:
                self.skip(row.sample_id, row.path, "unreadable", "its sample_id leads out of the folder")
                continue
            if stem.suffix.lower() in IMAGE_SUFFIXES:
                stem = stem.with_suffix("")
            try:
                images = {ref.geometry.flip: (ref.geometry, self._latents(ref)) for ref in row.images}
                captions = []
                for caption in row.captions:
                    tensors = cache.get(caption.key).tensors
                    embeds = tensors["prompt_embeds"], tensors["pooled_prompt_embeds"]
                    captions.append(ExportCaption(caption.text, *embeds))
            except (EntryMissingError, EntryDamagedError) as error:
                reason = "missing" if isinstance(error, EntryMissingError) else "corrupt"
                self.skip(row.sample_id, row.path, reason, str(error))
                continue
            geometry, latents = images[False]
            flipped = images[True][1] if True in images else None
            yield ExportSample(row.sample_id, stem, row.path, geometry, latents, flipped, tuple(captions))

    def _latents(self, ref: ImageRef) -> torch.Tensor:
        tensors = self._cache.get(ref.key).tensors
        if "latents" in tensors:
            if self._seed is not None:
                self.report.note("latents are stored, not moments: they are exported as they are, without a draw")
            return tensors["latents"].float()
        generator = None
        if self._seed is not None:
            generator = torch.Generator().manual_seed(int(digest(f"{self._seed} {ref.key}".encode())[:15], 16))
        return latents_from_moments(tensors["moments"][None].float(), generator)[0]

    def write(self, path: Path, data: bytes, sample: ExportSample) -> bool:
        """Write one file of `sample`, whole or not at all.

        False, and a refusal in the report, if the file exists already or its name is too long. Raises ReadOnlyError,
        StorageFullError or StoreError.
        """
        if path in self._written or (os.path.exists(path) and not self._overwrite):
            detail = "another sample has this file" if path in self._written else "it exists already: give --overwrite"
            self.skip(sample.sample_id, path, "duplicate", detail)
            return False
        try:
            with typed_errors(path, len(data)):
                path.parent.mkdir(parents=True, exist_ok=True)
            write_sealed(path, data)
        except StoreError as error:
            if getattr(error.__cause__, "errno", None) != errno.ENAMETOOLONG:
                raise
            detail = f"its name is too long for a file here: {len(path.name)} characters"
            self.skip(sample.sample_id, path, "unreadable", detail)
            return False
        self._written.add(path)
        self.report.num_files += 1
        self.report.bytes_written += len(data)
        return True
