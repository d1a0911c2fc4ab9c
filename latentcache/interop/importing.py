"""A foreign cache -> entries and a manifest. Latents are stored unscaled, and entries say that they were imported."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from pydantic import TypeAdapter, ValidationError

from latentcache.config import PROMPTS_PREFIX, Name
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_row import CaptionRef, ImageRef, PartRef, Row
from latentcache.dataset.row_table import check_geometry
from latentcache.errors import ConfigError, ForeignFileRefused, StoreError
from latentcache.families import DEFAULT, family_named
from latentcache.identity import SCHEMA, canonical_json, caption_digest, digest, key_of
from latentcache.interop.foreign_files import corrupt
from latentcache.interop.imported_facts import common_of, declared_by, recipe_of, scaling_of
from latentcache.interop.readers import ForeignCache, ForeignImage, ForeignText, bucket_of, check_frames, refusal_of
from latentcache.interop.reports import ImportReport
from latentcache.interop.scale_check import ScaleCheck
from latentcache.interop.verification import Verification, Verifier
from latentcache.models.vae import problems
from latentcache.precache.prompts import last_manifest
from latentcache.precache.workspace import Workspace
from latentcache.provenance import provenance_json
from latentcache.store.entry import dtype_name, flat_bytes
from latentcache.store.writer import Writer
from latentcache.types import Entry, Kind, Record, Refusal
from latentcache.utils.progress import Progress

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


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

    Latents are stored unscaled: the scaling of scaled ones is undone in float32. `store_dtype` None keeps the dtype
    of unscaled latents and of embeddings, and float32 for what was divided: an export then writes the same values, but
    for the last bit of a float32. Entries are unverified, unless `verification` shows that encoding gives them. With
    `verification` all entries are stored in the dtypes of its config, so that verified and unverified ones fit into one
    batch: a `store_dtype` is then a ConfigError. A manifest that was imported before is replaced, unless nothing could
    be imported.

    Raises StoreError if precache made the manifest of that name, or if the foreign cache holds nothing at all, and
    DatasetError if the latents are not scaled as the format claims (then nothing is imported): `scale_check` False is
    for VAEs other than the family's published one.
    """
    started = time.monotonic()
    _check_name(name)
    if verification is not None and store_dtype is not None:
        raise ConfigError("what is verified is stored in the dtypes of the config: give no --dtype with --verify")
    previous = last_manifest(workspace.manifests, name)
    if previous is not None and previous.imported_from is None:
        raise StoreError(
            f"manifest {name} was made by precache: an import needs a name of its own; give another --name"
        )
    report = ImportReport(foreign.format, name)
    report.declared = {} if foreign.declaration is None else foreign.declaration.statement()
    # What a verification lacks is found now, not when all has been read.
    verifier = None if verification is None else Verifier(verification, name, workspace, report)
    dtypes: Mapping[str, torch.dtype | None]  # None: that of the file
    dtypes = {"image": store_dtype, "text": store_dtype} if verifier is None else verifier.store_dtypes
    run = _Import(foreign, workspace, dtypes, scale_check, report)
    progress = progress or Progress()
    with workspace.in_use():
        try:
            rows = run.read(progress)
            if verifier is not None:
                rows = verifier.verify(rows, progress)
        finally:
            progress.finish()
        if rows:
            workspace.manifests.write(Manifest(name, use.role, use.repeats, common_of(foreign, rows), rows))
        elif not report.refused:
            detail = f"there are no files of {foreign.format}'s cache. Name its folder, or another format"
            raise StoreError(f"nothing was imported: {detail}")
    trusts = [ref.trust for row in rows.values() for ref in row.images]
    trusts += [ref.trust for row in rows.values() for ref in row.captions]
    trusts += [ref.trust for row in rows.values() for ref in row.parts]
    report.num_verified, report.num_unverified = trusts.count("verified"), trusts.count("unverified")
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


