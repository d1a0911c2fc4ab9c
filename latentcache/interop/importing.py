"""A foreign cache -> entries and a manifest. Latents are stored unscaled, and entries say that they were imported."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import TypeAdapter, ValidationError

from latentcache.config import PROMPTS_PREFIX, Name
from latentcache.dataset.manifest import CaptionRef, ImageRef, Manifest, Row
from latentcache.errors import ConfigError, StoreError
from latentcache.identity import caption_digest, digest
from latentcache.interop.imported_identity import imported_common, unverified_entry
from latentcache.interop.items import ForeignCache, ForeignImage, ForeignText, bucket_of
from latentcache.interop.latent_scale_check import LatentScale
from latentcache.interop.reports import ImportReport
from latentcache.interop.verification import Verification, Verifier
from latentcache.models.vae import problems
from latentcache.precache.workspace import Workspace
from latentcache.provenance import provenance_json
from latentcache.store.base import Writer, dtype_name
from latentcache.types import Entry, Kind, Refusal
from latentcache.utils.progress import NoProgress, Progress

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
StoreDtypes = Mapping[Kind, torch.dtype | None]
"""In which dtype each kind is stored; None: in the dtype of the file."""


@dataclass(frozen=True, slots=True)
class DatasetUse:
    """What an imported dataset is for, and how often an epoch visits each sample. ConfigError if that is below 1."""

    role: Literal["train", "validation"] = "train"
    repeats: int = 1

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"repeats is {self.repeats}; it must be at least 1")


def import_cache(
    foreign: ForeignCache,
    workspace: Workspace,
    *,
    name: str,
    use: DatasetUse = DatasetUse(),
    store_dtype: torch.dtype | None = None,
    scale_check: bool = True,
    verification: Verification | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """Import a foreign cache as the manifest `name`; what is refused is listed in the report.

    Latents are stored unscaled: scaled ones are divided by their factor in float32. `store_dtype` None keeps the dtype
    of unscaled latents and of embeddings, and float32 for what was divided: an export then writes the same values, but
    for the last bit of a float32. Entries are unverified, unless `verification` shows that encoding gives them. With
    `verification` all entries are stored in the dtypes of its config, so that verified and unverified ones fit into one
    batch: a `store_dtype` is then a ConfigError. A manifest that was imported before is replaced, unless nothing could
    be imported.

    Raises StoreError if precache made the manifest of that name, or if the foreign cache holds nothing at all, and
    DatasetError if the latents are not scaled as the format claims (then nothing is imported): `scale_check` False is
    for VAEs other than SDXL's.
    """
    started = time.monotonic()
    _check_name(name)
    if verification is not None and store_dtype is not None:
        raise ConfigError("what is verified is stored in the dtypes of the config: give no --dtype with --verify")
    previous = workspace.manifests.read(name)
    if previous is not None and previous.imported_from is None:
        raise StoreError(
            f"manifest {name} was made by precache: an import needs a name of its own; give another --name"
        )
    # What a verification lacks is found now, not when all has been read.
    verifier = None if verification is None else Verifier(verification, name, workspace)
    dtypes: StoreDtypes = {"image": store_dtype, "text": store_dtype} if verifier is None else verifier.store_dtypes()
    run = _Import(foreign, workspace, dtypes, LatentScale(scale_check), ImportReport(foreign.format, name))
    progress = progress or NoProgress()
    with workspace.in_use():
        try:
            rows = run.read(progress)
            if verifier is not None:
                rows = verifier.verify(rows, run.report, progress)
        finally:
            progress.finish()
        if rows:
            workspace.manifests.write(Manifest(name, use.role, use.repeats, imported_common(foreign.format), rows))
        elif not run.report.refused:
            raise StoreError(
                f"nothing was imported: there are no files of {foreign.format}'s cache. Name its folder, or another "
                "format"
            )
    report = run.report
    trusts = [ref.trust for row in rows.values() for ref in row.images]
    trusts += [ref.trust for row in rows.values() for ref in row.captions]
    report.num_verified = trusts.count("verified")
    report.num_unverified = trusts.count("unverified")
    report.cache = None if workspace.path is None else str(workspace.path)
    report.seconds = time.monotonic() - started
    return report


def _check_name(name: str) -> None:
    """Raises ConfigError for a name that no dataset of a config can have."""
    try:
        TypeAdapter(Name).validate_python(name)
    except ValidationError as error:
        detail = f"the name is {name!r}; use letters, digits, dash and underscore, 64 at most"
        raise ConfigError(detail) from error
    if name.lower().startswith(PROMPTS_PREFIX):
        raise ConfigError(f"the name {name!r} may not begin with {PROMPTS_PREFIX!r}: so do the prompts' manifests")


@dataclass(slots=True)
class _Sample:
    """A sample while its parts are read."""

    path: str
    source: str | None = None
    images: list[ImageRef] = field(default_factory=list)
    captions: list[CaptionRef] = field(default_factory=list)


class _Import:
    """The state of one import."""

    def __init__(
        self,
        foreign: ForeignCache,
        workspace: Workspace,
        dtypes: StoreDtypes,
        scale: LatentScale,
        report: ImportReport,
    ):
        self._foreign, self._workspace, self._dtypes = foreign, workspace, dtypes
        self._scale, self.report = scale, report
        self._samples: dict[str, _Sample] = {}
        self._forms: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._before = set(workspace.store.keys())
        self._new: set[str] = set()
        self._last_digest: tuple[Path, str] | None = None

    def read(self, progress: Progress) -> dict[str, Row]:
        """Store every item; the rows of the manifest. If the scale is wrong, what was stored is removed again."""
        progress.start(f"import {self.report.format}", None)
        writer = self._workspace.store.writer()
        path = ""
        try:
            with writer:
                for item in self._foreign.items():
                    path = item.path
                    refusal = item if isinstance(item, Refusal) else self._keep(item, writer)
                    if refusal is not None:
                        self.report.refused.append(refusal)
                    progress.advance()
                writer.seal()
            self._scale.verify(path)
        except BaseException:
            # No manifest refers to these entries, and a second attempt stores them again.
            self._workspace.store.remove(self._workspace.store.find(self._new))
            raise
        self.report.bytes_written = writer.bytes_written
        self.report.scale = self._scale.to_json()
        return {sample_id: self._row(sample_id, sample) for sample_id, sample in self._samples.items()}

    def _keep(self, item: ForeignImage | ForeignText, writer: Writer) -> Refusal | None:
        """Store one item; why it cannot be stored, if so."""
        if isinstance(item, ForeignImage):
            return self._keep_image(item, writer)
        return self._keep_text(item, writer)

    def _add(self, entry: Entry, writer: Writer) -> None:
        key = entry.record.key
        if key not in self._before and key not in self._new:
            self._new.add(key)
            writer.add(entry)

    # Images

    def _keep_image(self, item: ForeignImage, writer: Writer) -> Refusal | None:
        if (fault := self._image_fault(item)) is not None:
            return Refusal(item.sample_id, item.path, *fault)
        entry = self._image_entry(item)
        self._add(entry, writer)
        sample = self._samples.setdefault(item.sample_id, _Sample(item.path))
        sample.path = str(item.image_path or item.path)
        sample.source = entry.record.identity["source"]
        sample.images.append(ImageRef(entry.record.key, item.geometry, "unverified"))
        self.report.note(item.note)
        self.report.num_images += 1
        self.report.num_flipped += item.geometry.flip
        return None

    def _image_fault(self, item: ForeignImage) -> tuple[str, str] | None:
        """(reason, detail) if the latents cannot be imported."""
        shape, target = tuple(item.latents.shape), item.geometry.target_size
        if len(shape) != 3 or bucket_of(item.latents) != target:
            return "corrupt", f"its latents have the shape {list(shape)}, which does not fit a bucket of {target}"
        sample = self._samples.get(item.sample_id)
        if sample is not None and any(ref.geometry.flip == item.geometry.flip for ref in sample.images):
            twin = "flipped " if item.geometry.flip else ""
            return "duplicate", f"sample {item.sample_id!r} has a {twin}latent already; only the first is imported"
        fault = self._values_fault({"latents": item.latents}, (shape[0],), "image")
        if fault is None:
            self._scale.add(item.latents, item.scaling_factor, item.path)
        return fault

    def _image_entry(self, item: ForeignImage) -> Entry:
        latents = item.latents
        if item.scaling_factor is not None:
            latents = latents.float() / item.scaling_factor
        return unverified_entry(
            "image",
            {"latents": latents.to(self._dtypes["image"] or latents.dtype)},
            format_name=self._foreign.format,
            output=item.output,
            source=self._digest_of(item.image_path),
            geometry=item.geometry,
            provenance=self._provenance(item, item.sample_id, item.latents),
        )

    def _digest_of(self, path: Path | None) -> str | None:
        if path is None:
            return None
        if self._last_digest is None or self._last_digest[0] != path:  # a flipped latent comes after its twin
            try:
                self._last_digest = path, digest(path.read_bytes())
            except OSError as error:
                self.report.note(f"image could not be read: {error.strerror}")
                return None
        return self._last_digest[1]

    # Texts

    def _keep_text(self, item: ForeignText, writer: Writer) -> Refusal | None:
        if (fault := self._text_fault(item)) is not None:
            return Refusal(item.sample_ids[0] if item.sample_ids else "", item.path, *fault)
        entry = self._text_entry(item)
        self._add(entry, writer)
        for sample_id in item.sample_ids:
            captions = self._samples.setdefault(sample_id, _Sample(item.path)).captions
            if all(ref.key != entry.record.key for ref in captions):
                captions.append(CaptionRef(item.caption or "", entry.record.key, "unverified"))
        self.report.note(item.note)
        self.report.num_texts += 1
        self.report.num_unknown_captions += item.caption is None
        return None

    def _text_fault(self, item: ForeignText) -> tuple[str, str] | None:
        """(reason, detail) if the embeddings cannot be imported."""
        embeds, pooled = item.prompt_embeds, item.pooled_prompt_embeds
        if not item.sample_ids:
            return "missing", "it is the caption of no sample here: no manifest would refer to it"
        if embeds.ndim != 2 or pooled.ndim != 1:
            return "corrupt", f"its embeddings have the shapes {list(embeds.shape)} and {list(pooled.shape)}"
        tensors = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
        return self._values_fault(tensors, (*embeds.shape, *pooled.shape), "text")

    def _text_entry(self, item: ForeignText) -> Entry:
        tensors = {"prompt_embeds": item.prompt_embeds, "pooled_prompt_embeds": item.pooled_prompt_embeds}
        dtype = self._dtypes["text"] or item.prompt_embeds.dtype
        return unverified_entry(
            "text",
            {name: tensor.to(dtype) for name, tensor in tensors.items()},
            format_name=self._foreign.format,
            output=None,
            source=None if item.caption is None else caption_digest(item.caption),
            geometry=None,
            provenance=self._provenance(item, item.sample_ids[0], item.prompt_embeds),
        )

    # All

    def _provenance(self, item: ForeignImage | ForeignText, sample_id: str, tensor: torch.Tensor) -> dict[str, Any]:
        """Which file the entry was imported from; its values are rounded to `file_dtype`, also if another is stored."""
        return provenance_json(
            sample_id=sample_id,
            source_path=item.path,
            imported_from=self._foreign.format,
            file_dtype=dtype_name(tensor),
            note=item.note,
        )

    def _values_fault(
        self, tensors: Mapping[str, torch.Tensor], form: tuple[int, ...], kind: Kind
    ) -> tuple[str, str] | None:
        """(reason, detail) if values are bad, or shape and dtype are not those of the first item: a batch has one."""
        store_dtype = self._dtypes[kind]
        for name, tensor in tensors.items():
            if tensor.dtype not in DTYPES or tensor.numel() == 0:
                detail = f"{name} is {tensor.dtype} {list(tensor.shape)}; use float32, float16 or bfloat16"
                return "corrupt", detail
            problem = problems(tensor[None])[0]
            if problem is not None:
                return "bad-output", f"{name} holds {problem}"
            problem = None if store_dtype is None else problems(tensor.to(store_dtype)[None])[0]
            if problem is not None:
                return "bad-output", f"{name} holds {problem} in {store_dtype}, which is to be stored"
        dtype = store_dtype or next(iter(tensors.values())).dtype
        first = self._forms.setdefault(kind, (form, dtype))
        if first != (form, dtype):
            what = "latents" if kind == "image" else "embeddings"
            return "corrupt", (
                f"its {what} are {dtype} of form {list(form)}, but the first are {first[1]} of form {list(first[0])}, "
                "and a batch holds one form; for dtypes alone give --dtype"
            )
        return None

    def _row(self, sample_id: str, sample: _Sample) -> Row:
        images = tuple(sorted(sample.images, key=lambda ref: ref.geometry.flip))
        lacking = "image" if not any(not ref.geometry.flip for ref in images) else "text"
        refusal = None
        if lacking == "image" or not sample.captions:
            detail = f"no {lacking} entry was imported for {sample_id!r}: precache makes what is missing"
            refusal = Refusal(sample_id, sample.path, "missing", detail)
            self.report.incomplete.append(refusal)
        else:
            self.report.num_samples += 1
        return Row(sample_id, sample.path, sample.source, images, tuple(sample.captions), refusal)
