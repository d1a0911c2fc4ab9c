"""What a writer has that is not durable yet: a process that counts on its entries counts on the others only."""

from __future__ import annotations

from pathlib import Path

import torch

from latentcache.identity import key_of
from latentcache.store.disk import DiskStore
from latentcache.types import Entry, Record


def entry(number: int) -> Entry:
    identity = {"number": number}
    return Entry(Record(key_of(identity), "image", identity, {}), {"field": torch.ones(2)})


def test_what_is_not_durable_is_pending(tmp_path: Path) -> None:
    with DiskStore(tmp_path / "cache") as store, store.writer() as writer:
        keys = {entry(number).record.key for number in range(3)}
        for number in range(3):
            writer.add(entry(number))
        assert writer.pending() == keys and store.find(keys) == set()
        writer.seal()
        assert writer.pending() == set() and store.find(keys) == keys