class _Import:
    """The state of one import."""

    def __init__(
        self,
        foreign: ForeignCache,
        workspace: Workspace,
        dtypes: Mapping[str, torch.dtype | None],
        scale_check: bool,
        report: ImportReport,
    ):
        self._foreign, self._workspace, self._dtypes = foreign, workspace, dtypes
        self._family, self._scaling, self._report = family_named(foreign.family), scaling_of(foreign), report
        self._scale_check = ScaleCheck(
            foreign.family, self._scaling, is_declared=foreign.declaration is not None, is_wanted=scale_check
        )
        self._rows: dict[str, Row] = {}
        self._forms: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._last_digest: tuple[Path, str] | None = None
        self._refused_at: str | None = None
        """Where the last latent lay that was refused. A text there is left out: another latent may have its sample."""

    def read(self, progress: Progress) -> dict[str, Row]:
        """Store every item; the rows of the manifest. What an error leaves is in no manifest, and goes with a prune."""
        progress.start(f"import {self._report.format}", None)
        store = self._workspace.store
        path = ""
        with store.writer() as writer:
            for item in self._foreign.items():
                path = item.path
                refusal = item if isinstance(item, Refusal) else self._keep(item, writer)
                if refusal is not None:
                    self._report.refused.append(refusal)
                progress.advance()
            writer.seal()
        self._scale_check.check(path)
        self._report.bytes_written = writer.bytes_written
        self._report.scale = self._scale_check.to_json()
        return {sample_id: self._finished(row) for sample_id, row in self._rows.items()}

    def _keep(self, item: ForeignImage | ForeignText, writer: Writer) -> Refusal | None:
        """Store one item, and note it in the rows of its samples; why it cannot be stored, if so."""
        sample_ids = (item.sample_id,) if isinstance(item, ForeignImage) else item.sample_ids
        if not sample_ids and item.note is not None:
            self._report.note(item.note)
            return None
        if isinstance(item, ForeignText) and item.path == self._refused_at:
            return None
        try:
            entry = self._image_entry(item) if isinstance(item, ForeignImage) else self._text_entry(item)
        except ForeignFileRefused as error:
            if isinstance(item, ForeignImage) and not item.geometry.flip:
                self._refused_at = item.path
            return refusal_of(sample_ids[0] if sample_ids else "", error)
        key = entry.record.key
        writer.add(entry)
        self._report.note(item.note)
        for sample_id in sample_ids:
            row = self._rows.get(sample_id, Row(sample_id, item.path, None, (), ()))
            if isinstance(item, ForeignImage):
                images = (*row.images, ImageRef(key, item.geometry, "unverified"))
                path, source = str(item.image_path or item.path), entry.record.identity["source"]
                parts = row.parts if item.mask is None else (*row.parts, self._mask_of(item, item.mask, source, writer))
                row = replace(row, path=path, source=source, images=images, parts=parts)
            elif all(ref.key != key for ref in row.captions):
                row = replace(row, captions=(*row.captions, CaptionRef(item.caption or "", key, "unverified")))
            self._rows[sample_id] = row
        return None

    def _mask_of(self, item: ForeignImage, mask: torch.Tensor, source: str | None, writer: Writer) -> PartRef:
        """The mask of an image, stored. What it was made of is the file's."""
        entry = self._entry(item, {"mask": mask}, source)
        digest_of_file: str = entry.record.identity["imported"]["digest"]
        writer.add(entry)
        return PartRef("mask", entry.record.key, item.geometry, source or digest_of_file, "unverified")

    def _image_entry(self, item: ForeignImage) -> Entry:
        """The entry of a latent. Raises ForeignFileRefused."""
        latents, target = item.latents, item.geometry.target_size
        unscaled = self._unscaled(item)
        if unscaled is None or bucket_of(unscaled, self._family.name) != target:
            shape = list(latents.shape)
            detail = f"its latents have the shape {shape}, which does not fit a bucket of {target}"
            raise corrupt(item.path, f"{detail} of {self._family.name}")
        try:
            check_geometry(item.geometry)
        except ValueError as error:
            raise corrupt(item.path, str(error)) from error
        row = self._rows.get(item.sample_id)
        if row is not None and any(ref.geometry.flip == item.geometry.flip for ref in row.images):
            twin = "flipped " if item.geometry.flip else ""
            detail = f"sample {item.sample_id!r} has a {twin}latent already; only the first is imported"
            raise ForeignFileRefused(item.path, "duplicate", detail)
        check_frames(item, self._family)
        self._check("image", {"latents": latents}, (latents.shape[0],), item.path)
        self._scale_check.add(latents, item.is_scaled, item.path)
        self._report.num_images += 1
        self._report.num_flipped += item.geometry.flip
        stored = unscaled.to(self._dtypes["image"] or unscaled.dtype)
        return self._entry(item, {"latents": stored}, self._digest_of(item.image_path))

    def _unscaled(self, item: ForeignImage) -> torch.Tensor | None:
        """What the VAE's encoder gave: in float32 where it was scaled. None for latents of another shape."""
        latents, is_scaled = item.latents, item.is_scaled
        if latents.ndim != (4 if self._family.latent.is_video else 3):
            return None
        num_channels = len(self._scaling.mean) or self._family.latent.channels
        if self._scaling.rule == "batch_norm" and not is_scaled:
            num_channels //= 4  # of which scaling makes patches of 2x2
        # What names no family is taken as of the first one, and may be of any.
        if latents.shape[0] != num_channels and (self._scaling.mean or self._family.name != DEFAULT):
            return None
        return self._scaling.undo(latents.float()) if is_scaled and latents.numel() else latents

    def _text_entry(self, item: ForeignText) -> Entry:
        """The entry of a caption. Raises ForeignFileRefused."""
        embeds, pooled = item.prompt_embeds, item.pooled_prompt_embeds
        if not item.sample_ids:
            detail = "it is the caption of no sample here: no manifest would refer to it"
            raise ForeignFileRefused(item.path, "missing", detail)
        tensors = {"prompt_embeds": embeds, **({} if pooled is None else {"pooled_prompt_embeds": pooled})}
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        if embeds.ndim not in (2, 3) or (pooled is not None and pooled.ndim != 1):
            raise corrupt(item.path, f"its embeddings have the shapes {' and '.join(map(str, shapes.values()))}")
        if tensors.keys() != self._family.fields.keys():
            wanted = " and ".join(self._family.fields)
            raise corrupt(item.path, f"it has {' and '.join(tensors)}; texts of {self._family.name} have {wanted}")
        ragged = self._ragged()
        form = tuple(side for name, sides in shapes.items() for side in sides[name in ragged :])
        self._check("text", tensors, form, item.path)
        self._report.num_texts += 1
        self._report.num_unknown_captions += item.caption is None
        dtype = self._dtypes["text"] or embeds.dtype
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        source = None if item.caption is None else caption_digest(item.caption)
        return self._entry(item, tensors, source, ragged)

    def _ragged(self) -> frozenset[str]:
        """The fields that are stored without padding."""
        if self._foreign.keeps_padding:
            return frozenset()
        recipe = recipe_of(self._foreign)
        return frozenset(name for name in self._family.fields if self._family.padding(name, recipe) is not None)

    def _entry(
        self,
        item: ForeignImage | ForeignText,
        tensors: Mapping[str, torch.Tensor],
        source: str | None,
        ragged: frozenset[str] = frozenset(),
    ) -> Entry:
        """An entry whose identity says that it was imported: an encoded entry never has its key.

        `source` is the digest of the image's bytes or of the caption, if they are known.
        """
        tensors = {name: tensor.contiguous() for name, tensor in sorted(tensors.items())}
        described = [[name, dtype_name(tensor), list(tensor.shape)] for name, tensor in tensors.items()]
        parts = [canonical_json(described), *(flat_bytes(tensor).tobytes() for tensor in tensors.values())]
        if isinstance(item, ForeignImage):
            kind: Kind = "mask" if "mask" in tensors else "image"
            sample_id, output, geometry = (
                item.sample_id,
                item.output if kind == "image" else None,
                item.geometry.to_json(),
            )
            values = tensors.get("mask", item.latents)
        else:
            kind, sample_id, values, output, geometry = "text", item.sample_ids[0], item.prompt_embeds, None, None
        identity = {
            "kind": kind,
            "schema": SCHEMA,
            "imported": {
                "format": self._foreign.format,
                "digest": digest(b"".join(parts)),
                "output": output,
                "dtype": described[0][1],
                **declared_by(self._foreign),
                **(recipe_of(self._foreign) if kind == "text" else {}),
            },
            "source": source,
            "geometry": geometry,
            "trust": "unverified",
        }
        provenance = provenance_json(
            sample_id=sample_id,
            source_path=item.path,
            imported_from=self._foreign.format,
            # The values are rounded to it, also if another dtype is stored.
            file_dtype=dtype_name(values),
            note=item.note,
        )
        return Entry(Record(key_of(identity), kind, identity, provenance), tensors, ragged)

    def _digest_of(self, path: Path | None) -> str | None:
        if path is None:
            return None
        if self._last_digest is None or self._last_digest[0] != path:  # a flipped latent comes after its twin
            try:
                self._last_digest = path, digest(path.read_bytes())
            except OSError as error:
                self._report.note(f"image could not be read: {error.strerror}")
                return None
        return self._last_digest[1]

    def _check(self, kind: Kind, tensors: Mapping[str, torch.Tensor], form: tuple[int, ...], path: str) -> None:
        """Refuse bad values, and another form or dtype than the first item of this kind has: a batch has one."""
        store_dtype = self._dtypes[kind]
        for name, tensor in tensors.items():
            if tensor.dtype not in DTYPES or tensor.numel() == 0:
                raise corrupt(path, f"{name} is {tensor.dtype} {list(tensor.shape)}; use float32, float16 or bfloat16")
            if problem := problems(tensor[None])[0]:
                raise ForeignFileRefused(path, "bad-output", f"{name} holds {problem}")
            if store_dtype is not None and (problem := problems(tensor.to(store_dtype)[None])[0]):
                detail = f"{name} holds {problem} in {store_dtype}, which is to be stored"
                raise ForeignFileRefused(path, "bad-output", detail)
        dtype = store_dtype or next(iter(tensors.values())).dtype
        first = self._forms.setdefault(kind, (form, dtype))
        if first != (form, dtype):
            what = "latents" if kind == "image" else "embeddings"
            raise corrupt(
                path,
                f"its {what} are {dtype} of form {list(form)}, but the first are {first[1]} of form {list(first[0])}, "
                "and a batch holds one form; for dtypes alone give --dtype",
            )

    def _finished(self, row: Row) -> Row:
        """The row for the manifest: the flipped latent last, and refused if the image or all texts are lacking."""
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
