"""One precache run: plan, then decode | encode | write, then replace the manifests.

This order makes every crash harmless. Entries become visible pack by pack. The manifests, which define the dataset, are
replaced only after each of their entries was stored or refused. To resume a stopped run, run it again.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import nullcontext
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Protocol

import torch

from latentcache.config import Config
from latentcache.dataset.manifest import Manifest, prompts_name
from latentcache.dataset.row_table import Row
from latentcache.dataset.sources import open_source
from latentcache.devices.placement import device_named
from latentcache.errors import ConfigError
from latentcache.families import unread_controls
from latentcache.identity import key_names
from latentcache.models.model_loader import Models
from latentcache.precache.encodings import Encodings, choose_encodings, for_images, load_models
from latentcache.precache.plan import Stopped, make_plan
from latentcache.precache.prompts import add_prompts
from latentcache.precache.report import Failure, Report, timed
from latentcache.precache.stages import ImageStage, MaskStage, RunContext, TextStage
from latentcache.precache.tasks import Plan, Shard
from latentcache.precache.workspace import Workspace, open_workspace
from latentcache.store.cut_captions import CutCaptions
from latentcache.store.disk import DiskStore
from latentcache.store.entry import dtype_name
from latentcache.store.writer import Writer
from latentcache.types import Entry, Kind, Refusal
from latentcache.utils.json_document import recalled
from latentcache.utils.progress import Progress
from latentcache.utils.wording import MAX_NAMED

logger = logging.getLogger("latentcache")

CLAIM_WAIT_S = 0.2
"""Interval for polling whether another process has made the entries that it claimed."""
STAGES: dict[Kind, Callable[[RunContext], MaskStage | TextStage | ImageStage]] = {
    "mask": MaskStage,
    "text": TextStage,
    "image": ImageStage,
}


class RemoteEncoders(Protocol):
    """Encoders in other processes, such as those of a cluster."""

    device: torch.device
    """The device they compute on, which determines dtypes. This machine need not have it."""

    def encode(self, plan: Plan, context: RunContext) -> None:
        """Encode the plan's texts and images. Unless stopped, each entry is stored durably or passed to `context.fail`.

        Adds `num_encoded`, `bytes_written` and the counts of captions and retries to the report.
        """


def run_precache(  # noqa: PLR0913 - each is a choice of the caller's
    config: Config,
    *,
    models: Models | None = None,
    workspace: Workspace | None = None,
    dry_run: bool = False,
    verify_sources: bool = False,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
    shard: Shard | None = None,
    remote_encoders: RemoteEncoders | None = None,
    only: Set[str] | None = None,
) -> Report:
    """Encode what is not cached yet, and report what was done. Bad images are refused and listed in the report.

    `models` are the caller's own (`LoadedModels`), and `workspace` is where entries go; both default to the config's.
    Setting `stop` ends the run at the next batch; finished entries are sealed. `shard` is this process's share, by
    default RANK and WORLD_SIZE. `remote_encoders` encode in place of this process. `only` are keys from the manifests:
    just these entries are encoded, by any rank that calls this, and no manifest is replaced. A sample whose entry
    would now have another key is then refused as `changed`.
    Raises ConfigError, DatasetError (a dataset that cannot be read at all), DeviceError, ModelError, StoreError.
    """
    started = time.monotonic()
    given = nullcontext(workspace) if workspace is not None else open_workspace(config.cache, read_only=dry_run)
    with given as workspace:
        for dataset in config.datasets:  # detect a wrong path early: the model may have to be downloaded
            open_source(dataset.source, dataset.part_files, videos=dataset.frames is not None)
        models = models or load_models(config.model, workspace.memo)
        shard = shard or Shard.from_environment()
        shard = shard if only is None else replace(shard, rank=0, world_size=1)  # claims share the work
        if not dry_run:
            _check_ranks(shard, workspace)
        report = Report(rank=shard.rank, world_size=shard.world_size, dry_run=dry_run)
        progress, stop = progress or Progress(), stop or threading.Event()
        wanted = None if only is None else frozenset(only)
        run = _Run(config, workspace, models, shard, progress, stop, report, remote_encoders, wanted)
        with workspace.in_use(wait=only is not None):  # training must not fail because of a concurrent compaction
            try:
                run.plan(verify_sources)
                if not dry_run:
                    run.encode()
                if only is None:
                    run.count_samples()
            except Stopped:
                report.interrupted = True
            finally:
                run.progress.finish()
        if config.cache.max_bytes is not None and not (dry_run or report.interrupted or only is not None):
            workspace.prune(config.cache.max_bytes)
        path = None if workspace.path is None else str(workspace.path)
        report.cache = {"path": path, **workspace.store.stats().to_json()}
        report.seconds["total"] = time.monotonic() - started
        return report


def _check_ranks(shard: Shard, workspace: Workspace) -> None:
    """Raise ConfigError if ranks cannot share their refusals: each would wait for the others' entries."""
    is_remote = isinstance(workspace.path, str)
    if is_remote and shard.world_size > 1 and shard.local_world_size != shard.world_size:
        here = "not set" if shard.local_world_size is None else f"{shard.local_world_size}"
        raise ConfigError(
            f"{shard.world_size} ranks fill {workspace.path}, but LOCAL_WORLD_SIZE is {here}: with a remote cache, "
            "ranks share refusals through a local file, so all must run on one machine. Start them there by torchrun, "
            "or run a separate precache, without RANK, on each machine: with a service these share the work; "
            "with a bucket, run one after the other",
            source="WORLD_SIZE",
        )


