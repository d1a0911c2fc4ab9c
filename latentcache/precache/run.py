"""One precache run: plan, then decode | encode | write, then the manifests.

The order makes every crash harmless. Entries become visible pack by pack; the manifests, which say what the dataset
is, are replaced only after every entry of theirs was stored or refused. A run that was stopped is simply run again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import torch

from latentcache.config import Config
from latentcache.dataset.images import decode, prepare
from latentcache.devices.placement import Placement, placed
from latentcache.encoders.batching import BatchRunner
from latentcache.encoders.clip import encode_captions, num_tokens, token_limit
from latentcache.encoders.models import Models
from latentcache.encoders.vae import DTYPES, encode_images, keep_output, problems
from latentcache.errors import EncodeError, ImageRefused
from latentcache.fingerprint import digest
from latentcache.precache.encodings import Encodings, choose_encodings, dtype_name, load_models
from latentcache.precache.faults import Fault, Faults, write_manifests
from latentcache.precache.plan import ImageTask, Plan, TextTask
from latentcache.precache.planner import Stopped, make_plan
from latentcache.precache.progress import NoProgress, Progress
from latentcache.precache.report import Report
from latentcache.precache.shard import Shard
from latentcache.precache.texts import placed_texts, text_entries
from latentcache.precache.window import windowed
from latentcache.precache.workspace import Workspace, open_workspace
from latentcache.provenance import Provenance
from latentcache.store.base import Writer
from latentcache.store.memo import Memo
from latentcache.types import Entry, Record

logger = logging.getLogger("latentcache")


def run_precache(
    config: Config,
    *,
    models: Models | None = None,
    workspace: Workspace | None = None,
    dry_run: bool = False,
    verify_sources: bool = False,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
    shard: Shard | None = None,
) -> Report:
    """Encode what is not cached yet, and say what was done.

    `models` are the caller's own (`encoders.models.LoadedModels`); by default they load from the config. `workspace`
    is where entries go; by default the config's cache. `stop` ends the run at the next batch: what is done is sealed.
    `shard` is this process's share; by default RANK and WORLD_SIZE. Bad images are refused and listed in the report.
    Raises ConfigError, DatasetError (a dataset that cannot be read at all), DeviceError, ModelError, StoreError.
    """
    started = time.monotonic()
    opened = workspace is None
    workspace = workspace or open_workspace(config.cache, read_only=dry_run)
    try:
        models = models or load_models(config.model, workspace.memo)
        shard = shard or Shard.from_environment()
        run = _Run(config, workspace, models, shard, progress or NoProgress(), stop or threading.Event())
        run.report.dry_run = dry_run
        with workspace.in_use():
            try:
                run.plan(verify_sources)
                if not dry_run:
                    run.encode()
            except Stopped:
                run.report.interrupted = True
            finally:
                run.progress.finish()
            run.describe_cache()
        run.report.seconds["total"] = time.monotonic() - started
        return run.report
    finally:
        if opened:
            workspace.close()


class _Run:
    """The state of one run."""

    def __init__(
        self,
        config: Config,
        workspace: Workspace,
        models: Models,
        shard: Shard,
        progress: Progress,
        stop: threading.Event,
    ):
        self.config, self.workspace, self.models = config, workspace, models
        self.shard, self.progress, self.stop = shard, progress, stop
        self.report = Report(rank=shard.rank, world_size=shard.world_size)
        self._faults = Faults(shard)
        self._plan = Plan()
        self._encodings: Encodings
        self._writer: Writer

    def plan(self, verify_sources: bool) -> None:
        """Plan, and put what the plan tells into the report."""
        with self._stage("load"):
            self._encodings = encodings = choose_encodings(
                self.config, self.models, self.workspace.memo, self.shard.local_rank
            )
        with self._stage("plan"):
            self._plan = plan = make_plan(
                self.config,
                self.workspace,
                encodings,
                shard=self.shard,
                verify_sources=verify_sources,
                progress=self.progress,
                stop=self.stop,
            )
        report = self.report
        report.num_samples, report.num_hits, report.num_misses = plan.num_samples, plan.num_hits, plan.num_misses
        report.num_missing_captions = plan.num_missing_captions
        report.misses_by_reason = dict(plan.misses_by_reason)
        report.estimate = {"bytes": plan.miss_bytes, "seconds": self._estimate_seconds()}
        report.placement = {"vae": _describe(encodings.vae), "text": _describe(encodings.text_encoders)}
        for refusal in plan.refused:
            report.refuse(refusal)

    def encode(self) -> None:
        """Encode this shard's misses, store them, and replace the manifests."""
        plan = self._plan
        if plan.text_batches or plan.image_batches:
            self._begin()
            writer = self.workspace.store.writer()
            try:
                with writer as self._writer:
                    self._encode_texts()
                    self._encode_images()
                    with self._stage("write"):
                        writer.seal()
            finally:
                # Also after an error: what was sealed is there, and the caller may want to know.
                self.report.bytes_written = writer.bytes_written
                self.report.num_encoded = writer.num_added
                self.models.release()
        for refusal in self._faults.refusals(plan.manifests):
            self.report.refuse(refusal)
        if not self.report.interrupted:
            with self._stage("write"):
                self.report.manifests_waiting = write_manifests(
                    self.workspace, plan.manifests, self._faults, self.shard
                )

    def _begin(self) -> None:
        for manifest in self._plan.manifests:
            self.workspace.manifests.begin(manifest.name)
        if self.shard.world_size > 1 and isinstance(self.workspace.memo, Memo):
            batches = (*self._plan.text_batches, *self._plan.image_batches)
            self._faults.begin(self.workspace.memo, (task.key for batch in batches for task in batch))

    # Text

    def _encode_texts(self) -> None:
        batches = self._plan.text_batches
        if not batches or self._is_stopped():
            return
        placement = self._encodings.text_encoders
        with self._stage("load"), ExitStack() as stack:
            parts = stack.enter_context(placed_texts(self.models, placement))
            undo = stack.pop_all()
        with undo:
            self.progress.start("encode captions", sum(map(len, batches)))
            runner: BatchRunner[TextTask, dict[str, torch.Tensor]] = BatchRunner(
                "text_encoder", placement.batch_size, placement.device
            )

            def encode(tasks: Sequence[TextTask]) -> dict[str, torch.Tensor]:
                captions = [task.caption for task in tasks]
                clip_skip = tasks[0].identity.encoding.clip_skip  # a batch has one: it is formed by it
                return encode_captions(parts, captions, clip_skip=clip_skip, device=placement.device)

            done, limit = 0, token_limit(parts)
            for batch in batches:
                with self._stage("text"):
                    for tasks, outputs in runner.run(batch, encode, self._out_of_memory):
                        lengths = num_tokens(parts, [task.caption for task in tasks])
                        self.report.num_truncated_captions += sum(length > limit for length in lengths)
                        self._keep_texts(tasks, outputs, lengths)
                        done += len(tasks)
                        self.progress.advance(len(tasks))
                        if self._is_stopped():
                            break
                if self.report.interrupted:
                    break
            self._remember_rate("text", self.report.seconds.get("text", 0.0), done)
        self.progress.finish()
        self.models.release("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")  # room for the VAE

    def _keep_texts(self, tasks: Sequence[TextTask], outputs: dict[str, torch.Tensor], lengths: Sequence[int]) -> None:
        for task, made in text_entries(tasks, outputs, lengths, self._encodings, self.models):
            if isinstance(made, Fault):
                self._faults.add(task.key, made)
            else:
                self._writer.add(made)

    # Images

    def _encode_images(self) -> None:
        batches = self._plan.image_batches
        if not batches or self._is_stopped():
            return
        placement = self._encodings.vae
        with self._stage("load"):
            vae = self.models.vae(placement.dtype)
        num_workers = self.config.encode.num_workers
        num_threads = (os.cpu_count() or 1) if num_workers == "auto" else num_workers
        runner: BatchRunner[tuple[ImageTask, np.ndarray], torch.Tensor] = BatchRunner(
            "vae", placement.batch_size, placement.device
        )
        encode = partial(_encode_pixels, vae)
        self.progress.start("encode images", sum(map(len, batches)))
        num_pixels = 0
        with placed(vae, placement.device), ThreadPoolExecutor(num_threads) as executor:
            tasks = (task for batch in batches for task in batch)
            decoded = windowed(executor, _decode, tasks, num_threads + self._encodings.image_group_size)
            for batch in batches:
                with self._stage("decode"):
                    items = [item for _ in batch if (item := self._decoded(decoded)) is not None]
                self.progress.advance(len(batch) - len(items))
                with self._stage("encode"):
                    for done, moments in runner.run(items, encode, self._out_of_memory):
                        self._keep_images([task for task, _ in done], [pixels for _, pixels in done], moments)
                        num_pixels += sum(pixels.shape[0] * pixels.shape[1] for _, pixels in done)
                        self.progress.advance(len(done))
                        if self._is_stopped():
                            break
                if self._is_stopped():
                    break
            decoded.close()
        self._remember_rate("image", self.report.seconds.get("encode", 0.0), num_pixels)
        self.progress.finish()

    def _decoded(self, decoded: Iterator) -> tuple[ImageTask, np.ndarray] | None:
        """The next decoded image, or None when it was refused."""
        task, future = next(decoded)
        try:
            return task, future.result()
        except ImageRefused as refused:
            self._faults.add(task.key, Fault(refused.reason, refused.detail, refused.path))
            return None

    def _keep_images(self, tasks: Sequence[ImageTask], pixels: Sequence[np.ndarray], moments: torch.Tensor) -> None:
        tensors, faults = self._finish_images(tasks, moments)
        for number, task in enumerate(tasks):
            outputs = {name: tensor[number] for name, tensor in tensors.items()}
            computed, note = self._encodings.image.compute_dtype, None
            if faults[number] is not None and self._encodings.vae.dtype != torch.float32:
                note = f"the VAE gave {faults[number]} in {computed}: encoded again in float32"
                logger.warning("%s: %s", task.sample.path, note)
                retried = self._encode_in_float32(task, pixels[number])
                if retried is None:
                    continue
                outputs, faults[number], computed = *retried, "float32"
                self.report.num_retried_in_float32 += faults[number] is None
            if faults[number] is not None:
                stored = self._encodings.image.store_dtype
                detail = f"the VAE gave {faults[number]}, computed in {computed} and stored as {stored}"
                self._faults.add(task.key, Fault("bad-output", detail, task.sample.path))
                continue
            provenance = Provenance(
                sample_id=task.sample.sample_id,
                source_path=task.sample.path,
                models={"vae": self.models.origin("vae")},
                device=str(self._encodings.vae.device),
                computed_dtype=computed,
                note=note,
            )
            record = Record(task.key, "image", task.identity.to_json(), provenance.to_json())
            self._writer.add(Entry(record, outputs))

    def _encode_in_float32(
        self, task: ImageTask, pixels: np.ndarray
    ) -> tuple[dict[str, torch.Tensor], str | None] | None:
        """What is stored of one image, and what is wrong with it; None when it does not fit into memory."""
        device = self._encodings.vae.device
        # Loaded anew, or a copy: weights that were rounded to half precision do not come back by a cast.
        with placed(self.models.vae(torch.float32), device) as vae:
            runner: BatchRunner[tuple[ImageTask, np.ndarray], torch.Tensor] = BatchRunner("vae", 1, device)
            encode = partial(_encode_pixels, vae)
            for _, moments in runner.run([(task, pixels)], encode, self._out_of_memory):
                tensors, faults = self._finish_images([task], moments)
                return {name: tensor[0] for name, tensor in tensors.items()}, faults[0]
        return None

    def _finish_images(
        self, tasks: Sequence[ImageTask], moments: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], list[str | None]]:
        """What is stored of the moments, on the CPU, and what is wrong with each item."""
        encoding = self._encodings.image
        seeds = [int(task.key[:15], 16) for task in tasks]  # the key holds the seed of the config and the image
        kept = keep_output(moments, encoding.output, seeds)
        tensors = {name: tensor.to(DTYPES[encoding.store_dtype]) for name, tensor in kept.items()}
        faults = [problems(tensor) for tensor in (moments, *tensors.values())]
        worst = [next((fault for fault in item if fault), None) for item in zip(*faults, strict=True)]
        return {name: tensor.cpu() for name, tensor in tensors.items()}, worst

    def _out_of_memory(self, item: TextTask | tuple[ImageTask, np.ndarray], error: EncodeError) -> None:
        task = item[0] if isinstance(item, tuple) else item
        self._faults.add(task.key, Fault("out-of-memory", str(error)))

    # Manifests and figures

    def _is_stopped(self) -> bool:
        """Whether to leave the rest to the next run."""
        self.report.interrupted |= self.stop.is_set()
        return self.report.interrupted

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.report.seconds[name] = self.report.seconds.get(name, 0.0) + time.monotonic() - started

    def _rate_name(self, kind: str) -> str:
        placement = self._encodings.vae if kind == "image" else self._encodings.text_encoders
        part = self._encodings.image.vae if kind == "image" else self._encodings.text.text_encoder_2
        return f"rate {kind} {placement.device} {dtype_name(placement.dtype)} {part.name}"

    def _remember_rate(self, kind: str, seconds: float, amount: int) -> None:
        if amount and seconds > 0:
            self.workspace.memo[self._rate_name(kind)] = repr(seconds / amount)

    def _estimate_seconds(self) -> float | None:
        """Seconds for this shard's misses, at the rate of the last run with these models on this device."""
        amounts = {"text": self._plan.num_captions_to_encode, "image": self._plan.num_pixels_to_encode}
        total = 0.0
        for kind, amount in amounts.items():
            rate = self.workspace.memo.get(self._rate_name(kind))
            if amount and rate is None:
                return None
            total += amount * float(rate or 0.0)
        return round(total, 1)

    def describe_cache(self) -> None:
        """What the cache holds now, for the report."""
        path = self.workspace.path
        self.report.cache = {"path": None if path is None else str(path), **self.workspace.store.stats().to_json()}


def _decode(task: ImageTask) -> np.ndarray:
    """The pixels that the encoder sees. The very bytes that are decoded are hashed: the entry is what it says."""
    data = task.source.read(task.sample)
    if digest(data) != task.identity.source:
        raise ImageRefused(task.sample.path, "changed", "the file changed during the run; run precache again")
    return prepare(decode(data, task.sample.path, task.policy), task.identity.preparation.geometry)


def _encode_pixels(vae: torch.nn.Module, items: Sequence[tuple[ImageTask, np.ndarray]]) -> torch.Tensor:
    return encode_images(vae, np.stack([pixels for _, pixels in items]))


def _describe(placement: Placement) -> str:
    return f"{placement.device} {dtype_name(placement.dtype)}: {placement.reason}"
