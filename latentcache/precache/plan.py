"""Makes the plan: reads the datasets, computes every sample's keys, and finds what must be encoded, and why.

Samples are processed in chunks: their keys are computed, then looked up together. Tasks and reasons are made for misses
only; a hit just takes its place in a batch, and its columns in the manifest.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from itertools import islice

import msgspec
import numpy as np

from latentcache.config import Config, DatasetConfig
from latentcache.dataset.clips import probe_clip
from latentcache.dataset.folder import VIDEO_SUFFIXES
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.row_table import CaptionValues, RowTable, RowTableBuilder
from latentcache.dataset.samples import Sample, variants_of
from latentcache.dataset.sources import open_source
from latentcache.errors import ConfigError, ImageRefused
from latentcache.identity import SCHEMA, digest, encoding_json, key_names, key_of
from latentcache.models.model_loader import Models
from latentcache.precache.encodings import Encodings, family_json
from latentcache.precache.preparation import Controls, Preparations, Shape, TextKeys
from latentcache.precache.prompts import last_manifest, plan_prompts, plan_validation_prompts
from latentcache.precache.reasons import History, image_facts, text_facts
from latentcache.precache.tasks import TEXT_BATCH_SIZE, Plan, Shard, Task, num_threads
from latentcache.precache.workspace import Workspace
from latentcache.types import Refusal, Size, prompt_id
from latentcache.utils.json_document import recalled
from latentcache.utils.progress import Progress
from latentcache.utils.wording import counted, size

CHUNK = 1024
"""Samples whose keys are looked up together."""
VIDEOS_AT_ONCE = 4
"""Videos read at a time by all threads together: files are read whole, and one may have a GiB."""

logger = logging.getLogger("latentcache")


class Stopped(Exception):
    """The run was stopped while it planned."""


class _FileFacts(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What the memo remembers of an image or a clip: the digest of its bytes, its upright size, and a clip's frames."""

    source: str
    height: int
    width: int
    num_frames: int | None = None
    signature: str = ""
    """The file's signature when it was read. Not part of the memo's name, so that a new reading replaces the old."""


_FACTS = msgspec.json.Decoder(_FileFacts)

_Entry = tuple[str, Shape, str]
"""The key of an image entry, its shape, and the digest of its file: for a masked image that of the mask."""
_Planned = tuple[Sample, str, Sequence[_Entry], Sequence[CaptionValues]]
"""A sample that is not refused, the digest of its image, and its entries."""