@dataclass(slots=True)
class _Run:
    """The state of one run."""

    config: Config
    workspace: Workspace
    models: Models
    shard: Shard
    progress: Progress
    stop: threading.Event
    report: Report
    remote_encoders: RemoteEncoders | None = None
    only: frozenset[str] | None = None
    _plan: Plan = field(init=False)
    _encodings: Encodings = field(init=False)

    def plan(self, verify_sources: bool) -> None:
        """Make the plan, and report its figures."""
        report, memo, config, only = self.report, self.workspace.memo, self.config, self.only
        rows = [] if only is None else _rows_with(only, config, self.workspace)
        with timed(report, "load"):
            remote = self.remote_encoders
            device = remote.device if remote else device_named(config.encode.device, self.shard.local_rank)
            self._encodings = encodings = choose_encodings(config, self.models, memo, device)
        with timed(report, "plan"):
            self._plan = plan = make_plan(
                config,
                self.workspace,
                encodings,
                self.models,
                plan=Plan(self.workspace.store, self.shard, report, only),
                verify_sources=verify_sources,
                only=None if only is None else frozenset(row.sample_id for _, row in rows),
                progress=self.progress,
                stop=self.stop,
            )
        if only is not None:
            report.refused = self._refused_of(rows, only)
        if remote is None:  # remote encoders choose their own batch size
            self._encodings = encodings = for_images(encodings, config.encode, plan.batches["image"])
        with_control = [dataset.name for dataset in config.datasets if dataset.control]
        if with_control and (reason := unread_controls(self.models.family)) is not None:
            note = f"control images are cached for your own code only: {reason}"
            report.notes += [f"{name}: {note}" for name in with_control]
        if not self.models.family.takes_masked:
            note = f"masked images are cached for your own code only: no {self.models.family.name} denoiser takes them"
            report.notes += [f"{each.name}: {note}" for each in config.datasets if each.mask and each.mask.inpaint]
        report.placement = {"family": f"{self.models.family.name}: {self.models.family_reason}"}
        report.placement |= {
            name: f"{placement.device} {dtype_name(placement.dtype)}: {placement.reason}"
            for name, placement in (("vae", encodings.vae), ("text", encodings.text_encoders))
        }

    def _refused_of(self, rows: Sequence[tuple[str, Row]], wanted: Set[str]) -> list[Refusal]:
        """Why wanted entries are not in the plan: a refusal for each of these manifest rows that needs one of them."""
        planned = {manifest.name: manifest.rows for manifest in self._plan.manifests}
        lost = wanted - {key for manifest in self._plan.manifests for key in manifest.keys()}
        changed = "its image, its caption, the models or the settings have changed since it was precached"
        refused = []
        for name, row in rows:
            if not lost.isdisjoint(row.keys()):
                now = planned[name].get(row.sample_id) if name in planned else None
                gone = now is None and name in planned
                reason, detail = ("missing", "it is no longer in the dataset") if gone else ("changed", changed)
                found = None if now is None else now.refusal
                refused.append(found or Refusal(row.sample_id, row.path, reason, detail))
        return refused

    def encode(self) -> None:
        """Encode this shard's misses, store them, and replace the manifests."""
        plan, report, failures = self._plan, self.report, _Failures(self.shard, self.workspace)
        if any(plan.batches.values()):
            for manifest in plan.manifests if self.only is None else ():
                self.workspace.manifests.begin(manifest.name)
            failures.forget(task.key for batches in plan.batches.values() for batch in batches for task in batch)
            # Masks need no model.
            self._encode_here(failures, ["mask"] if self.remote_encoders else list(plan.batches))
            if self.remote_encoders is not None and (plan.batches["text"] or plan.batches["image"]):
                self._encode_remotely(self.remote_encoders, failures)
        for number, manifest in enumerate(plan.manifests):
            plan.manifests[number], failed = failures.refused_in(manifest)
            if manifest.role == "prompts":  # those read with a sample's bad control image count with the sample
                known = {(each.path, each.reason) for each in report.refused}
                failed = [each for each in failed if (each.path, each.reason) not in known]
            report.refused += failed
            report.failed += [refusal.path for refusal in failed]
        if not report.interrupted and self.only is None:
            with timed(report, "write"):
                report.manifests_waiting = write_manifests(self.workspace, plan.manifests, failures)

    def count_samples(self) -> None:
        """Count the samples that are not refused, but may not be as the user expects.

        Truncated captions are counted from the records on this disk; for a remote cache, the stage counts those that
        it encodes.
        """
        report, store = self.report, self.workspace.store
        captions = CutCaptions(store, self.workspace.memo) if isinstance(store, DiskStore) else None
        if captions is not None:
            report.num_truncated_captions, report.truncated_captions = 0, []
        for table in (manifest.rows for manifest in self._plan.manifests if manifest.role != "prompts"):
            found = {"missing_captions": table.without_caption(), "mostly_cut": table.mostly_cut()}
            if captions is not None:
                is_cut = captions.flags(table.columns["caption/keys"])
                found["truncated_captions"] = table.usable_with("caption", is_cut)
            for what, numbers in found.items():
                first = table.sample_ids.at(numbers[:MAX_NAMED])
                report.add_samples(what, first, len(numbers))

    def _context(self, store: Callable[[Entry], None], fail: Callable[[str, Failure], None]) -> RunContext:
        encode, progress = self.config.encode, self.progress
        return RunContext(encode, self._encodings, self.models, store, fail, self.report, progress, self.stop)

    def _encode_remotely(self, encoders: RemoteEncoders, failures: _Failures) -> None:
        if self.models.family.text_reads_control:
            raise ConfigError(
                f"{self.models.family.name} reads captions together with control images, which are not sent to remote "
                "encoders; run precache without --ray",
                key="ray",
            )
        self.models.release()
        with timed(self.report, "encode"):
            encoders.encode(self._plan, self._context(lambda entry: None, failures.add))

    def _encode_here(self, failures: _Failures, kinds: Sequence[Kind]) -> None:
        report, writer = self.report, self.workspace.store.writer()

        def fail(key: str, failure: Failure) -> None:
            failures.add(key, failure)
            writer.release([key])

        context = self._context(writer.add, fail)
        try:
            with writer:
                for kind in kinds:
                    if self._plan.batches[kind] and not context.is_stopped():
                        self._run_stage(kind, writer, context)
                with timed(report, "write"):
                    writer.seal()
        finally:
            # Also after an error: sealed entries are stored, and the report should say so.
            report.bytes_written, report.num_encoded = writer.bytes_written, writer.num_added
            self.models.release()

    def _run_stage(self, kind: Kind, writer: Writer, context: RunContext) -> None:
        """Encode the plan's entries of a kind, except those that other processes encode; retry what these abandon."""
        others = list[Sequence[Any]]()

        def claim(batch: Sequence[Any]) -> Sequence[Any]:
            """Select the tasks that no other process is doing or has done. Those in progress go to `others`."""
            mine, theirs = writer.claim(task.key for task in batch)
            if theirs:
                others.append([task for task in batch if task.key in theirs])
            if done := len(batch) - len(mine) - len(theirs):
                context.progress.advance(done)
            return [task for task in batch if task.key in mine]

        stage, batches = STAGES[kind](replace(context, claim=claim)), self._plan.batches[kind]
        stage.run(batches)
        while others and not context.is_stopped():
            writer.seal()  # the other process may be waiting for entries of this one
            theirs, others[:] = list(others), []
            if left := [mine for batch in theirs if (mine := claim(batch))]:
                stage.run(left)
            else:
                self.stop.wait(CLAIM_WAIT_S)
        if kind == "text":  # free the memory for the VAE
            self.models.release(*(name for name in self.models.family.parts if name != "vae"))


