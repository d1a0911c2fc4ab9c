"""Entries that could not be made, and the manifests that say so."""

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
class Fault:
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


class Faults:
    """Faults by key. Ranks tell each other theirs through the memo, as each one sees only its own."""

    def __init__(self, shard: Shard):
        self._shard = shard
        self._by_key: dict[str, Fault] = {}

    def add(self, key: str, fault: Fault) -> None:
        self._by_key[key] = fault

    def marked(self, row: Row) -> Row:
        """The row, refused if one of its entries could not be made."""
        fault = next((self._by_key[key] for key in row.keys() if key in self._by_key), None)
        return row if fault is None else replace(row, refusal=fault.refusal(row))

    def refusals(self, manifests: Iterable[Manifest]) -> Iterator[Refusal]:
        """The samples that these faults cost, beyond those that the plan refused."""
        for manifest in manifests:
            for row in manifest.rows.values():
                marked = self.marked(row)
                if marked is not row and marked.refusal is not None:
                    yield marked.refusal

    def begin(self, memo: Memo, keys: Iterable[str]) -> None:
        """Take back what was told of these keys in earlier runs: this rank is about to try them again."""
        for key in keys:
            if self._name(key) in memo:
                del memo[self._name(key)]

    def share(self, memo: Memo) -> None:
        """Tell the other ranks."""
        for key, fault in self._by_key.items():
            memo[self._name(key)] = json.dumps([fault.reason, fault.detail, fault.path])
        memo.flush()

    def learn(self, memo: Memo, keys: set[str]) -> None:
        """Take over what other ranks told of these keys."""
        names = {self._name(key): key for key in keys}
        for name, told in memo.reread(names).items():
            self.add(names[name], Fault(*json.loads(told)))

    def _name(self, key: str) -> str:
        # The launch is part of it where the launcher names it: what an older launch refused is no news.
        return f"refused/1 {self._shard.launch} {key}"


def write_manifests(workspace: Workspace, manifests: Sequence[Manifest], faults: Faults, shard: Shard) -> list[str]:
    """Replace the manifests, and return the names of those that had to wait.

    With several ranks a manifest waits until each of its entries was stored or refused: the rank that finishes last
    finds them all there. A single process has seen to all of them.
    """
    waiting = []
    told = workspace.memo if shard.world_size > 1 and isinstance(workspace.memo, Memo) else None
    if told is not None:
        faults.share(told)
    for manifest in manifests:
        absent: set[str] = set()
        if told is not None:
            wanted = _needed(manifest.rows.values())
            absent = wanted - workspace.store.find(wanted)
            faults.learn(told, absent)
        rows = {row.sample_id: faults.marked(row) for row in manifest.rows.values()}
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
