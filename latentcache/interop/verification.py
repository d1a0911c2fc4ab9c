"""Verification of imported entries: some are encoded again, and both results are compared."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch

from latentcache.config import Config
from latentcache.dataset.bucket_rules import filter_of_trainer
from latentcache.dataset.folder import CaptionFileSource
from latentcache.dataset.images import probe
from latentcache.dataset.row_table import Ref, Row
from latentcache.dataset.samples import Sample
from latentcache.errors import ConfigError, ImageRefused
from latentcache.families.scaling import latents_from_moments, posterior_std
from latentcache.identity import key_of
from latentcache.interop.reports import Difference, ImportReport
from latentcache.models.model_loader import Models
from latentcache.precache.encodings import load_models
from latentcache.precache.preparation import Preparations, TextKeys
from latentcache.precache.report import Failure
from latentcache.precache.serving_models import ServingModels
from latentcache.precache.tasks import Task
from latentcache.precache.workspace import Workspace
from latentcache.store.batch import DTYPES
from latentcache.types import Entry, Refusal
from latentcache.utils.progress import Progress

_FARTHEST_DRAW = 1.25
"""Upper bound for the root mean square distance of a true draw from the mean, in standard deviations of the posterior.
The expected value is 1, and even the smallest latents are within a few percent of it."""
RELATIVE = {torch.float32: 1e-4, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
"""Tolerance for each value x: this times (|x| + the tensor's root mean square), for the coarsest dtype of the file, the
computation and the store. Half precision allows four roundings. float32 allows for kernels, devices and batch sizes
that sum in another order, which costs far more than a rounding and far less than another model."""
_EXACT = {"image_output": "moments", "store_dtype": "float32", "text_store_dtype": "float32"}
"""Settings for encoding: outputs are compared at full precision, whatever the config stores."""
_FILES = CaptionFileSource("", ".txt")
"""Reads an image at any path: a sample's `locator`."""


class Comparison(NamedTuple):
    """How an imported tensor differs from the encoded one."""

    largest: float
    """Largest absolute difference."""
    share: float
    """Largest ratio of difference to tolerance; the tensors count as equal up to 1."""


def compare(imported: torch.Tensor, encoded: torch.Tensor, *, relative: float) -> Comparison:
    """Compare two tensors of one shape in float32. `relative` is a value of RELATIVE."""
    imported, encoded = imported.float(), encoded.float()
    difference = (imported - encoded).abs()
    allowed = encoded.abs().add(encoded.square().mean().sqrt()).mul(relative)
    # If both are all zeros, 0 / 0 is no difference.
    share = torch.where(difference == 0, 0.0, difference / allowed)
    return Comparison(difference.max().item(), share.max().item())


class Verification:
    """Encodes imported entries again, as precache does, and notes in the report how they differ.

    `num_entries` of each kind are encoded with `models`, or with the config's if None. Images are prepared as for the
    config's dataset with the name of the import, or its only dataset, but with the trainer's resize filter. Call
    `begin` before `verify`.
    """

    def __init__(self, config: Config, models: Models | None = None, num_entries: int | Literal["all"] = 8):
        self._config, self._given, self._num_entries = config, models, num_entries

    def begin(self, name: str, workspace: Workspace, report: ImportReport) -> None:
        """Load the models for an import of this name.

        Raises ConfigError if the config has several datasets and none of that name, ModelError or DeviceError.
        """
        self._store, self._report, config = workspace.store, report, self._config
        named = [dataset for dataset in config.datasets if dataset.name == name] or list(config.datasets)
        if len(named) > 1:
            names = ", ".join(dataset.name for dataset in named)
            message = f"none of the datasets {names} is named {name!r}: give the name of the one with these images"
            raise ConfigError(message, key="datasets")
        [self._dataset] = named
        config = config.model_copy(update={"encode": config.encode.model_copy(update=_EXACT)})
        models = self._given or load_models(config.model, workspace.memo)
        self._models = ServingModels(config, models, workspace.memo)
        encodings = self._models.encodings
        self._compute_dtypes = {"image": DTYPES[encodings.image.compute_dtype]}
        if encodings.has_texts:
            self._compute_dtypes["text"] = DTYPES[encodings.text.compute_dtype]
        self._preparations = Preparations(self._dataset, encodings, "")
        self._texts = TextKeys(models.family, models.tokenizers, encodings.text, "")
        self._expected: dict[str, list[tuple[Row, Ref]]] = {}
        """Key of an entry to encode -> the imported ones that should equal it."""

    def verify(self, rows: Mapping[str, Row], progress: Progress) -> None:
        """Encode some entries of these rows again, and compare them. `encode.text: none` leaves out texts.

        Raises ModelError, DeviceError or StoreError.
        """
        images = list(self._image_tasks([(row, ref) for row in rows.values() for ref in row.images]))
        captions = [(row, ref) for row in rows.values() for ref in row.captions]
        if captions and "text" not in self._compute_dtypes:
            self._report.note("texts were not compared: the config has encode.text: none")
            captions = []
        texts = list(self._text_tasks(captions))
        progress.start("verify", len(images) + len(texts))

        def compared(encoded: Entry) -> None:
            self._compare(encoded)
            progress.advance()

        tasks: Sequence[Task]
        for tasks in (images, texts):
            if tasks:
                self._models.encode(tasks, compared, self._note_failure)
                self._models.unload()

    def _refuse(self, row: Row, reason: str, detail: str) -> None:
        self._report.unequal.append(Refusal(row.sample_id, row.path, reason, detail))

    # Encoding

    def _image_tasks(self, refs: Sequence[tuple[Row, Ref]]) -> Iterator[Task]:
        for row, ref in self._drawn(refs):
            if row.source is None:
                self._refuse(row, "missing", "there is no image to encode again: give --images")
                continue
            sample, geometry = Sample(row.sample_id, row.path, locator=row.path), ref.geometry
            try:
                size = probe(_FILES.read(sample), row.path, self._dataset.images)
            except ImageRefused as refused:
                self._refuse(row, refused.reason, refused.detail)
                continue
            if size != geometry.original_size:
                detail = f"the image is {size} now (upright), but was {geometry.original_size} when it was cached"
                self._refuse(row, "unequal", detail)
                continue
            identity = self._preparations.identity(self._preparations.roles[0], row.source, geometry)
            resample = filter_of_trainer(self._report.format, geometry)
            identity = replace(identity, preparation=replace(identity.preparation, resample=resample))
            key = key_of(identity.to_json())
            if self._expect(key, row, ref):
                yield Task(key, identity, sample, _FILES, self._dataset.images)

    def _text_tasks(self, refs: Sequence[tuple[Row, Ref]]) -> Iterator[Task]:
        for row, ref in self._drawn(refs):
            if self._store.record(ref.key).identity["source"] is None:
                self._refuse(row, "missing", "its caption is unknown, so it cannot be encoded again")
                continue
            identity = self._texts.identity(ref.text)
            key = key_of(identity.to_json())
            if self._expect(key, row, ref):
                yield Task(key, identity, Sample(row.sample_id, row.path), caption=ref.text)

    def _drawn(self, refs: Sequence[tuple[Row, Ref]]) -> list[tuple[Row, Ref]]:
        """A random choice of the entries to encode again. An entry that samples share counts once."""
        unique = {ref.key: (row, ref) for row, ref in reversed(refs)}
        pool = [unique[key] for key in sorted(unique)]
        num = len(pool) if self._num_entries == "all" else min(self._num_entries, len(pool))
        return random.Random(0).sample(pool, num)

    def _expect(self, key: str, row: Row, ref: Ref) -> bool:
        """Have the imported entry compared with the one encoded under `key`; False if that is scheduled already."""
        expected = self._expected.setdefault(key, [])
        expected.append((row, ref))
        return len(expected) == 1

    # Comparing

    def _note_failure(self, key: str, failure: Failure) -> None:
        """Report the imported entries that cannot be compared because encoding failed."""
        nothing = "there is nothing to compare with: " if failure.reason == "bad-output" else ""
        for row, _ in self._expected[key]:
            self._refuse(row, failure.reason, f"{nothing}{failure.detail}")

    def _compare(self, encoded: Entry) -> None:
        """Compare one encoded entry with the imported ones that should equal it."""
        kind, tensors = encoded.record.kind, encoded.tensors
        found = self._report.differences.setdefault(kind, Difference())
        if kind == "image":
            tensors = {"latents": latents_from_moments(tensors["moments"][None])[0]}
        for row, ref in self._expected[encoded.record.key]:
            entry = self._store.get(ref.key)
            found.num_compared += 1
            if other := _other_shape(entry, tensors):
                self._refuse(row, "unequal", f"{other}: it was made with another model or max_length")
                continue
            result = self._compared(entry, tensors)
            found.largest = max(found.largest, result.largest)
            found.largest_share = max(found.largest_share, result.share)
            if result.share <= 1:
                found.num_equal += 1
                continue
            detail = f"encoding gives different {'latents' if kind == 'image' else 'embeddings'}: largest difference "
            detail += f"{result.largest:.3g}, {result.share:.3g} times the tolerance"
            if entry.record.identity["imported"]["output"] == "sample":
                distance, farthest = _distance(entry, encoded, tensors["latents"], result)
                found.largest_deviations = max(found.largest_deviations or 0.0, distance)
                if distance <= farthest:
                    found.num_draws += 1
                    continue
                detail += f"; a draw of the posterior is 1 deviation from its mean, this one {distance:.3g}"
            self._refuse(row, "unequal", detail)

    def _compared(self, entry: Entry, encoded: Mapping[str, torch.Tensor]) -> Comparison:
        """The largest values over all fields."""
        dtypes = {DTYPES[entry.record.provenance["file_dtype"]], self._compute_dtypes[entry.record.kind]}
        relative = max(RELATIVE[dtype] for dtype in dtypes | {tensor.dtype for tensor in entry.tensors.values()})
        fields = [compare(tensor, encoded[name], relative=relative) for name, tensor in entry.tensors.items()]
        return Comparison(max(field.largest for field in fields), max(field.share for field in fields))


def _distance(draw: Entry, encoded: Entry, mean: torch.Tensor, result: Comparison) -> tuple[float, float]:
    """The distance of a draw from the mean, and its upper bound for a true draw, in deviations of the posterior.

    The bound adds the rounding of the file to the deviation.
    """
    std = posterior_std(encoded.tensors["moments"][None]).square().mean().sqrt().item()
    distance = (draw.tensors["latents"].float() - mean).square().mean().sqrt().item()
    rounding = result.largest / result.share if result.share else 0.0
    return distance / std, _FARTHEST_DRAW * math.hypot(std, rounding) / std


def _other_shape(entry: Entry, encoded: Mapping[str, torch.Tensor]) -> str | None:
    """The first field whose shape differs from the encoded one's, for messages; None if there is none."""
    for name, tensor in entry.tensors.items():
        if name not in encoded or tensor.shape != encoded[name].shape:
            shapes = ", ".join(f"{each} {list(made.shape)}" for each, made in encoded.items())
            return f"its {name} are {list(tensor.shape)}, encoding gives {shapes}"
    return None
