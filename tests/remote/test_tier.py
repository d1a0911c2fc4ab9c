"""Reading a cache that is elsewhere: whole packs on this disk, damage on the way and here, and what is there twice."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from helpers.far_stores import served_store
from helpers.relay import Relay, relaying
from helpers.remote_samples import NUM_SAMPLES, entries_of, make_cache
from helpers.serving import RunningServer, serving

from latentcache.errors import EntryDamagedError, EntryMissingError, LatentCacheError, StoreError
from latentcache.remote import index
from latentcache.remote.store import RemoteStore
from latentcache.remote.tier import Tier, folder_of
from latentcache.remote.transport import Listed, Transport
from latentcache.store.batch import read_batch
from latentcache.store.upkeep import compact

IMAGES = [entries_of(number)[0] for number in range(0, NUM_SAMPLES, 2)]  # one bucket
KEYS = [entry.record.key for entry in IMAGES]
MOMENTS = torch.stack([entry.tensors["moments"] for entry in IMAGES])
Change = Callable[[str, int, bytes], bytes | None]


def read(store: RemoteStore, first: int, end: int) -> bool:
    """Whether a batch of these images is what was stored."""
    return read_batch(store, KEYS[first:end])["moments"].equal(MOMENTS[first:end])


def packs_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("**/packs/*/*.safetensors"))


def fetched(relay: Relay) -> list[str]:
    """The packs that were fetched as a whole: their headers are no more than the first 64 KiB, of small packs all."""
    return [route for route in relay.routes() if route.startswith("packs/")]


def test_a_pack_is_fetched_once_and_the_second_epoch_does_not_touch_the_network(
    relay: Relay, server: RunningServer, tmp_path: Path
) -> None:
    with served_store(relay.url, token=server.token, local=tmp_path / "local") as store:
        for start in range(0, 24, 4):
            assert read(store, start, start + 4)
        assert relay.routes().count("packs") == 1 and len(fetched(relay)) == 6, "a header and a whole, of three packs"
        before = len(relay.requests)
        for start in range(0, 24, 4):
            store.prefetch(KEYS[start : start + 4])
            assert read(store, start, start + 4)
        assert store.describe(KEYS[0]) and store.record(KEYS[0]) == IMAGES[0].record
        assert store.get(KEYS[1]).tensors["moments"].equal(MOMENTS[1])
        assert len(relay.requests) == before
    with served_store(relay.url, token=server.token, local=tmp_path / "local") as again:
        assert read(again, 0, 24)
        assert relay.routes()[before:] == ["packs"], "what packs say is read here too"


def test_packs_come_while_others_are_read(relay: Relay, server: RunningServer, tmp_path: Path) -> None:
    with served_store(relay.url, token=server.token, local=tmp_path / "local") as store:
        store.find(KEYS)
        list(store.keys())
        store.prefetch([*KEYS, "0" * 64])
        end = time.monotonic() + 20
        while len(packs_in(tmp_path / "local")) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        before = len(relay.requests)
        assert read(store, 0, 24) and len(relay.requests) == before
        with pytest.raises(EntryMissingError):
            store.rows([KEYS[5], "0" * 64])


def flipping(number: int) -> Change:
    """Changes a bit in the values of so many packs that come whole."""
    left = [number]

    def change(path: str, status: int, data: bytes) -> bytes:
        if "/packs/" not in path or status != 200 or not left[0]:
            return data
        left[0] -= 1
        at = data.index(MOMENTS[0].numpy().tobytes()) if MOMENTS[0].numpy().tobytes() in data else -100
        return data[:at] + bytes([data[at] ^ 4]) + data[at:][1:]

    return change


def test_what_was_damaged_on_its_way_is_fetched_once_more(
    relay: Relay, server: RunningServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with served_store(relay.url, token=server.token, local=tmp_path / "a") as store:
        relay.change = flipping(1)
        assert read(store, 0, 4) and "It is fetched again" in caplog.text
    with served_store(relay.url, token=server.token, local=tmp_path / "b") as store:
        relay.change = flipping(2)
        with pytest.raises(EntryDamagedError, match="digest") as caught:
            read(store, 0, 4)
        assert caught.value.key == KEYS[0] and "latentcache verify" in str(caught.value)
        assert store.find(KEYS[:4]) == set(KEYS[1:4]) and store.damaged().keys() == {KEYS[0]}
        assert read(store, 1, 4), "the others of its pack are whole"
        with pytest.raises(EntryDamagedError):
            store.get(KEYS[0])
        num_fetched = len(fetched(relay))
        with pytest.raises(EntryDamagedError):
            read(store, 0, 4)
        assert len(fetched(relay)) == num_fetched, "not for ever"
    with served_store(relay.url, token=server.token, local=tmp_path / "b") as store:
        assert read(store, 0, 4), "another process asks once more"


@pytest.mark.parametrize("where", [0, 8, 40, 200, 1000, 5000, -1, -3000])
def test_no_flipped_bit_gives_other_values(relay: Relay, server: RunningServer, tmp_path: Path, where: int) -> None:
    relay.change = lambda path, status, data: (
        data if "/packs/" not in path else data[: where % len(data)] + bytes([data[where] ^ 1]) + data[where:][1:]
    )
    with (
        served_store(relay.url, token=server.token, retry_s=2, local=tmp_path / "local") as store,
        suppress(LatentCacheError),
    ):
        for start in range(0, 24, 4):
            assert read(store, start, start + 4)


def test_another_pack_in_the_place_of_one_is_refused(relay: Relay, server: RunningServer, tmp_path: Path) -> None:
    kept: list[bytes] = []

    def change(path: str, status: int, data: bytes) -> bytes:
        if "/packs/" in path and status == 200:
            kept.append(data)
            return kept[0].ljust(len(data))[: len(data)]
        return data

    relay.change = change
    with served_store(relay.url, token=server.token, local=tmp_path / "local") as store:
        assert read(store, 0, 8) or kept
        for start in range(0, 24, 4):
            with suppress(StoreError):
                assert read(store, start, start + 4)


@pytest.fixture
def twice(tmp_path: Path) -> Iterator[tuple[RunningServer, Relay]]:
    """A service that has each entry in two packs: of two caches that were merged by copying files."""
    cache, other = make_cache(tmp_path / "cache", num_samples=16), make_cache(tmp_path / "other", num_samples=16)
    for path in packs_in(other):
        (cache / "packs" / path.parent.name).mkdir(exist_ok=True)
        path.rename(cache / "packs" / path.parent.name / path.name)
    with serving(cache) as server, relaying(server.address) as relay:
        yield server, relay


def test_another_copy_serves_where_one_is_damaged(twice: tuple[RunningServer, Relay], tmp_path: Path) -> None:
    server, relay = twice
    with served_store(relay.url, token=server.token, local=tmp_path / "local") as store:
        assert len(list(store.keys())) == len(set(store.keys())) == 18
        first = min(store.index.sizes)
        relay.change = lambda path, status, data: (
            data[:-3000] + bytes(3000) if f"packs/{first}" in path and status == 200 else data
        )
        assert read(store, 0, 8) and store.find(KEYS[:8]) == set(KEYS[:8])


def test_an_entry_that_moves_meanwhile_is_found_where_it_is_now(tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "cache")
    with serving(cache) as server, served_store(server.url, token=server.token, local=tmp_path / "local") as store:
        list(store.keys())
        compact(cache)
        assert read(store, 0, 24), "its packs are gone there, and were not here"
        assert len(packs_in(tmp_path / "local")) == 1


def test_a_pack_whose_header_came_damaged_is_asked_for_again_later(
    relay: Relay,
    server: RunningServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad: list[str] = []

    def change(path: str, status: int, data: bytes) -> bytes:
        if "/packs/" not in path:
            return data
        bad[1:] = []
        bad.append(path)
        return bytes(len(data)) if path == bad[0] else data

    relay.change = change
    with served_store(relay.url, token=server.token, local=tmp_path / "local") as store:
        assert len(list(store.keys())) < 54 and "Its entries are missing" in caplog.text
        relay.change = None
        num_fetched = len(fetched(relay))
        assert len(list(store.keys())) < 54 and len(fetched(relay)) == num_fetched, "not at each look"
        monkeypatch.setattr(index, "UNREADABLE_S", 0.0)
        assert len(list(store.keys())) == 54 and read(store, 0, 24)


# The folder


def test_the_tier_is_bounded_and_the_longest_unused_goes(
    server: RunningServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local = tmp_path / "local"
    with served_store(server.url, token=server.token, local=local) as store:
        assert read(store, 0, 24)
        first = store.index.look_up(KEYS[:1])[0].pack.id  # type: ignore[union-attr]
        last = store.index.look_up(KEYS[-1:])[0].pack.id  # type: ignore[union-attr]
    size = max(path.stat().st_size for path in packs_in(local))
    for path in packs_in(local):
        then = time.time() - (7200 if path.stem == first else 3 * 3600)
        os.utime(path, (then, then))
        if path.stem == last:
            path.unlink()
    with served_store(server.url, token=server.token, local=local, local_max_bytes=2 * size + 100) as store:
        assert read(store, 0, 8), "this is a use"
        assert read(store, 20, 24)
        assert {path.stem for path in packs_in(local)} == {first, last} and "no room" not in caplog.text
        for _ in range(2):
            assert read(store, 0, 24), "also where not all of it has room"
        assert sum(path.stat().st_size for path in packs_in(local)) <= 2 * size + 100
        assert caplog.text.count("order='packs'") == 1


def test_what_is_damaged_or_gone_in_the_tier_is_fetched_again(
    relay: Relay, server: RunningServer, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    with served_store(relay.url, token=server.token, local=local) as store:
        assert read(store, 0, 24)
        [path] = [path for path in packs_in(local) if MOMENTS[2].numpy().tobytes() in path.read_bytes()]
        whole = path.read_bytes()
        at = whole.index(MOMENTS[2].numpy().tobytes())
        for data in (whole[: at + 5] + bytes([whole[at + 5] ^ 1]) + whole[at + 6 :], whole[:at], b"", None):
            path.unlink()
            if data is not None:
                path.write_bytes(data)
            before = len(fetched(relay))
            with served_store(relay.url, token=server.token, local=local) as other:
                assert read(other, 0, 8) and len(fetched(relay)) <= before + 2, "the pack, and first what it holds"
                assert other.damaged() == {} and other.record(KEYS[2]) == IMAGES[2].record
        assert path.read_bytes() == whole and read(store, 0, 8)


def test_what_another_process_fetched_in_between_stays(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served_store(server.url, token=server.token, local=tmp_path / "local") as store:
        assert read(store, 0, 8)
        (path,) = packs_in(tmp_path / "local")
        data, has = path.read_bytes(), Tier.has
        path.unlink()
        store.release_all()

        def fetched_after(self: Tier, pack: str) -> bool:
            is_here = has(self, pack)
            path.write_bytes(data) if not is_here else None
            return is_here

        monkeypatch.setattr(Tier, "has", fetched_after)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", lambda *_, **__: pytest.fail("what is here is removed"))
            assert store.record(KEYS[0]) == IMAGES[0].record and read(store, 0, 8)


def test_where_nothing_can_be_kept_the_error_says_so(server: RunningServer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be kept here"):
        served_store(server.url, local=tmp_path / "file")


def test_a_full_disk_is_a_clear_error(server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served_store(server.url, token=server.token, local=tmp_path / "local") as store:
        list(store.keys())

        def full(path: Path, data: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_bytes", full)
            with pytest.raises(StoreError, match=r"No space left on device.*cache\.local_max_bytes"):
                read(store, 0, 4)
        assert not list((tmp_path / "local").rglob("*.part")) and read(store, 0, 4)


def test_what_a_killed_process_left_goes(server: RunningServer, tmp_path: Path) -> None:
    folder = folder_of(server.url, tmp_path / "local") / "packs" / "ab"
    folder.mkdir(parents=True)
    old, new = folder / "x.1.2.part", folder / "y.1.2.part"
    for path in (old, new):
        path.touch()
    os.utime(old, (1, 1))
    served_store(server.url, local=tmp_path / "local").close()
    assert new.exists() and not old.exists()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("max_bytes", [None, 0])
def test_a_fork_reads_on(server: RunningServer, tmp_path: Path, max_bytes: int | None) -> None:
    with served_store(server.url, token=server.token, local=tmp_path / "local", local_max_bytes=max_bytes) as store:
        assert read(store, 0, 4)
        child = os.fork()
        if child == 0:
            os._exit(0 if read(store, 0, 12) and read(store, 4, 24) else 1)
        assert read(store, 4, 12)
        assert os.waitpid(child, 0)[1] == 0
        assert read(store, 0, 24)


def test_a_pack_is_kept_also_while_others_make_room(tmp_path: Path) -> None:
    """Each of many threads and tiers reads all, with the room of one pack."""
    cache = make_cache(tmp_path / "cache")
    wrong: list[object] = []

    def epochs(seed: int) -> None:
        try:
            with RemoteStore(DirectoryOfFiles(cache), local=tmp_path / "local", local_max_bytes=1) as store:
                for number in range(30):
                    start = 4 * ((number * (2 * seed + 1)) % 6)
                    if not read(store, start, start + 4):
                        wrong.append(start)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=epochs, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == [] and len(packs_in(tmp_path / "local")) <= 4


class DirectoryOfFiles(Transport):
    """A directory that is read as if it were far away."""

    def __init__(self, path: Path):
        self.path, self.url = path, str(path)

    def list(self, folder: str) -> dict[str, Listed]:
        files = ((path.relative_to(self.path).as_posix(), path) for path in (self.path / folder).rglob("*"))
        return {name: Listed(path.stat().st_size, path.stat().st_mtime) for name, path in files if path.is_file()}

    def read(self, name: str, start: int = 0, num_bytes: int | None = None) -> tuple[memoryview, str]:
        with (self.path / name).open("rb") as file:
            file.seek(start)
            return memoryview(file.read(-1 if num_bytes is None else num_bytes)), ""

    def is_writable(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing is open between calls."""
