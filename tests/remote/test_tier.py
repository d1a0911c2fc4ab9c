"""Reading a cache that is elsewhere: whole packs on this disk, damage on the way and here, and what is there twice."""

from __future__ import annotations

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers.relay import Relay
from helpers.remote_samples import NUM_SAMPLES, entries_of, make_cache
from helpers.serving import TOKEN, RunningServer, served_store, wait_until
from helpers.tensor_bits import read_batch
from obstore.store import LocalStore

from latentcache.errors import EntryMissingError, StoreError
from latentcache.remote import tier
from latentcache.remote.bucket import BucketTransport
from latentcache.remote.store import RemoteStore
from latentcache.store import directory

MAPS = Path("/proc/self/maps")
IMAGES = [entries_of(number)[0] for number in range(0, NUM_SAMPLES, 2)]  # one bucket
KEYS = [entry.record.key for entry in IMAGES]
MOMENTS = torch.stack([entry.tensors["moments"] for entry in IMAGES])


def read(store: RemoteStore, first: int, end: int) -> bool:
    """Whether a batch of these images is what was stored."""
    return read_batch(store, KEYS[first:end])["moments"].equal(MOMENTS[first:end])


def packs_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("**/packs/*/*.safetensors"))


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "local"


def test_packs_come_while_others_are_read(relay: Relay, local: Path) -> None:
    with served_store(relay.url, token=TOKEN, local=local) as store:
        store.find(KEYS)
        list(store.keys())
        store.prefetch([*KEYS, "0" * 64])
        wait_until(lambda: len(packs_in(local)) == 3)
        before = len(relay.requests)
        assert read(store, 0, 24) and len(relay.requests) == before
        with pytest.raises(EntryMissingError):
            store.rows([KEYS[5], "0" * 64])


def test_the_tier_is_bounded_and_the_longest_unused_goes(server: RunningServer, local: Path) -> None:
    with served_store(server.url, token=TOKEN, local=local) as store:
        assert read(store, 0, 24)
        first, last = (place.pack.id for place in store.index.look_up([KEYS[0], KEYS[-1]]) if place is not None)
    size = max(path.stat().st_size for path in packs_in(local))
    for path in packs_in(local):
        then = time.time() - (7200 if path.stem == first else 3 * 3600)
        os.utime(path, (then, then))
        if path.stem == last:
            path.unlink()
    with served_store(server.url, token=TOKEN, local=local, local_max_bytes=2 * size + 100) as store:
        assert read(store, 0, 8), "this is a use"
        assert read(store, 20, 24)
        assert {path.stem for path in packs_in(local)} == {first, last}
        for _ in range(2):
            assert read(store, 0, 24), "also where not all of it has room"
        assert sum(path.stat().st_size for path in packs_in(local)) <= 2 * size + 100


def test_what_is_damaged_or_gone_in_the_tier_is_fetched_again(relay: Relay, local: Path) -> None:
    def num_fetched() -> int:
        return len([route for route in relay.routes() if route.startswith("packs/")])

    with served_store(relay.url, token=TOKEN, local=local) as store:
        assert read(store, 0, 24)
        [path] = [path for path in packs_in(local) if MOMENTS[2].numpy().tobytes() in path.read_bytes()]
        whole = path.read_bytes()
        at = whole.index(MOMENTS[2].numpy().tobytes())
        for data in (whole[:at] + bytes(4) + whole[at + 4 :], whole[:at], b"", None):
            path.unlink()
            if data is not None:
                path.write_bytes(data)
            before = num_fetched()
            with served_store(relay.url, token=TOKEN, local=local) as other:
                assert read(other, 0, 8) and num_fetched() <= before + 2, "the pack, and first what it holds"
                assert other.damaged() == {} and other.record(KEYS[2]) == IMAGES[2].record
        assert path.read_bytes() == whole and read(store, 0, 8)


def test_where_nothing_can_be_kept_the_error_says_so(
    server: RunningServer, tmp_path: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot write a pack to the local tier"):
        served_store(server.url, local=tmp_path / "file")
    with served_store(server.url, token=TOKEN, local=local) as store:
        list(store.keys())
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_bytes", full)
            with pytest.raises(StoreError, match=r"No space left on device.*cache\.local_max_bytes"):
                read(store, 0, 4)
        assert not list(local.rglob("*.part")) and read(store, 0, 4)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("max_bytes", [None, 0])
def test_a_fork_reads_on(server: RunningServer, local: Path, max_bytes: int | None) -> None:
    with served_store(server.url, token=TOKEN, local=local, local_max_bytes=max_bytes) as store:
        assert read(store, 0, 4)
        child = os.fork()
        if child == 0:
            os._exit(0 if read(store, 0, 12) and read(store, 4, 24) else 1)
        assert read(store, 4, 12)
        assert os.waitpid(child, 0)[1] == 0
        assert read(store, 0, 24)


def test_a_pack_is_kept_also_while_others_make_room(tmp_path: Path, local: Path) -> None:
    """Each of many threads and tiers reads all, with the room of one pack."""
    cache = make_cache(tmp_path / "cache")

    def epochs(seed: int) -> bool:
        transport = BucketTransport(LocalStore(cache), str(cache))
        with RemoteStore(transport, local=local, local_max_bytes=1) as store:
            starts = [4 * ((number * (2 * seed + 1)) % 6) for number in range(30)]
            return all(read(store, start, start + 4) for start in starts)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(epochs, range(4))) and len(packs_in(local)) <= 4


@pytest.fixture
def keeps_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows: a file that this process has mapped can be renamed, but neither removed nor replaced."""
    if not MAPS.exists():
        pytest.skip("nothing says which files are mapped")

    def refusing(call: Any, target: int) -> Any:
        def replaced(*paths: Any, **options: Any) -> Any:
            if f"{os.path.realpath(paths[target])}\n" in MAPS.read_text():
                raise PermissionError(13, "in use", str(paths[target]))
            return call(*paths, **options)

        return replaced

    for place, name, target in ((Path, "unlink", 0), (Path, "replace", 1), (os, "replace", 1)):
        monkeypatch.setattr(place, name, refusing(getattr(place, name), target))
    for module in (directory, tier):
        monkeypatch.setattr(module, "KEEPS_MAPPED", True)


@pytest.mark.parametrize("max_bytes", [1, None], ids=["no room", "room"])
def test_a_tier_gives_way_to_what_is_mapped(
    keeps_mapped: None, tmp_path: Path, local: Path, max_bytes: int | None
) -> None:
    """It goes on without room, and where there is room it fetches a pack again that was damaged."""
    transport = BucketTransport(LocalStore(make_cache(tmp_path / "cache")), "s3://bucket/cache")
    for _ in range(2):
        with RemoteStore(transport, local=local, local_max_bytes=max_bytes) as store:
            assert all(read(store, first, end) for first, end in ((0, 24), (0, 24), (4, 8), (8, 12)))
            assert not store.damaged()
        for path in packs_in(local):
            path.write_bytes(path.read_bytes().replace(MOMENTS[0].numpy().tobytes(), bytes(MOMENTS[0].nbytes)))
