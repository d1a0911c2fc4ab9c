"""The entries that a run could not make, and the samples that are refused for that."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import astuple

from latentcache.dataset.manifest import Manifest
from latentcache.dataset.row_table import Row
from latentcache.precache.report import Failure
from latentcache.precache.tasks import Shard
from latentcache.precache.workspace import Workspace
from latentcache.types import Refusal
from latentcache.utils.json_document import recalled


class Failures:
    """Entries that could not be made, by key. With several ranks each shares its own with the others by the memo."""

    def __init__(self, shard: Shard, workspace: Workspace):
        self._shared = workspace.memo if shard.world_size > 1 and workspace.memo.is_shared else None
        """Where other ranks' failures are; None for a single process."""
        self._launch = shard.launch
        self._by_key: dict[str, Failure] = {}

    def add(self, key: str, failure: Failure) -> None:
        """Note that the entry `key` could not be made."""
        self._by_key[key] = failure

    def refusal(self, row: Row) -> Refusal | None:
        """The refusal of a sample that needs one of the entries. Samples with equal images share one."""
        key = next((key for key in row.keys() if key in self._by_key), None)
        if key is None:
            return None
        failure = self._by_key[key]
        detail, path = failure.detail, row.path
        own = (*(ref.key for ref in row.images), *(ref.key for ref in row.captions))
        if key not in own:
            name = next(part.role for part in row.parts if part.key == key)
            detail, path = f"{name}: {detail}", failure.path or row.path
        elif failure.path not in (None, row.path):
            detail = f"the same image at {failure.path}: {detail}"
        return Refusal(row.sample_id, path, failure.reason, detail)

    def refusals(self, manifest: Manifest) -> dict[int, Refusal]:
        """The refusals of a manifest's samples, by the numbers of their rows."""
        numbers = manifest.rows.rows_with(self._by_key) if self._by_key else ()
        found = ((number, self.refusal(manifest.rows.row(number))) for number in numbers)
        return {number: refusal for number, refusal in found if refusal is not None}

    def forget(self, keys: Iterable[str]) -> None:
        """Remove what earlier runs noted of these keys: this rank is about to try them again."""
        if self._shared is not None:
            for name in self._shared.get_many(map(self._name, keys)):
                del self._shared[name]

    def share(self) -> None:
        """Write this rank's failures where the other ranks read them."""
        if self._shared is not None:
            # Not by pydantic, whose JSON has no paths with a broken encoding.
            self._shared.update({self._name(key): json.dumps(astuple(each)) for key, each in self._by_key.items()})
            self._shared.flush()

    def read_others(self, keys: Iterable[str]) -> None:
        """Add what other ranks wrote of these keys."""
        names = {self._name(key): key for key in keys}
        written = {} if self._shared is None else self._shared.get_many(names)
        for name in written:
            if (failure := recalled(written, name, lambda text: Failure(*json.loads(text)))) is not None:
                self.add(names[name], failure)

    def _name(self, key: str) -> str:
        # The name holds the launch, if the launcher names it: failures of an older launch do not count.
        return f"refused/1 {self._launch} {key}"
