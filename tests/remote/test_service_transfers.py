"""Packs and manifests that move to a service and from it, also where the network fails or a process is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.pack_damage import damage
from helpers.relay import Relay, relaying
from helpers.remote_samples import entries_of
from helpers.serving import RunningServer, serving
from transfers.test_transfers import check, fill, manifest_of, packs_of

from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.remote.transfer import transfer
from latentcache.store import DiskStore
from latentcache.store.upkeep import verify

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Path]]:
    """A server on a cache that tests empty and fill."""
    cache = tmp_path_factory.mktemp("moved") / "far"
    DiskStore(cache).close()
    with serving(cache) as server:
        yield server, cache


@pytest.fixture
def far(running: tuple[RunningServer, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of the service, empty, and its writing token in the environment."""
    monkeypatch.setenv("LATENTCACHE_TOKEN", str(running[0].write_token))
    yield running[1]
    with DiskStore(running[1]) as store:
        store.remove(list(store.keys()))
        packs = store.catalog.table.empty_packs()
        store.catalog.drop_empty(packs)
    for file in (running[1] / "manifests").glob("*"):
        file.unlink()


@pytest.fixture
def url(running: tuple[RunningServer, Path]) -> str:
    return running[0].url


@pytest.fixture
def slow(running: tuple[RunningServer, Path]) -> Iterator[Relay]:
    with relaying(running[0].address) as relay:
        yield relay


def test_push_and_pull_give_the_same_cache(tmp_path: Path, far: Path, url: str, run_json: Run) -> None:
    here, back = fill(tmp_path / "here", range(32)), tmp_path / "back"
    code, planned = run_json("push", here, url, "--dry-run")
    assert code == 0 and planned["num_packs"] == 4 and packs_of(far) == {}
    code, report = run_json("push", here, url)
    assert code == 0 and report["num_packs"] == 4 and report["manifests"] == ["photos"]
    assert packs_of(far) == packs_of(here) and manifest_of(far) == manifest_of(here)
    assert ManifestFolder(far / "manifests").unfinished() == {}
    ManifestFolder(far / "manifests").begin("photos")  # of a run on the server's machine, which goes on
    assert run_json("push", here, url)[1]["num_there"] == 4
    assert transfer(fill(tmp_path / "more", range(32, 40)), url).ok
    assert list(ManifestFolder(far / "manifests").unfinished()) == ["photos"]
    here = fill(here, range(40))
    code, report = run_json("pull", url, back)
    assert code == 0 and report["num_packs"] == 5 and manifest_of(back) == manifest_of(here)
    check(back, range(40))
    assert run_json("pull", url, back)[1]["num_packs"] == 0


def damage_first(what: str) -> Callable[[str, int, bytes], bytes | None]:
    """A fault at the first answer about each pack: nothing of it, half of it, or another bit."""
    seen: set[str] = set()

    def change(path: str, status: int, data: bytes) -> bytes | None:
        if "/packs/" not in path or path in seen:
            return data
        seen.add(path)
        if what == "lost":
            return None
        return data[: len(data) // 2] if what == "half" else data[:-300] + bytes([data[-300] ^ 1]) + data[-299:]

    return change


@pytest.mark.parametrize("what", ["lost", "half", "other"])
def test_answers_that_are_lost_or_damaged(tmp_path: Path, far: Path, slow: Relay, what: str) -> None:
    here = fill(tmp_path / "here", range(32))
    slow.change = damage_first("lost" if what == "other" else what)
    assert transfer(here, slow.url).ok, "the second attempt of an upload learns that the pack is there"
    assert packs_of(far) == packs_of(here) and verify(far).ok
    slow.change = damage_first(what)
    assert transfer(slow.url, tmp_path / "back").ok
    check(tmp_path / "back", range(32))


def test_a_pack_that_always_comes_damaged_is_refused_by_name(tmp_path: Path, far: Path, slow: Relay) -> None:
    here = fill(tmp_path / "here", range(32))
    transfer(here, slow.url)
    bad = min(packs_of(here))
    slow.change = lambda path, _, data: data[:-100] + b"\x07" * 100 if f"packs/{bad}" in path else data
    report = transfer(slow.url, tmp_path / "back")
    assert bad in report.refused and report.num_packs >= 3 and not report.manifests
    slow.change = None
    assert transfer(slow.url, tmp_path / "back").ok
    check(tmp_path / "back", range(32))


def test_what_is_damaged_in_one_pack_and_whole_in_another_is_no_fault(tmp_path: Path, far: Path, url: str) -> None:
    fill(far, range(16))
    [image, _] = entries_of(3)
    damage(far, image.tensors["moments"].numpy().tobytes())
    assert verify(far).damaged
    with DiskStore(far) as store:
        store.add([image])
    report = transfer(url, tmp_path / "back")
    assert report.ok and report.manifests == ["photos"], report.refused
    check(tmp_path / "back", range(16))


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_killed_in_the_middle_and_then_again(
    tmp_path: Path, far: Path, slow: Relay, run_json: Run, direction: str
) -> None:
    here = tmp_path / "here"
    fill(here if direction == "push" else far, range(96), per_pack=2)
    DiskStore(here).close()
    slow.change = lambda path, _, data: (time.sleep(0.2), data)[1] if "/packs/" in path else data
    way = (here, slow.url) if direction == "push" else (slow.url, here)
    target = far if direction == "push" else here
    process = subprocess.Popen([sys.executable, "-m", "latentcache", direction, *map(str, way)])
    while len(packs_of(target)) < 10:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert manifest_of(target) is None and ManifestFolder(target / "manifests").unfinished()
    time.sleep(0.5)  # the service finishes what it was sent
    num_there, slow.change = len(packs_of(target)), None
    assert 10 <= num_there < 48 and verify(target).ok
    slow.requests.clear()
    code, report = run_json(direction, *way)
    assert code == 0 and (report["num_packs"], report["num_there"]) == (48 - num_there, num_there)
    method = "PUT" if direction == "push" else "GET"
    assert len({path for each, path in slow.requests if "/packs/" in path and each == method}) <= 48 - num_there, (
        "what is there is not sent again"
    )
    assert packs_of(here) == packs_of(far) and manifest_of(target) is not None
    assert not list(here.rglob("*.tmp")) and not ManifestFolder(target / "manifests").unfinished()
    check(target, range(96))


def test_two_caches_push_at_once(tmp_path: Path, far: Path, url: str) -> None:
    """Processes of their own: nothing is lost, and their manifests are merged."""
    parts = [fill(tmp_path / f"{first}", range(first, first + 32), per_pack=2) for first in (0, 24)]
    command = [sys.executable, "-m", "latentcache", "push"]
    started = [
        subprocess.Popen([*command, str(part), url, "--json"], stdout=subprocess.PIPE, text=True) for part in parts
    ]
    for process in started:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0 and json.loads(out)["ok"]
    merged = manifest_of(far)
    assert merged is not None and set(merged.rows) == {f"{n}.png" for n in range(56)}
    check(far, range(56))
