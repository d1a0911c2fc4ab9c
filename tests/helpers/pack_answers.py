"""The entries of a pack that a service answers with."""

from __future__ import annotations

from latentcache.store.batch import own_tensors
from latentcache.store.pack import WholePack
from latentcache.types import Entry


def entries_in(body: bytes) -> dict[str, Entry]:
    """The entries of a pack by key, each compared with its digest and its key."""
    whole, found = WholePack.in_memory("answer", body), {}
    for at, key in enumerate(whole.row.names()):
        location = whole.row.location(at)
        assert (problem := whole.problem(key, location)) is None, problem
        owned = whole.entry(key, location)
        assert not isinstance(owned, str)
        found[key] = own_tensors(whole.record(at), owned.values, owned.ragged)
    return found
