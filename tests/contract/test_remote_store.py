"""The contract of stores, over HTTP: against a real server process, with and without the local tier."""

from __future__ import annotations

import pytest
import torch
from helpers.serving import serving
from store_contract import StoreContract, make_entry, same

from latentcache.errors import EntryMissingError
from latentcache.remote.remote_store import RemoteStore
from latentcache.store import DiskStore
from latentcache.store.stacking import read_batch, stack


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    cache = tmp_path_factory.mktemp("served") / "cache"
    DiskStore(cache).close()
    with serving(cache) as server:
        yield server


class RemoteStoreContract(StoreContract):
    def test_rows_count_as_long_as_the_generation_is_equal(self, store):
        entries = [make_entry(number, kind="text") for number in range(3)]
        store.add(entries)
        keys = [entry.record.key for entry in entries]
        rows = store.rows(keys)
        assert store.generation is None, "what comes over the network is not remembered"
        expected = torch.stack([entry.tensors["moments"] for entry in entries])
        assert store.remove(keys[:1]) == 1
        with pytest.raises(EntryMissingError):
            store.rows(keys)
        assert len(store.rows(keys[1:])) == 2 and not store.rows([])
        assert same(stack(keys, rows)["moments"], expected), "what was read stays readable"

    @pytest.mark.parametrize("num_values", [60_000, 64_000, 126_464, 131_072, 400_000])
    def test_entries_of_all_sizes_come_whole(self, store, num_values):
        """An answer is sent in parts, and entries may be smaller or larger than these."""
        entries = [make_entry(number, shape=(num_values,)) for number in range(3)]
        store.add(entries)
        batch = read_batch(store, [entry.record.key for entry in entries])
        assert same(batch["moments"], torch.stack([entry.tensors["moments"] for entry in entries]))


class TestRemoteStore(RemoteStoreContract):
    @pytest.fixture
    def store(self, server):
        with RemoteStore(server.url, token=server.write_token) as store:
            store.remove(store.keys())
            yield store


class TestRemoteStoreWithLocalTier(RemoteStoreContract):
    @pytest.fixture
    def store(self, server, tmp_path):
        with RemoteStore(server.url, token=server.write_token, local=tmp_path / "local") as store:
            store.remove(store.keys())
            yield store
