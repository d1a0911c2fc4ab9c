"""Makes the plan: reads the datasets, computes every sample's keys, and finds the reason of each miss."""

from __future__ import annotations

import gc
import logging
import math
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import islice
from typing import Annotated

import msgspec

from latentcache.config import Config, DatasetConfig
from latentcache.dataset.clips import probe_clip
from latentcache.dataset.manifest import Manifest, prompts_name
from latentcache.dataset.manifest_row import CaptionRef, ImageRef, PartRef, Row
from latentcache.dataset.row_table import RowTableBuilder
from latentcache.dataset.samples import Sample
from latentcache.dataset.sources import VIDEO_SUFFIXES, open_source
from latentcache.errors import ConfigError, ImageRefused
from latentcache.families.base import check_prompts
from latentcache.identity import SCHEMA, ImageIdentity, MaskIdentity, digest, encoding_json
from latentcache.models.model_loader import Models
from latentcache.precache.encodings import Encodings, family_json
from latentcache.precache.miss_reasons import LOST, History
from latentcache.precache.part_preparations import CONTROL_OUTPUT, PartPreparations
from latentcache.precache.plan import ImageTask, MaskTask, Plan, PlanBuilder, Shard
from latentcache.precache.preparations import Preparations
from latentcache.precache.prompts import last_manifest, plan_prompts
from latentcache.precache.texts import Controls, TextKeys
from latentcache.precache.workspace import Workspace
from latentcache.types import Refusal, Size
from latentcache.utils.json_document import recalled
from latentcache.utils.progress import Progress

CHUNK = 1024
"""Samples whose keys are looked up together."""
MAX_NAMED = 5
"""Samples that a note of the report names."""
VIDEOS_AT_ONCE = 4
"""Files that are read whole: one may have a GiB, and there are threads for each core."""

logger = logging.getLogger("latentcache")


_Positive = Annotated[int, msgspec.Meta(ge=1)]


