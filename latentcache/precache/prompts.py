"""The manifest of validation prompts, and caching single prompts without planning any dataset."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch

from latentcache.config import Config
from latentcache.dataset.manifest import CaptionRef, Manifest, Manifests, Row, prompts_name
from latentcache.devices.placement import DeviceLike, device_of
from latentcache.errors import DatasetError, EncodeError, ModelError
from latentcache.identity import (
    SCHEMA,
    PartIdentity,
    TextEncoding,
    TextIdentity,
    caption_digest,
    encoding_json,
    key_of,
)
from latentcache.models.batching import BatchRunner
from latentcache.models.clip import encode_tokens, token_limit, tokenize
from latentcache.models.model_loader import PARTS, Models
from latentcache.precache.encodings import TextEncodings, choose_text_encodings, text_batch_size
from latentcache.precache.failures import Failure
from latentcache.precache.plan import TextTask
from latentcache.precache.text_stage import finished_texts, placed_texts, text_entries
from latentcache.precache.workspace import Workspace
from latentcache.store.base import Store
from latentcache.types import prompt_id

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

    Keys and stored bytes are those of a precache run with the prompts in `validation`, so the next run finds them. The
    dtypes follow `encode` of the config; the encoders run on `device` and always return to where they were. No dataset
    is planned and no VAE is needed. The rows join those of the manifest of prompts.

    Raises ModelError if these are not the text encoders (or settings) of the config's cached datasets,
    TrainableEncoderError if one is being trained, EncodeError if an output is unusable, StoreError.
    """
    encodings = choose_text_encodings(config, models, workspace.memo)
    where = device_of(device)
    placement = replace(encodings.text_encoders, device=where, batch_size=text_batch_size(where))
    encodings = replace(encodings, text_encoders=placement)
    manifest = prompts_manifest(texts, encodings, {"schema": SCHEMA, "salt": config.cache.salt})
    for dataset in config.datasets:
        _check_same_encoders(last_manifest(workspace.manifests, dataset.name), manifest.common)
    with workspace.in_use():
        tasks = _missing(manifest, encodings, workspace.store)
        if tasks:
            workspace.manifests.begin(manifest.name)
            try:
                _encode(tasks, encodings, models, workspace.store)
            finally:
                models.release()
        # Read only now: another process may have cached other prompts meanwhile.
        others = prompts_of_others(workspace.store, workspace.manifests, manifest.name)
        if tasks or any(others.get(name) != row for name, row in manifest.rows.items()):
            workspace.manifests.write(replace(manifest, rows={**others, **manifest.rows}))
    return len(tasks)


def prompts_manifest(
    texts: Iterable[tuple[str, bool]], encodings: TextEncodings, shared: Mapping[str, Any]
) -> Manifest:
    """The manifest of exactly these prompts: pairs of a text and whether it is a negative prompt.

    `shared` has the cache's `schema` and `salt`.
    """
    common = {
        **shared,
        "text_encoding": encoding_json(encodings.text),
        "negative_encoding": encoding_json(encodings.negative),
    }
    rows = {}
    for text, negative in dict.fromkeys(texts):
        sample_id = prompt_id(text, negative=negative)
        ref = CaptionRef(text, text_key(text, encodings.negative if negative else encodings.text, shared["salt"]))
        rows[sample_id] = Row(sample_id, sample_id, None, (), (ref,))
    return Manifest(prompts_name(common), "prompts", 1, common, rows)


def prompts_of_others(store: Store, manifests: Manifests, name: str) -> dict[str, Row]:
    """Prompts that other runs cached with these encoders, and whose entries are there: they stay."""
    manifest = last_manifest(manifests, name)
    if manifest is None:
        return {}
    present = store.find(manifest.keys())
    whole = (row for row in manifest.rows.values() if row.refusal is None and present.issuperset(row.keys()))
    return {row.sample_id: row for row in whole}


