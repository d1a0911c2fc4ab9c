"""Packs and manifests that move to a bucket or a service, and from there: also where the network or a process fails."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers.comparing_server import ComparingServer
from helpers.pack_damage import damage
from helpers.relay import Relay, relaying
from helpers.remote_samples import entries_of
from helpers.serving import TOKEN, RunningServer, serving_here
from transfers.test_transfers import check, fill, key_of_image, manifest_of, packs_of

from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.errors import RemoteError, StoreError
from latentcache.remote.bucket import BucketTransport
from latentcache.remote.manifests import RemoteManifests
from latentcache.remote.transfer import transfer
from latentcache.remote.transport import ANY_VERSION, packs_in
from latentcache.store import DiskStore
from latentcache.store.directory import pack_name
from latentcache.store.upkeep import rebuild, verify

Run = Callable[..., Any]
COMMAND = [sys.executable, "-m", "latentcache"]


@dataclass
class Far:
    """An empty cache behind a relay; `folder` is the directory of one that a service has."""

    url: str
    relay: Relay
    folder: Path | None = None

    def bucket(self) -> BucketTransport:
        return BucketTransport.open(self.url)

    def packs(self) -> dict[str, bytes]:
        if self.folder is not None:
            return packs_of(self.folder)
        return {pack: bytes(self.bucket().read(pack_name(pack))[0]) for pack in packs_in(self.bucket())}

    def num_packs(self) -> int:
        return len(packs_in(self.bucket()) if self.folder is None else packs_of(self.folder))

    def manifests(self) -> RemoteManifests | ManifestFolder:
        return RemoteManifests(self.bucket()) if self.folder is None else ManifestFolder(self.folder / "manifests")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Path]]:
    """A server on a cache that tests fill."""
    cache = tmp_path_factory.mktemp("moved") / "far"
    DiskStore(cache).close()
    with serving_here(cache, token=TOKEN) as server:
        yield server, cache


@pytest.fixture
def service(running: tuple[RunningServer, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Far]:
    server, folder = running
    monkeypatch.setenv("LATENTCACHE_TOKEN", str(server.write_token))
    with relaying(server.address) as relay:
        yield Far(relay.url, relay, folder)
    with DiskStore(folder) as store:
        store.remove(list(store.keys()))
        store.drop_empty(store.table.empty_packs())
    for file in (folder / "manifests").glob("*"):
        file.unlink()


@pytest.fixture
def bucket(object_server: ComparingServer, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Far]:
    with relaying(("127.0.0.1", object_server.server_port)) as relay:
        monkeypatch.setenv("AWS_ENDPOINT_URL", relay.url)
        yield Far(s3_url, relay)


@pytest.fixture(params=["bucket", "service"])
def far(request: pytest.FixtureRequest) -> Far:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def test_push_and_pull_give_the_same_cache(tmp_path: Path, far: Far, run_json: Run) -> None:
    here, back = fill(tmp_path / "here", range(32)), tmp_path / "back"
    code, planned = run_json("push", here, far.url, "--dry-run")
    assert code == 0 and planned["num_packs"] == 4 and far.packs() == {}
    code, report = run_json("push", here, far.url)
    assert code == 0 and report["num_packs"] == 4 and report["manifests"] == ["photos"]
    assert far.packs() == packs_of(here) and far.manifests().read("photos") == manifest_of(here)
    assert not far.manifests().unfinished()
    far.manifests().begin("photos")  # of a run elsewhere, which goes on
    assert run_json("push", here, far.url)[1]["num_there"] == 4
    assert transfer(fill(tmp_path / "more", range(32, 40)), far.url).ok
    assert list(far.manifests().unfinished()) == ["photos"]
    here = fill(here, range(40))
    code, report = run_json("pull", far.url, back)
    assert code == 0 and report["num_packs"] == 5 and manifest_of(back) == manifest_of(here)
    check(back, range(40))
    assert run_json("pull", far.url, back)[1]["num_packs"] == 0


def first_times(what: str) -> Callable[[str, int, bytes], bytes | None]:
    """A fault at the first answer about each pack: nothing of it, half of it, or another bit."""
    seen: set[str] = set()

    def change(path: str, status: int, data: bytes) -> bytes | None:
        if "/packs/" not in path or path in seen:
            return data
        seen.add(path)
        if what == "lost" or not data:
            return None
        return data[: len(data) // 2] if what == "half" else data[:-300] + bytes([data[-300] ^ 1]) + data[-299:]

    return change


@pytest.mark.parametrize("what", ["lost", "half", "other"])
def test_answers_that_are_lost_or_damaged(tmp_path: Path, far: Far, what: str) -> None:
    here = fill(tmp_path / "here", range(32))
    far.relay.change = first_times("lost" if what == "other" else what)
    assert transfer(here, far.url).ok, "the second attempt of an upload learns that the pack is there"
    assert far.packs() == packs_of(here)
    far.relay.change = first_times(what)
    assert transfer(far.url, tmp_path / "back").ok
    check(tmp_path / "back", range(32))


def test_a_fault_that_stays_is_an_error_with_a_next_step(
    tmp_path: Path, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = fill(tmp_path / "here", range(16))
    monkeypatch.setattr("latentcache.remote.transfer.RETRY_S", 1.5)
    far.relay.change = lambda path, status, data: None if "/packs/" in path else data
    with pytest.raises(RemoteError) as caught:
        transfer(here, far.url)
    assert "run the same again" in caught.value.next_step
    far.relay.change = None
    assert far.manifests().names() == [] and list(far.manifests().unfinished()) == ["photos"]
    assert transfer(here, far.url).ok
    transfer(far.url, tmp_path / "back")
    check(tmp_path / "back", range(16))


def test_packs_that_cannot_be_had_do_not_stop_the_rest(tmp_path: Path, far: Far) -> None:
    """One that always comes damaged; and one in an archive, from which a bucket gives nothing at once."""
    here = fill(tmp_path / "here", range(32))
    transfer(here, far.url)
    archived, damaged, *_ = sorted(packs_of(here))
    refused = {damaged, "photos"}
    far.relay.change = lambda path, _, data: data[:-100] + b"\x07" * 100 if damaged in path else data
    if far.folder is None:
        far.relay.answer = lambda method, path: 403 if archived in path and method == "GET" else None
        refused.add(archived)
    report = transfer(far.url, tmp_path / "back")
    assert report.refused.keys() == refused and not report.manifests
    assert report.num_packs >= 2 and (far.folder or "403" in report.refused[archived])
    far.relay.change = far.relay.answer = None
    assert transfer(far.url, tmp_path / "back").ok
    check(tmp_path / "back", range(32))


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_killed_in_the_middle_and_then_again(tmp_path: Path, far: Far, run_json: Run, direction: str) -> None:
    full, here = fill(tmp_path / "full", range(96), per_pack=2), tmp_path / "here"
    DiskStore(here).close()
    if direction == "pull":
        transfer(full, far.url)
    method, way = ("PUT", (full, far.url)) if direction == "push" else ("GET", (far.url, here))
    far.relay.answer = lambda each, path: time.sleep(0.2) if "/packs/" in path and each == method else None

    def num_there() -> int:
        return far.num_packs() if direction == "push" else len(packs_of(here))

    process = subprocess.Popen([*COMMAND, direction, *map(str, way)])
    while num_there() < 10:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    time.sleep(0.5)  # what was sent arrives
    far.relay.answer, before = None, num_there()
    manifests = far.manifests() if direction == "push" else ManifestFolder(here / "manifests")
    assert 10 <= before < 48 and manifests.read("photos") is None and list(manifests.unfinished()) == ["photos"]
    far.relay.requests.clear()
    code, report = run_json(direction, *way)
    assert code == 0 and (report["num_packs"], report["num_there"]) == (48 - before, before)
    asked = {path for each, path in far.relay.requests if "/packs/" in path and each == method}
    assert len(asked) <= 48 - before, "what is there is not sent again"
    assert manifests.read("photos") == manifest_of(full) and not manifests.unfinished()
    assert (far.packs() if direction == "push" else packs_of(here)) == packs_of(full)
    assert not list(here.rglob("*.tmp"))
    if direction == "pull" or far.folder is not None:
        check(here if far.folder is None or direction == "pull" else far.folder, range(96))


def test_two_caches_push_at_once(tmp_path: Path, far: Far) -> None:
    """Processes of their own: nothing is lost, and their manifests are merged."""
    parts = [fill(tmp_path / f"{first}", range(first, first + 32), per_pack=2) for first in (0, 24)]
    command = [*COMMAND, "push"]
    started = [
        subprocess.Popen([*command, str(part), far.url, "--json"], stdout=subprocess.PIPE, text=True) for part in parts
    ]
    for process in started:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0 and json.loads(out)["ok"]
    merged = far.manifests().read("photos")
    assert merged is not None and set(merged.rows) == {f"{n}.png" for n in range(56)}
    assert transfer(far.url, tmp_path / "back").ok
    check(tmp_path / "back", range(56))


def test_what_is_damaged_in_one_pack_and_whole_in_another_is_no_fault(tmp_path: Path, service: Far) -> None:
    folder, [image, _] = service.folder, entries_of(3)
    assert folder is not None
    fill(folder, range(16))
    damage(folder, image.tensors["moments"].numpy().tobytes())
    assert verify(folder).damaged
    with DiskStore(folder) as store:
        store.add([image])
    report = transfer(service.url, tmp_path / "back")
    assert report.ok and report.manifests == ["photos"], report.refused
    check(tmp_path / "back", range(16))


def test_a_bucket_copied_by_other_tools_is_a_cache(tmp_path: Path, bucket: Far, object_server: ComparingServer) -> None:
    """As `aws s3 sync` of the bucket, and `latentcache rebuild`."""
    transfer(fill(tmp_path / "here", range(16)), bucket.url)
    for name, (data, _) in object_server.objects.items():
        path = tmp_path / "copy" / name.partition("/cache/")[2]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    assert rebuild(tmp_path / "copy").num_entries == 18
    check(tmp_path / "copy", range(16))


def test_verify_reads_a_bucket(tmp_path: Path, bucket: Far, run_json: Run) -> None:
    here, url = fill(tmp_path / "here", range(32)), bucket.url
    transfer(here, url)
    code, report = run_json("verify", url)
    assert code == 0 and report["ok"] and (report["num_entries"], report["num_packs"]) == (36, 4)
    damage(here, entries_of(3)[0].tensors["moments"].numpy().tobytes())
    (pack, data) = next((pack, data) for pack, data in packs_of(here).items() if data != bucket.packs()[pack])
    bucket.bucket().write(pack_name(pack), data, version=ANY_VERSION)
    code, report = run_json("verify", url)
    assert code == 1 and report["damaged"].keys() == {key_of_image(3)}
    code, report = run_json("verify", url)
    assert code == 1 and not report["damaged"] and len(report["known_damaged"]) == 1, "it is a miss now"
    assert transfer(here, url).refused.keys() >= {"photos"}
    assert transfer(fill(tmp_path / "more", range(4)), url).ok
    transfer(url, tmp_path / "back")
    check(tmp_path / "back", range(32))


def test_what_is_no_cache_and_what_is_not_there(tmp_path: Path, s3_url: str, run: Run) -> None:
    code, _, err = run("pull", s3_url, tmp_path / "b")
    assert code == 2 and "there is no cache here" in err and "latentcache push" in err
    with pytest.raises(StoreError):
        transfer(tmp_path / "absent", s3_url)
