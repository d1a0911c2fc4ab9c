"""The pipeline module that replaces mgds' DiskCache, on top of a store of content-addressed entries."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from latentcache.errors import (
    EntryDamagedError,
    EntryMissingError,
    ItemsError,
    PipelineError,
    add_note,
)
from latentcache.identity import canonical_json
from latentcache.integrations.onetrainer.items import (
    GroupNames,
    Groups,
    Item,
    ItemReader,
    signature_of,
)
from latentcache.integrations.onetrainer.upstream import PATHS, TEXTS, Upstream
from latentcache.integrations.onetrainer.values import (
    PLAIN_FIELD,
    Failure,
    ItemEncoding,
    fields_of,
    on_current_device,
    own_random_streams,
    plain_values,
    values_of,
)
from latentcache.precache.memo import Memo
from latentcache.store.batch import own_fields
from latentcache.store.disk import DiskStore
from latentcache.types import Entry, Record
from latentcache.utils.durable_files import expanded
from latentcache.utils.signals import uninterrupted

logger = logging.getLogger("latentcache")

_MEMO_NAME = "onetrainer-values/2 "
FOLDER = "latentcache"
"""The store's folder in `cache_dir`, next to files that DiskCache may have there."""


def _nothing() -> None:
    """The default callback."""


class CacheModule:
    """A drop-in for `mgds.pipelineModules.DiskCache`. `onetrainer.LatentCacheModule` adds mgds' base classes.

    The parameters up to `before_cache_fun` are those of DiskCache. `after_cache_fun` is called after encoding, also
    after an error. `provenance` (JSON; see `description.describe`) states what cannot be read from upstream modules.
    `should_stop` is called between items.
    """

    # Provided by mgds' base classes:
    pipeline: Any
    current_variation: int
    _state: Any
    _get_previous_item: Callable[[int, str, int], Any]
    _get_previous_length: Callable[[str], int]

    def __init__(  # noqa: PLR0913 -- the signature of mgds' DiskCache, which trainers call
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
        if not self.split_names + self.aggregate_names:
            raise PipelineError("split_names and aggregate_names are both empty: name the values to cache")
        try:
            canonical_json(self.provenance)
        except (TypeError, ValueError) as error:
            raise PipelineError(f"provenance must be JSON: {error}") from error
        self._groups: Groups | None = None
        self._outputs: list[tuple[int, int]] = []
        self._items: dict[tuple[int, int], tuple[str, Mapping[str, Any]]] = {}

    # The interface of mgds' modules

    def length(self) -> int:
        """Outputs per epoch; before the first `start`, the number of inputs."""
        if self._groups is None:
            return self._get_previous_length((self.split_names + self.aggregate_names)[0])
        return len(self._groups)

    def get_inputs(self) -> list[str]:
        """The names that this module requests."""
        return list(dict.fromkeys([*self.get_outputs(), *self._group_names.names()]))

    def get_outputs(self) -> list[str]:
        """The names whose values this module provides."""
        return self.split_names + self.aggregate_names

    def start(self, out_variation: int) -> None:
        """Plan this epoch and encode its missing items.

        If any is missing, `before_cache_fun` is called once before, and `after_cache_fun` after, also after an error.
        Raises ItemsError for items that cannot be cached, once all others are stored; PipelineStopped; and
        ReadOnlyError for a cache that cannot be written.
        """
        reader = self._item_reader()
        outputs = self._grouped().inputs(out_variation)
        items, failures = self._plan(reader, outputs)
        self._memo.flush()
        missing = self._missing(items.values())
        detail = ""
        if missing:
            encoding = self._encode_missing(reader, missing)
            failures += encoding.failures
            left = self._missing(items.values())
            if left and not failures:
                raise PipelineError(f"{len(left)} items are missing after they were stored, the first: {left[0].name}")
            detail = ", and the rest was not tried" if encoding.is_hopeless else ""
        self._memo.flush()
        if failures:
            lines = tuple(f"{name}: {type(error).__name__}: {error}" for name, error in failures)
            raise ItemsError(lines, len(set(outputs)), detail) from failures[0][1]
        self._outputs = outputs
        # Only the key and the passed values are kept: there may be a million items.
        self._items = {place: (item.key, item.passed) for place, item in items.items()}

    def get_item(self, index: int, requested_name: str | None = None) -> dict[str, Any]:
        """The values of one output of this epoch, tensors on the pipeline's device.

        The whole entry is read, unless `requested_name` is a plain value. Raises StoreError for an entry that was lost
        or damaged since `start`. Only the next `start` encodes it again: during an epoch the trainer uses the model.
        """
        place = self._outputs[index]
        key, passed = self._items[place]
        values = dict(passed)
        try:
            if requested_name in self.aggregate_names and requested_name not in values:
                values |= self._plain_values(key)
            if requested_name is None or requested_name not in values:
                values |= self._read(key)
        except (EntryDamagedError, EntryMissingError) as error:
            name = next(iter(passed.values()), f"item {place[1]}")
            add_note(error, f"{name}: start the training again from its last backup. It encodes this item again.")
            raise
        return values

    # Internals

    @cached_property
    def _store(self) -> DiskStore:
        return DiskStore(expanded(self.cache_dir) / FOLDER)

    @cached_property
    def _memo(self) -> Memo:
        return Memo(self._store.path / "memo")

    def _item_reader(self) -> ItemReader:
        names = self.get_outputs()
        upstream = Upstream(self, names)
        if not upstream.files and not upstream.texts:
            raise PipelineError(
                f"the source of {', '.join(names)} is unknown: no mgds module before the cache provides a path or a "
                f"text ({', '.join(sorted(PATHS.keys() | TEXTS))})"
            )
        return ItemReader(upstream, names, self.provenance, self._memo)

    def _grouped(self) -> Groups:
        if self._groups is None:
            num_items = self._get_previous_length(self._group_names.variations or self.get_outputs()[0])
            # mgds too takes the concepts' values from variation 0.
            self._groups = Groups(self._group_names, num_items, partial(self._get_previous_item, 0))
        return self._groups

    def _plan(
        self, reader: ItemReader, outputs: Sequence[tuple[int, int]]
    ) -> tuple[dict[tuple[int, int], Item], list[Failure]]:
        """The items of an epoch, and the failures of those whose files or texts cannot be read."""
        items: dict[tuple[int, int], Item] = {}
        failures: list[Failure] = []
        for place in dict.fromkeys(outputs):
            try:
                items[place] = reader.read(*place)
            except (OSError, RuntimeError, ValueError) as error:
                failures.append((reader.name_of(*place), error))
        return items, failures

    def _missing(self, items: Collection[Item]) -> list[Item]:
        """Items without an entry, one for each key."""
        by_key = {item.key: item for item in items}
        stored = self._store.find(by_key)
        return [item for key, item in by_key.items() if key not in stored]

    def _encode_missing(self, reader: ItemReader, missing: Sequence[Item]) -> ItemEncoding:
        encode = on_current_device(torch.device(self.pipeline.device), partial(self._encode, reader))
        tidy = getattr(self, "_torch_gc", _nothing)  # mgds' modules have it
        encoding = ItemEncoding(self._store, self._state.executor, encode, self.should_stop, tidy)
        # Wait for a compaction by another process instead of ending the training.
        with self._store.lock("caching", shared=True, wait=True), own_random_streams(missing):
            try:
                self.before_cache_fun()
                encoding.run(missing)
            finally:
                with uninterrupted():
                    self.after_cache_fun()
        return encoding

    def _encode(self, reader: ItemReader, item: Item) -> Entry:
        """Compute the item's entry with the modules before this one, in a thread of the pipeline."""
        with torch.no_grad():
            names = [name for name in self.get_outputs() if name not in item.passed]
            values = {name: self._get_previous_item(item.variation, name, item.index) for name in names}
        # What is requested again in this thread is what was encoded: modules keep the values of their last item.
        texts = zip(item.texts, reader.texts(item.variation, item.index), strict=True)
        changed = [path for path, signature in item.files if signature_of(path) != signature]
        changed += [repr(before) for before, now in texts if now != before]
        if changed:
            raise PipelineError(f"{changed[0]} changed before it was encoded; the next start encodes it")
        record = Record(item.key, reader.kind, item.identity, reader.provenance(item))
        fields = fields_of(values)
        if PLAIN_FIELD in fields:
            self._note(item.key, fields[PLAIN_FIELD].numpy().tobytes())
        return Entry(record, fields)

    def _plain_values(self, key: str) -> dict[str, Any]:
        """The values of an entry that are not tensors, from the memo if possible: all items' are requested at once."""
        text = self._memo.get(_MEMO_NAME + key)
        if text is None:
            [row] = self._store.rows([key])
            data = dict(zip(row.description, row.arrays, strict=True)).get(PLAIN_FIELD)
            text = self._note(key, b"{}" if data is None else data.tobytes())
        return plain_values(text)

    def _note(self, key: str, data: bytes) -> str:
        self._memo[_MEMO_NAME + key] = text = data.decode().rstrip()
        return text

    def _read(self, key: str) -> dict[str, Any]:
        tensors = own_fields(self._store.rows([key])[0])
        device = torch.device(self.pipeline.device)
        if device.type != "cpu":
            plain = {PLAIN_FIELD: tensors.pop(PLAIN_FIELD)} if PLAIN_FIELD in tensors else {}
            tensors = {name: tensor.to(device) for name, tensor in tensors.items()} | plain
        return values_of(tensors)
