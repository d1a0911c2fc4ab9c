"""The pipeline module: what mgds' DiskCache is to a pipeline, over a store of content-addressed entries."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from latentcache.errors import EntryDamagedError, EntryMissingError, PipelineError
from latentcache.fingerprint import canonical_json
from latentcache.integrations.onetrainer.filling import (
    Filling,
    as_found,
    current_device,
    items_error,
    set_current_device,
)
from latentcache.integrations.onetrainer.items import Item, Items
from latentcache.integrations.onetrainer.sources import FileDigests, signature_of
from latentcache.integrations.onetrainer.upstream import walk
from latentcache.integrations.onetrainer.values import read_values, tensors_of, values_of
from latentcache.integrations.onetrainer.variations import GroupNames, Groups, make_groups
from latentcache.store.disk import DiskStore
from latentcache.store.memo import Memo
from latentcache.types import Entry, Record
from latentcache.validation.interrupts import uninterrupted

SPLIT, AGGREGATE = "split", "aggregate"
FOLDER = "latentcache"
"""The store's folder in `cache_dir`, where files of DiskCache may lie."""


def _nothing() -> None:
    """In place of a function that was not given."""


class CacheModule:
    """A drop-in for `mgds.pipelineModules.DiskCache`. `onetrainer.LatentCacheModule` joins it to mgds' base classes.

    The parameters up to `before_cache_fun` are those of DiskCache. `after_cache_fun` is called after encoding,
    whatever ends it. `provenance` states what upstream modules are that cannot be described (JSON; see
    `description.describe`). `source_path_in_name` gives paths of files that count by their bytes, and is never stored.
    The values of `source_value_in_names` count as they are. `should_stop` is asked between items.
    """

    # From mgds: `pipeline`, `current_variation`, `_state`, `_get_previous_item`, `_get_previous_length`.
    pipeline: Any
    current_variation: int
    _state: Any
    _get_previous_item: Callable[[int, str, int], Any]
    _get_previous_length: Callable[[str], int]

    def __init__(  # the signature that trainers call
        self,
        cache_dir: str,
        split_names: list[str] | None = None,
        aggregate_names: list[str] | None = None,
        variations_in_name: str | None = None,
        balancing_in_name: str | None = None,
        balancing_strategy_in_name: str | None = None,
        variations_group_in_name: str | list[str] | None = None,
        group_enabled_in_name: str | None = None,
        before_cache_fun: Callable[[], None] | None = None,
        *,
        after_cache_fun: Callable[[], None] | None = None,
        provenance: Mapping[str, Any] | None = None,
        source_path_in_name: str | None = "image_path",
        source_value_in_names: Sequence[str] = (),
        should_stop: Callable[[], bool] | None = None,
    ):
        super().__init__()
        self.cache_dir = cache_dir
        self.split_names = list(split_names or ())
        self.aggregate_names = list(aggregate_names or ())
        group = variations_group_in_name or ()
        self._group_names = GroupNames(
            variations_in_name,
            balancing_in_name,
            balancing_strategy_in_name,
            (group,) if isinstance(group, str) else tuple(group),
            group_enabled_in_name,
        )
        self.before_cache_fun = before_cache_fun or _nothing
        self.after_cache_fun = after_cache_fun or _nothing
        self.should_stop = should_stop or (lambda: False)
        self.provenance = dict(provenance or {})
        self.source_path_in_name = source_path_in_name
        self.source_value_in_names = tuple(source_value_in_names)
        self._check()
        self._groups: Groups | None = None
        self._store: DiskStore | None = None
        self._memo: Memo | None = None
        self._outputs: list[tuple[int, int]] = []
        self._items: dict[tuple[int, int], Item] = {}
        self._rows: dict[str, Any] = {}
        self._aggregates: dict[str, dict[str, Any]] = {}
        self._live: dict[tuple[int, int], dict[str, Any]] = {}

    def _check(self) -> None:
        if not self.split_names + self.aggregate_names:
            raise PipelineError("split_names and aggregate_names are both empty: there is nothing to cache")
        try:
            canonical_json(self.provenance)
        except (TypeError, ValueError) as error:
            raise PipelineError(f"provenance must be JSON: {error}") from error

    # What mgds asks of a module

    def length(self) -> int:
        if self._groups is None:
            return self._get_previous_length((self.split_names + self.aggregate_names)[0])
        return len(self._groups)

    def get_inputs(self) -> list[str]:
        asked = (*self._group_names.heads(), *self.source_value_in_names)
        return list(dict.fromkeys([*self.split_names, *self.aggregate_names, *asked]))

    def get_outputs(self) -> list[str]:
        return self.split_names + self.aggregate_names

    def start(self, out_variation: int) -> None:
        """Plan this epoch, encode what is missing of it, and read the aggregate values.

        `before_cache_fun` is called once if something is missing, and `after_cache_fun` after it, also after an error.
        Raises ItemsError for items that cannot be cached when all others are stored, and PipelineStopped.
        """
        store = self._open()
        items, failures = self._plan(out_variation)
        missing = self._missing(store, items.values())
        if missing:
            self._fill(store, missing)
            left = self._missing(store, items.values())
            if left:
                raise PipelineError(f"{len(left)} items are missing after they were stored, the first: {left[0].name}")
        if failures:
            raise items_error(failures, len(items) + len(failures)) from failures[0][1]
        self._items = items
        wanted = {key for item in items.values() for key in item.keys.values()}
        self._rows = {key: rows for key, rows in self._rows.items() if key in wanted}
        self._aggregates = {key: values for key, values in self._aggregates.items() if key in wanted}

    def get_item(self, index: int, requested_name: str | None = None) -> dict[str, Any]:
        """The values of an output of this epoch, tensors on the pipeline's device; never None.

        With a split name all split names, with an aggregate name all of these, else all. StoreError where an entry was
        lost or found damaged since `start`.
        """
        place = self._outputs[index]
        item = self._items[place]
        device = self.pipeline.device
        values = dict(self._live[place])
        if requested_name is None or requested_name in self.aggregate_names:
            found = self._aggregates.get(item.keys.get(AGGREGATE, ""), {})
            values |= {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in found.items()}
        if SPLIT in item.keys and (requested_name is None or requested_name in self.split_names):
            values |= self._read(item)
        return values

    # Inside

    def _open(self) -> DiskStore:
        if self._store is None:
            path = Path(self.cache_dir).expanduser() / FOLDER
            self._store = DiskStore(path)
            self._memo = Memo(self._store.path / "memo")
        return self._store

    def _plan(self, out_variation: int) -> tuple[dict[tuple[int, int], Item], list[tuple[str, Exception]]]:
        """The items of this epoch, and those whose files or texts cannot be read, with the reason."""
        if self._groups is None:
            # Values of concepts are asked at variation 0, as mgds does.
            num_items = self._get_previous_length(self._group_names.variations or self.get_outputs()[0])
            self._groups = make_groups(self._group_names, num_items, self._puller(0))
        self._outputs = self._groups.inputs(out_variation)
        upstream = walk(
            self, self.get_outputs(), source_path=self.source_path_in_name, source_values=self.source_value_in_names
        )
        if not upstream.files and not upstream.texts:
            raise PipelineError(
                f"what {', '.join(self.get_outputs())} are made from cannot be told: no module before the cache asks for "
                f"a file or a text. Name the text in source_value_in_names, or the path in source_path_in_name "
                f"(now {self.source_path_in_name!r})"
            )
        assert self._memo is not None
        held = {
            SPLIT: [name for name in self.split_names if name not in upstream.live],
            AGGREGATE: [name for name in self.aggregate_names if name not in upstream.live],
        }
        maker = Items(upstream, held, self.provenance, FileDigests(self._memo))
        self._maker, self._held = maker, held
        items: dict[tuple[int, int], Item] = {}
        failures: list[tuple[str, Exception]] = []
        self._live = {}
        for place in dict.fromkeys(self._outputs):
            try:
                self._live[place] = {name: self._get_previous_item(*self._at(place, name)) for name in upstream.live}
                items[place] = maker.item(*place)
            except (OSError, RuntimeError, ValueError) as error:
                named = next(iter(self._live.get(place, {}).values()), f"item {place[1]}")
                failures.append((str(named), error))
        self._memo.flush()
        return items, failures

    def _at(self, place: tuple[int, int], name: str) -> tuple[int, str, int]:
        return place[0], name, place[1]

    def _puller(self, variation: int) -> Callable[[str, int], Any]:
        """Asks for names with dots, as mgds does, but for the part before the first dot once an item only."""
        last: dict[str, tuple[int, Any]] = {}

        def pull(name: str, index: int) -> Any:
            head, _, rest = name.partition(".")
            if head not in last or last[head][0] != index:
                last[head] = index, self._get_previous_item(variation, head, index)
            value = last[head][1]
            for part in rest.split(".") if rest else ():
                if part not in value:
                    return None
                value = value[part]
            return value

        return pull

    def _missing(self, store: DiskStore, items: Collection[Item]) -> list[Item]:
        """Items that lack an entry, one for each key. Aggregate values that are there are read."""
        there = store.find({key for item in items for key in item.keys.values()})
        wanted = {item.keys[AGGREGATE] for item in items if AGGREGATE in item.keys} & there
        self._aggregates |= read_values(store, sorted(wanted - self._aggregates.keys()))
        there -= wanted - self._aggregates.keys()  # found damaged
        missing = {tuple(item.keys.values()): item for item in items if not there.issuperset(item.keys.values())}
        return list(missing.values())

    def _fill(self, store: DiskStore, missing: Sequence[Item]) -> None:
        device = torch.device(self.pipeline.device)
        number = current_device(device)

        def encode(item: Item) -> list[Entry]:
            set_current_device(device, number)
            return self._encode(item)

        filling = Filling(store, self._state.executor, encode, self.should_stop)
        with as_found():
            try:
                self.before_cache_fun()
                filling.run(missing)
            finally:
                with uninterrupted():
                    self.after_cache_fun()

    def _encode(self, item: Item) -> list[Entry]:
        """In a thread of the pipeline: the item's entries, from the modules before this one."""
        with torch.no_grad():
            values = {
                part: {name: self._get_previous_item(item.variation, name, item.index) for name in self._held[part]}
                for part in item.keys
            }
        changed = [path for path, signature in item.files if signature_of(path) != signature]
        if changed:
            raise PipelineError(f"{changed[0]} changed while it was encoded; the next start reads it again")
        provenance = self._maker.provenance(item)
        return [
            Entry(Record(key, self._maker.kind, item.identities[part], provenance), tensors_of(values[part]))
            for part, key in item.keys.items()
        ]

    def _read(self, item: Item) -> dict[str, Any]:
        store, key = self._open(), item.keys[SPLIT]
        try:
            rows = self._rows.get(key)
            if rows is None:
                rows = self._rows[key] = store.resolve([key])
            batch = store.read_rows(rows)
        except (EntryDamagedError, EntryMissingError) as error:
            error.add_note(f"{item.name}: start the trainer again, and it is encoded again")
            raise
        device = self.pipeline.device
        values = values_of({name: rows[0] for name, rows in batch.items()})
        return {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in values.items()}
