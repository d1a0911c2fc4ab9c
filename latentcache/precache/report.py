"""What a precache run did, as one document."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from latentcache.types import Refusal
from latentcache.utils.wording import MAX_NAMED, counted, cut_note, first_of, size


@dataclass(slots=True)
class Report:
    """The figures of one run. Hits and encoded entries count entries (unique keys), not samples.

    With several ranks, `num_samples`, `num_hits`, `misses_by_reason` and the plan's refusals cover the whole dataset;
    `num_encoded`, `bytes_written` and later refusals are this rank's own.
    """

    num_samples: int = 0
    num_hits: int = 0
    num_misses: int = 0
    num_encoded: int = 0
    num_missing_captions: int = 0
    """Samples without a caption, which get the empty one."""
    missing_captions: list[str] = field(default_factory=list)
    """The first of their sample_ids."""
    num_mostly_cut: int = 0
    """Images that lose more than half in the crop."""
    mostly_cut: list[str] = field(default_factory=list)
    """The first of their sample_ids."""
    num_truncated_captions: int = 0
    """Samples with a caption of more tokens than the text encoders read. For a remote cache, only those whose captions
    this run encoded."""
    truncated_captions: list[str] = field(default_factory=list)
    """The first of their sample_ids."""
    num_retried_in_float32: int = 0
    refused: list[Refusal] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Paths of refused files that this run tried to encode. They are misses in the next run too."""
    misses_by_reason: dict[str, int] = field(default_factory=dict)
    bytes_written: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time of the main thread, without other threads' time: load, plan, text (the whole stage), decode (waiting
    for pixels), encode, write (waiting for storage), total."""
    miss_bytes: int = 0
    """Estimated size of the misses' entries."""
    placement: dict[str, str] = field(default_factory=dict)
    """Part of the model -> device, dtype and the reason for them. `family` -> the family, and how it was determined."""
    notes: list[str] = field(default_factory=list)
    """Remarks on things that are cached as requested, but not used as one might expect."""
    cache: dict[str, Any] = field(default_factory=dict)
    manifests_waiting: list[str] = field(default_factory=list)
    """Manifests that were not replaced, because entries of other ranks are still missing."""
    rank: int = 0
    world_size: int = 1
    dry_run: bool = False
    interrupted: bool = False

    @property
    def num_refused(self) -> int:
        """How many samples were refused."""
        return len(self.refused)

    def add_samples(self, what: str, sample_ids: Sequence[str], count: int | None = None) -> None:
        """Add to a count of samples, by default the number of `sample_ids`, and keep the first ids.

        `what` is missing_captions, mostly_cut or truncated_captions.
        """
        setattr(self, f"num_{what}", getattr(self, f"num_{what}") + (len(sample_ids) if count is None else count))
        setattr(self, what, [*getattr(self, what), *sample_ids][:MAX_NAMED])

    def add(self, other: Report) -> None:
        """Add the counts of an encoding stage in another process."""
        self.num_encoded += other.num_encoded
        self.bytes_written += other.bytes_written
        self.add_samples("truncated_captions", other.truncated_captions, other.num_truncated_captions)
        self.num_retried_in_float32 += other.num_retried_in_float32

    def to_json(self) -> dict[str, Any]:
        """All fields and `num_refused`; seconds to the millisecond."""
        seconds = {stage: round(seconds, 3) for stage, seconds in self.seconds.items()}
        return asdict(self) | {"num_refused": self.num_refused, "seconds": seconds}

    def to_text(self, *, verbose: bool = False) -> str:
        """The report as text, with five refusals per reason. `verbose` lists all refusals, timings and placements."""
        lines = [f"samples   {self.num_samples}", f"hits      {self.num_hits}", f"misses    {self.num_misses}"]
        lines += [f"          {count:>6} {reason}" for reason, count in sorted(self.misses_by_reason.items())]
        if self.dry_run:
            lines.append(f"estimate  {size(self.miss_bytes)}")
        else:
            lines.append(f"encoded   {self.num_encoded} ({size(self.bytes_written)})")
        lines += [f"note      {note}" for note in (*self._noted(), *self.notes)]
        lines += refusal_lines("refused", self.refused, "--verbose names them", None if verbose else MAX_NAMED)
        if self.failed:
            lines.append(f"failed    {len(self.failed)} of the refused: every run retries them until they change")
        if verbose:
            stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in self.seconds.items())
            lines.append(f"seconds   {stages}")
            lines += [f"{part:<9} {placement}" for part, placement in self.placement.items()]
        lines += [f"waiting   manifest {name}: entries of it are still missing" for name in self.manifests_waiting]
        if self.interrupted:
            lines.append("stopped before the end: run the same command again to continue")
        return "\n".join(lines)

    def _noted(self) -> Iterator[str]:
        """Remarks on samples that may not be as the user expects."""
        if count := self.num_missing_captions:
            verbs = ("has", "trains") if count == 1 else ("have", "train")
            named = first_of(self.missing_captions, count)
            yield f"{counted(count, 'sample')} {verbs[0]} no caption, and {verbs[1]} on the empty one: {named}"
        if count := self.num_truncated_captions:
            yield cut_note(count, self.truncated_captions)
        if count := self.num_retried_in_float32:
            yield f"{counted(count, 'entry')} encoded again in float32"
        if count := self.num_mostly_cut:
            advice = "raise buckets.max_aspect, choose another buckets.rule, or crop them yourself"
            verb, named = "loses" if count == 1 else "lose", first_of(self.mostly_cut, count)
            yield f"{counted(count, 'image')} {verb} more than half in the crop: {named}; {advice}"


def refusal_lines(title: str, refused: Sequence[Refusal], others: str, most: int | None = MAX_NAMED) -> list[str]:
    """The number of refusals, and at most `most` per reason. `others` says how to see the rest."""
    lines, reasons = [f"{title:<9} {len(refused)}"], dict[str, list[Refusal]]()
    for refusal in refused:
        reasons.setdefault(refusal.reason, []).append(refusal)
    for reason, refusals in reasons.items():
        said = ""
        for refusal in refusals[:most]:
            detail = "as above" if refusal.detail == said else refusal.detail  # a detail may be a paragraph
            lines.append(f"          {refusal.path}: {reason}: {detail}")
            said = refusal.detail
        if left := len(refusals[most:]) if most else 0:
            lines.append(f"          and {left} more: {reason} ({others})")
    return lines


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an entry could not be made. `reason` is a `types.RefusalReason`; `path` is the image's."""

    reason: str
    detail: str
    path: str | None = None


@contextmanager
def timed(report: Report, stage: str) -> Iterator[None]:
    """Add the time spent inside to the report's stage."""
    started = time.monotonic()
    try:
        yield
    finally:
        report.seconds[stage] = report.seconds.get(stage, 0.0) + time.monotonic() - started
