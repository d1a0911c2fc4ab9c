"""One precache run: plan, then decode | encode | write, then the manifests.

The order makes every crash harmless. Entries become visible pack by pack; the manifests, which say what the dataset
is, are replaced only after every entry of theirs was stored or refused. A run that was stopped is simply run again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from latentcache.config import Config
from latentcache.devices.placement import Placement
from latentcache.models.model_loader import Models
from latentcache.precache.context import RunContext, estimate_seconds, remember_rate, timed
from latentcache.precache.encodings import Encodings, choose_encodings, dtype_name, load_models
from latentcache.precache.failures import Failures, write_manifests
from latentcache.precache.image_stage import ImageStage
from latentcache.precache.plan import ImageTask, Plan, TextTask
from latentcache.precache.planner import Stopped, make_plan
from latentcache.precache.report import Report
from latentcache.precache.scratch import Memo
from latentcache.precache.shard import Shard
from latentcache.precache.text_stage import TextStage
from latentcache.precache.workspace import Workspace, open_workspace
from latentcache.store.base import Writer
from latentcache.utils.progress import NoProgress, Progress


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
    """Encode what is not cached yet, and report what was done.

    `models` are the caller's own (`LoadedModels`); by default they load from the config. `workspace`
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
        self._failures = Failures(shard)
        self._plan = Plan()
        self._encodings: Encodings

    def plan(self, verify_sources: bool) -> None:
        """Plan, and report the plan's figures."""
        with timed(self.report, "load"):
            self._encodings = encodings = choose_encodings(
                self.config, self.models, self.workspace.memo, self.shard.local_rank
            )
        with timed(self.report, "plan"):
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
        report.estimate = {"bytes": plan.miss_bytes, "seconds": estimate_seconds(self.workspace.memo, encodings, plan)}
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
                with writer:
                    self._run_stages(writer)
                    with timed(self.report, "write"):
                        writer.seal()
            finally:
                # Also after an error: what was sealed is there, and the report says so.
                self.report.bytes_written = writer.bytes_written
                self.report.num_encoded = writer.num_added
                self.models.release()
        for refusal in self._failures.refusals(plan.manifests):
            self.report.refuse(refusal)
        if not self.report.interrupted:
            with timed(self.report, "write"):
                self.report.manifests_waiting = write_manifests(
                    self.workspace, plan.manifests, self._failures, self.shard
                )

    def _begin(self) -> None:
        for manifest in self._plan.manifests:
            self.workspace.manifests.begin(manifest.name)
        if self.shard.world_size > 1 and isinstance(self.workspace.memo, Memo):
            batches: list[Sequence[ImageTask | TextTask]] = [*self._plan.text_batches, *self._plan.image_batches]
            self._failures.forget(self.workspace.memo, (task.key for batch in batches for task in batch))

    def _run_stages(self, writer: Writer) -> None:
        """Encode captions, then images: the text encoders are released before the VAE needs the memory."""
        plan, memo, encodings = self._plan, self.workspace.memo, self._encodings
        context = RunContext(
            encode=self.config.encode,
            encodings=encodings,
            models=self.models,
            store=writer.add,
            fail=self._failures.add,
            report=self.report,
            progress=self.progress,
            stop=self.stop,
        )
        if plan.text_batches and not context.is_stopped():
            remember_rate(memo, encodings, "text", *TextStage(context).run(plan.text_batches))
            self.models.release("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
        if plan.image_batches and not context.is_stopped():
            remember_rate(memo, encodings, "image", *ImageStage(context).run(plan.image_batches))

    def describe_cache(self) -> None:
        """Report what is in the cache now."""
        path = self.workspace.path
        self.report.cache = {"path": None if path is None else str(path), **self.workspace.store.stats().to_json()}


def _describe(placement: Placement) -> str:
    return f"{placement.device} {dtype_name(placement.dtype)}: {placement.reason}"