def _rows_with(keys: Set[str], config: Config, workspace: Workspace) -> list[tuple[str, Row]]:
    """Pairs (manifest name, row) of the rows with these keys in the manifests of the datasets and their prompts."""
    names = [dataset.name for dataset in config.datasets]
    found = [manifest for name in names if (manifest := workspace.manifests.read(name)) is not None]
    prompts = {prompts_name(manifest.common) for manifest in found if manifest.imported_from is None}
    found += [manifest for name in prompts if (manifest := workspace.manifests.read(name)) is not None]
    rows = [(each.name, each.rows.row(number)) for each in found for number in each.rows.rows_with(keys)]
    if lacking := keys - {key for _, row in rows for key in row.keys()}:
        raise ConfigError(
            f"{len(lacking)} of {len(keys)} entries to encode are in no manifest of {', '.join(names)} in "
            f"{workspace.path or 'the CPU store'}. Use the config that the dataset was precached with, and reopen the "
            "dataset after each precache",
            key="datasets",
        )
    return rows


class _Failures:
    """Entries that could not be made, by key. Several ranks share theirs through the memo."""

    def __init__(self, shard: Shard, workspace: Workspace):
        self._shared = workspace.memo if shard.world_size > 1 and workspace.memo.is_shared else None
        """The memo with other ranks' failures; None for a single process."""
        self._launch = shard.launch
        self._by_key: dict[str, Failure] = {}

    def add(self, key: str, failure: Failure) -> None:
        """Record that the entry `key` could not be made."""
        self._by_key[key] = failure

    def refused_in(self, manifest: Manifest) -> tuple[Manifest, Sequence[Refusal]]:
        """Refuse the samples that need a failed entry. Returns the changed manifest and the refusals."""
        rows = manifest.rows
        numbers = rows.rows_with(self._by_key) if self._by_key else ()
        found = {number: self._refusal(rows.row(number)) for number in numbers}
        return manifest.with_rows(rows.with_refusals(found)) if found else manifest, list(found.values())

    def _refusal(self, row: Row) -> Refusal:
        """The refusal of a sample that needs a failed entry, which may be that of an equal image in another sample."""
        # Captions last: a control image that cannot be read also costs the texts that are read with it.
        ref = next(ref for ref in (*row.images, *row.parts, *row.captions) if ref.key in self._by_key)
        failure = self._by_key[ref.key]
        detail, path = failure.detail, failure.path or row.path
        if ref in row.parts:
            detail = f"{ref.role}: {detail}"
        elif ref in row.images and path != row.path:
            detail, path = f"the same image at {path}: {detail}", row.path
        return Refusal(row.sample_id, path, failure.reason, detail)

    def forget(self, keys: Iterable[str]) -> None:
        """Remove earlier failures of these keys, which this rank is about to retry."""
        if self._shared is not None:
            for name in self._shared.get_many(map(self._name, keys)):
                del self._shared[name]

    def share(self) -> None:
        """Publish this rank's failures to the other ranks."""
        if self._shared is not None:
            # Not by pydantic, which cannot write paths in a broken encoding.
            self._shared.update({self._name(key): json.dumps(astuple(each)) for key, each in self._by_key.items()})
            self._shared.flush()

    def read_others(self, keys: Iterable[str]) -> None:
        """Add the failures of these keys that other ranks published."""
        names = {self._name(key): key for key in keys}
        written = {} if self._shared is None else self._shared.get_many(names)
        for name in written:
            if (failure := recalled(written, name, lambda text: Failure(*json.loads(text)))) is not None:
                self.add(names[name], failure)

    def _name(self, key: str) -> str:
        # With the launch, if the launcher identifies it, so that failures of an older launch are ignored.
        return f"refused/1 {self._launch} {key}"


def write_manifests(workspace: Workspace, manifests: Sequence[Manifest], failures: _Failures) -> list[str]:
    """Replace the manifests, and return the names of those that must wait.

    A manifest waits until each of its entries is stored or refused. With several ranks, the one that finishes last
    replaces it. With a single process, it waits only if an entry disappeared after the plan was made. Raises
    StoreBusyError if another client of a remote cache replaced a dataset's manifest since the plan was made.
    """
    waiting = []
    failures.share()
    for manifest in manifests:
        needed = manifest.rows.entry_keys(usable=True)
        absent = set(key_names(needed[~workspace.store.has(needed)]))
        failures.read_others(absent)
        manifest, _ = failures.refused_in(manifest)
        if absent and (absent := absent.intersection(key_names(manifest.rows.entry_keys(usable=True)))):
            waiting.append(manifest.name)
            logger.info(
                "manifest %s waits for %d entries of other ranks, or that disappeared; if no rank is running, run "
                "precache again",
                manifest.name,
                len(absent),
            )
        elif manifest.role == "prompts":  # keep prompts that a service cached since the plan was made
            add_prompts(workspace, manifest, always=True)
        else:
            workspace.manifests.write(manifest)
    return waiting
