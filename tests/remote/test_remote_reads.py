"""Reading from a service: requests, damage on the way, the local tier."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from helpers.relay import Relay
from helpers.remote_samples import NUM_SAMPLES, entries_of, make_cache
from helpers.serving import RunningServer

from latentcache.errors import EntryMissingError, RemoteError, StoreError
from latentcache.remote.fetched import MAX_READS
from latentcache.remote.fetching_store import SETTLED_READS
from latentcache.remote.local_tier import LocalTier
from latentcache.remote.remote_store import RemoteStore
from latentcache.store import DiskStore
from latentcache.store.stacking import read_batch

IMAGES = [entries_of(number)[0] for number in range(0, NUM_SAMPLES, 2)]  # one bucket
KEYS = [entry.record.key for entry in IMAGES]
MOMENTS = torch.stack([entry.tensors["moments"] for entry in IMAGES])


def read(store: RemoteStore, first: int, end: int) -> bool:
    """Whether a batch of these images is what was stored."""
    return read_batch(store, KEYS[first:end])["moments"].equal(MOMENTS[first:end])


def test_a_batch_is_one_request_and_connections_are_kept(relay: Relay, server: RunningServer) -> None:
    with RemoteStore(relay.url, token=server.token) as store:
        for start in range(0, 16, 4):
            assert read(store, start, start + 4)
        assert read_batch(store, [*KEYS[:3], *KEYS[:3]])["moments"].equal(torch.cat([MOMENTS[:3]] * 2))
    assert relay.routes() == ["entries:read"] * 5
    assert relay.num_connections == 1


def flipping(number: int):
    """Changes a bit in the values of so many answers."""
    left = [number]

    def change(path: str, status: int, data: bytes) -> bytes:
        if status != 200 or not left[0]:
            return data
        left[0] -= 1
        return data[:-100] + bytes([data[-100] ^ 4]) + data[-99:]

    return change


def test_what_was_damaged_on_its_way_is_fetched_once_more(
    relay: Relay, server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with RemoteStore(relay.url, token=server.token) as store:
        relay.change = flipping(1)
        assert read(store, 0, 4)
        assert relay.routes() == ["entries:read"] * 2 and "damaged on its way" in caplog.text
        relay.change = flipping(2)
        with pytest.raises(RemoteError, match="sent entries twice that are not what was stored") as caught:
            read(store, 0, 4)
        assert "latentcache verify" in caught.value.next_step
        assert read(store, 0, 4)


@pytest.mark.parametrize("where", [0, 8, 40, 200, 1000, -1])
def test_no_flipped_bit_gives_other_values(relay: Relay, server: RunningServer, where: int) -> None:
    relay.change = lambda path, status, data: data[: where % len(data)] + bytes([data[where] ^ 1]) + data[where:][1:]
    with RemoteStore(relay.url, token=server.token, retry_s=2) as store, suppress(RemoteError):
        assert read(store, 0, 4)


def test_an_answer_with_other_entries_is_refused(relay: Relay, server: RunningServer) -> None:
    with RemoteStore(relay.url, token=server.token) as store:
        kept: list[bytes] = []
        relay.change = lambda path, status, data: kept.append(data) or data
        assert read(store, 4, 8)
        relay.change = lambda path, status, data: kept[0]
        with pytest.raises(StoreError):
            read(store, 0, 4)


def test_prefetched_batches_come_while_others_are_read(relay: Relay, server: RunningServer) -> None:
    with RemoteStore(relay.url, token=server.token) as store:
        batches = [KEYS[start : start + 4] for start in range(0, 24, 4)]
        for batch in batches[:4]:
            store.prefetch(batch)
        for number in range(len(batches)):
            if number + 4 < len(batches):
                store.prefetch(batches[number + 4])
            assert read(store, 4 * number, 4 * number + 4)
        assert relay.routes() == ["entries:read"] * 6
        for _ in range(30):  # what nobody reads is not kept for ever
            store.prefetch(KEYS[:2])
            store.prefetch([KEYS[2]])
        assert read(store, 0, 4)
        store.prefetch([KEYS[5], "0" * 64])
        with pytest.raises(EntryMissingError):
            store.rows([KEYS[5], "0" * 64])
        assert read(store, 5, 6)


def test_what_is_needed_next_is_kept_where_more_is_prefetched_than_there_is_room_for(
    relay: Relay, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("latentcache.remote.fetched.MAX_AHEAD", 8)
    num = 8 + 3
    with RemoteStore(relay.url, token=server.token) as store:
        for start in range(num):
            store.prefetch(KEYS[start : start + 1])
        for start in range(num):
            assert read(store, start, start + 1)
    assert relay.routes() == ["entries:read"] * num, "nothing is fetched twice"


def test_what_a_loader_prefetched_that_stopped_does_not_stay(
    relay: Relay, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("latentcache.remote.fetched.MAX_AHEAD", 8)
    with RemoteStore(relay.url, token=server.token) as store:
        for start in range(8):
            store.prefetch(KEYS[start : start + 1])
        for _ in range(MAX_READS + 1):
            assert read(store, 20, 21)
        before = len(relay.requests)
        store.prefetch(KEYS[21:22])
        deadline = time.monotonic() + 20
        while len(relay.requests) == before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(relay.requests) == before + 1, "there is room again"
        assert read(store, 21, 22) and len(relay.requests) == before + 1


def test_the_second_epoch_does_not_touch_the_network(relay: Relay, server: RunningServer, tmp_path: Path) -> None:
    with RemoteStore(relay.url, token=server.token, local=tmp_path / "local") as store:
        for start in range(0, 24, 4):
            assert read(store, start, start + 4)
        assert store.generation is None
        before = len(relay.requests)
        assert before == 6
        end = time.monotonic() + 30
        while store.generation is None and time.monotonic() < end:  # a thread writes the pack meanwhile
            for start in range(0, 24, 4):
                store.prefetch(KEYS[start : start + 4])
                assert read(store, start, start + 4)
        assert store.generation == store.tier.disk.generation is not None, "what the disk gives is remembered"
        assert store.describe(KEYS[0]) and store.record(KEYS[0]) == IMAGES[0].record
        assert store.get(KEYS[1]).tensors["moments"].equal(MOMENTS[1])
        assert len(relay.requests) == before
        assert store.tier.disk.stats().num_packs == 1, "a pack for each batch would be slow to open and to copy"
        assert read_batch(store, [entries_of(1)[0].record.key])
        assert store.generation is None and len(relay.requests) == before + 1
    with RemoteStore(relay.url, token=server.token, local=tmp_path / "local") as again:
        assert read(again, 0, 24) and len(relay.requests) == before + 1


def test_a_batch_that_shares_a_caption_does_not_seal_a_pack(server: RunningServer, tmp_path: Path) -> None:
    shared = entries_of(0)[1].record.key
    with RemoteStore(server.url, token=server.token, local=tmp_path / "local") as store:
        for start in range(0, 24, 4):
            store.rows([*KEYS[start : start + 4], shared])
    with DiskStore(tmp_path / "local", read_only=True) as disk:
        assert disk.stats().num_packs == 1 and disk.stats().num_entries == {"image": 24, "text": 1}


def test_the_local_tier_is_bounded_and_the_longest_unused_goes(server: RunningServer, tmp_path: Path) -> None:
    local = tmp_path / "local"
    for start in range(0, 24, 8):  # three packs
        with RemoteStore(server.url, token=server.token, local=local) as store:
            assert read(store, start, start + 8)
    with DiskStore(local) as disk:
        packs = sorted(
            disk.directory.pack_sizes(), key=lambda pack: disk.catalog.table.look_up([KEYS[0]])[0].pack.id != pack
        )
        assert len(packs) == 3
        size = max(disk.directory.pack_sizes().values())
        used = {pack: time.time() - (7200 if pack == packs[0] else 3 * 3600) for pack in packs}
        for pack, then in used.items():
            os.utime(disk.directory.pack_path(pack), (then, then))
    with RemoteStore(server.url, token=server.token, local=local, local_max_bytes=3 * size + 100) as store:
        assert read(store, 0, 8), "this is a use"
        store.rows([entries_of(number)[0].record.key for number in range(1, 17, 2)])
    with DiskStore(local, read_only=True) as disk:
        assert sum(disk.directory.pack_sizes().values()) <= 3 * size + 100
        assert disk.find(KEYS[:8]) == set(KEYS[:8]), "what was used last stays"
    with RemoteStore(server.url, token=server.token, local=local) as store:
        assert read(store, 0, 24)


@pytest.mark.parametrize("settled", [False, True])
def test_the_use_of_a_local_pack_is_noted_again(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settled: bool
) -> None:
    """Also where what was read is remembered, and only prefetching says that it is used."""
    with RemoteStore(server.url, token=server.token, local=tmp_path / "local") as store:
        assert read(store, 0, 4)
    with RemoteStore(server.url, token=server.token, local=tmp_path / "local") as store:
        for _ in range(SETTLED_READS):
            assert read(store, 0, 4)
        (path,) = (tmp_path / "local").glob("packs/*/*.safetensors")
        then = time.time() - 7200
        os.utime(path, (then, then))
        assert read(store, 0, 4) and path.stat().st_mtime == pytest.approx(then, abs=2), "not at each read"
        monkeypatch.setattr("latentcache.remote.local_tier.NOTE_S", 0.0)
        if settled:
            assert store.generation is not None
            store.prefetch(KEYS[:4])
        else:
            assert read(store, 0, 4)
        assert time.time() - path.stat().st_mtime < 600


def test_what_is_damaged_or_gone_in_the_tier_is_fetched_again(
    relay: Relay, server: RunningServer, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    with RemoteStore(relay.url, token=server.token, local=local) as store:
        assert read(store, 0, 8)
    (path,) = local.glob("packs/*/*.safetensors")
    data = bytearray(path.read_bytes())
    at = data.index(MOMENTS[2].numpy().tobytes())
    data[at + 5] ^= 1
    path.write_bytes(data)
    before = len(relay.requests)
    with RemoteStore(relay.url, token=server.token, local=local) as store:
        assert read(store, 0, 8) and len(relay.requests) == before + 1
        assert json.dumps(sorted(store.tier.disk.damaged())) == json.dumps([KEYS[2]])
    with RemoteStore(relay.url, token=server.token, local=local) as store:
        assert read(store, 0, 8) and len(relay.requests) == before + 1
        assert store.tier.disk.damaged() == {}
    for pack in local.glob("packs/*/*.safetensors"):
        pack.unlink()
    with RemoteStore(relay.url, token=server.token, local=local) as store:
        assert read(store, 0, 8)


def test_a_cache_with_manifests_is_no_local_tier(tmp_path: Path) -> None:
    make_cache(tmp_path / "own")
    with pytest.raises(StoreError, match="is a cache of its own, with the manifest 'served'"):
        LocalTier(tmp_path / "own", 1)
    assert DiskStore(tmp_path / "own").stats().num_packs == 3
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="file: is not a directory"):
        LocalTier(tmp_path / "file")


def test_a_tier_that_cannot_be_written_leaves_reading_as_it_is(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with RemoteStore(server.url, token=server.token, local=tmp_path / "local") as store:
        assert store.tier is not None

        def full(entries: object) -> tuple[int, int]:
            raise StoreError("no space left")

        monkeypatch.setattr(store.tier.disk, "seal", full)
        assert read(store, 0, 8) and read(store, 0, 8)
        store.tier.close()
        assert "no space left" in caplog.text


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("with_tier", [False, True])
def test_a_fork_reads_on(server: RunningServer, tmp_path: Path, with_tier: bool) -> None:
    local = tmp_path / "local" if with_tier else None
    with RemoteStore(server.url, token=server.token, local=local) as store:
        store.prefetch(KEYS[:4])
        assert read(store, 0, 4)
        store.prefetch(KEYS[4:8])
        child = os.fork()
        if child == 0:
            os._exit(0 if read(store, 0, 12) and read(store, 4, 8) else 1)
        assert read(store, 4, 12)
        assert os.waitpid(child, 0)[1] == 0
        assert read(store, 0, 12)


def test_reads_settle_only_after_some(server: RunningServer, tmp_path: Path) -> None:
    with RemoteStore(server.url, token=server.token, local=tmp_path / "local") as store:
        assert read(store, 0, 4)
    with RemoteStore(server.url, token=server.token, local=tmp_path / "local") as store:
        for number in range(SETTLED_READS):
            assert store.generation is None, number
            assert read(store, 0, 4)
        assert store.generation is not None


def test_processes_share_a_tier_also_with_one_that_ends_without_closing(
    relay: Relay, server: RunningServer, tmp_path: Path
) -> None:
    program = (
        "import sys; from latentcache.remote.remote_store import RemoteStore\n"
        "RemoteStore(sys.argv[1], token=sys.argv[2], local=sys.argv[3]).rows(sys.argv[4:])"
    )
    command = [sys.executable, "-c", program, server.url, str(server.token), str(tmp_path / "local"), *KEYS[:3]]
    with RemoteStore(relay.url, token=server.token, local=tmp_path / "local") as store:
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        assert read(store, 0, 3) and relay.requests == []
        assert read(store, 0, 4) and len(relay.requests) == 1
