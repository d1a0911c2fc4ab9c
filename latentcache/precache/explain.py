"""Why one sample is a hit or a miss."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from latentcache.config import Config
from latentcache.dataset.manifest import Row
from latentcache.errors import SampleError
from latentcache.models.model_loader import Models
from latentcache.precache.encodings import choose_encodings, load_models
from latentcache.precache.miss_reasons import REFUSED
from latentcache.precache.planner import make_plan
from latentcache.precache.workspace import open_workspace


@dataclass(frozen=True, slots=True)
class EntryStatus:
    """One entry of a sample. `reason` says why it is a miss, and is None for a hit."""

    kind: str
    key: str
    what: str
    reason: str | None

    def to_json(self) -> dict[str, Any]:
        """The status as a JSON object, with `status` hit or miss."""
        return {
            "kind": self.kind,
            "key": self.key,
            "what": self.what,
            "status": "hit" if self.reason is None else "miss",
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Explanation:
    """A sample as the next precache run would see it, once per dataset that it is in."""

    sample_id: str
    rows: tuple[tuple[str, Row, tuple[EntryStatus, ...]], ...]

    @property
    def is_refused(self) -> bool:
        """Whether the plan refuses the sample, or the last run did, which decodes more than a header."""
        return any(
            row.refusal is not None or any((entry.reason or "").startswith(REFUSED) for entry in entries)
            for _, row, entries in self.rows
        )

    def to_json(self) -> dict[str, Any]:
        """The explanation as a JSON object."""
        datasets = [
            {
                "dataset": name,
                "path": row.path,
                "source": row.source,
                "refusal": None if row.refusal is None else row.refusal.to_json(),
                "entries": [entry.to_json() for entry in entries],
            }
            for name, row, entries in self.rows
        ]
        return {"sample_id": self.sample_id, "datasets": datasets}

    def to_text(self) -> str:
        """The explanation for people, a line for each entry."""
        lines = []
        for name, row, entries in self.rows:
            lines.append(f"{self.sample_id} in {name}: {row.path}")
            if row.refusal is not None:
                lines.append(f"  refused ({row.refusal.reason}): {row.refusal.detail}")
            for entry in entries:
                verdict = "hit" if entry.reason is None else f"miss: {entry.reason}"
                lines.append(f"  {entry.kind:<5} {entry.key[:12]}  {verdict}  ({entry.what})")
        return "\n".join(lines)


def explain(config: Config, sample_id: str, *, models: Models | None = None) -> Explanation:
    """What the next run would do with this sample, and why. Writes nothing.

    Raises SampleError, naming the nearest sample_id, when no dataset of the config has it.
    """
    with open_workspace(config.cache, read_only=True) as workspace:
        models = models or load_models(config.model, workspace.memo)
        encodings = choose_encodings(config, models, workspace.memo)
        plan = make_plan(config, workspace, encodings, only=frozenset([sample_id]))
        rows = tuple(
            (manifest.name, row, _entries(row, plan.reasons))
            for manifest in plan.manifests
            for row in manifest.rows.values()
            if row.sample_id == sample_id
        )
        if not rows:
            known = (manifest for name in workspace.manifests.names() if (manifest := workspace.manifests.read(name)))
            ids = [row_id for manifest in known if manifest.role != "prompts" for row_id in manifest.rows]
            near = difflib.get_close_matches(sample_id, ids, n=1)
            names = ", ".join(dataset.name for dataset in config.datasets)
            remedy = f"did you mean {near[0]!r}?" if near else "a sample_id is a path relative to the dataset's folder"
            raise SampleError(sample_id, f"is in none of the datasets {names}", remedy)
        return Explanation(sample_id, rows)


def _entries(row: Row, reasons: dict[str, str]) -> tuple[EntryStatus, ...]:
    images = [
        EntryStatus("image", ref.key, f"{ref.geometry.target_size}{' flipped' if ref.geometry.flip else ''}", reason)
        for ref in row.images
        for reason in (reasons.get(ref.key),)
    ]
    captions = [EntryStatus("text", ref.key, repr(ref.text), reasons.get(ref.key)) for ref in row.captions]
    return (*images, *captions)
