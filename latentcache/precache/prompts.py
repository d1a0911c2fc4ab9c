"""The manifest of validation prompts, and caching of prompts without planning a dataset."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from latentcache.config import Config, EncodeConfig
from latentcache.dataset.manifest import Manifest, prompts_name
from latentcache.dataset.manifest_folder import Manifests, update_manifest
from latentcache.dataset.row_table import Ref, Row, RowTable
from latentcache.dataset.samples import Sample
from latentcache.devices.placement import DeviceLike, device_of
from latentcache.errors import ConfigError, DatasetError, EncodeError, ModelError
from latentcache.identity import SCHEMA, encoding_json, key_of
from latentcache.models.model_loader import Models
from latentcache.precache.encodings import TextEncodings, choose_text_encodings, text_batch_size, text_family_json
from latentcache.precache.preparation import TextKeys
from latentcache.precache.reasons import History, text_causes, text_facts
from latentcache.precache.report import Failure, Report
from latentcache.precache.stages import RunContext, TextStage
from latentcache.precache.tasks import TEXT_BATCH_SIZE, Plan, Shard, Task
from latentcache.precache.workspace import Workspace
from latentcache.store.base import Store
from latentcache.types import prompt_id
from latentcache.utils.progress import Progress
from latentcache.utils.wording import cut_note

logger = logging.getLogger("latentcache")


def cache_prompts(
    config: Config,
    workspace: Workspace,
    models: Models,
    texts: Sequence[tuple[str, bool]],
    *,
    device: DeviceLike,
) -> int:
    """Cache these prompts, pairs of a text and whether it is a negative prompt. Returns how many were encoded.

    Keys and stored bytes equal those of a precache run with the prompts in `validation`, so the next run finds them.
    Dtypes follow `encode` of the config. The encoders run on `device` and always return to where they were. No dataset
    is planned, and no VAE is needed. The rows are added to the prompts manifest.

    Raises ConfigError with `encode.text: none`, ModelError if the text encoders (or settings) differ from those of the
    config's cached datasets, TrainableEncoderError if one is being trained, EncodeError if an output is unusable, and
    StoreError.
    """
    encodings = choose_text_encodings(config, models, workspace.memo)
    where = device_of(device)
    placement = replace(encodings.text_encoders, device=where, batch_size=text_batch_size(where))
    encodings = replace(encodings, text_encoders=placement)
    with workspace.in_use():
        plan = Plan(workspace.store, Shard())
        manifest = plan_prompts(plan, workspace.manifests, encodings, models, config.cache.salt, texts)
        for dataset in config.datasets:
            _check_same_encoders(last_manifest(workspace.manifests, dataset.name), manifest.common, models)
        batches = plan.finish().batches["text"]
        if batches:
            workspace.manifests.begin(manifest.name)
            try:
                _encode(batches, encodings, models, workspace.store)
            finally:
                models.release()
        add_prompts(workspace, manifest, always=bool(batches))
    return sum(map(len, batches))


def add_prompts(workspace: Workspace, manifest: Manifest, *, always: bool) -> None:
    """Add these prompts to the manifest of this name. Its other prompts stay if their entries are present.

    If nothing is new, writes only with `always`, which also unmarks a run in progress.
    """

    def whole() -> Manifest | None:
        # Read as late as possible: another process may have cached other prompts meanwhile.
        last, store = last_manifest(workspace.manifests, manifest.name), workspace.store
        keys = set() if last is None else last.keys()
        present = store.find(keys) if store.can_tell() else keys
        rows = () if last is None else last.rows.values()
        others = {row.sample_id: row for row in rows if row.refusal is None and present.issuperset(row.keys())}
        if not always and all(others.get(name) == row for name, row in manifest.rows.items()):
            return None
        return manifest.with_rows({**others, **manifest.rows}) if others else manifest

    update_manifest(workspace.manifests, whole)


def plan_validation_prompts(
    plan: Plan,
    config: Config,
    manifests: Manifests,
    encodings: TextEncodings,
    models: Models,
) -> None:
    """Plan the validation prompts. The empty prompt is planned twice: negative prompts may be encoded differently.

    If the family reads texts with control images, prompts are captions and there is nothing to plan here. With
    `encode.text: none` there are no prompts either, which the report notes.
    """
    if not encodings.has_texts:
        if config.validation.prompts:
            plan.report.notes.append("validation.prompts are not cached: encode.text is none")
        return
    if encodings.family.text_reads_control:
        return
    texts = [*((text, False) for text in ("", *config.validation.prompts)), ("", True)]
    texts.append((config.validation.negative_prompt or "", True))
    # The prompts of this config's last run, which may have used other encoders.
    last = last_manifest(manifests, config.datasets[0].name)
    if last is not None and last.has_texts:
        last = last_manifest(manifests, prompts_name(last.common))
    plan.manifests.append(plan_prompts(plan, manifests, encodings, models, config.cache.salt, texts, last))


def plan_prompts(
    plan: Plan,
    manifests: Manifests,
    encodings: TextEncodings,
    models: Models,
    salt: str,
    texts: Iterable[tuple[str, bool]],
    last: Manifest | None = None,
    *,
    read_with_controls: Sequence[Task] = (),
) -> Manifest:
    """Plan exactly these prompts, pairs of a text and whether it is a negative prompt, and return their manifest.

    Reasons for misses compare with `last`, by default the manifest that this one replaces. `read_with_controls` are
    negative prompts that are each read with the control images of a caption.
    """
    common, keys = prompts_common(encodings, salt), prompt_keys(encodings, models, salt)
    name = prompts_name(common)
    history = History(last or last_manifest(manifests, name), common, plan.damaged)
    tasks = [prompt_task(text, keys, negative=negative) for text, negative in dict.fromkeys(texts)]
    tasks += read_with_controls
    present = plan.store.find({task.key for task in tasks})
    for task in tasks:
        sample_id = task.sample.sample_id
        is_negative = sample_id != prompt_id(task.caption)
        recipe = (encodings.negative if is_negative else encodings.text).recipe
        if plan.is_miss(task.key, present, "text", recipe, TEXT_BATCH_SIZE):
            part = "negative_encoding" if is_negative else "text_encoding"
            reason = history.why(sample_id, part, task.key, text_facts(task.caption, task.caption))
            plan.add(task, recipe, TEXT_BATCH_SIZE, encodings.text_bytes, reason)
    return Manifest(name, "prompts", 1, common, RowTable.of(map(prompt_row, tasks)))


def prompts_common(encodings: TextEncodings, salt: str) -> dict[str, Any]:
    """The `common` of a prompts manifest."""
    return {
        "schema": SCHEMA,
        "salt": salt,
        "text_encoding": encoding_json(encodings.text),
        "negative_encoding": encoding_json(encodings.negative),
        **text_family_json(encodings),
    }


PromptKeys = Mapping[bool, TextKeys]
"""The keys of prompts (False) and of negative prompts (True)."""


def prompt_keys(encodings: TextEncodings, models: Models, salt: str) -> PromptKeys:
    """The keys of prompts and negative prompts with these encodings."""
    both = {False: encodings.text, True: encodings.negative}
    return {negative: TextKeys(encodings.family, models.tokenizers, each, salt) for negative, each in both.items()}


def prompt_task(text: str, keys: PromptKeys, *, negative: bool) -> Task:
    """The task for a prompt: the same that a precache run with this prompt in `validation` makes.

    Raises ConfigError for a family that reads texts with control images.
    """
    if (family := keys[negative].family).text_reads_control:
        raise ConfigError(
            f"{family.name} reads a prompt together with control images, and a prompt alone has none: name the caption "
            "of a sample in a validation set",
            key="validation.prompts",
        )
    identity, sample_id = keys[negative].identity(text), prompt_id(text, negative=negative)
    return Task(key_of(identity.to_json()), identity, Sample(sample_id, sample_id), caption=text)


def prompt_row(task: Task) -> Row:
    """The row of a prompt in the prompts manifest."""
    return Row(task.sample.sample_id, task.sample.path, None, (), (Ref.of_text(task.caption, task.key),))


def last_manifest(manifests: Manifests, name: str) -> Manifest | None:
    """The manifest of the last run; None if there is none, or an invalid one, which the run replaces."""
    try:
        return manifests.read(name)
    except DatasetError as error:
        logger.warning("%s. Treating it as absent.", error)
        return None


def _check_same_encoders(dataset: Manifest | None, common: Mapping[str, Any], models: Models) -> None:
    # An imported dataset does not name its encoders, and one without texts has none.
    if dataset is None or dataset.imported_from is not None or not dataset.has_texts:
        return
    if prompts_name(dataset.common) == prompts_name(common):
        return
    causes = text_causes(dataset.common, common)
    if any(name == "compute_dtype" for name, _ in causes):
        # Weights are identified in their compute dtype, so another dtype alone makes them differ.
        causes = [(name, cause) for name, cause in causes if not name.startswith("text_encoder")]
    raise ModelError(
        f"prompts would be encoded differently from the captions of dataset {dataset.name}: "
        f"{', '.join(cause for _, cause in causes)}. Use the text encoders and settings that the cache was made with, "
        "or run `latentcache precache CONFIG` with these.",
        part=next((name for name, _ in causes if name in models.family.parts), None),
    )


def _encode(batches: Sequence[Sequence[Task]], encodings: TextEncodings, models: Models, store: Store) -> None:
    sample_ids = {task.key: task.sample.sample_id for batch in batches for task in batch}

    def fail(key: str, failure: Failure) -> None:
        raise EncodeError(f"{sample_ids[key]}: {failure.detail}", part="text_encoder", problem=failure.reason)

    report = Report()
    with store.writer() as writer:
        context = RunContext(EncodeConfig(), encodings, models, writer.add, fail, report, Progress(), threading.Event())
        TextStage(context).run(batches)
        writer.seal()
    if report.num_truncated_captions:
        logger.warning("%s", cut_note(report.num_truncated_captions, report.truncated_captions))