def last_manifest(manifests: Manifests, name: str) -> Manifest | None:
    """The manifest of the last run. Without a broken one only the reasons are lost: the next run replaces it."""
    try:
        return manifests.read(name)
    except DatasetError as error:
        logger.warning("%s; misses are called new", error)
        return None


def text_key(text: str, encoding: TextEncoding, salt: str) -> str:
    """The key of this text's entry."""
    return key_of(TextIdentity(caption_digest(text), encoding, salt).to_json())


def _check_same_encoders(dataset: Manifest | None, common: Mapping[str, Any]) -> None:
    if dataset is None or dataset.imported_from is not None:  # an imported dataset does not name its encoders
        return
    if prompts_name(dataset.common) == prompts_name(common):
        return
    differing = list(_differences(dataset.common, common))
    shown = "; ".join(f"{name} is {given}, in the cache {cached}" for name, given, cached in differing)
    part = next((name for name, _, _ in differing if name in PARTS), None)
    raise ModelError(
        f"prompts would not be encoded as the captions of dataset {dataset.name} were: {shown}. "
        "Give the text encoders and the settings that the cache was made with, or run `latentcache precache CONFIG` "
        "with these.",
        part=part,
    )


def _differences(cached: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Name, given value and cached value of everything that makes the text encodings differ."""
    flat = [{"schema": each["schema"], "salt": each["salt"], **each["text_encoding"]} for each in (given, cached)]
    # Weights are identified as they compute: those of another dtype differ for that reason alone.
    same_dtype = flat[0]["compute_dtype"] == flat[1].get("compute_dtype")
    for name in flat[0]:
        values = [each.get(name) for each in flat]
        if values[0] != values[1] and (same_dtype or name not in ("text_encoder", "text_encoder_2")):
            yield name, *(PartIdentity(**v).name if isinstance(v, Mapping) else repr(v) for v in values)


def _missing(manifest: Manifest, encodings: TextEncodings, store: Store) -> list[TextTask]:
    """What is not cached yet, one task a key, those with equal clip_skip together."""
    present = store.find(manifest.keys())
    tasks: dict[str, TextTask] = {}
    for row in manifest.rows.values():
        ref = row.captions[0]
        if ref.key in present:
            continue
        negative = row.sample_id == prompt_id(ref.text, negative=True)
        encoding = encodings.negative if negative else encodings.text
        identity = TextIdentity(caption_digest(ref.text), encoding, manifest.common["salt"])
        tasks.setdefault(ref.key, TextTask(ref.key, identity, ref.text, row.sample_id, row.path))
    return sorted(tasks.values(), key=_clip_skip)


def _encode(tasks: Sequence[TextTask], encodings: TextEncodings, models: Models, store: Store) -> None:
    placement = encodings.text_encoders
    runner: BatchRunner[TextTask, tuple[tuple[int, ...], dict[str, torch.Tensor]]] = BatchRunner(
        "text_encoder", placement.batch_size, placement.device
    )
    with placed_texts(models, placement) as parts, store.writer() as writer:

        def encode(batch: Sequence[TextTask]) -> tuple[tuple[int, ...], dict[str, torch.Tensor]]:
            tokens = tokenize(parts, [task.caption for task in batch])
            outputs = encode_tokens(parts, tokens, clip_skip=_clip_skip(batch[0]), device=placement.device)
            return tokens.num_tokens, outputs

        for _, group in groupby(tasks, key=_clip_skip):
            for batch, (lengths, outputs) in runner.run(list(group), encode):
                made_of_batch = text_entries(batch, finished_texts(outputs, encodings), lengths, encodings, models)
                for number, (task, made) in enumerate(made_of_batch):
                    if isinstance(made, Failure):
                        raise EncodeError(f"{task.sample_id}: {made.detail}", part="text_encoder", problem=made.reason)
                    if lengths[number] > token_limit(parts):
                        logger.warning(
                            "%s has %d tokens, %d are used", task.sample_id, lengths[number], token_limit(parts)
                        )
                    writer.add(made)
        writer.seal()


def _clip_skip(task: TextTask) -> int:
    return task.identity.encoding.clip_skip
