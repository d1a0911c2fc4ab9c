"""Samples of a cache as other trainers' formats need them, and the files that are written of them."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch

from latentcache.config import RULES, BucketsConfig, settings_of
from latentcache.config_file import parse_buckets
from latentcache.dataset.bucket_rules import BucketRule
from latentcache.dataset.images import IMAGE_SUFFIXES
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_row import ImageRef, PartRef, PartRole, Row
from latentcache.errors import ConfigError, EntryDamagedError, EntryMissingError, StoreError
from latentcache.families import DEFAULT, family_named
from latentcache.families.scaling import latents_from_moments
from latentcache.identity import digest
from latentcache.interop.foreign_family import check_family
from latentcache.interop.imported_facts import knows_caption
from latentcache.interop.reports import ExportReport
from latentcache.loading.cache import LatentCache
from latentcache.types import Entry, Geometry, Refusal
from latentcache.utils.durable_files import typed_errors, write_sealed
from latentcache.utils.progress import Progress

A_CLIP = "unsupported-format", "it is a clip: images alone are exported"
"""Reason and detail, where a format has no place for clips."""
NOTE_UNKNOWN = "a text was imported without its caption, by which its file is found: it was not exported"


@dataclass(frozen=True, slots=True)
class ExportCaption:
    """One caption's embeddings, as they are stored: [T, D] or [T, layers, D], and [P] where the family has them."""

    text: str | None
    """None: it was imported without its caption."""
    prompt_embeds: torch.Tensor
    pooled_prompt_embeds: torch.Tensor | None
    num_tokens: int | None
    """Tokens of the caption, uncut; None where they were not counted."""
    others: tuple[str, ...] = ()
    """What else is stored of it, as Chroma's mask of texts with their padding."""


@dataclass(frozen=True, slots=True)
class ExportSample:
    """One sample: `latents` and, if the dataset flips, `flipped` [C, (F,) h, w]: unscaled, float32, on the CPU.

    `geometry` is that of `latents`, `flipped_geometry` that of `flipped`. `stem` is the path of its files below the
    folder of an export: the sample_id without an image's suffix.
    """

    sample_id: str
    stem: PurePosixPath
    path: str
    geometry: Geometry
    latents: torch.Tensor
    flipped: torch.Tensor | None
    flipped_geometry: Geometry | None
    captions: tuple[ExportCaption, ...]
    dtype: torch.dtype
    """That in which the latents are stored."""
    output: str
    """`mean` or `sample` (one draw): what the latents are of the posterior."""
    row: Row


class _Latents(NamedTuple):
    """[C, (F,) h, w] in float32; the stored dtype; and `mean` or `sample`."""

    values: torch.Tensor
    dtype: torch.dtype
    output: str


