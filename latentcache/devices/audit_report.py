"""What an audit of devices found: every offender by name, as text, as JSON and as one error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from latentcache.errors import DeviceMismatchError

NUM_SHOWN = 20
"""An error message lists this many offenders, and counts the others."""

Kind: TypeAlias = Literal[
    "parameter", "buffer", "attribute", "gradient", "optimizer state", "orphan",
    "ema", "batch", "scale", "hook", "meta", "dtype", "mode",
]  # fmt: skip
"""What is wrong where: `attribute` is a tensor that is no buffer, which `.to()` leaves behind; `orphan` a parameter of
an optimizer that is no longer the model's, or one of the model that its optimizer lacks; `mode` a train/eval flag."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One offender. `name` is dotted and starts below `part`; `found` and `wanted` are devices, dtypes or modes."""

    part: str
    name: str
    kind: Kind
    shape: tuple[int, ...] | None
    found: str
    wanted: str
    level: Literal["error", "warning"]
    reason: str = ""

    @property
    def path(self) -> str:
        """Part and name, dotted."""
        return f"{self.part}.{self.name}" if self.name else self.part

    def to_json(self) -> dict[str, Any]:
        """All fields, the shape as a list."""
        value = {name: getattr(self, name) for name in self.__slots__}
        value["shape"] = None if self.shape is None else list(self.shape)
        return value

    def to_text(self) -> str:
        """One line: who, what, where it is, where it should be, and why."""
        shape = "" if self.shape is None else f" {list(self.shape)}"
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.path}{shape} ({self.kind}) is {self.found}, wanted {self.wanted}{reason}"


@dataclass(frozen=True, slots=True)
class AuditReport:
    """All findings of one audit, what it walked, and notes on what it left alone and why.

    `devices` holds the device that each part is meant to be on, as given or inferred.
    """

    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    devices: tuple[tuple[str, str], ...] = ()
    num_tensors: int = 0

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that fail a step, or train the wrong thing."""
        return tuple(finding for finding in self.findings if finding.level == "error")

    @property
    def ok(self) -> bool:
        """Whether there is no error; there may be warnings."""
        return not self.errors

    def to_json(self) -> dict[str, Any]:
        """`{"ok", "num_tensors", "devices", "findings": [...], "notes": [...]}` of plain JSON values."""
        return {
            "ok": self.ok,
            "num_tensors": self.num_tensors,
            "devices": dict(self.devices),
            "findings": [finding.to_json() for finding in self.findings],
            "notes": list(self.notes),
        }

    def to_text(self) -> str:
        """A line per finding and note, errors first, and a last line with the counts."""
        lines = [f"error    {finding.to_text()}" for finding in self.errors]
        lines += [f"warning  {finding.to_text()}" for finding in self.findings if finding.level == "warning"]
        lines += [f"note     {note}" for note in self.notes]
        num_warnings = len(self.findings) - len(self.errors)
        lines.append(f"{self.num_tensors} tensors: {len(self.errors)} errors, {num_warnings} warnings")
        return "\n".join(lines)

    def raise_for_errors(self) -> None:
        """DeviceMismatchError that lists the errors, if there are any; its fields tell of the first."""
        if self.ok:
            return
        first = self.errors[0]
        raise DeviceMismatchError(
            listed(f"{len(self.errors)} tensors or flags are not as declared", (e.to_text() for e in self.errors)),
            module=first.part,
            argument=first.name,
            found=first.found,
            wanted=first.wanted,
        )


def listed(headline: str, lines: Iterable[str]) -> str:
    """The headline and one line per offender, cut after NUM_SHOWN with a count of the others."""
    lines = list(lines)
    shown = [f"{headline}:", *(f"  {line}" for line in lines[:NUM_SHOWN])]
    if len(lines) > NUM_SHOWN:
        shown.append(f"  ... and {len(lines) - NUM_SHOWN} more")
    return "\n".join(shown)
