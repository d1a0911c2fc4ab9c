"""Proof that an imported entry is what encoding gives: precache's stages encode it again, and the two are compared."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple, TypeVar

import torch

from latentcache.config import Config, DatasetConfig
from latentcache.dataset.bucket_rules import filter_of_trainer
from latentcache.dataset.folder import CaptionFileSource
from latentcache.dataset.images import probe
from latentcache.dataset.row_table import CaptionRef, ImageRef, Row
from latentcache.dataset.samples import Sample
from latentcache.errors import ConfigError, ImageRefused
from latentcache.families.scaling import latents_from_moments, posterior_std
from latentcache.identity import ImageEncoding, TextEncoding, key_of
from latentcache.interop.reports import Difference, ImportReport
from latentcache.models.model_loader import Models
from latentcache.precache.encoding_stage import RunContext
from latentcache.precache.encodings import choose_encodings, for_images, load_models
from latentcache.precache.image_stage import ImageStage
from latentcache.precache.preparation import Preparations, TextKeys
from latentcache.precache.report import Failure, Report
from latentcache.precache.tasks import TEXT_BATCH_SIZE, Batches, ImageTask, Shard, TextTask
from latentcache.precache.text_stage import TextStage
from latentcache.precache.workspace import Workspace
from latentcache.store.entry import DTYPES
from latentcache.store.writer import Writer
from latentcache.types import Entry, Refusal
from latentcache.utils.progress import Progress

Ref = TypeVar("Ref", ImageRef, CaptionRef)
_FARTHEST_DRAW = 1.25
"""An honest draw's root mean square distance from the mean, at most, in deviations of the posterior. It is 1 on
average, and within a few percent of it for the smallest latents."""
RELATIVE = {torch.float32: 1e-4, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
"""What is allowed by default at each number x of a tensor: this times (|x| + the tensor's root mean square), for the
coarsest dtype of the file, the computation and the store. Half precision: four roundings. float32: other kernels,
devices and batch sizes sum in another order, which costs far more than a rounding and far less than another model."""


@dataclass(frozen=True, slots=True)
class Verification:
    """How many entries of each kind are encoded again, with which config's models.

    The entries are drawn with `seed`. `models` None loads those of the config. The image policy is that of the config's
    dataset of the import's name, or of its only dataset. `encode.image_output` of the config must be `mean`.
    """

    config: Config
    models: Models | None = None
    num_entries: int | Literal["all"] = 8
    seed: int = 0

    def dataset(self, name: str) -> DatasetConfig:
        """The dataset whose image policy counts. ConfigError if an import of this name cannot be verified."""
        output = self.config.encode.image_output
        if output != "mean":
            raise ConfigError(
                f"encode.image_output is {output}, but imported latents can only stand for the mean: verify with a "
                "config that has `image_output: mean`",
                key="encode.image_output",
            )
        named = [dataset for dataset in self.config.datasets if dataset.name == name] or list(self.config.datasets)
        if len(named) > 1:
            names = ", ".join(dataset.name for dataset in named)
            raise ConfigError(
                f"none of the datasets {names} is named {name!r}: import under the name of the one whose images these "
                "are",
                key="datasets",
            )
        return named[0]


_FILES = CaptionFileSource("", ".txt")
"""It reads an image by the path in its sample, wherever that is."""


class Comparison(NamedTuple):
    """How an imported tensor differs from the encoded one."""

    largest: float
    """Largest absolute difference."""
    share: float
    """Of what is allowed, at the place where it is worst: at most 1 is equal."""


def compare(imported: torch.Tensor, encoded: torch.Tensor, *, relative: float) -> Comparison:
    """Compare two tensors of one shape in float32. `relative`: see `RELATIVE`."""
    imported, encoded = imported.float(), encoded.float()
    difference = (imported - encoded).abs()
    allowed = encoded.abs().add(encoded.square().mean().sqrt()).mul(relative)
    # Where nothing is allowed, nothing may differ.
    share = torch.where(difference == 0, 0.0, difference / allowed)
    return Comparison(difference.max().item(), share.max().item())


class Verifier:
    """Encodes imported entries again. Each that is equal is stored once more under its real identity, verified.

    Images are prepared as the config's dataset does, but with the resize filter of the trainer.

    Raises ConfigError if an import of this name cannot be verified, ModelError or DeviceError.
    """

    def __init__(self, verification: Verification, name: str, workspace: Workspace, report: ImportReport):
        self._verification, self._store, self._report = verification, workspace.store, report
        self._dataset = verification.dataset(name)
        self._models = verification.models or load_models(verification.config.model, workspace.memo)
        self._encodings = choose_encodings(verification.config, self._models, workspace.memo)
        encodings: dict[str, ImageEncoding | TextEncoding]
        encodings = {"image": self._encodings.image, "text": self._encodings.text}
        self.store_dtypes = {kind: DTYPES[encoding.store_dtype] for kind, encoding in encodings.items()}
        """In which dtypes precache stores what the models give."""
        if self.store_dtypes["text"] not in RELATIVE:
            met = self._encodings.text.store_dtype
            message = f"text_store_dtype is {met}, which is too coarse to verify texts; set it to auto"
            raise ConfigError(message, key="encode.text_store_dtype")
        self._compute_dtypes = {kind: DTYPES[encoding.compute_dtype] for kind, encoding in encodings.items()}
        salt = verification.config.cache.salt
        self._preparations = Preparations(self._dataset, self._encodings, salt)
        self._texts = TextKeys(self._models.family, self._models.tokenizers, self._encodings.text, salt)
        self._random = random.Random(verification.seed)
        self._expected: dict[str, list[tuple[Row, ImageRef | CaptionRef]]] = {}
        """Key of an encoded entry -> the imported ones that should equal it."""
        self._verified: dict[str, str] = {}
        """Key of an imported entry -> that under which it is verified."""

    def verify(self, rows: Mapping[str, Row], progress: Progress) -> dict[str, Row]:
        """Encode some entries of these rows again, and return the rows with the keys of those that are verified.

        What was found goes into the report. The unverified entries stay in the store, as other imports may share
        them: `prune` removes those that nothing refers to. Raises ModelError, DeviceError or StoreError.
        """
        images = self._image_batches([(row, ref) for row in rows.values() for ref in row.images])
        texts = self._text_batches([(row, ref) for row in rows.values() for ref in row.captions])
        with self._store.writer() as writer:
            # Precache's stages, which give what is compared: moments and embeddings in float32.
            context = RunContext(
                encode=self._verification.config.encode,
                encodings=replace(self._encodings, text=replace(self._encodings.text, store_dtype="float32")),
                models=self._models,
                store=partial(self._compare, writer),
                fail=self._note_failure,
                report=Report(),
                progress=progress,
                stop=threading.Event(),
                compared=replace(self._encodings.image, output="moments", store_dtype="float32"),
            )
            if images:
                encodings = for_images(self._encodings, context.encode, images)
                ImageStage(replace(context, encodings=encodings)).run(images)
                self._models.release(self._models.vae_name)
            if texts:
                TextStage(context).run(texts)
                self._models.release()
            writer.seal()
        self._report.bytes_written += writer.bytes_written

        def updated(refs: Sequence[Ref]) -> tuple[Ref, ...]:
            keys = self._verified
            return tuple(replace(ref, key=keys[ref.key], trust="verified") if ref.key in keys else ref for ref in refs)

        return {
            sample_id: replace(row, images=updated(row.images), captions=updated(row.captions))
            for sample_id, row in rows.items()
        }

    def _refuse(self, row: Row, reason: str, detail: str) -> None:
        self._report.unequal.append(Refusal(row.sample_id, row.path, reason, detail))

    # What is encoded

    def _image_batches(self, refs: Sequence[tuple[Row, ImageRef]]) -> list[list[ImageTask]]:
        batches: Batches[ImageTask] = Batches(Shard())
        for row, ref in self._drawn(refs):
            if row.source is None:
                self._refuse(row, "missing", "the image is not there, so it cannot be encoded again: give --images")
                continue
            sample, geometry = Sample(row.sample_id, row.path, locator=row.path), ref.geometry
            try:
                size = probe(_FILES.read(sample), row.path, self._dataset.images)
            except ImageRefused as refused:
                self._refuse(row, refused.reason, refused.detail)
                continue
            if size != geometry.original_size:
                detail = f"the image is {size} now (upright), but one of {geometry.original_size} was cached"
                self._refuse(row, "unequal", detail)
                continue
            identity = self._preparations.identity(self._preparations.roles[0], row.source, geometry)
            resample = filter_of_trainer(self._report.format, geometry) or identity.preparation.resample
            identity = replace(identity, preparation=replace(identity.preparation, resample=resample))
            key = key_of(identity.to_json())
            if self._expect(key, row, ref):
                task = ImageTask(key, identity, sample, _FILES, self._dataset.images)
                batches.add(geometry.extent, self._encodings.image_group_size, task)
        return batches.finish()

    def _text_batches(self, refs: Sequence[tuple[Row, CaptionRef]]) -> list[list[TextTask]]:
        batches: Batches[TextTask] = Batches(Shard())
        for row, ref in self._drawn(refs):
            if self._store.record(ref.key).identity["source"] is None:
                self._refuse(row, "missing", "its caption is not known, so it cannot be encoded again")
                continue
            identity = self._texts.identity(ref.text)
            key = key_of(identity.to_json())
            if self._expect(key, row, ref):
                sample = Sample(row.sample_id, row.path)
                batches.add("text", TEXT_BATCH_SIZE, TextTask(key, identity, sample, ref.text))
        return batches.finish()

    def _drawn(self, refs: Sequence[tuple[Row, Ref]]) -> list[tuple[Row, Ref]]:
        """The entries to encode again: each once, however many samples share it."""
        unique = {ref.key: (row, ref) for row, ref in reversed(refs)}
        pool = [unique[key] for key in sorted(unique)]
        num_entries = self._verification.num_entries
        return pool if num_entries == "all" or num_entries >= len(pool) else self._random.sample(pool, num_entries)

    def _expect(self, key: str, row: Row, ref: ImageRef | CaptionRef) -> bool:
        """Compare the entry with what is encoded under `key`. False if that is to be encoded already."""
        expected = self._expected.setdefault(key, [])
        expected.append((row, ref))
        return len(expected) == 1

    # What came of it

    def _note_failure(self, key: str, failure: Failure) -> None:
        """Note that these entries could not be encoded."""
        for row, ref in self._expected[key]:
            detail = failure.detail
            if failure.reason == "bad-output":
                detail = f"there is nothing to compare with: {detail}"
                if isinstance(ref, CaptionRef) and self._encodings.text.compute_dtype != "float32":
                    detail += "; use `encode.text_dtype: float32`"
            self._refuse(row, failure.reason, detail)

    def _compare(self, writer: Writer, encoded: Entry) -> None:
        """Compare one encoded entry with the imported ones that should equal it, and store those that do."""
        key, kind, tensors = encoded.record.key, encoded.record.kind, encoded.tensors
        found = self._report.differences.setdefault(kind, Difference())
        if kind == "image":
            tensors = {"latents": latents_from_moments(tensors["moments"][None])[0]}
        for row, ref in self._expected[key]:
            entry = self._store.get(ref.key)
            found.num_compared += 1
            if other := _other_shape(entry, tensors):
                self._refuse(row, "unequal", f"{other}: it comes from another model or max_length")
                continue
            result = self._compared(entry, tensors)
            found.largest = max(found.largest, result.largest)
            found.largest_share = max(found.largest_share, result.share)
            distance, farthest = 1.0, 0.0
            if entry.record.identity["imported"]["output"] == "sample":
                distance, farthest = _distance(entry, encoded, tensors["latents"], result)
                found.largest_deviations = max(found.largest_deviations or 0.0, distance)
            if result.share <= 1:
                found.num_equal += 1
                self._verified[ref.key] = key
                # Under the identity of the encoded entry. If precache made that, it stays.
                shown = {"trust": "verified", "largest_difference": result.largest, "share_of_allowed": result.share}
                record = replace(encoded.record, provenance={**entry.record.provenance, "verification": shown})
                stored = {name: tensor.to(self.store_dtypes[kind]) for name, tensor in entry.tensors.items()}
                writer.add(Entry(record, stored, encoded.ragged))
            elif distance <= farthest:
                found.num_draws += 1
            else:
                detail = f"encoding gives other {'latents' if kind == 'image' else 'embeddings'}: largest difference "
                detail += f"{result.largest:.3g}, {result.share:.3g} times what is allowed"
                if farthest:
                    detail += f"; a draw of the posterior is 1 deviation from its mean, this is {distance:.3g}"
                self._refuse(row, "unequal", detail)

    def _compared(self, entry: Entry, encoded: Mapping[str, torch.Tensor]) -> Comparison:
        """The worst field's comparison."""
        kind = entry.record.kind
        file_dtype = DTYPES[entry.record.provenance["file_dtype"]]
        dtypes = {file_dtype, self._compute_dtypes[kind], self.store_dtypes[kind]}
        relative = max(RELATIVE[dtype] for dtype in dtypes | {tensor.dtype for tensor in entry.tensors.values()})
        fields = [compare(tensor, encoded[name], relative=relative) for name, tensor in entry.tensors.items()]
        return Comparison(max(field.largest for field in fields), max(field.share for field in fields))


def _distance(draw: Entry, encoded: Entry, mean: torch.Tensor, result: Comparison) -> tuple[float, float]:
    """How far a draw is from the mean, and how far an honest one is at most, in deviations of the posterior.

    A draw is as far from the mean as the deviation says, and the roundings of its file come on top.
    """
    std = posterior_std(encoded.tensors["moments"][None]).square().mean().sqrt().item()
    distance = (draw.tensors["latents"].float() - mean).square().mean().sqrt().item()
    rounding = result.largest / result.share if result.share else 0.0
    return distance / std, _FARTHEST_DRAW * math.hypot(std, rounding) / std


def _other_shape(entry: Entry, encoded: Mapping[str, torch.Tensor]) -> str | None:
    """The first field whose shape is not that of the encoded one, for messages; None if there is none."""
    for name, tensor in entry.tensors.items():
        if name not in encoded:
            return f"{name} is stored, encoding gives {' and '.join(encoded)}"
        if tensor.shape != encoded[name].shape:
            return f"{name} has the shape {list(tensor.shape)}, encoding gives {list(encoded[name].shape)}"
    return None
