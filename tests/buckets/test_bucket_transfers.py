"""Packs and manifests that move to a bucket and from it: also where the network fails."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.comparing_server import ComparingServer
from helpers.pack_damage import damage
from helpers.relay import Relay, relaying
from helpers.remote_samples import entries_of
from transfers.test_transfers import check, fill, key_of_image, manifest_of, packs_of

from latentcache.errors import RemoteError, StoreError
from latentcache.remote.bucket import BucketTransport
from latentcache.remote.manifests import RemoteManifests
from latentcache.remote.transfer import transfer
from latentcache.remote.transport import ANY_VERSION, packs_in, read_pack
from latentcache.store import DiskStore
from latentcache.store.directory import pack_name
from latentcache.store.upkeep import rebuild

Run = Callable[..., Any]
RETRY_S = 3.0


@pytest.fixture
def relay(object_server: ComparingServer, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    """A relay before the server, to which `s3_url` leads from here on."""
    with relaying(("127.0.0.1", object_server.server_port)) as relay:
        monkeypatch.setenv("AWS_ENDPOINT_URL", relay.url)
        yield relay


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are tried again for RETRY_S only."""
    monkeypatch.setattr("latentcache.remote.transfer.RETRY_S", RETRY_S)


def packs_at(url: str) -> dict[str, bytes]:
    bucket = BucketTransport.open(url)
    return {pack: bytes(read_pack(bucket, pack)) for pack in packs_in(bucket)}


def test_copied_by_other_tools_it_is_a_cache(tmp_path: Path, s3_url: str, object_server: ComparingServer) -> None:
    """As `aws s3 sync` of the bucket, and `latentcache rebuild`."""
    transfer(fill(tmp_path / "here", range(16)), s3_url)
    for name, (data, _) in object_server.objects.items():
        path = tmp_path / "copy" / name.partition("/cache/")[2]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    assert rebuild(tmp_path / "copy").num_entries == 18
    check(tmp_path / "copy", range(16))


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_killed_in_the_middle_and_then_again(
    tmp_path: Path, s3_url: str, relay: Relay, run_json: Run, direction: str
) -> None:
    full = fill(tmp_path / "full", range(80), per_pack=2)
    here = full if direction == "push" else tmp_path / "here"
    if direction == "pull":
        transfer(full, s3_url)
        DiskStore(here).close()
    method = "PUT" if direction == "push" else "GET"
    relay.answer = lambda each, path: time.sleep(0.3) if "/packs/" in path and each == method else None
    way = (here, s3_url) if direction == "push" else (s3_url, here)

    def num_there() -> int:
        return len(packs_in(BucketTransport.open(s3_url)) if direction == "push" else packs_of(here))

    process = subprocess.Popen([sys.executable, "-m", "latentcache", direction, *map(str, way)])
    while num_there() < 8:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    time.sleep(0.5)
    relay.answer = None
    before = num_there()
    assert 8 <= before < 40 and (direction == "push" or manifest_of(here) is None)
    relay.requests.clear()
    code, report = run_json(direction, *way)
    assert code == 0 and (report["num_packs"], report["num_there"]) == (40 - before, before)
    if direction == "push":
        assert len([path for each, path in relay.requests if each == method and "/packs/" in path]) == 40 - before
        assert packs_at(s3_url) == packs_of(here)
    else:
        assert packs_of(here) == packs_of(full) and not list(here.rglob("*.tmp"))
        check(here, range(80))


