"""Proof that an imported entry is what encoding gives: it is encoded again and compared."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

import torch

from latentcache.config import Config, DatasetConfig
from latentcache.dataset.images import ImagePolicy, decode, prepare
from latentcache.dataset.manifest import CaptionRef, ImageRef, Row
from latentcache.devices.placement import placed
from latentcache.errors import ConfigError, ImageRefused
from latentcache.identity import (
    ImageIdentity,
    Preparation,
    TextIdentity,
    caption_digest,
    digest,
    key_of,
)
from latentcache.interop.reports import Difference, ImportReport
from latentcache.models.clip import encode_captions
from latentcache.models.model_loader import Models
from latentcache.models.vae import DTYPES, encode_images, latents_from_moments, posterior_std, problems
from latentcache.precache.encodings import Encodings, choose_encodings, load_models
from latentcache.precache.text_stage import placed_texts
from latentcache.precache.workspace import Workspace
from latentcache.store.base import Writer
from latentcache.types import Entry, Kind, Record, Refusal
from latentcache.utils.progress import Progress

Ref = TypeVar("Ref", ImageRef, CaptionRef)
RELATIVE = {torch.float32: 1e-4, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
"""What is allowed by default at each number x of a tensor: this times (|x| + the tensor's root mean square), for the
coarsest dtype of the file, the computation and the store. Half precision: four roundings. float32: other kernels,
devices and batch sizes sum in another order, which costs far more than a rounding and far less than another model."""


@dataclass(frozen=True, slots=True)
class Verification:
    """How many entries of each kind are encoded again, with which config's models.

    The entries are drawn with `seed`. `models` None loads those of the config. `tolerance` is the largest absolute
    difference, finite and not negative; None goes by dtype (`RELATIVE`). The image policy is that of the config's
    dataset of the import's name, or of its only dataset. `encode.image_output` of the config must be `mean`.
    """

    config: Config
    models: Models | None = None
    num_entries: int | Literal["all"] = 8
    seed: int = 0
    tolerance: float | None = None

    def check(self, name: str) -> None:
        """Raises ConfigError if an import of this name cannot be verified with this config."""
        _dataset_of(self.config, name)
        output = self.config.encode.image_output
        if output != "mean":
            raise ConfigError(
                f"it is {output}, but imported latents can only stand for the mean: verify with a config that has "
                "`image_output: mean`",
                key="encode.image_output",
            )
        if self.tolerance is not None and not 0 <= self.tolerance < math.inf:
            raise ConfigError(f"the tolerance is {self.tolerance}; give a finite number, 0 or more")

    def prepare(self, name: str, workspace: Workspace) -> Encoders:
        """What encodes again. Raises what `check` does, ModelError or DeviceError."""
        self.check(name)
        models = self.models or load_models(self.config.model, workspace.memo)
        return Encoders(models, choose_encodings(self.config, models, workspace.memo))


@dataclass(frozen=True, slots=True)
class Encoders:
    """The models of a verification, and how they encode."""

    models: Models
    encodings: Encodings

    def store_dtypes(self) -> dict[Kind, torch.dtype]:
        """In which dtypes precache stores what they give."""
        return {
            "image": DTYPES[self.encodings.image.store_dtype],
            "text": DTYPES[self.encodings.text.store_dtype],
        }


class Comparison(NamedTuple):
    """One imported tensor beside the encoded one."""

    largest: float
    share: float
    """Of what is allowed, at the place where it is worst: at most 1 is equal."""


def compare(imported: torch.Tensor, encoded: torch.Tensor, *, relative: float, tolerance: float | None) -> Comparison:
    """Compare two tensors of one shape in float32. `tolerance` is absolute; without it, see `RELATIVE`."""
    imported, encoded = imported.float(), encoded.float()
    difference = (imported - encoded).abs()
    allowed = encoded.abs().add(encoded.square().mean().sqrt()).mul(relative)
    if tolerance is not None:
        allowed = torch.full_like(encoded, tolerance)
    # Where nothing is allowed, nothing may differ.
    share = torch.where(difference == 0, 0.0, difference / allowed)
    return Comparison(difference.max().item(), share.max().item())


def verify_rows(
    rows: Mapping[str, Row],
    name: str,
    workspace: Workspace,
    verification: Verification,
    encoders: Encoders,
    report: ImportReport,
    progress: Progress,
) -> dict[str, Row]:
    """Encode some entries of these rows again; those that are equal are stored under their real identity, verified.

    `encoders` are those that `verification` prepared. Returns the rows with the keys of what was verified, and notes in
    the report what was found. The unverified entries stay in the store, as other imports may share them: `prune`
    removes those that nobody refers to. Raises ModelError, DeviceError or StoreError.
    """
    with workspace.store.writer() as writer:
        run = _Verification(name, workspace, verification, encoders, report, writer)
        verified = {**run.images(rows, progress), **run.texts(rows, progress)}
        writer.seal()
    report.bytes_written += writer.bytes_written
    return {sample_id: _with_verified(row, verified) for sample_id, row in rows.items()}


class _Verification:
    """The state of one verification."""

    def __init__(
        self,
        name: str,
        workspace: Workspace,
        verification: Verification,
        encoders: Encoders,
        report: ImportReport,
        writer: Writer,
    ):
        self._writer = writer
        self._workspace, self._verification, self._report = workspace, verification, report
        self._policy = ImagePolicy(**_dataset_of(verification.config, name).images.model_dump())
        self._models, self._encodings = encoders.models, encoders.encodings
        self._random = random.Random(verification.seed)

    def images(self, rows: Mapping[str, Row], progress: Progress) -> dict[str, str]:
        """Old key -> new key of the latents that encoding gives."""
        chosen = self._chosen([(row, ref) for row in rows.values() for ref in row.images])
        if not chosen:
            return {}
        progress.start("verify images", len(chosen))
        placement, verified = self._encodings.vae, {}
        with placed(self._models.vae(placement.dtype), placement.device) as vae:
            for row, ref in chosen:
                new = self._image(row, ref, vae)
                if new is not None:
                    verified[ref.key] = new
                progress.advance()
        self._models.release("vae")
        progress.finish()
        return verified

    def texts(self, rows: Mapping[str, Row], progress: Progress) -> dict[str, str]:
        """Old key -> new key of the embeddings that encoding gives."""
        chosen = self._chosen([(row, ref) for row in rows.values() for ref in row.captions])
        if not chosen:
            return {}
        progress.start("verify captions", len(chosen))
        placement, verified = self._encodings.text_encoders, {}
        clip_skip = self._encodings.text.clip_skip
        with placed_texts(self._models, placement) as parts:
            for row, ref in chosen:
                entry = self._workspace.store.get(ref.key)
                progress.advance()
                if entry.record.identity["source"] is None:
                    self._unequal(row, "missing", "its caption is not known, so it cannot be encoded again")
                    continue
                # One at a time, as precache does on a CPU: the last bits of the pooled output depend on the batch.
                encoded = encode_captions(parts, [ref.text], clip_skip=clip_skip, device="cpu")
                encoded = {name: tensor[0] for name, tensor in encoded.items()}
                found = self._compared(row, "text", entry, encoded, placement.dtype)
                if found is not None:
                    identity = TextIdentity(
                        caption_digest(ref.text), self._encodings.text, self._verification.config.cache.salt
                    )
                    verified[ref.key] = self._store(entry, identity.to_json(), found, self._encodings.text.store_dtype)
        self._models.release("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
        progress.finish()
        return verified

    def _chosen(self, refs: list[tuple[Row, Ref]]) -> list[tuple[Row, Ref]]:
        """The entries to look at: each once, whoever shares it."""
        unique = {ref.key: (row, ref) for row, ref in reversed(refs)}
        pool = [unique[key] for key in sorted(unique)]
        wanted = self._verification.num_entries
        return pool if wanted == "all" or wanted >= len(pool) else self._random.sample(pool, wanted)

    def _image(self, row: Row, ref: ImageRef, vae: torch.nn.Module) -> str | None:
        """The key under which the latent is verified, or None if it is not."""
        if row.source is None:
            self._unequal(row, "missing", "the image is not there, so it cannot be encoded again: give --images")
            return None
        try:
            pixels = decode(_read(row.path, row.source), row.path, self._policy)
        except ImageRefused as refused:
            self._unequal(row, refused.reason, refused.detail)
            return None
        size = (ref.geometry.original_size.height, ref.geometry.original_size.width)
        if pixels.shape[:2] != size:
            met = f"{pixels.shape[0]}x{pixels.shape[1]}"
            self._unequal(
                row, "unequal", f"the image is {met} now (upright), but one of {ref.geometry.original_size} was cached"
            )
            return None
        moments = encode_images(vae, prepare(pixels, ref.geometry)[None]).float().cpu()
        entry = self._workspace.store.get(ref.key)
        encoded = {"latents": latents_from_moments(moments)[0]}
        if entry.record.identity["imported"]["output"] == "sample":
            self._note_draw(entry.tensors["latents"], encoded["latents"], posterior_std(moments)[0])
        found = self._compared(row, "image", entry, encoded, self._encodings.vae.dtype)
        if found is None:
            return None
        preparation = Preparation.of(self._policy.identity(), ref.geometry)
        salt = self._verification.config.cache.salt
        identity = ImageIdentity(row.source, preparation, self._encodings.image, salt)
        return self._store(entry, identity.to_json(), found, self._encodings.image.store_dtype)

    def _note_draw(self, latents: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> None:
        """How far a draw lies from the mean, in deviations of the posterior."""
        if latents.shape != mean.shape:
            return  # _compared says so
        distance = (latents.float() - mean).square().mean().sqrt()
        deviations = (distance / std.square().mean().sqrt()).item()
        found = self._report.differences.setdefault("image", Difference())
        found.largest_deviations = max(found.largest_deviations or 0.0, deviations)

    def _compared(
        self, row: Row, kind: str, entry: Entry, encoded: Mapping[str, torch.Tensor], compute_dtype: torch.dtype
    ) -> Comparison | None:
        """The worst field's comparison if the entry is equal, else None."""
        stored = self._encodings.image.store_dtype if kind == "image" else self._encodings.text.store_dtype
        in_file = DTYPES[entry.record.provenance["file_dtype"]]
        dtypes = (compute_dtype, DTYPES[stored], in_file, *(tensor.dtype for tensor in entry.tensors.values()))
        relative = max(RELATIVE[dtype] for dtype in dtypes)
        found = self._report.differences.setdefault(kind, Difference())
        found.num_compared += 1
        comparisons = []
        for name, tensor in entry.tensors.items():
            if tensor.shape != encoded[name].shape:
                shapes = f"{name} has the shape {list(tensor.shape)}, encoding gives {list(encoded[name].shape)}"
                self._unequal(row, "unequal", f"{shapes}: it comes from another model")
                return None
            problem = problems(encoded[name][None])[0]
            if problem is not None:
                part = "vae" if kind == "image" else "text"
                remedy = "" if compute_dtype is torch.float32 else f"; use `encode.{part}_dtype: float32`"
                told = f"encoding in {str(compute_dtype).removeprefix('torch.')} gives {name} that are {problem}"
                self._unequal(row, "bad-output", f"{told}: nothing to compare with{remedy}")
                return None
            tolerance = self._verification.tolerance
            comparisons.append(compare(tensor, encoded[name], relative=relative, tolerance=tolerance))
        largest, share = (max(values) for values in zip(*comparisons, strict=True))
        found.largest, found.largest_share = max(found.largest, largest), max(found.largest_share, share)
        if share > 1:
            self._unequal(row, "unequal", _unequal_detail(kind, entry, largest, share))
            return None
        found.num_equal += 1
        return Comparison(largest, share)

    def _store(self, entry: Entry, identity: Mapping[str, object], found: Comparison, dtype: str) -> str:
        """The imported tensors under the identity of an encoded entry."""
        told = {"trust": "verified", "largest_difference": found.largest, "share_of_allowed": found.share}
        provenance = {**entry.record.provenance, "verification": told}
        tensors = {name: tensor.to(DTYPES[dtype]) for name, tensor in entry.tensors.items()}
        key = key_of(identity)
        # If precache made this very entry already, that one stays.
        self._writer.add(Entry(Record(key, entry.record.kind, identity, provenance), tensors))
        return key

    def _unequal(self, row: Row, reason: str, detail: str) -> None:
        self._report.unequal.append(Refusal(row.sample_id, row.path, reason, detail))


def _unequal_detail(kind: str, entry: Entry, largest: float, share: float) -> str:
    detail = f"encoding gives other {'latents' if kind == 'image' else 'embeddings'}: largest difference {largest:.3g}"
    detail += f", {share:.3g} times what is allowed"
    if entry.record.identity["imported"]["output"] == "sample":
        detail += "; it is one draw of the posterior, which seldom equals the mean"
    return detail


def _read(path: str, source: str) -> bytes:
    """The image's bytes, if they are those that the import saw. Raises ImageRefused."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise ImageRefused(path, "unreadable", error.strerror or str(error)) from error
    if digest(data) != source:
        raise ImageRefused(path, "changed", "the file changed during the import")
    return data


def _dataset_of(config: Config, name: str) -> DatasetConfig:
    """The dataset whose image policy the verification uses."""
    named = [dataset for dataset in config.datasets if dataset.name == name] or list(config.datasets)
    if len(named) > 1:
        names = ", ".join(dataset.name for dataset in named)
        raise ConfigError(
            f"none of the datasets {names} is named {name!r}: import under the name of the one whose images these are",
            key="datasets",
        )
    return named[0]


def _with_verified(row: Row, verified: Mapping[str, str]) -> Row:
    images = tuple(_verified_refs(row.images, verified))
    return replace(row, images=images, captions=tuple(_verified_refs(row.captions, verified)))


def _verified_refs(refs: Sequence[Ref], verified: Mapping[str, str]) -> Iterator[Ref]:
    for ref in refs:
        yield replace(ref, key=verified[ref.key], trust="verified") if ref.key in verified else ref
