"""What commands print, as one JSON document or as text, and their exit codes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentcache.types import Size
from latentcache.utils.wording import counted, short, size

if TYPE_CHECKING:
    from latentcache.precache.report import Report
    from latentcache.remote.upkeep import PruneReport as BucketPruneReport

DONE, DONE_WITH_FAULTS, COULD_NOT_RUN = 0, 1, 2
STARTED = time.monotonic()
"""When the command started, before torch and the model packages are imported."""


def finish(report: Any, as_json: bool, *, has_faults: bool, text: str | None = None) -> int:
    """Print a report as JSON or text, and return the exit code: 1 if it `has_faults`."""
    if as_json:
        print(json.dumps(report if isinstance(report, dict) else report.to_json(), ensure_ascii=True))
    else:
        print(report.to_text() if text is None else text)
    return DONE_WITH_FAULTS if has_faults else DONE


def precache_text(report: Report, target: Path | str, *, verbose: bool) -> str:
    """Say what a run did, how long it took, what is ready, and the next command for `target`, a config or cache."""
    lines = [report.to_text(verbose=verbose)]
    total = report.seconds.get("total", 0.0)
    before = max(0.0, time.monotonic() - STARTED - total)
    lines.append(f"time      {total:.1f} s, plus {before:.0f} s to start")
    if not (report.dry_run or report.interrupted or report.manifests_waiting or report.world_size > 1):
        place = "" if report.cache.get("path") is None else f" in {report.cache['path']}"
        ready = f"{report.num_samples - report.num_refused:,} of {counted(report.num_samples, 'sample')}{place}"
        stored = size(report.cache.get("file_bytes", 0))
        lines.append(f"ready: {ready} ({stored}). Next: latentcache browse {target}")
    return "\n".join(lines)


def shown_text(found: Mapping[str, Any]) -> str:
    """Format a sample or an entry that `status.show` found."""
    lines = []
    for dataset in found.get("datasets", ()):
        lines.append(row_text(dataset, f" in {dataset['dataset']}"))
        sizes = {image["key"]: _geometry(image) for image in dataset["images"]}
        further = f" and {dataset['variants'] - 1} variants" if "variants" in dataset else ""
        texts = {caption["key"]: f"{short(caption['text'])!r}{further}" for caption in dataset["captions"]}
        for entry in dataset["entries"]:
            lines += _entry_lines(entry, sizes.get(entry["key"]) or texts.get(entry["key"]))
    if not lines:
        lines = [found["key"], *_entry_lines(found, found.get("provenance", {}).get("source_path"))]
    return "\n".join([*lines, "--json shows everything that the keys depend on"])


def row_text(row: Mapping[str, Any], where: str = "") -> str:
    """Format a sample of a manifest on one line."""
    refusal = row["refusal"]
    end = "" if refusal is None else f"; refused: {refusal['reason']}: {refusal['detail']}"
    return f"{row['sample_id']}{where}: {row['path']}{end}"


def _geometry(image: Mapping[str, Any]) -> str:
    original, target = (Size(*image[name]) for name in ("original_size", "target_size"))
    return f"{original} to {target}{' flipped' if image['flip'] else ''}"


def _entry_lines(entry: Mapping[str, Any], what: str | None) -> Iterator[str]:
    if "error" in entry:
        yield f"  {entry['key'][:12]}  {entry['error']}"
        return
    from latentcache.store.entry import ARRAY_DTYPES

    fields, made = entry["fields"], entry["provenance"]
    num_bytes = sum(ARRAY_DTYPES[field["dtype"]].itemsize * math.prod(field["shape"]) for field in fields.values())
    yield f"  {entry['kind']:<5} {entry['key'][:12]}  {size(num_bytes)}" + (f"  ({what})" if what else "")
    for name, field in fields.items():
        yield f"        {name}: {field['dtype']} {field['shape']}"
    models = dict.fromkeys(map(str, made.get("models", {}).values()))
    by = [*models, *(str(made[name]) for name in ("device", "created") if name in made)]
    if by:
        yield f"        made with {', '.join(by)}"


def upkeep_text(report: Any) -> str:
    """Describe what `verify`, `rebuild`, `prune` or `compact` did."""
    from latentcache.store.upkeep import CompactReport, PruneReport, VerifyReport

    entries, again = counted(report.num_entries, "entry"), "damaged; latentcache precache encodes them again"
    if isinstance(report, VerifyReport):
        lines = [f"read {entries} in {counted(report.num_packs, 'pack')} ({size(report.bytes_read)})"]
        if report.ok:
            lines[0] += ": no damage"
        lines += _listed(again, report.damaged | report.known_damaged)
    elif isinstance(report, PruneReport):
        done = "would drop" if report.dry_run else "dropped"
        lines = [f"{done} {entries} ({size(report.num_bytes)}) that no manifest refers to"]
        if report.num_packs:
            lines[0] += f", and with them {counted(report.num_packs, 'pack')} ({size(report.file_bytes)})"
        lines[0] += f"; {size(report.file_bytes_left)} are left"
        if report.num_bytes > report.file_bytes:
            lines.append("run latentcache compact to free the space of dropped entries in packs that stay")
    elif isinstance(report, CompactReport):
        before, after = size(report.file_bytes_before), size(report.file_bytes_after)
        packs = counted(report.num_packs_before, "pack")
        lines = [
            f"nothing to rewrite: {packs}, {before}; packs are rewritten if they are small or 30 % of them is dropped"
        ]
        if report.num_entries or report.file_bytes_before != report.file_bytes_after:
            done = "would rewrite" if report.dry_run else "rewrote"
            lines = [f"{done} {entries}: {packs} to {report.num_packs_after:,}, {before} to {after}"]
        lines += _listed(again, report.damaged)
    else:
        lines = [f"the index has {entries} in {counted(report.num_packs, 'pack')}"]
    return "\n".join(lines + _listed("packs that cannot be read", getattr(report, "unreadable", {})))


def bucket_pruned_text(report: BucketPruneReport) -> str:
    """Describe what `prune` of a bucket did."""
    removed, listed = ("would remove", "would list") if report.dry_run else ("removed", "listed")
    gone, soon = counted(report.num_removed, "pack"), counted(report.num_listed, "pack")
    lines = [
        f"{removed} {gone} ({size(report.removed_bytes)}) of {report.num_packs:,}: unused, and past their grace time",
        f"{listed} {soon} ({size(report.listed_bytes)}): run prune in {report.grace_h:g} hours to remove them; "
        f"{report.num_waiting:,} listed earlier are still waiting",
        f"entries that no manifest refers to, including those in packs that stay: {report.num_unused:,}",
    ]
    return "\n".join(lines + _listed("packs that cannot be read", report.unreadable))


def _listed(title: str, problems: Mapping[str, str]) -> list[str]:
    """Return a title and one line per problem, or nothing if there are none."""
    return [f"{title}:", *(f"  {name}: {reason}" for name, reason in problems.items())] if problems else []


def fail(error: BaseException, as_json: bool, text: str | None = None) -> int:
    """Return the exit code of a command that could not run. With `--json`, print its error as a document."""
    if as_json:
        print(json.dumps({"error": str(error) if text is None else text, "type": type(error).__name__}))
    return COULD_NOT_RUN