class Export:
    """One export of the manifest `name` to the files of a format: gives the samples, writes files, and reports.

    Moments give their mean, or with `seed` one draw for each entry, which the seed and the entry determine. Files that
    exist are left alone, and listed, unless `overwrite`. `buckets` are those of the training that is to read the files;
    by default those of the cache, if it was made with the trainer's rule, else the trainer's own defaults for that
    area. `families` are those that the format can hold; None is all. Raises StoreError if there is no such manifest,
    or it holds prompts, and ConfigError for another family, and for buckets of another rule.
    """

    takes_clips = False
    """Whether the format has a place for clips."""

    def __init__(  # noqa: PLR0913 - what an export has, by keyword
        self,
        format_name: str,
        cache: LatentCache,
        name: str,
        folder: str | Path,
        *,
        seed: int | None = None,
        overwrite: bool = False,
        buckets: BucketsConfig | None = None,
        families: Collection[str] | None = (DEFAULT,),
        progress: Progress | None = None,
    ):
        if buckets is not None and buckets.rule != format_name:
            raise ConfigError(f"the buckets are of rule {buckets.rule}, the files for {format_name}", key="buckets")
        self._buckets = buckets
        self._rule: BucketRule | None = None
        self.report = ExportReport(format_name, name, path=str(folder))
        self._cache, self._seed, self._overwrite = cache, seed, overwrite
        self._progress = progress or Progress()
        self._written: set[Path] = set()
        self.takes: tuple[PartRole, ...] = ()
        """The roles of further parts that the format has a place for: set it before `samples`."""
        self.manifest = cache.manifest(name)
        self.scaling = cache.scaling(self.manifest)
        family = str(self.manifest.common.get("family", DEFAULT))
        self.family = family_named(family if families is None else check_family(family, families, format_name))

    def __contains__(self, path: Path) -> bool:
        """Whether this file was written."""
        return path in self._written

    def skip(self, sample_id: str, path: str | Path, reason: str, detail: str) -> None:
        """Report what is not exported."""
        self.report.skipped.append(Refusal(sample_id, str(path), reason, detail))

    def samples(self) -> Iterator[ExportSample]:
        """The samples, one in memory at a time; what cannot be exported is listed in the report.

        Raises SampleError, before the first sample, if one was imported and is unverified, unless the cache was opened
        with `unverified`, and ConfigError if the trainer's buckets cannot be derived from the cache's.
        """
        cache, manifest = self._cache, self.manifest
        self._rule = self._rule_of(manifest)
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
        """The sample of a row; None, and reported, if it cannot be exported."""
        if (what := _not_text(row)) is not None:
            self.skip(row.sample_id, row.path, "unreadable", f"{what} is not UTF-8")
            return None
        stem = PurePosixPath(row.sample_id)
        if stem.is_absolute() or ".." in stem.parts or "\0" in row.sample_id or not stem.name:
            self.skip(row.sample_id, row.path, "unreadable", "its sample_id leads out of the folder")
            return None
        if names := ", ".join(dict.fromkeys(name for name, ref in row.named_parts() if ref.role not in self.takes)):
            self.skip(row.sample_id, row.path, "has-parts", f"it has {names}, for which the format has no place")
            return None
        if stem.suffix.lower() in IMAGE_SUFFIXES:
            stem = stem.with_suffix("")
        try:
            images = {ref.geometry.flip: (ref.geometry, self._latents(ref)) for ref in row.images}
            captions = []
            for caption in row.captions:
                captions.append(_caption_of(caption.text, self._cache.get(caption.key)))
        except (EntryMissingError, EntryDamagedError) as error:
            reason = "missing" if isinstance(error, EntryMissingError) else "corrupt"
            self.skip(row.sample_id, row.path, reason, str(error))
            return None
        geometry, latents = images[False]
        if geometry.num_frames is not None and not self.takes_clips:
            self.skip(row.sample_id, row.path, *A_CLIP)
            return None
        flipped_geometry, flipped = images.get(True, (None, None))
        return ExportSample(
            sample_id=row.sample_id,
            stem=stem,
            path=row.path,
            geometry=geometry,
            latents=latents.values,
            flipped=None if flipped is None else flipped.values,
            flipped_geometry=flipped_geometry,
            captions=tuple(captions),
            dtype=latents.dtype,
            output=latents.output,
            row=row,
        )

    def parts(self, sample: ExportSample, role: PartRole) -> list[torch.Tensor] | None:
        """The latents of a sample's control images, or its mask. None, and reported, if one of them cannot be read."""
        refs = [ref for _, ref in sample.row.named_parts(flip=False) if ref.role == role]
        try:
            return [
                self._cache.get(ref.key).tensors["mask"] if role == "mask" else self._latents(ref).values
                for ref in refs
            ]
        except (EntryMissingError, EntryDamagedError) as error:
            self.skip(sample.sample_id, sample.path, "missing", str(error))
            return None

    def other_bucket(self, sample: ExportSample, *, exact: bool = False) -> str | None:
        """How the bucket differs from what the trainer would make of this image, for messages; None if it does not.

        With `exact`, resize and crop count too. The report counts those that differ. What was imported from the same
        trainer has its buckets.
        """
        if self._rule is None:
            return None
        geometry, usual = sample.geometry, self._rule.geometry(sample.geometry.original_size)
        if usual == geometry or (not exact and usual is not None and usual.target_size == geometry.target_size):
            return None
        self.report.num_other_buckets += 1
        would = "none" if usual is None else f"{usual.target_size}, cut from {usual.resized_size}"
        return (
            f"its bucket is {geometry.target_size}, cut from {geometry.resized_size}; that of {self._rule} is {would}"
        )

    def _rule_of(self, manifest: Manifest) -> BucketRule | None:
        """What the trainer would do. None for what was imported from it, and for a format without a rule."""
        rule, chosen = self.report.format, self._buckets
        if chosen is None:
            if manifest.imported_from == rule or rule not in RULES:
                return None
            source = f"manifest {manifest.name}"
            made = parse_buckets(manifest.common.get("buckets") or {}, source=source)
            chosen = made if made.rule == rule else parse_buckets(_likely(made, rule), source=source)
        self.report.buckets = {name: getattr(chosen, name) for name in sorted({"rule", *settings_of(rule)})}
        return BucketRule(chosen)

    def _latents(self, ref: ImageRef | PartRef) -> _Latents:
        entry = self._cache.get(ref.key)
        if "latents" in entry.tensors:
            if self._seed is not None:
                self.report.note("latents are stored, not moments: they are exported as they are, without a draw")
            stored, identity = entry.tensors["latents"], entry.record.identity
            return _Latents(stored.float(), stored.dtype, identity.get("encoding", identity.get("imported"))["output"])
        generator = None
        if self._seed is not None:
            generator = torch.Generator().manual_seed(int(digest(f"{self._seed} {ref.key}".encode())[:15], 16))
        moments = entry.tensors["moments"]
        latents = latents_from_moments(moments[None].float(), generator)[0]
        return _Latents(latents, moments.dtype, "mean" if generator is None else "sample")

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


def _not_text(row: Row) -> str | None:
    """What of a row no file can hold: it has half of a surrogate pair, as a name from a broken archive may have."""
    what = "its name"
    try:
        os.fsencode(row.sample_id)
        what = "a caption"
        for caption in row.captions:
            caption.text.encode()
    except UnicodeEncodeError:
        return what
    return None


def _caption_of(text: str, entry: Entry) -> ExportCaption:
    """A caption as formats need it. Of an imported one that is not known the manifest has the empty text."""
    known = text if knows_caption(entry.record) else None
    tensors = dict(entry.tensors)
    embeds, pooled = tensors.pop("prompt_embeds"), tensors.pop("pooled_prompt_embeds", None)
    return ExportCaption(known, embeds, pooled, entry.record.provenance.get("num_tokens"), tuple(tensors))


def _likely(made: BucketsConfig, rule: str) -> dict[str, Any]:
    """The settings of a training with `rule` that a cache with other buckets was most likely made for."""
    side = math.isqrt(made.area) if made.rule == "latentcache" else made.resolution
    likely = {"rule": rule, "resolution": side}
    if rule == "kohya" and side > 1024:
        likely["max_side"] = side
    if rule == "kohya" and side < 256:
        likely["min_side"] = made.step
    return likely if rule == "ai-toolkit" else {**likely, "step": made.step}
