"""Batches of one bucket each: their order in an epoch, each rank's share, and the place where a run stopped.

Every random choice of the training data follows from what it is for, the seed, the epoch and the position alone.
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
"""Packs that are read at the same time: those of a rank whose rows are mixed."""


class Places(NamedTuple):
    """Where the items of a dataset lie: the number of each one's pack, in the order of ids, and its row in it.

    Both int64 [n], and -1 for an item whose entry is not there. `identity` is a digest of them and of the ids.
    """

    packs: np.ndarray
    rows: np.ndarray
    identity: str

    @classmethod
    def of(cls, store: Store, keys: Sequence[str]) -> Places:
        """The places of these entries. StoreError for a store that does not say."""
        found, places = store.places(keys)
        ids = sorted({found[number] for number in np.unique(places[:, 0]).tolist() if number >= 0})
        by_id = {pack: number for number, pack in enumerate(ids)}  # other packs of the store may come and go
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
    """All items in batches of one bucket each. `buckets` has the items of each bucket.

    Packs are shuffled and dealt to streams, whose batches take turns: batch i is of stream i modulo `num_streams`,
    until a stream ends. A stream reads its packs in their order; a row comes up to `window` packs later than its pack
    begins. Rows fill a batch of their bucket, which comes when it is full; the last ones of each bucket are joined, and
    their batches come at the end, of which only one a bucket may be smaller. Without a generator nothing is shuffled.
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
    """These items in batches, of which the last one may be smaller."""
    return [items[at : at + batch_size] for at in range(0, len(items), batch_size)]


def _full_batches(items: np.ndarray, buckets: np.ndarray, batch_size: int, left: list[list[int]]) -> list[list[int]]:
    """The full batches of a stream, in the order in which they are full. The rest of each bucket is added to `left`."""
    batches: list[tuple[int, list[int]]] = []
    for bucket, rest in enumerate(left):
        own = np.flatnonzero(buckets == bucket)
        num = len(own) // batch_size * batch_size
        full = items[own[:num]].reshape(-1, batch_size).tolist()
        batches += zip(own[batch_size - 1 : num : batch_size].tolist(), full, strict=True)
        rest += items[own[num:]].tolist()
    return [batch for _, batch in sorted(batches)]


if TYPE_CHECKING:  # it needs this module
    from latentcache.loading.dataset import LatentDataset

STATE_VERSION = 1


class Visit(int):
    """The number of an item, and what the choices at this visit follow from: `draw` (63 random bits), epoch and seed.

    It is the plain number to everything else, also on its way to a DataLoader's workers.
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
    """Visits of n items as arrays: numbers, draws and epochs, int64 [n], and the seeds of variants, uint64 [n]."""

    items: np.ndarray
    draws: np.ndarray
    epochs: np.ndarray
    seeds: np.ndarray

    @classmethod
    def of(cls, indices: Sequence[int], *, are_drawn: bool = True) -> Visits:
        """The visits of these items. Plain numbers get a draw and a seed from torch's global generator.

        Where they are not drawn all but the items is 0.
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


@lru_cache(64)  # all visits of a sampler share it
def _seed_of_variants(seed: int) -> int:
    return seed_of("variants", seed)


def noise_generator(seed: int, epoch: int, position: int) -> torch.Generator:
    """The CPU generator that the latents of the batch at `position` of the epoch are drawn with.

    On the CPU, because its numbers are the same for every device. torch keeps 32 bits of a CPU generator's seed, so
    that two batches that lie far apart may, rarely, share their noise.
    """
    return torch.Generator("cpu").manual_seed(seed_of("latents", seed, epoch, position))


def order_generator(seed: int, epoch: int) -> np.random.Generator:
    """The generator that shuffles an epoch. numpy's, because it keeps all 64 bits of its seed."""
    return np.random.default_rng(seed_of("order", seed, epoch))


class PlannedBatch(NamedTuple):
    """One batch of a rank: its place in the epoch, its items, and the position at which all ranks have had theirs."""

    epoch: int
    position: int
    numbers: list[int]
    end: int
    seed: int

    @property
    def items(self) -> list[Visit]:
        """The items, each with a draw of its own."""
        draws = self.visits.draws.tolist()
        return [Visit.of(item, draw, self.epoch, self.seed) for item, draw in zip(self.numbers, draws, strict=True)]

    @property
    def visits(self) -> Visits:
        """The items as arrays, each with its draw, epoch and seed."""
        num = len(self.numbers)
        # The generator's own bits: they stay the same in all versions of numpy, and take a fifth of the time.
        bits = np.random.PCG64(seed_of("visits", self.seed, self.epoch, self.position)).random_raw(num)
        items, epochs = np.array(self.numbers, np.int64), np.full(num, self.epoch, np.int64)
        return Visits(items, (bits >> 1).view(np.int64), epochs, np.full(num, _seed_of_variants(self.seed), np.uint64))


@dataclass(slots=True)
class Cursor:
    """The progress of an epoch: `position` batches of it, of all ranks together, are done."""

    epoch: int
    position: int = 0
    started: bool = False


