"""Entries that could not be made, and the manifests that list them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from latentcache.dataset.manifest import Manifest, Row
from latentcache.precache.scratch import Memo
from latentcache.precache.shard import Shard
from latentcache.precache.workspace import Workspace
from latentcache.types import Refusal

logger = logging.getLogger("latentcache")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an entry could not be made. `reason` is a `types.RefusalReason`; `path` is the image that was tried."""

    reason: str
    detail: str
    path: str | None = None

    def refusal(self, row: Row) -> Refusal:
        """The refusal of a sample that needs the entry. Samples with equal images share one, made from one of them."""
        other = self.path is not None and self.path != row.path
        return Refusal(
            row.sample_id,
            row.path,
            self.reason,
            f"the same image at {self.path}: {self.detail}" if other else self.detail,
        )


class Failures:
    """Failures by key. Each rank sees only its own, and reads those of the others from the memo."""

    def __init__(self, shard: Shard):
        self._shard = shard
        self._by_key: dict[str, Failure] = {}

    def add(self, key: str, failure: Failure) -> None:
        """Note that the entry `key` could not be made."""
        self._by_key[key] = failure

    def marked(self, row: Row) -> Row:
        """The row, refused if one of its entries could not be made."""
        failure = next((self._by_key[key] for key in row.keys() if key in self._by_key), None)
        return row if failure is None else replace(row, refusal=failure.refusal(row))

    def refusals(self, manifests: Iterable[Manifest]) -> Iterator[Refusal]:
        """The samples that are refused because of these failures, beyond those that the plan refused."""
        for manifest in manifests:
            for row in manifest.rows.values():
                marked = self.marked(row)
                if marked is not row and marked.refusal is not None:
                    yield marked.refusal

    def forget(self, memo: Memo, keys: Iterable[str]) -> None:
        """Remove what earlier runs noted of these keys: this rank is about to try them again."""
        for key in keys:
            if self._name(key) in memo:
                del memo[self._name(key)]

    def share(self, memo: Memo) -> None:
        """Write this rank's failures where the other ranks read them."""
        for key, failure in self._by_key.items():
            memo[self._name(key)] = json.dumps([failure.reason, failure.detail, failure.path])
        memo.flush()

    def read_others(self, memo: Memo, keys: set[str]) -> None:
        """Add what other ranks wrote of these keys."""
        names = {self._name(key): key for key in keys}
        for name, text in memo.reread(names).items():
            self.add(names[name], Failure(*json.loads(text)))

    def _name(self, key: str) -> str:
        # The name holds the launch, if the launcher names it: failures of an older launch do not count.
        return f"refused/1 {self._shard.launch} {key}"


def write_manifests(workspace: Workspace, manifests: Sequence[Manifest], failures: Failures, shard: Shard) -> list[str]:
    """Replace the manifests, and return the names of those that had to wait.

    With several ranks a manifest waits until each of its entries was stored or refused: the rank that finishes last
    finds them all there. A single process has tried all of them.
    """
    waiting = []
    shared = workspace.memo if shard.world_size > 1 and isinstance(workspace.memo, Memo) else None
    if shared is not None:
        failures.share(shared)
    for manifest in manifests:
        absent: set[str] = set()
        if shared is not None:
            needed = _needed(manifest.rows.values())
            absent = needed - workspace.store.find(needed)
            failures.read_others(shared, absent)
        rows = {row.sample_id: failures.marked(row) for row in manifest.rows.values()}
        if absent and (absent := absent & _needed(rows.values())):
            waiting.append(manifest.name)
            logger.info(
                "manifest %s waits for %d entries of other ranks; if no rank is running, run precache again",
                manifest.name,
                len(absent),
            )
            continue
        workspace.manifests.write(replace(manifest, rows=rows))
    return waiting


def _needed(rows: Iterable[Row]) -> set[str]:
    """The keys of the samples that are not refused."""
    return {key for row in rows if row.refusal is None for key in row.keys()}