class _FileFacts(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """What the memo lists of an image or a clip: the digest of its bytes, its upright size, and a clip's frames."""

    source: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    height: _Positive
    width: _Positive
    num_frames: _Positive | None = None
    signature: str = ""
    """What the file's status was when it was read. The memo has it by path, so that a new reading replaces the last."""

    @property
    def size(self) -> Size:
        return Size(self.height, self.width)


_FACTS = msgspec.json.Decoder(_FileFacts)


class Stopped(Exception):
    """The run was stopped while it planned."""


def make_plan(  # noqa: PLR0913 - each is a choice of the caller's
    config: Config,
    workspace: Workspace,
    encodings: Encodings,
    models: Models,
    *,
    shard: Shard | None = None,
    verify_sources: bool = False,
    only: frozenset[str] | None = None,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Plan:
    """Plan a run. Only the memo of digests is written.

    One bad file is a refusal. `only` restricts the plan to these sample ids. `verify_sources` reads and hashes every
    image, also those whose files look unchanged. Raises DatasetError for a dataset that cannot be read at all, and
    Stopped when `stop` is set.
    """
    builder = PlanBuilder(workspace.store, config.cache.salt, shard or Shard())
    progress = progress or Progress()
    # The first one is read once, for the prompts too.
    last = last_manifest(workspace.manifests, config.datasets[0].name)
    _plan_prompts(builder, config, workspace, encodings, models, last)
    num_workers = config.encode.num_workers
    num_threads = os.cpu_count() if num_workers == "auto" else num_workers
    with ExitStack() as after, ThreadPoolExecutor(num_threads) as executor:
        if gc.isenabled():
            # Plans have many values and no cycles: scanning them takes half as long as all the rest of planning.
            after.callback(gc.enable)
            gc.disable()
        for dataset in config.datasets:
            progress.start(f"plan {dataset.name}", None)
            planner = _DatasetPlanner(builder, dataset, workspace, encodings, models, verify_sources, only)
            planner.run(executor, progress, stop or threading.Event(), last)
            progress.finish()
            last = None
    return builder.finish()


def _plan_prompts(
    builder: PlanBuilder,
    config: Config,
    workspace: Workspace,
    encodings: Encodings,
    models: Models,
    last: Manifest | None,
) -> None:
    """The validation prompts. A negative prompt may be encoded otherwise, so the empty prompt is two.

    `last` is the manifest of the first dataset. Where texts are read with control images there are none: ConfigError
    for those that the config has.
    """
    check_prompts(encodings.family, config.validation.prompts)
    if encodings.family.text_reads_control:
        return
    positive = [(text, False) for text in ("", *config.validation.prompts)]
    negative = [(text, True) for text in ("", config.validation.negative_prompt or "")]
    # The prompts of this config's last run, which may have had other encoders.
    if last is not None:
        last = last_manifest(workspace.manifests, prompts_name(last.common))
    manifest = plan_prompts(builder, workspace.manifests, encodings, models, [*positive, *negative], last)
    builder.plan.manifests.append(manifest)


class _DatasetPlanner:
    """One dataset's part of the plan."""

    def __init__(
        self,
        builder: PlanBuilder,
        dataset: DatasetConfig,
        workspace: Workspace,
        encodings: Encodings,
        models: Models,
        verify_sources: bool,
        only: frozenset[str] | None,
    ):
        self._builder, self._dataset, self._workspace, self._encodings = builder, dataset, workspace, encodings
        self._verify_sources, self._only = verify_sources, only
        # What was probed under some settings says nothing about others, which may refuse the image.
        frames = "" if dataset.frames is None else dataset.frames.model_dump_json()
        # A table's rows have several images, and the path of a row does not say which is read.
        column = dataset.source.image_column if dataset.source.kind == "parquet" else ""
        self._images_digest = digest((dataset.images.model_dump_json() + frames + column).encode())
        self._preparations = Preparations(dataset, encodings, builder.salt)
        self._texts = TextKeys(encodings.family, models.tokenizers, encodings.text, builder.salt)
        self._parts = PartPreparations(dataset, encodings, builder.salt)
        self._videos = threading.Semaphore(VIDEOS_AT_ONCE)
        self._source = open_source(dataset.source, dataset.part_files, videos=dataset.frames is not None)
        if encodings.family.text_reads_control and not dataset.control:
            message = (
                f"{encodings.family.name} reads captions together with control images; give dataset {dataset.name} some"
            )
            raise ConfigError(message, key="datasets.control")
        self._common = {
            "schema": SCHEMA,
            "salt": builder.salt,
            "policy": self._preparations.policy,
            "buckets": dataset.buckets.model_dump(mode="json", exclude_defaults=True),
            "image_encoding": encoding_json(encodings.image),
            "text_encoding": encoding_json(encodings.text),
            **family_json(encodings),
            **({"parts": parts} if (parts := self._parts.to_json()) else {}),
            **({"frames": self._preparations.frames} if dataset.frames else {}),
        }

    def run(
        self, executor: ThreadPoolExecutor, progress: Progress, stop: threading.Event, last: Manifest | None
    ) -> None:
        """Plan the dataset. `last` is its manifest, if it was read."""
        name, rows = self._dataset.name, RowTableBuilder()
        history = History(last or last_manifest(self._workspace.manifests, name), self._builder.damaged)
        samples = self._samples(executor, stop)
        while chunk := list(islice(samples, CHUNK)):
            present = self._builder.find(key for _, row in chunk for key in row.keys())
            rows.add([row for _, row in chunk])
            for sample, row in chunk:
                if sample is not None:
                    self._add(sample, row, history, present)
            progress.advance(len(chunk))
        table, lost = rows.finish(), history.sources
        if table and lost and self._only is None and lost.isdisjoint(table.sources()):
            logger.warning(
                "manifest %s listed %d other images, none of which is in %s: it will be replaced, and `prune` will "
                "remove what only it refers to. Give each dataset a name of its own.",
                name,
                len(lost),
                self._dataset.source.path,
            )
        manifest = Manifest(name, self._dataset.role, self._dataset.repeats, self._common, table)
        self._builder.plan.manifests.append(manifest)

    def _samples(self, executor: ThreadPoolExecutor, stop: threading.Event) -> Iterator[tuple[Sample | None, Row]]:
        """Each sample with its row; a refused one as a row alone."""
        plan = self._builder.plan
        seen: set[str] = set()
        items = (item for item in self._source.samples() if self._only is None or item.sample_id in self._only)
        for item, facts in self._found(executor, items):
            if stop.is_set():
                raise Stopped
            plan.num_samples += 1
            if item.sample_id in seen:
                # Two rows cannot have one name, and neither may be dropped silently.
                detail = f"sample id {item.sample_id!r} occurs twice in this dataset; rename one"
                plan.refused.append(Refusal(item.sample_id, item.path, "duplicate", detail))
                continue
            seen.add(item.sample_id)
            if isinstance(facts, Refusal):
                plan.refused.append(facts)
                yield None, Row(item.sample_id, item.path, None, (), (), facts)
                continue
            assert isinstance(item, Sample)  # a refusal has no other facts than itself
            row = self._row(item, facts)
            if row.refusal is not None:
                plan.refused.append(row.refusal)
                yield None, row
                continue
            plan.num_missing_captions += not item.has_caption
            if row.images[0].geometry.kept_share < 0.5:
                plan.num_mostly_cut += 1
                plan.mostly_cut += [item.sample_id] if plan.num_mostly_cut <= MAX_NAMED else []
            yield item, row

    def _found(
        self, executor: ThreadPoolExecutor, items: Iterator[Sample | Refusal]
    ) -> Iterator[tuple[Sample | Refusal, list[_FileFacts] | Refusal]]:
        """Each item with its facts. Files are read in threads, where that is needed: most are known as a rule."""
        while chunk := list(islice(items, 2 * CHUNK)):
            known = list(map(self._known_facts, chunk))
            read = executor.map(self._facts, [item for item, facts in zip(chunk, known, strict=True) if facts is None])
            for item, facts in zip(chunk, known, strict=True):
                yield item, next(read) if facts is None else facts

    def _known_facts(self, item: Sample | Refusal) -> list[_FileFacts] | Refusal | None:
        """What is known of an image and its parts without reading them: a refusal, or facts of the last reading."""
        if isinstance(item, Refusal):
            return item
        if self._verify_sources:
            return None
        found = []
        for sample in (item, *item.parts):
            facts = recalled(self._workspace.memo, self._memo_name(sample), _FACTS.decode)
            if facts is None or sample.signature is None or facts.signature != sample.signature.to_text():
                return None
            found.append(facts)
        return found

    def _facts(self, item: Sample | Refusal) -> list[_FileFacts] | Refusal:
        """The facts of a sample's image, then of its parts. The memo stores them until the files change."""
        assert isinstance(item, Sample)  # else the facts are known
        found: list[_FileFacts] = []
        for sample in (item, *item.parts):
            is_video = sample.path.lower().endswith(VIDEO_SUFFIXES)
            try:
                with self._videos if is_video else nullcontext():
                    found.append(self._facts_of(sample))
            except ImageRefused as refused:
                detail = f"{self._parts.names[len(found) - 1]}: {refused.detail}" if found else refused.detail
                return Refusal(item.sample_id, refused.path, refused.reason, detail)
        return found

    def _facts_of(self, sample: Sample) -> _FileFacts:
        data, dataset = self._source.read(sample), self._dataset
        size, num_frames = probe_clip(data, sample.path, dataset.images, dataset.frames)
        signature = "" if sample.signature is None else sample.signature.to_text()
        facts = _FileFacts(digest(data), *size, num_frames, signature)
        # What was read may be of another file, where a link or a folder was replaced since the sample was listed.
        if sample.signature is not None and sample.signature.is_settled() and sample.is_unchanged():
            self._workspace.memo[self._memo_name(sample)] = msgspec.json.encode(facts).decode()
        return facts

    def _memo_name(self, sample: Sample) -> str:
        return f"image/2 {self._images_digest} {sample.path}"

    def _row(self, sample: Sample, facts: list[_FileFacts]) -> Row:
        own, *others = facts
        source = own.source
        try:
            images = self._preparations.refs(source, own.size, sample.path, own.num_frames)
            part_refs: tuple[PartRef, ...] = ()
            if self._parts.names:
                parts = [(each.source, each.size) for each in others]
                part_refs = self._parts.refs(images, (source, own.size), parts, sample.path)
        except ImageRefused as refused:
            refusal = Refusal(sample.sample_id, refused.path, refused.reason, refused.detail)
            return Row(sample.sample_id, sample.path, source, (), (), refusal)
        texts = dict.fromkeys(sample.captions)
        controls = self._read_with_texts(part_refs)
        captions = tuple([CaptionRef(text, self._texts.key(text, controls)) for text in texts])
        return Row(sample.sample_id, sample.path, source, images, captions, None, part_refs)

    def _read_with_texts(self, parts: Iterable[PartRef]) -> Controls:
        """The control images that the family's text encoder reads with each caption: those that are not mirrored."""
        if not self._encodings.family.text_reads_control:
            return ()
        refs = [ref for ref in parts if ref.role == "control" and not ref.geometry.flip]
        found = [self._parts.identity(number, ref.source, ref.geometry) for number, ref in enumerate(refs)]
        return tuple((each.source, each.preparation) for each in found)

    def _add(self, sample: Sample, row: Row, history: History, present: set[str]) -> None:
        encodings = self._encodings
        for image in row.images:
            why = partial(self._why_image, history, row, image)
            self._builder.add_image(image, encodings, present, why, partial(self._task, sample, row, image))
        for caption in row.captions:
            why = partial(self._why_text, history, row, caption)
            identity = partial(self._texts.identity, caption.text, self._read_with_texts(row.parts))
            controls = partial(self._controls_of, sample, row)
            self._builder.add_text(row, caption, encodings.text, encodings.text_bytes, present, why, identity, controls)
        for name, part in row.named_parts():
            why = partial(self._why_part, history, row, name, part)
            number = self._parts.names.index(name)
            if part.role == "mask":
                mask_task = partial(self._mask_task, sample, part, number)
                num_bytes = math.prod(part.geometry.target_size) // self._parts.downscale**2
                self._builder.add_mask(part, num_bytes, present, why, mask_task)
            else:
                task = partial(self._control_task, sample, part, number)
                self._builder.add_image(part, encodings, present, why, task, CONTROL_OUTPUT)

    # Of misses alone: finding a sample's last row takes as long as all the rest of its plan.

    def _why_image(self, history: History, row: Row, ref: ImageRef) -> str:
        before = history.row(row.sample_id, row.source)
        return history.why_image(before, str(row.source), ref, self._common)

    def _why_text(self, history: History, row: Row, ref: CaptionRef) -> str:
        before = history.row(row.sample_id, row.source)
        reason = history.why_text(before, ref, self._common, "text_encoding")
        if not self._encodings.family.text_reads_control or before is None:
            return reason
        was, now = ([part for name, part in each.named_parts(flip=False) if name != "mask"] for each in (before, row))
        changed = [(part.source, part.geometry) for part in was] != [(part.source, part.geometry) for part in now]
        return f"control changed, {reason}".removesuffix(f", {LOST}") if changed else reason

    def _why_part(self, history: History, row: Row, name: str, ref: PartRef) -> str:
        before = history.row(row.sample_id, row.source)
        return f"{name}: {history.why_part(before, name, ref, self._common)}"

    def _controls_of(self, sample: Sample, row: Row) -> tuple[ImageTask, ...]:
        if not self._encodings.family.text_reads_control:
            return ()
        refs = [ref for ref in row.parts if ref.role == "control" and not ref.geometry.flip]
        return tuple(self._control_task(sample, ref, number) for number, ref in enumerate(refs))

    def _control_task(self, sample: Sample, ref: PartRef, number: int) -> ImageTask:
        identity = self._parts.identity(number, ref.source, ref.geometry)
        assert isinstance(identity, ImageIdentity)
        return ImageTask(ref.key, identity, sample.parts[number], self._source, self._dataset.images)

    def _mask_task(self, sample: Sample, ref: PartRef, number: int) -> MaskTask:
        identity = self._parts.identity(number, ref.source, ref.geometry)
        assert isinstance(identity, MaskIdentity)
        is_alpha = self._parts.takes_alpha
        read = sample if is_alpha else sample.parts[number]
        return MaskTask(ref.key, identity, read, self._source, self._dataset.images, is_alpha)

    def _task(self, sample: Sample, row: Row, ref: ImageRef) -> ImageTask:
        identity = self._preparations.identity(str(row.source), ref.geometry)
        return ImageTask(ref.key, identity, sample, self._source, self._dataset.images)
