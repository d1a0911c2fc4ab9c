"""Pack order: packs come in random order and their rows a few packs apart, so that packs can be read whole, in turn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from blake3 import blake3

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
