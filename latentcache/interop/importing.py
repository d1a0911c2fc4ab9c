"""Import another trainer's cache as entries and a manifest: latents unscaled, every entry marked as imported."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import TypeAdapter, ValidationError

from latentcache.config import PROMPTS_PREFIX, DatasetConfig, Name
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.row_table import Ref, Row, RowTable, check_geometry
from latentcache.errors import ConfigError, DatasetError, ForeignFileRefused, StoreError
from latentcache.families import DEFAULT, family_named
from latentcache.families.scaling import Scaling
from latentcache.identity import SCHEMA, canonical_json, caption_digest, digest, key_of
from latentcache.interop.readers import (
    ForeignCache,
    ForeignImage,
    ForeignItem,
    ForeignText,
    bucket_of,
    corrupt,
    flaw_of,
    keeps_padding,
    refusal_of,
)
from latentcache.interop.reports import ImportReport
from latentcache.precache.workspace import Workspace
from latentcache.provenance import now, provenance_json
from latentcache.store.entry import as_array, dtype_name
from latentcache.store.writer import Writer
from latentcache.types import Entry, Kind, Record, Refusal
from latentcache.utils.progress import Progress

if TYPE_CHECKING:
    from latentcache.interop.verification import Verification

logger = logging.getLogger("latentcache")
FIRST_LOOK = 64
"""Latents after which the scale is first checked, so that a wrong one is detected early."""

_LEAST_SPREAD = 2.0
"""The check tolerates a factor of at least the square root of this: images vary between 0.8 and 1.2."""


def import_cache(
    foreign: ForeignCache,
    workspace: Workspace,
    *,
    name: str,
    dataset: DatasetConfig | None = None,
    scale_check: bool = True,
    verification: Verification | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """Import a foreign cache as the manifest `name`. Files that cannot be used are listed in the report.

    Scaled latents are unscaled in float32 and stored in float32. Unscaled latents and embeddings keep their dtype. An
    export writes the same values again, to within the last bit of a float32. Entries stay unverified, and precache
    replaces them. A `verification` only notes in the report how they differ from encoded ones. An earlier import of
    that name is replaced, unless nothing could be imported this time. The manifest gets the role, repeats and
    loss_weight of `dataset`. `scale_check` False is for a VAE other than the family's published one.

    Raises StoreError if precache made the manifest of that name or the foreign cache is empty, and DatasetError if the
    latents are not scaled as the format claims. In both cases nothing is imported.
    """
    started = time.monotonic()
    try:
        TypeAdapter(Name).validate_python("" if name.lower().startswith(PROMPTS_PREFIX) else name)
    except ValidationError as error:
        allowed = f"at most 64 letters, digits, dashes and underscores, not beginning with {PROMPTS_PREFIX!r}"
        raise ConfigError(f"the name is {name!r}; use {allowed}") from error
    try:
        previous = workspace.manifests.read(name)
    except DatasetError as error:
        logger.warning("%s. The manifest is ignored.", error)
        previous = None
    if previous is not None and previous.imported_from is None:
        raise StoreError(f"manifest {name} was made by precache, and an import would replace it: give another --name")
    report = ImportReport(foreign.format, name)
    if verification is not None:
        verification.begin(name, workspace, report)  # it fails before anything is read, if at all
    run = _Import(foreign, workspace, report, scale_check=scale_check)
    progress = progress or Progress()
    with workspace.in_use():
        workspace.manifests.begin(name)  # `in_use` does not lock a service's directory
        try:
            rows = run.read(progress)
            if verification is not None:
                verification.verify(rows, progress)
            if rows:
                manifest = Manifest(name, "train", 1, _common_of(foreign, rows, run.length), RowTable.of(rows))
                if dataset is not None:
                    role, repeats, weight = dataset.role, dataset.repeats, dataset.loss_weight
                    manifest = replace(manifest, role=role, repeats=repeats, loss_weight=weight)
                workspace.manifests.write(manifest)
            elif not report.refused:
                detail = f"the folder has no files of a {foreign.format} cache. Check the folder and the format"
                raise StoreError(f"nothing was imported: {detail}")
        finally:
            progress.finish()
            workspace.manifests.end(name)
    report.cache = None if workspace.path is None else str(workspace.path)
    report.seconds = round(time.monotonic() - started, 3)
    return report


def _common_of(foreign: ForeignCache, rows: Mapping[str, Row], length: Mapping[str, int]) -> dict[str, Any]:
    """The `common` of an imported manifest. Only the scale of the latents is known of how they were encoded.

    `length` is added to the recipe of the texts.
    """
    scaling, family = published_scaling(foreign.family), family_named(foreign.family)
    masks = {"name": "mask", "downscale": family.latent.downscale}
    return {
        "schema": SCHEMA,
        "salt": "",
        "imported": {"format": foreign.format, "time": now()},
        "policy": {},
        "image_encoding": {"scaling_factor": scaling.scaling_factor, "shift_factor": scaling.shift_factor},
        "text_encoding": {**_recipe_of(foreign.family), **length},
        **({} if family.name == DEFAULT else {"family": family.name}),
        **({"scaling": scaling.to_json()} if scaling.mean else {}),
        **({"parts": [masks]} if any(row.parts for row in rows.values()) else {}),
    }


def _recipe_of(family: str) -> dict[str, Any]:
    """How texts are padded in a batch, all that is known of them. Empty for the default family, to keep its keys."""
    if family == DEFAULT:
        return {}
    return {"family": family, "max_length": family_named(family).max_length, "keeps_padding": keeps_padding(family)}


class _Import:
    """The state of one import."""

    def __init__(self, foreign: ForeignCache, workspace: Workspace, report: ImportReport, *, scale_check: bool):
        self._foreign, self._workspace, self._report = foreign, workspace, report
        self._family, self._scale_check = family_named(foreign.family), scale_check
        self._scaling = published_scaling(foreign.family)
        self._stds: list[float] = []
        """Standard deviation of each latent after scaling."""
        self._rows: dict[str, Row] = {}
        self._forms: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.length: Mapping[str, int] = {}
        """The `max_length` of the texts, which all have one form; empty for the family's default."""

    def read(self, progress: Progress) -> dict[str, Row]:
        """Store every item and return the rows of the manifest. After an error, a prune removes what was stored."""
        progress.start(f"import {self._report.format}", None)
        with self._workspace.store.writer() as writer:
            for item in self._foreign.items():
                try:
                    if isinstance(item, Refusal):
                        self._report.refused.append(item)
                    elif isinstance(item, ForeignImage):
                        self._keep_image(item, writer)
                    else:
                        self._keep_text(item, writer)
                except ForeignFileRefused as error:
                    self._report.refused.append(refusal_of(_sample_id_of(item), error))
                progress.advance()
            writer.seal()
        self._check_scale()
        self._report.bytes_written = writer.bytes_written
        return {sample_id: self._finished(row) for sample_id, row in self._rows.items()}

    # Images

    def _keep_image(self, item: ForeignImage, writer: Writer) -> None:
        """Store a latent and its mask, and add them to the row of the sample. Raises ForeignFileRefused."""
        row = self._rows.get(item.sample_id) or Row(item.sample_id, item.path, None, (), ())
        if any(ref.geometry.flip == item.geometry.flip for ref in row.images):
            twin = "flipped " if item.geometry.flip else ""
            detail = f"sample {item.sample_id!r} already has a {twin}latent; only the first is imported"
            raise ForeignFileRefused(item.path, "duplicate", detail)
        stored = self._stored("image", {"latents": self._unscaled(item)}, (item.latents.shape[0],), item.path)
        values = item.latents.float()
        self._stds.append((values if item.is_scaled else self._scaling.apply(values)).std().item())
        self._last = item
        if len(self._stds) == FIRST_LOOK:
            self._check_scale()
        source = self._digest_of(item.image_path)
        entry = self._entry(item, "image", stored, source)
        writer.add(entry)
        parts = row.parts
        if item.mask is not None:
            mask = self._entry(item, "mask", {"mask": item.mask}, source)
            writer.add(mask)
            made_of = source or mask.record.identity["imported"]["digest"]
            parts = (*parts, Ref(mask.record.key, item.geometry, "unverified", "mask", made_of))
        images = (*row.images, Ref(entry.record.key, item.geometry, "unverified"))
        path = str(item.image_path or item.path)
        self._rows[item.sample_id] = replace(row, path=path, source=source, images=images, parts=parts)
        self._report.num_images += 1
        self._report.num_flipped += item.geometry.flip
        self._report.note(item.note)

    def _unscaled(self, item: ForeignImage) -> torch.Tensor:
        """The latents as the VAE encoded them, in float32 if they were scaled. Raises ForeignFileRefused."""
        latents, family, target = item.latents, self._family, item.geometry.target_size
        is_image = latents.ndim == 4 and latents.shape[1] == 1 if family.latent.is_video else latents.ndim == 3
        # Files that name no family are read as the default one, but may be of another.
        has_channels = family.name == DEFAULT or latents.shape[:1] == (family.latent.channels,)
        if not is_image or not has_channels or bucket_of(latents, family.name) != target:
            detail = f"its latents have the shape {list(latents.shape)}, which does not fit a bucket of {target}"
            raise corrupt(item.path, f"{detail} of {family.name}")
        try:
            check_geometry(item.geometry)
        except ValueError as error:
            raise corrupt(item.path, str(error)) from error
        return self._scaling.undo(latents.float()) if item.is_scaled else latents

    def _check_scale(self) -> None:
        """Raise DatasetError if the latents are not scaled as the last one claims.

        The median standard deviation, after scaling, must be near 1. A wrong claim is off by the factor `spread`.
        """
        if not self._scale_check or not self._stds:
            return
        spread = _spread_of(self._scaling)
        # With a spread near 1 scaled and unscaled latents cannot be told apart.
        border = max(spread, 1 / spread, _LEAST_SPREAD) ** 0.5
        median, family = statistics.median(self._stds), self._family.name
        if 1 / border <= median <= border:
            return
        met, expected, claimed = median, 1.0, "scaled"
        if not self._last.is_scaled:
            met, expected, claimed = median * spread, spread, "unscaled"
        raise DatasetError(
            self._last.path,
            f"the latents' median standard deviation is {met:.3g} (over {len(self._stds)} latents), but this format "
            f"holds {claimed} latents of {family}, which have about {expected:.3g}. Nothing was imported: the cache "
            "was made for another model or has another format. If it was made with a VAE other than "
            f"{family}'s, give --no-scale-check",
        )

    def _digest_of(self, path: Path | None) -> str | None:
        if path is None:
            return None
        try:
            return digest(path.read_bytes())
        except OSError as error:
            self._report.note(f"image could not be read: {error.strerror}")
            return None

    # Texts

    def _keep_text(self, item: ForeignText, writer: Writer) -> None:
        """Store a caption's embeddings, and add them to the rows of its samples. Raises ForeignFileRefused."""
        if not item.sample_ids:
            raise ForeignFileRefused(item.path, "missing", "no sample has this caption")
        embeds, pooled = item.prompt_embeds, item.pooled_prompt_embeds
        tensors = {"prompt_embeds": embeds, **({} if pooled is None else {"pooled_prompt_embeds": pooled})}
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        if embeds.ndim not in (2, 3) or (pooled is not None and pooled.ndim != 1):
            raise corrupt(item.path, f"its embeddings have the shapes {' and '.join(map(str, shapes.values()))}")
        family = self._family
        if tensors.keys() != family.fields.keys():
            wanted = " and ".join(family.fields)
            raise corrupt(item.path, f"it has {' and '.join(tensors)}; texts of {family.name} have {wanted}")
        ragged = frozenset[str]()  # fields that are stored without padding
        if not keeps_padding(family.name):
            recipe = _recipe_of(family.name)
            ragged = frozenset(name for name in family.fields if family.padding(name, recipe) is not None)
        form = tuple(side for name, sides in shapes.items() for side in sides[name in ragged :])
        stored = self._stored("text", tensors, form, item.path)
        self.length = {} if item.max_length is None else {"max_length": item.max_length}
        source = None if item.caption is None else caption_digest(item.caption)
        entry = self._entry(item, "text", stored, source, ragged)
        key = entry.record.key
        writer.add(entry)
        for sample_id in item.sample_ids:
            row = self._rows.get(sample_id) or Row(sample_id, item.path, None, (), ())
            if all(ref.key != key for ref in row.captions):
                row = replace(row, captions=(*row.captions, Ref.of_text(item.caption or "", key, "unverified")))
            self._rows[sample_id] = row
        self._report.num_texts += 1
        self._report.num_unknown_captions += item.caption is None
        self._report.note(item.note)

    # Both

    def _entry(
        self,
        item: ForeignImage | ForeignText,
        kind: Kind,
        tensors: Mapping[str, torch.Tensor],
        source: str | None,
        ragged: frozenset[str] = frozenset(),
    ) -> Entry:
        """An entry whose identity marks it as imported, so that no encoded entry ever has its key.

        `source` is the digest of the image's bytes or of the caption; None if unknown.
        """
        tensors = {name: tensor.contiguous() for name, tensor in sorted(tensors.items())}
        described = [[name, dtype_name(tensor), list(tensor.shape)] for name, tensor in tensors.items()]
        parts = [canonical_json(described), *(as_array(tensor).tobytes() for tensor in tensors.values())]
        values = item.latents if isinstance(item, ForeignImage) else item.prompt_embeds
        identity = {
            "kind": kind,
            "schema": SCHEMA,
            "imported": {
                "format": self._foreign.format,
                "digest": digest(b"".join(parts)),
                "output": item.output if isinstance(item, ForeignImage) and kind == "image" else None,
                "dtype": described[0][1],
                **(_recipe_of(self._family.name) if kind == "text" else {}),
            },
            "source": source,
            "geometry": item.geometry.to_json() if isinstance(item, ForeignImage) else None,
            "trust": "unverified",
        }
        provenance = provenance_json(
            sample_id=_sample_id_of(item),
            source_path=item.path,
            imported_from=self._foreign.format,
            # The precision of the values, even if they are stored in another dtype.
            file_dtype=dtype_name(tensors.get("mask", values)),
            note=item.note,
        )
        return Entry(Record(key_of(identity), kind, identity, provenance), tensors, ragged)

    def _stored(
        self, kind: Kind, found: Mapping[str, torch.Tensor], form: tuple[int, ...], path: str
    ) -> dict[str, torch.Tensor]:
        """These tensors, all in the dtype of the first.

        Raises ForeignFileRefused for bad values, and if form or dtype differ from those of the first item of this kind.
        """
        dtype = next(iter(found.values())).dtype
        stored = {name: tensor.to(dtype) for name, tensor in found.items()}
        for name, tensor in stored.items():
            if problem := flaw_of(tensor):
                raise ForeignFileRefused(path, "bad-output", f"{name} holds {problem}")
        first = self._forms.setdefault(kind, (form, dtype))
        if first != (form, dtype):
            what = "latents" if kind == "image" else "embeddings"
            raise corrupt(
                path,
                f"its {what} are {dtype} of form {list(form)}, but the first are {first[1]} of form {list(first[0])}, "
                "and a batch holds one form: import this folder separately, under another --name",
            )
        return stored

    def _finished(self, row: Row) -> Row:
        """The row for the manifest: flipped latent last, refused if it has no unflipped image or no text."""
        images = tuple(sorted(row.images, key=lambda ref: ref.geometry.flip))
        has_image = any(not ref.geometry.flip for ref in images)
        refusal = None
        if has_image and row.captions:
            self._report.num_samples += 1
        else:
            lacking = "text" if has_image else "image"
            detail = f"no {lacking} entry was imported for {row.sample_id!r}: precache makes what is missing"
            refusal = Refusal(row.sample_id, row.path, "missing", detail)
            self._report.incomplete.append(refusal)
        return replace(row, images=images, refusal=refusal)


def _sample_id_of(item: ForeignItem) -> str:
    """The item's sample; the first one of a text, or "" if it has none."""
    return next(iter(item.sample_ids), "") if isinstance(item, ForeignText) else item.sample_id


def published_scaling(family: str) -> Scaling:
    """The scaling of the family's published VAE, which trainers hard-code. ConfigError if only its weights have it."""
    found = family_named(family).latent.published
    if found is None:
        raise ConfigError(
            f"the scaling of {family} latents is stored only in the weights of its VAE, which a foreign cache lacks: "
            "precache the images instead",
            key="family",
        )
    return found


def _spread_of(scaling: Scaling) -> float:
    """The standard deviation of unscaled latents that have about 1 when scaled."""
    if not scaling.mean:
        return 1 / scaling.scaling_factor
    mean = sum(scaling.mean) / len(scaling.mean)
    variances = (std * std + (each - mean) ** 2 for each, std in zip(scaling.mean, scaling.std, strict=True))
    return math.sqrt(sum(variances) / len(scaling.mean)) / scaling.scaling_factor