def make_plan(  # noqa: PLR0913 - each is a choice of the caller's
    config: Config,
    workspace: Workspace,
    encodings: Encodings,
    models: Models,
    *,
    plan: Plan | None = None,
    verify_sources: bool = False,
    only: frozenset[str] | None = None,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Plan:
    """Fill `plan`, by default that of a single process, and count samples in its report.

    Writes nothing but the memo of digests. A bad file is a refusal. `only` restricts the plan to these sample ids.
    `verify_sources` also reads and hashes images whose files look unchanged. Raises DatasetError for a dataset that
    cannot be read at all, and Stopped when `stop` is set.
    """
    plan, progress = plan or Plan(workspace.store, Shard()), progress or Progress()
    plan_validation_prompts(plan, config, workspace.manifests, encodings, models)
    with ExitStack() as after, ThreadPoolExecutor(num_threads(config.encode)) as executor:
        if gc.isenabled():
            # Plans have many objects and no cycles; collection would add half of the planning time.
            after.callback(gc.enable)
            gc.disable()
        negatives = dict[str, Task]()
        for dataset in config.datasets:
            progress.start(f"plan {dataset.name}", None)
            planner = _DatasetPlanner(plan, dataset, workspace, encodings, models, config)
            planner.run(executor, progress, stop or threading.Event(), verify_sources, only)
            progress.finish()
            negatives |= planner.negatives
    if negatives:
        salt, tasks = config.cache.salt, [*negatives.values()]
        prompts = plan_prompts(plan, workspace.manifests, encodings, models, salt, (), read_with_controls=tasks)
        plan.manifests.append(prompts)
    return plan.finish()


class _DatasetPlanner:
    """One dataset's part of the plan."""

    def __init__(
        self,
        plan: Plan,
        dataset: DatasetConfig,
        workspace: Workspace,
        encodings: Encodings,
        models: Models,
        config: Config,
    ):
        family, salt = encodings.family, config.cache.salt
        if family.text_reads_control and encodings.has_texts and not dataset.control:
            message = f"{family.name} reads captions with control images; add control to dataset {dataset.name}"
            raise ConfigError(message, key="datasets.control")
        is_varied = "flip" if dataset.flip else "variations" if dataset.variations > 1 else ""
        if family.text_reads_control and encodings.has_texts and is_varied:
            # A caption is encoded once, but another view of the image would have another control image.
            message = f"{family.name} reads captions with the control images of one view"
            message += f"; remove {is_varied} from dataset {dataset.name}, or set encode.text to none"
            raise ConfigError(message, key=f"datasets.{is_varied}")
        self._plan, self._dataset, self._encodings = plan, dataset, encodings
        self._memo = workspace.memo
        # Facts are valid only for the settings they were probed with: other settings may refuse the image.
        frames = "" if dataset.frames is None else dataset.frames.model_dump_json()
        # A row of a table may have several images, and its path does not say which one is read.
        column = dataset.source.image_column if dataset.source.kind == "parquet" else ""
        self._memo_prefix = f"image/2 {digest((dataset.images.model_dump_json() + frames + column).encode())} "
        self._preparations, self._rows = Preparations(dataset, encodings, salt), RowTableBuilder()
        self._texts = TextKeys(family, models.tokenizers, encodings.text, salt)
        self._videos = threading.Semaphore(VIDEOS_AT_ONCE)
        self._source = open_source(dataset.source, dataset.part_files, videos=dataset.frames is not None)
        self._common = {
            "schema": SCHEMA,
            "salt": salt,
            "image_encoding": encoding_json(encodings.image),
            "text_encoding": encoding_json(encodings.text) if encodings.has_texts else None,
            **family_json(encodings),
            **self._preparations.common(),
        }
        self._history = History(last_manifest(workspace.manifests, dataset.name), self._common, plan.damaged)
        self._seen = set[str]()
        shows = family.text_reads_control and encodings.has_texts and dataset.role == "validation"
        self._prompts = frozenset(config.validation.prompts if shows else ())
        self._negative = config.validation.negative_prompt or ""
        self.negatives = dict[str, Task]()
        """By sample_id, the negative prompt with the control images of each caption that is a validation prompt."""

    def run(
        self,
        executor: ThreadPoolExecutor,
        progress: Progress,
        stop: threading.Event,
        verify_sources: bool,
        only: frozenset[str] | None,
    ) -> None:
        """Plan the dataset, or `only` these samples of it."""
        samples = (sample for sample in self._source.samples() if only is None or sample.sample_id in only)
        while chunk := list(islice(samples, CHUNK)):
            planned: list[_Planned] = []
            for sample, facts in self._with_facts(chunk, executor, verify_sources):
                if stop.is_set():
                    raise Stopped
                planned += self._planned(sample, facts)
            keys = {value[0] for *_, entries, texts in planned for value in (*entries, *texts)} - {""}
            present = self._plan.store.find(keys)
            for each in planned:
                self._sort(*each, present)
            progress.advance(len(chunk))
        dataset, table = self._dataset, self._rows.finish()
        if only is None and (num_lost := self._history.num_lost(table)):
            logger.warning(
                "manifest %s lists %d images, none of which is in %s: it will be replaced, and `prune` will remove "
                "entries that only it refers to. Give each dataset its own name.",
                dataset.name,
                num_lost,
                dataset.source.path,
            )
        if only is None:
            self._note_costs(table)
        rule, use = dataset.captions, (dataset.name, dataset.role, dataset.repeats)
        drawn = (rule.variants, rule.weights or (), dataset.loss_weight)
        self._plan.manifests.append(Manifest(*use, self._common, table, *drawn))

    def _note_costs(self, table: RowTable) -> None:
        """Report how many entries crops and variants add, before anything is encoded: often most of the cache."""
        dataset, notes = self._dataset, list[str]()

        def number_of(keys: np.ndarray) -> int:
            return len(set(key_names(keys)))

        if dataset.variations > 1:
            keys = table.columns["image/keys"]
            num_first, num_all = number_of(keys[table.columns["image/crop"] == 0]), number_of(keys)
            notes.append(
                f"{dataset.variations} crops of each image add {num_all - num_first:,} entries to {num_first:,}"
            )
        if (variants := dataset.captions.variants) > 1 and self._encodings.has_texts:
            keys = table.columns["caption/keys"]
            captions, num_texts = counted(number_of(keys[::variants]), "caption"), number_of(keys)
            num_bytes = size(num_texts * self._encodings.text_bytes)
            notes.append(f"{variants} variants of {captions}: {counted(num_texts, 'text')}, {num_bytes}")
        for note in notes:
            self._plan.report.notes.append(f"{dataset.name}: {note}")
            logger.info("%s: %s", dataset.name, note)

    def _with_facts(
        self, samples: Sequence[Sample | Refusal], executor: ThreadPoolExecutor, verify_sources: bool
    ) -> Iterator[tuple[Sample | Refusal, Sequence[_FileFacts] | Refusal]]:
        """Pair each sample with the facts of its image and companions. Changed files are read, in threads."""
        texts: Mapping[str, str] = {}
        if not verify_sources:
            files = [file for sample in samples if isinstance(sample, Sample) for file in (sample, *sample.parts)]
            texts = self._memo.get_many(self._memo_prefix + file.path for file in files)
        found = [sample if isinstance(sample, Refusal) else self._recalled(sample, texts) for sample in samples]
        read = executor.map(self._read, [each for each, facts in zip(samples, found, strict=True) if facts is None])
        for sample, facts in zip(samples, found, strict=True):
            yield sample, next(read) if facts is None else facts

    def _recalled(self, sample: Sample, texts: Mapping[str, str]) -> list[_FileFacts] | None:
        """The facts in the memo; None if a file may have changed since."""
        found = []
        for file in (sample, *sample.parts):
            facts = recalled(texts, self._memo_prefix + file.path, _FACTS.decode)
            if facts is None or file.signature is None or facts.signature != file.signature.to_text():
                return None
            found.append(facts)
        return found

    def _read(self, sample: Sample) -> list[_FileFacts] | Refusal:
        """Read the facts of a sample's image and companions, and memoize them."""
        found: list[_FileFacts] = []
        for file in (sample, *sample.parts):
            try:
                with self._videos if file.path.lower().endswith(VIDEO_SUFFIXES) else nullcontext():
                    found.append(self._read_file(file))
            except ImageRefused as refused:
                detail = f"{self._preparations.roles[len(found)].name}: {refused.detail}" if found else refused.detail
                return Refusal(sample.sample_id, refused.path, refused.reason, detail)
        return found

    def _read_file(self, file: Sample) -> _FileFacts:
        data, dataset = self._source.read(file), self._dataset
        size, num_frames = probe_clip(data, file.path, dataset.images, dataset.frames)
        signature = "" if file.signature is None else file.signature.to_text()
        facts = _FileFacts(digest(data), *size, num_frames, signature)
        # If a link or a folder was replaced since the sample was listed, another file may have been read.
        if file.signature is not None and file.signature.is_settled() and file.is_unchanged():
            self._memo[self._memo_prefix + file.path] = msgspec.json.encode(facts).decode()
        return facts

    def _planned(self, sample: Sample | Refusal, facts: Sequence[_FileFacts] | Refusal) -> Sequence[_Planned]:
        """Add a sample's row, and return its entries; nothing if it is refused, or its id is a duplicate."""
        report, sample_id, path = self._plan.report, sample.sample_id, sample.path
        report.num_samples += 1
        if sample_id in self._seen:
            # Two rows cannot share an id, and neither may be dropped silently.
            detail = f"sample id {sample_id!r} occurs twice in this dataset; rename one"
            report.refused.append(Refusal(sample_id, path, "duplicate", detail))
            return ()
        if not self._source.has_unique_ids:
            self._seen.add(sample_id)
        image = None if isinstance(facts, Refusal) else facts[0].source
        try:
            if isinstance(facts, Refusal):
                raise ImageRefused(facts.path, facts.reason, facts.detail)
            sizes = [Size(facts[role.file].height, facts[role.file].width) for role in self._preparations.roles]
            shapes = self._preparations.shapes(sizes, facts[0].num_frames, path, image)
        except ImageRefused as refused:
            refusal = Refusal(sample_id, refused.path, refused.reason, refused.detail)
            report.refused.append(refusal)
            self._rows.put(sample_id, path, image, refusal=refusal)
            return ()
        assert isinstance(sample, Sample) and image is not None  # a refused one has no facts
        sources = [(shape, facts[shape.role.file].source) for shape in shapes]
        entries = [(self._preparations.key(shape, image, source), shape, source) for shape, source in sources]
        _, controls = self._read_with_texts(entries)
        rule = self._dataset.captions
        # Equal captions are merged, unless captions have weights, which go by position.
        distinct = sample.captions if rule.weights else dict.fromkeys(sample.captions)
        texts = [text for caption in distinct for text in variants_of(caption, rule)]
        keys = [self._texts.key(text, controls) for text in texts] if self._encodings.has_texts else [""] * len(texts)
        captions = [(made, text, False) for made, text in zip(keys, texts, strict=True)]
        images = [(shape.role.name, made, shape.column, of, shape.crop, False) for made, shape, of in entries]
        self._rows.put(sample_id, path, image, images, captions)
        return [(sample, image, entries, captions)]

    def _read_with_texts(self, entries: Sequence[_Entry]) -> tuple[Sequence[_Entry], Controls]:
        """The control images that the family's text encoder reads with each caption, and how they enter its key.

        They have a single view.
        """
        if not self._encodings.family.text_reads_control:
            return (), ()
        read, identity = [entry for entry in entries if entry[1].role.part == "control"], self._preparations.identity
        return read, tuple((of, identity(shape.role, of, shape.geometry).preparation) for _, shape, of in read)

    def _sort(
        self, sample: Sample, image: str, entries: Sequence[_Entry], texts: Sequence[CaptionValues], present: set[str]
    ) -> None:
        """Count a sample's entries, and make tasks for the misses."""
        for entry in entries:
            key, shape, source = entry
            if self._plan.is_miss(key, present, shape.role.kind, shape.group, shape.group_size):
                facts = image_facts(source, shape.geometry, shape.crop, image if shape.mask else None)
                reason = self._history.why(sample.sample_id, shape.role.name, key, facts)
                task = self._image_task(sample, image, entry)
                self._plan.add(task, shape.group, shape.group_size, shape.num_bytes, reason)
        recipe, (read, controls) = self._encodings.text.recipe, self._read_with_texts(entries)

        def text_task(text: str, named: Sample) -> Task:
            identity = self._texts.identity(text, controls)
            images = tuple(self._image_task(sample, image, each) for each in read)
            return Task(key_of(identity.to_json()), identity, named, caption=text, controls=images)

        for number, (key, text, _) in enumerate(texts):
            if text in self._prompts and number % self._dataset.captions.variants == 0:
                named = Sample(prompt_id(self._negative, negative=True, beside=key), sample.path)
                self.negatives[named.sample_id] = text_task(self._negative, named)
            if key and self._plan.is_miss(key, present, "text", recipe, TEXT_BATCH_SIZE):
                caption = texts[number - number % self._dataset.captions.variants][1]
                facts = text_facts(caption, text, [(of, shape.geometry) for _, shape, of in read] or None)
                reason = self._history.why(sample.sample_id, "text_encoding", key, facts)
                self._plan.add(text_task(text, sample), recipe, TEXT_BATCH_SIZE, self._encodings.text_bytes, reason)

    def _image_task(self, sample: Sample, image: str, entry: _Entry) -> Task:
        """The task for an image entry of a sample whose image has the digest `image`."""
        key, shape, source = entry
        identity = self._preparations.identity_of(shape, image, source)
        files, role = (sample, *sample.parts), shape.role
        file, mask = (files[role.file], None) if shape.mask is None else (sample, files[role.file])
        is_alpha = role.number > 0 and role.file == 0
        return Task(key, identity, file, self._source, self._dataset.images, is_alpha, mask)
