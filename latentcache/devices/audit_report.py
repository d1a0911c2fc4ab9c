"""The report of an audit of devices: every offender by name, as text, as JSON and as one error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from latentcache.devices.tensor_location import AuditKind
from latentcache.errors import DeviceMismatchError, listed


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One offender. `name` is dotted and starts below `part`; `found` and `expected` are devices, dtypes or modes."""

    part: str
    name: str
    kind: AuditKind
    shape: tuple[int, ...] | None
    found: str
    expected: str
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
        """One line: the path, the shape, the kind, what it is, what it should be, and why."""
        shape = "" if self.shape is None else f" {list(self.shape)}"
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.path}{shape} ({self.kind}) is {self.found}, expected {self.expected}{reason}"


@dataclass(frozen=True, slots=True)
class AuditReport:
    """All findings of one audit, the number of tensors that it looked at, and notes on what it left alone and why.

    `devices` holds the device that each part is meant to be on, as given or inferred.
    """

    findings: tuple[AuditFinding, ...]
    notes: tuple[str, ...] = ()
    devices: tuple[tuple[str, str], ...] = ()
    num_tensors: int = 0

    @property
    def errors(self) -> tuple[AuditFinding, ...]:
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
        """DeviceMismatchError that lists the errors, if there are any; its fields are those of the first."""
        if self.ok:
            return
        first = self.errors[0]
        raise DeviceMismatchError(
            f"{len(self.errors)} tensors or flags are not as declared:{listed(e.to_text() for e in self.errors)}",
            module=first.part,
            argument=first.name,
            found=first.found,
            expected=first.expected,
        )
