"""Batches of one bucket each: their order in an epoch, each rank's share, and the position for a resume.

Every random choice of the training data depends only on its purpose, the seed, the epoch and the position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from blake3 import blake3
from torch.utils.data import Sampler

from latentcache.errors import StoreError
from latentcache.identity import seed_of
from latentcache.store.base import Store

WINDOW = 16
"""How many packs of a rank are read at a time, with their rows mixed."""


class Places(NamedTuple):
    """Where a dataset's items are stored: each item's pack, numbered in the order of the packs' ids, and row in it.

    Both are int64 [n], -1 if the entry is missing. `identity` is a digest of them and of the packs' ids.
    """

    packs: np.ndarray
    rows: np.ndarray
    identity: str

    @classmethod
    def of(cls, store: Store, keys: np.ndarray) -> Places:
        """The places of these entries: keys uint8 [n, 32]. StoreError if the store cannot tell."""
        found, places = store.places(keys)
        ids = sorted({found[number] for number in np.unique(places[:, 0]).tolist() if number >= 0})
        by_id = {pack: number for number, pack in enumerate(ids)}  # ignores the store's other packs
        numbers = np.array([*(by_id.get(pack, -1) for pack in found), -1], np.int64)
        packs, rows = numbers[places[:, 0]], np.ascontiguousarray(places[:, 1])
        return cls(packs, rows, blake3(" ".join(ids).encode() + packs.tobytes() + rows.tobytes()).hexdigest())


def pack_batches(
    places: Places,
    buckets: Sequence[np.ndarray],
    batch_size: int,
    *,
    window: int,
    num_streams: int,
    generator: np.random.Generator | None,
) -> list[list[int]]:
    """All items in batches of one bucket each, in pack order. `buckets` has the items of each bucket.

    Packs are shuffled and dealt to streams, and the streams' batches alternate: batch i is of stream i modulo
    `num_streams`, until a stream ends. A stream reads its packs in order; a row comes at most `window` packs after its
    pack begins. Each row goes to the open batch of its bucket, which is emitted when it is full. The leftovers of each
    bucket are joined across streams and come last; only one batch per bucket may be smaller. Without a generator
    nothing is shuffled.
    """
    _, packs = np.unique(places.packs, return_inverse=True)
    num_packs = int(packs.max(initial=-1)) + 1
    turns = (np.arange(num_packs) if generator is None else generator.permutation(num_packs))[packs]
    if generator is None:
        order = np.lexsort((places.rows, turns))
    else:
        order = (turns // num_streams + generator.random(len(packs)) * window).argsort()
    bucket_of = np.zeros(len(packs), np.int64)
    for number, items in enumerate(buckets):
        bucket_of[items] = number
    streams: list[list[list[int]]] = []
    left: list[list[int]] = [[] for _ in buckets]
    for stream in range(num_streams):
        items = order[turns[order] % num_streams == stream]
        streams.append(_full_batches(items, bucket_of[items], batch_size, left))
    last = [batch for items in left for batch in split(items, batch_size)]
    if generator is not None:
        last = [last[number] for number in generator.permutation(len(last)).tolist()]
    return [batch for batches in zip_longest(*streams) for batch in batches if batch is not None] + last


def split(items: list[int], batch_size: int) -> list[list[int]]:
    """Split the items into batches; the last one may be smaller."""
    return [items[at : at + batch_size] for at in range(0, len(items), batch_size)]


def _full_batches(items: np.ndarray, buckets: np.ndarray, batch_size: int, left: list[list[int]]) -> list[list[int]]:
    """The full batches of a stream, in the order in which they fill up. Each bucket's leftovers are added to `left`."""
    batches: list[tuple[int, list[int]]] = []
    for bucket, rest in enumerate(left):
        own = np.flatnonzero(buckets == bucket)
        num = len(own) // batch_size * batch_size
        full = items[own[:num]].reshape(-1, batch_size).tolist()
        batches += zip(own[batch_size - 1 : num : batch_size].tolist(), full, strict=True)
        rest += items[own[num:]].tolist()
    return [batch for _, batch in sorted(batches)]