class BucketBatchSampler(Sampler[list[int]]):
    """Yields lists of item numbers, each list from one bucket. The order depends on `seed` and the epoch alone.

    `shuffle` mixes the items of each bucket and the batches. `drop_last` leaves out batches smaller than `batch_size`.
    Call `set_epoch` before each epoch, as with torch's DistributedSampler. The numbers are `Visit`s: what a dataset
    chooses at each visit (a caption, a flip) follows from seed, epoch and position too.

    With `world_size` ranks every rank gets the same number of batches, and the order does not depend on how many ranks
    there are. Batches that cannot be shared equally at the end of an epoch are left out: others in the next epoch.
    StoreError where a dataset with items gives a rank no batch at all.

    A dataset with `order="packs"` is visited in pack order (`pack_batches`): the packs that hold the images
    are shuffled and dealt to the ranks, and the rows of `window` packs of a rank are mixed. It then depends on the
    packs that there are when the sampler is made, on `window`, and on the number of ranks. Where torch.distributed runs
    with `world_size` ranks they compare their packs, so that each has to make the sampler; StoreError if these differ.

    `state_dict` says where the last iteration is, `load_state_dict` lets the next one begin there. A DataLoader with
    workers takes batches ahead of the loop, so with one the state is too far on: `LatentLoader` counts right.
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
        self._identity: str | None = None
        if len(dataset) and not len(self):  # training would end at once, without a word
            raise StoreError(
                f"an epoch of {len(dataset)} items has no batch: use a batch_size below {batch_size}, fewer ranks than "
                f"{world_size}, or drop_last=False"
            )

    @property
    def epoch(self) -> int:
        """The epoch of the last iteration, or of the next one after `set_epoch` or `load_state_dict`."""
        return self._cursor.epoch

    @property
    def num_batches(self) -> int:
        """Batches of a whole epoch, of all ranks together, before any is left out."""
        spare = 0 if self.drop_last else self.batch_size - 1
        return sum((len(items) + spare) // self.batch_size for items in self._buckets)

    def set_epoch(self, epoch: int) -> None:
        """Choose the next epoch. The present one keeps its place, so a resumed run may call this as always."""
        if epoch != self._cursor.epoch:
            self._cursor = Cursor(epoch)

    def begin(self) -> Cursor:
        """Start an iteration: where the state that was loaded says, otherwise with the epoch's first batch.

        `state_dict` follows this cursor from now on.
        """
        if self._cursor.started:
            self._cursor = Cursor(self._cursor.epoch)
        self._cursor.started = True
        return self._cursor

    def plan(self, epoch: int, position: int = 0) -> Iterator[PlannedBatch]:
        """This rank's batches of an epoch, from a position on. A position counts the batches of all ranks."""
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

        The state of any rank is that of all.
        """
        return self._settings() | {"epoch": self._cursor.epoch, "position": self._cursor.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin where this state was taken.

        Raises StoreError, naming each thing that differs, for a state of another dataset, batch size, seed, shuffle,
        drop_last or world size, or of other choices at each visit. Captions that were edited and values that were
        re-encoded do not matter; samples that came, went or changed their bucket do. In pack order an image that lies
        in another pack now, as after `compact`, or was found damaged, matters too.
        """
        epoch, position = state.get("epoch"), state.get("position")
        if type(epoch) is not int or type(position) is not int or position < 0:
            raise StoreError(
                f"the sampler's state has epoch {epoch!r} and position {position!r}, but two integers are needed: "
                "give what state_dict() returned"
            )
        here = self._settings()
        differing = [
            f"{name} ({state.get(name)!r} there, {here[name]!r} here)" for name in here if state.get(name) != here[name]
        ]
        if differing:
            raise StoreError(
                f"the sampler's state is not of this run: {', '.join(differing)}. Start with what it was taken from, "
                f"or start the epoch again with set_epoch({epoch})"
            )
        self._cursor = Cursor(epoch, position)

    def _settings(self) -> dict[str, Any]:
        if self._identity is None:
            self._identity = self.dataset.identity()
        names = ("batch_size", "shuffle", "drop_last", "seed", "world_size")
        fixed = {"version": STATE_VERSION, "dataset": self._identity, "num_items": len(self.dataset)}
        if self._places is not None:
            fixed |= {"packs": self._places.identity, "window": self.window}
        fixed |= self.dataset.choices.state()
        return fixed | {name: getattr(self, name) for name in names}

    def _num_left(self, position: int) -> int:
        return max(0, self.num_batches - position) // self.world_size

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
    """StoreError if ranks see other packs than the first one: some samples would come twice and others never."""
    distributed = torch.distributed  # some builds of torch have none of it
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() != world_size:
        return
    found: list[str] = [""] * world_size
    distributed.all_gather_object(found, packs)
    others = [str(rank) for rank, each in enumerate(found) if each != found[0]]
    if others:
        raise StoreError(
            f"rank {', '.join(others)} sees other packs than rank 0, so that samples would come twice or never: start "
            "the ranks again when nothing adds to the cache or compacts it, with the same cache for each"
        )