def first_times(what: str) -> Callable[[str, int, bytes], bytes | None]:
    """A fault at the first answer about each pack's object: none, half of it, another bit, or a late one."""
    seen: set[str] = set()

    def change(path: str, status: int, data: bytes) -> bytes | None:
        if "/packs/" not in path or path in seen:
            return data
        seen.add(path)
        if what == "stall":
            time.sleep(0.6 * RETRY_S)
        if what in ("drop", "stall") or not data:
            return None
        return data[: len(data) // 2] if what == "half" else data[:-300] + bytes([data[-300] ^ 1]) + data[-299:]

    return change


@pytest.mark.parametrize("what", ["drop", "half", "other", "stall", "busy"])
def test_faults_that_pass(tmp_path: Path, s3_url: str, relay: Relay, short: None, what: str) -> None:
    here = fill(tmp_path / "here", range(16))
    seen: set[tuple[str, str]] = set()

    def busy(method: str, path: str) -> int | None:
        is_first = (method, path) not in seen
        seen.add((method, path))
        return 503 if is_first and what == "busy" else None

    relay.answer, relay.change = busy, None if what == "busy" else first_times(what)
    assert transfer(here, s3_url).ok, "an answer that was lost is requested again, and finds the pack there"
    assert packs_at(s3_url) == packs_of(here)
    relay.answer, relay.change = busy, None if what == "busy" else first_times(what)
    seen.clear()
    assert transfer(s3_url, tmp_path / "back").ok
    check(tmp_path / "back", range(16))


@pytest.mark.parametrize("what", ["503", "drop"])
def test_faults_that_stay_are_errors_with_a_next_step(
    tmp_path: Path, s3_url: str, relay: Relay, short: None, what: str
) -> None:
    here = fill(tmp_path / "here", range(16))
    relay.answer = lambda method, path: 503 if "/packs/" in path and what == "503" else None
    relay.change = lambda path, status, data: None if "/packs/" in path and what == "drop" else data
    with pytest.raises(RemoteError) as caught:
        transfer(here, s3_url)
    assert "run the same again" in caught.value.next_step
    relay.answer = relay.change = None
    manifests = RemoteManifests(BucketTransport.open(s3_url))
    assert manifests.names() == [] and manifests.unfinished() == ["photos"]
    assert transfer(here, s3_url).ok
    transfer(s3_url, tmp_path / "back")
    check(tmp_path / "back", range(16))


def test_a_pack_that_cannot_be_had_does_not_stop_the_rest(tmp_path: Path, s3_url: str, relay: Relay) -> None:
    """One in an archive, from which a store gives nothing at once; and one whose object is damaged."""
    here = fill(tmp_path / "here", range(32))
    transfer(here, s3_url)
    archived, damaged, *_ = sorted(packs_of(here))
    relay.answer = lambda method, path: 403 if archived in path and method == "GET" else None
    bucket = BucketTransport.open(s3_url)
    data = packs_of(here)[damaged]
    bucket.write(pack_name(damaged), data[:-100] + bytes(100), version=ANY_VERSION)
    report = transfer(s3_url, tmp_path / "back")
    assert set(report.refused) == {archived, damaged, "photos"} and "403" in report.refused[archived]
    with DiskStore(tmp_path / "back") as store:
        assert len(list(store.keys())) >= 16
    relay.answer = None
    bucket.write(pack_name(damaged), data, version=ANY_VERSION)
    assert transfer(s3_url, tmp_path / "back").ok
    check(tmp_path / "back", range(32))


def test_verify_reads_a_bucket(tmp_path: Path, s3_url: str, run: Run, run_json: Run) -> None:
    here = fill(tmp_path / "here", range(32))
    transfer(here, s3_url)
    code, report = run_json("verify", s3_url)
    assert code == 0 and report["ok"] and (report["num_entries"], report["num_packs"]) == (36, 4)
    damage(here, entries_of(3)[0].tensors["moments"].numpy().tobytes())
    (pack, data) = next((pack, data) for pack, data in packs_of(here).items() if data != packs_at(s3_url)[pack])
    BucketTransport.open(s3_url).write(pack_name(pack), data, version=ANY_VERSION)
    code, report = run_json("verify", s3_url)
    assert code == 1 and report["damaged"].keys() == {key_of_image(3)}
    code, report = run_json("verify", s3_url)
    assert code == 1 and not report["damaged"] and len(report["known_damaged"]) == 1, "it is a miss now"
    assert transfer(here, s3_url).refused.keys() >= {"photos"}
    assert transfer(fill(tmp_path / "more", range(4)), s3_url).ok
    transfer(s3_url, tmp_path / "back")
    check(tmp_path / "back", range(32))


def test_what_is_no_cache_and_what_is_not_there(tmp_path: Path, s3_url: str, run: Run) -> None:
    code, _, err = run("pull", s3_url, tmp_path / "b")
    assert code == 2 and "there is no cache here" in err and "latentcache push" in err
    with pytest.raises(StoreError):
        transfer(tmp_path / "absent", s3_url)