if TYPE_CHECKING:  # it imports this module
    from latentcache.loading.dataset import LatentDataset

STATE_VERSION = 1


class Visit(int):
    """An item number with what the choices at this visit depend on: `draw` (63 random bits), epoch and seed.

    It is an int, so a DataLoader passes it to its workers like any item number.
    """

    draw: int = 0
    epoch: int = 0
    seed: int = 0

    @classmethod
    def of(cls, index: int, draw: int, epoch: int = 0, seed: int = 0) -> Visit:
        """The visit of an item with this draw, in this epoch of a sampler with this seed."""
        visit = cls(index)
        visit.draw, visit.epoch, visit.seed = draw, epoch, seed
        return visit


class Visits(NamedTuple):
    """Visits of n items as arrays: item numbers, draws and epochs, int64 [n], and seeds for variants, uint64 [n]."""

    items: np.ndarray
    draws: np.ndarray
    epochs: np.ndarray
    seeds: np.ndarray

    @classmethod
    def of(cls, indices: Sequence[int], *, are_drawn: bool = True) -> Visits:
        """The visits of these items; plain numbers get a draw and a seed from torch's global generator.

        Unless `are_drawn`, everything but the items is 0.
        """
        items = np.array(indices, np.int64)
        if not are_drawn:
            nothing = np.zeros_like(items)
            return cls(items, nothing, nothing, nothing.view(np.uint64))
        visits = [each if isinstance(each, Visit) else _plain_visit(each) for each in indices]
        draws, epochs = (np.array([getattr(each, name) for each in visits], np.int64) for name in ("draw", "epoch"))
        return cls(items, draws, epochs, np.array([_seed_of_variants(each.seed) for each in visits], np.uint64))


def _plain_visit(index: int) -> Visit:
    draw, seed = torch.randint(torch.iinfo(torch.int64).max, (2,), device="cpu").tolist()
    return Visit.of(index, draw, 0, seed)


@lru_cache(64)  # a sampler's visits share one seed
def _seed_of_variants(seed: int) -> int:
    return seed_of("variants", seed)


def noise_generator(seed: int, epoch: int, position: int) -> torch.Generator:
    """The generator that draws the latents of the batch at `position` of the epoch.

    It is on the CPU, so that its numbers do not depend on the device. torch keeps only 32 bits of a CPU generator's
    seed, so two distant batches may, rarely, share their noise.
    """
    return torch.Generator("cpu").manual_seed(seed_of("latents", seed, epoch, position))


def order_generator(seed: int, epoch: int) -> np.random.Generator:
    """The generator that shuffles an epoch; NumPy's, because it uses all 64 bits of its seed."""
    return np.random.default_rng(seed_of("order", seed, epoch))


class PlannedBatch(NamedTuple):
    """A batch of one rank: its position in the epoch, its items, and the position after which all ranks have theirs."""

    epoch: int
    position: int
    numbers: list[int]
    end: int
    seed: int

    @property
    def items(self) -> list[Visit]:
        """The items as visits, each with its own draw."""
        draws = self.visits.draws.tolist()
        return [Visit.of(item, draw, self.epoch, self.seed) for item, draw in zip(self.numbers, draws, strict=True)]

    @property
    def visits(self) -> Visits:
        """The items as arrays, each with its draw, epoch and seed."""
        num = len(self.numbers)
        # Raw bits of the generator are stable across NumPy versions, and take a fifth of the time.
        bits = np.random.PCG64(seed_of("visits", self.seed, self.epoch, self.position)).random_raw(num)
        items, epochs = np.array(self.numbers, np.int64), np.full(num, self.epoch, np.int64)
        return Visits(items, (bits >> 1).view(np.int64), epochs, np.full(num, _seed_of_variants(self.seed), np.uint64))


