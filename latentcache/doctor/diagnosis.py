"""The result of a check: findings, each with its level, its subject, what was found, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

Level: TypeAlias = Literal["ok", "note", "warning", "error"]
"""`note`: worth knowing. `warning`: works, with a drawback. `error`: fails, or will fail."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `remedy` is empty if there is nothing to do."""

    level: Level
    subject: str
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Findings in order, and the facts behind them by name, as JSON values."""

    findings: tuple[Finding, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __add__(self, other: Diagnosis) -> Diagnosis:
        return Diagnosis(self.findings + other.findings, {**self.facts, **other.facts})

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return all(finding.level != "error" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """`{"ok", "findings": [{"level", "subject", "found", "remedy"}, ...]}` plus the facts."""
        return {"ok": self.ok, "findings": [asdict(finding) for finding in self.findings], **self.facts}

    def to_text(self) -> str:
        """A table with one line per finding, its remedy below."""
        width = max((len(finding.subject) for finding in self.findings), default=0)
        lines = []
        for finding in self.findings:
            first, *others = finding.found.splitlines() or [""]
            lines.append(f"{finding.level:<7}  {finding.subject:<{width}}  {first}".rstrip())
            lines += [f"{'':<7}  {'':<{width}}  {line}" for line in others]
            if finding.remedy:
                lines.append(f"{'':<7}  {'':<{width}}  -> {finding.remedy}")
        counts = ", ".join(
            f"{number} {level}{'s' if number != 1 else ''}"
            for level in ("error", "warning", "note")
            if (number := sum(finding.level == level for finding in self.findings))
        )
        return "\n".join([*lines, counts or "nothing to do"])
