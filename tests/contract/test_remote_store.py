"""The contract of stores that are elsewhere: of a service, by a real server process."""

from __future__ import annotations

import pytest
from helpers.serving import serving
from helpers.tensor_bits import read_batch, same_bits
from store_contract import StoreContract, keys_of, make_entry, stacked

from latentcache.errors import StoreError
from latentcache.remote.service import ServiceTransport
from latentcache.remote.store import RemoteStore
from latentcache.store import DiskStore
from latentcache.store.upkeep import compact


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    cache = tmp_path_factory.mktemp("served") / "cache"
    DiskStore(cache).close()
    with serving(cache) as server:
        yield server


@pytest.fixture
def transport(server):
    with DiskStore(server.cache) as disk:
        disk.remove(list(disk.keys()))
        compact(disk)
    server.get("/v1/packs")  # it looks what is there now
    return ServiceTransport(server.url, token=server.write_token)


class RemoteStoreContract(StoreContract):
    @pytest.fixture
    def far(self, transport):
        return transport

    @pytest.fixture
    def store(self, far, tmp_path):
        with RemoteStore(far, local=tmp_path / "local") as store:
            yield store

    def test_entries_are_not_removed_one_by_one(self, store):
        store.add([make_entry(1)])
        with pytest.raises(StoreError, match=r"cannot be removed one by one; `latentcache prune"):
            store.remove([make_entry(1).record.key])
        assert store.find([make_entry(1).record.key])

    @pytest.mark.parametrize("num_values", [64_000, 400_000])
    def test_entries_of_all_sizes_come_whole(self, store, num_values):
        """An answer is sent in parts, and entries may be smaller or larger than these."""
        entries = [make_entry(number, shape=(num_values,)) for number in range(3)]
        store.add(entries)
        assert same_bits(read_batch(store, keys_of(entries))["moments"], stacked(entries))

    def test_another_client_sees_what_was_added(self, store, far, tmp_path):
        entries = [make_entry(number) for number in range(3)]
        with RemoteStore(far, local=tmp_path / "other") as other:
            assert not other.find(keys_of(entries))
            store.add(entries)
            assert other.find(keys_of(entries)) == {*keys_of(entries)}
            assert same_bits(read_batch(other, keys_of(entries))["moments"], stacked(entries))


class TestRemoteStore(RemoteStoreContract):
    """Of a service."""
