"""Entries that could not be made, and the manifests that say so."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace

from latentcache.dataset.manifest import Manifest, Row
from latentcache.precache.workspace import Workspace
from latentcache.store.memo import Memo
from latentcache.types import Refusal

logger = logging.getLogger("latentcache")


class Faults:
    """Why keys have no entry. Ranks tell each other through the memo, as each sees only its own."""

    def __init__(self) -> None:
        self._by_key: dict[str, tuple[str, str]] = {}

    def add(self, key: str, reason: str, detail: str) -> None:
        """`reason` is a `types.RefusalReason`."""
        self._by_key[key] = (reason, detail)

    def marked(self, row: Row) -> Row:
        """The row, refused if one of its entries could not be made."""
        fault = next((self._by_key[key] for key in row.keys() if key in self._by_key), None)
        return row if fault is None else replace(row, refusal=Refusal(row.sample_id, row.path, *fault))

    def refusals(self, manifests: list[Manifest]) -> Iterator[Refusal]:
        """The samples that these faults cost, beyond those that the plan refused."""
        for manifest in manifests:
            for row in manifest.rows.values():
                marked = self.marked(row)
                if marked is not row and marked.refusal is not None:
                    yield marked.refusal

    def share(self, memo: Memo) -> None:
        """Tell the other ranks."""
        memo.update({_name(key): json.dumps(fault) for key, fault in self._by_key.items()})
        memo.flush()

    def learn(self, memo: Memo, keys: set[str]) -> None:
        """Take over what other ranks told of these keys."""
        names = {_name(key): key for key in keys}
        for name, told in memo.reread(names).items():
            reason, detail = json.loads(told)
            self.add(names[name], reason, detail)


def write_manifests(workspace: Workspace, manifests: list[Manifest], faults: Faults) -> None:
    """Replace the manifests whose entries were all stored or refused.

    With several ranks the last one to finish finds everything there; the others leave the manifests as they were.
    """
    if isinstance(workspace.memo, Memo):
        faults.share(workspace.memo)
    for manifest in manifests:
        wanted = {key for row in manifest.rows.values() if row.refusal is None for key in row.keys()}
        absent = wanted - workspace.store.find(wanted)
        if isinstance(workspace.memo, Memo):
            faults.learn(workspace.memo, absent)
        rows = {row.sample_id: faults.marked(row) for row in manifest.rows.values()}
        whole = {key for row in rows.values() if row.refusal is None for key in row.keys()}
        if absent & whole:
            logger.info(
                "manifest %s: left to the ranks that are still encoding its other %d entries",
                manifest.name,
                len(absent & whole),
            )
            continue
        with workspace.manifests.lock(manifest.name):
            workspace.manifests.write(replace(manifest, rows=rows))


def _name(key: str) -> str:
    return f"refused {key}"
