"""Reports of imports and exports, as JSON and as text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from latentcache.precache.report import refusal_lines
from latentcache.store.base import Report
from latentcache.types import Refusal

_ALL = "--json lists all"


@dataclass(slots=True)
class Difference:
    """How imported entries of one kind (`image` or `text`) differ from encoded ones. Latents are compared unscaled."""

    num_compared: int = 0
    num_equal: int = 0
    num_draws: int = 0
    """Plausible draws: their distance from the mean is that of a draw from this posterior."""
    largest: float = 0.0
    """Largest absolute difference."""
    largest_share: float = 0.0
    """Largest difference relative to its tolerance: at most 1 for entries that count as equal."""
    largest_deviations: float | None = None
    """Largest root mean square distance from the mean of a draw that does not equal it, in standard deviations of the
    posterior. A true draw has about 1."""

    def to_text(self, kind: str) -> str:
        """One line for people."""
        draws = ""
        if self.largest_deviations is not None:
            draws = f", {self.num_draws} draws of the posterior, at most {self.largest_deviations:.2f} deviations off"
        return (
            f"compared  {self.num_compared} {kind} entries, {self.num_equal} equal{draws}; largest difference "
            f"{self.largest:.3g} ({self.largest_share:.2f} of the tolerance)"
        )


@dataclass(slots=True)
class InteropReport(Report):
    """The fields of both reports."""

    format: str
    name: str
    num_images: int = 0
    num_texts: int = 0
    bytes_written: int = 0
    notes: dict[str, int] = field(default_factory=dict)
    """Note -> count: what was inferred because the format does not record it, or dropped because it cannot."""

    def note(self, text: str | None) -> None:
        """Count a note; None is ignored."""
        if text is not None:
            self.notes[text] = self.notes.get(text, 0) + 1

    def _note_lines(self) -> list[str]:
        return [f"note      {count} {note}" for note, count in self.notes.items()]


@dataclass(slots=True)
class ImportReport(InteropReport):
    """The figures of one import."""

    num_samples: int = 0
    """Complete samples: an image and at least one caption."""
    num_flipped: int = 0
    """How many of the images are flipped."""
    num_unknown_captions: int = 0
    """Texts whose caption is neither in the file nor in a caption file."""
    incomplete: list[Refusal] = field(default_factory=list)
    """Samples without an image or without a text: they are in the manifest but never in a batch."""
    refused: list[Refusal] = field(default_factory=list)
    """Files that were not imported."""
    unequal: list[Refusal] = field(default_factory=list)
    """Entries that differ from encoded ones, or could not be encoded for comparison."""
    differences: dict[str, Difference] = field(default_factory=dict)
    """Kind -> differences from encoded entries; empty without verification."""
    seconds: float = 0.0
    cache: str | None = None

    def to_json(self) -> dict[str, Any]:
        """All fields, and the counts of refused and incomplete items."""
        return Report.to_json(self) | {"num_refused": len(self.refused), "num_incomplete": len(self.incomplete)}

    def to_text(self) -> str:
        """The report for people."""
        lines = [
            f"imported  {self.num_samples} samples from {self.format} as {self.name}",
            f"images    {self.num_images}, of which {self.num_flipped} flipped",
            f"texts     {self.num_texts}, of which {self.num_unknown_captions} with an unknown caption",
            *(found.to_text(kind) for kind, found in self.differences.items()),
            *self._note_lines(),
            *refusal_lines("unequal", self.unequal, _ALL),
            *refusal_lines("lacking", self.incomplete, _ALL),
            *refusal_lines("refused", self.refused, _ALL),
            f"written   {self.bytes_written:,} bytes in {self.seconds:.1f} s",
            f"cache     {self.cache or 'in memory'}",
        ]
        if self.num_images + self.num_texts:
            lines.append(
                "trust     entries are unverified: returned only with cache.unverified; precache replaces them"
            )
        else:
            lines.append(f"manifest  none written: nothing was imported; {self.name} is unchanged")
        return "\n".join(lines)


@dataclass(slots=True)
class ExportReport(InteropReport):
    """The figures of one export."""

    path: str = ""
    num_files: int = 0
    skipped: list[Refusal] = field(default_factory=list)
    """Samples that were not exported: they are refused in the manifest, or the format cannot hold them."""
    num_unread: int = 0
    """How many of these have a damaged or missing entry, which precache encodes again."""
    num_other_buckets: int = 0
    """Samples whose bucket differs from the one that the trainer chooses."""
    buckets: dict[str, Any] = field(default_factory=dict)
    """The trainer's bucket settings that this was checked against; empty if the check was not needed."""

    def to_text(self) -> str:
        """The report for people."""
        settings = ", ".join(f"{name} {value}" for name, value in self.buckets.items())
        buckets = f"buckets   {self.num_other_buckets} samples differ from the trainer's ({settings})"
        lines = [
            f"exported  {self.name} to {self.format}",
            f"images    {self.num_images}",
            f"texts     {self.num_texts}",
            f"written   {self.num_files} files, {self.bytes_written:,} bytes",
            *([buckets] if self.buckets else ()),
            *refusal_lines("skipped", self.skipped, _ALL),
            *self._note_lines(),
            f"folder    {self.path}",
        ]
        return "\n".join(lines)