@dataclass(slots=True)
class Cursor:
    """The progress of an epoch: `position` counts the finished batches of all ranks together."""

    epoch: int
    position: int = 0
    started: bool = False


class BucketBatchSampler(Sampler[list[int]]):
    """Yields lists of item numbers, each list from one bucket. The order depends only on `seed` and the epoch.

    `shuffle` mixes the items of each bucket and the batches. `drop_last` leaves out batches smaller than `batch_size`.
    Call `set_epoch` before each epoch, as with torch's DistributedSampler. The numbers are `Visit`s: what a dataset
    chooses at each visit (a caption, a flip) also follows from seed, epoch and position.

    With `world_size` ranks each rank gets the same number of batches, and the order does not depend on the number of
    ranks. Batches at the end of an epoch that cannot be shared equally are left out; these differ from epoch to epoch.
    StoreError if a dataset with items gives a rank no batch at all.

    A dataset with `order="packs"` is visited in pack order (`pack_batches`): the packs that hold the images are
    shuffled and dealt to the ranks, and the rows of `window` packs of a rank are mixed. The order then also depends on
    the packs present when the sampler is made, on `window`, and on the number of ranks. If torch.distributed runs with
    `world_size` ranks they compare their packs, so make the sampler on every rank; StoreError if the packs differ.

    `state_dict` says how far the last iteration is, and `load_state_dict` lets the next one continue there. A
    DataLoader with workers prefetches batches, which this state counts as done; `LatentLoader` counts correctly.
    """

    def __init__(
        self,
        dataset: LatentDataset,
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        window: int = WINDOW,
    ):
        if batch_size < 1:
            raise StoreError(f"batch_size is {batch_size}; it must be at least 1")
        if not 0 <= rank < world_size:
            raise StoreError(f"rank is {rank}; it must be at least 0 and less than world_size {world_size}")
        if window < 1:
            raise StoreError(f"window is {window}; it must be at least 1 pack")
        self.dataset = dataset
        self.batch_size, self.shuffle, self.drop_last = batch_size, shuffle, drop_last
        self.seed, self.rank, self.world_size = seed, rank, world_size
        groups = dataset.groups()
        order = groups.argsort(kind="stable")
        self._buckets = np.split(order, np.flatnonzero(np.diff(groups[order])) + 1) if len(order) else []
        self.window = window
        self._places = dataset.places()
        if self._places is not None:
            _check_ranks(self._places.identity, world_size)
        self._cursor = Cursor(0)
        self._fixed: dict[str, Any] | None = None
        if len(dataset) and not len(self):  # training would end at once, silently
            raise StoreError(
                f"an epoch of {len(dataset)} items has no batch: use a batch_size below {batch_size}, fewer ranks than "
                f"{world_size}, or drop_last=False"
            )

    @property
    def epoch(self) -> int:
        """The epoch of the last iteration, or of the next one after `set_epoch` or `load_state_dict`."""
        return self._cursor.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the next epoch. The current epoch keeps its position, so a resumed run can call this as usual."""
        if epoch != self._cursor.epoch:
            self._cursor = Cursor(epoch)

    def begin(self) -> Cursor:
        """Start an iteration at the loaded state, otherwise at the epoch's first batch.

        From now on `state_dict` reports this cursor.
        """
        if self._cursor.started:
            self._cursor = Cursor(self._cursor.epoch)
        self._cursor.started = True
        return self._cursor

    def plan(self, epoch: int, position: int = 0) -> Iterator[PlannedBatch]:
        """This rank's batches of an epoch from a position on, which counts the batches of all ranks."""
        order = self._order(epoch)
        firsts = range(position, position + self._num_left(position) * self.world_size, self.world_size)
        return (
            PlannedBatch(epoch, place, order[place], first + self.world_size, self.seed)
            for first, place in ((first, first + self.rank) for first in firsts)
        )

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch."""
        return self._num_left(0)

    def __iter__(self) -> Iterator[list[int]]:
        return self._drawn(self.begin())

    def _drawn(self, cursor: Cursor) -> Iterator[list[int]]:
        for batch in self.plan(cursor.epoch, cursor.position):
            cursor.position = batch.end
            yield [*batch.items]

    def state_dict(self) -> dict[str, Any]:
        """The epoch, how many of its batches are done, and what order and choices depend on: numbers and strings.

        It is the same on all ranks.
        """
        return self._settings() | {"epoch": self._cursor.epoch, "position": self._cursor.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin where this state was taken.

        Raises StoreError, listing the differences, for a state from another dataset, batch size, seed, shuffle,
        drop_last or world size, or with other choices at each visit. Edited captions and re-encoded values do not
        matter; samples that were added, removed or moved to another bucket do, and mirrored entries and further crops
        if visits draw from them. In pack order, so do images that are now in another pack, for instance after
        `compact`, or were found damaged.
        """
        epoch, position = state.get("epoch"), state.get("position")
        if type(epoch) is not int or type(position) is not int or position < 0:
            raise StoreError(
                f"the sampler's state has epoch {epoch!r} and position {position!r}, but both must be integers: give "
                "what state_dict() returned"
            )
        here = self._settings()
        differing = [
            f"{name} ({state.get(name)!r} there, {here[name]!r} here)" for name in here if state.get(name) != here[name]
        ]
        if differing:
            raise StoreError(
                f"the sampler's state is from another run: {', '.join(differing)}. Use the settings that it was saved "
                f"with, or restart the epoch with set_epoch({epoch})"
            )
        self._cursor = Cursor(epoch, position)

    def _settings(self) -> dict[str, Any]:
        if self._fixed is None:
            self._fixed = {"dataset": self.dataset.identity(), "num_items": len(self.dataset)} | self.dataset.drawn()
            if self._places is not None:
                self._fixed |= {"packs": self._places.identity, "window": self.window}
        names = ("batch_size", "shuffle", "drop_last", "seed", "world_size")
        return {"version": STATE_VERSION, **self._fixed, **{name: getattr(self, name) for name in names}}

    def _num_left(self, position: int) -> int:
        """This rank's batches from a position on."""
        spare = 0 if self.drop_last else self.batch_size - 1
        num_batches = sum((len(items) + spare) // self.batch_size for items in self._buckets)
        return max(0, num_batches - position) // self.world_size

    def _order(self, epoch: int) -> list[list[int]]:
        """The batches of an epoch, of all ranks."""
        generator = order_generator(self.seed, epoch)
        if self._places is not None:
            batches = pack_batches(
                self._places,
                self._buckets,
                self.batch_size,
                window=self.window,
                num_streams=self.world_size,
                generator=generator if self.shuffle else None,
            )
        else:
            orders = [generator.permutation(items) if self.shuffle else items for items in self._buckets]
            batches = [batch for items in orders for batch in split(items.tolist(), self.batch_size)]
        if self.drop_last:
            batches = [batch for batch in batches if len(batch) == self.batch_size]
        if self.shuffle and self._places is None:
            batches = [batches[i] for i in generator.permutation(len(batches)).tolist()]
        return batches


def _check_ranks(packs: str, world_size: int) -> None:
    """StoreError if a rank sees other packs than rank 0: some samples would come twice and others never."""
    distributed = torch.distributed  # a stub in some builds of torch
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() != world_size:
        return
    found: list[str] = [""] * world_size
    distributed.all_gather_object(found, packs)
    others = [str(rank) for rank, each in enumerate(found) if each != found[0]]
    if others:
        raise StoreError(
            f"rank {', '.join(others)} sees other packs than rank 0, so samples would come twice or never: restart the "
            "ranks with one cache, while nothing adds to it or compacts it"
        )
