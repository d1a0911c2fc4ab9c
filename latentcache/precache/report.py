"""What a precache run did, as one document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from latentcache.types import Refusal


@dataclass(slots=True)
class Report:
    """The figures of one run. Hits and encoded entries count entries (unique keys), not samples.

    With several ranks, `num_samples`, `num_hits`, `misses_by_reason` and the refusals of the plan are those of the
    whole dataset; `num_encoded`, `bytes_written` and later refusals are this rank's own.
    """

    num_samples: int = 0
    num_hits: int = 0
    num_misses: int = 0
    num_encoded: int = 0
    num_refused: int = 0
    num_missing_captions: int = 0
    """Samples without a caption: they get the empty one."""
    num_truncated_captions: int = 0
    """Captions, of those encoded in this run, with more tokens than the text encoders read."""
    num_retried_in_float32: int = 0
    refused: list[Refusal] = field(default_factory=list)
    misses_by_reason: dict[str, int] = field(default_factory=dict)
    bytes_written: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time of the main thread: load, plan, text (all of that stage), decode (waiting for pixels), encode, write
    (waiting for it), total. The time of other threads is not in it."""
    estimate: dict[str, float | int | None] = field(default_factory=dict)
    """Of the misses, before encoding: `bytes` and `seconds`. None where nothing is known yet."""
    placement: dict[str, str] = field(default_factory=dict)
    """Part of the model -> device, dtype, and the reason for them."""
    cache: dict[str, Any] = field(default_factory=dict)
    manifests_waiting: list[str] = field(default_factory=list)
    """Manifests that were left as they are, because entries of other ranks are not there yet."""
    rank: int = 0
    world_size: int = 1
    dry_run: bool = False
    interrupted: bool = False

    def refuse(self, refusal: Refusal) -> None:
        """Add a refused sample."""
        self.refused.append(refusal)
        self.num_refused += 1

    def to_json(self) -> dict[str, Any]:
        """All fields, with refusals as {sample_id, path, reason, detail} and seconds to the millisecond."""
        value = {name: getattr(self, name) for name in self.__slots__}
        value["refused"] = [refusal.to_json() for refusal in self.refused]
        value["seconds"] = {stage: round(seconds, 3) for stage, seconds in self.seconds.items()}
        return value

    def to_text(self) -> str:
        """The report for people."""
        lines = [f"samples   {self.num_samples}", f"hits      {self.num_hits}", f"misses    {self.num_misses}"]
        lines += [f"          {count:>6} {reason}" for reason, count in sorted(self.misses_by_reason.items())]
        if self.dry_run:
            lines.append(f"estimate  {format_estimate(self.estimate)}")
        else:
            lines.append(f"encoded   {self.num_encoded} ({self.bytes_written:,} bytes)")
        notes = {
            "missing captions (the empty caption is used)": self.num_missing_captions,
            "captions longer than the text encoders read": self.num_truncated_captions,
            "images encoded again in float32": self.num_retried_in_float32,
        }
        lines += [f"note      {count} {note}" for note, count in notes.items() if count]
        lines.append(f"refused   {self.num_refused}")
        lines += [f"          {refusal.path}: {refusal.reason}: {refusal.detail}" for refusal in self.refused]
        stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in self.seconds.items())
        lines.append(f"seconds   {stages}")
        lines += [f"{part:<9} {placement}" for part, placement in self.placement.items()]
        lines.append(f"cache     {self.cache.get('path', '')}")
        lines += [f"waiting   manifest {name}: other ranks are not done" for name in self.manifests_waiting]
        if self.interrupted:
            lines.append("stopped before the end: run the same command again to go on from here")
        return "\n".join(lines)


def format_estimate(estimate: Mapping[str, float | int | None]) -> str:
    """Bytes and seconds of an estimate for people; what is unknown says so."""
    size, seconds = estimate.get("bytes"), estimate.get("seconds")
    size_text = "size unknown" if size is None else f"{size:,} bytes"
    time_text = "time unknown before a first run with these models" if seconds is None else f"about {seconds:.0f} s"
    return f"{size_text}, {time_text}"
