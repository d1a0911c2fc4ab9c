"""Packs and manifests that move to a bucket or a service, and from there: also where the network or a process fails."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.far_caches import Far
from helpers.pack_damage import damage
from helpers.remote_samples import check, entries_of, fill, key_of_image, make_manifest, manifest_of, packs_of

from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.errors import RemoteError
from latentcache.remote.transfer import transfer
from latentcache.store import DiskStore
from latentcache.store.upkeep import compact, verify

Run = Callable[..., Any]


def test_push_and_pull_give_the_same_cache(tmp_path: Path, far: Far, run_json: Run) -> None:
    here, back = fill(tmp_path / "here", range(32)), tmp_path / "back"
    code, planned = run_json("push", here, far.url, "--dry-run")
    assert code == 0 and planned["num_packs"] == 4 and far.packs() == {}
    code, report = run_json("push", here, far.url)
    assert code == 0 and report["num_packs"] == 4 and report["manifests"] == ["photos"]
    assert far.packs() == packs_of(here) and far.manifests().read("photos") == manifest_of(here)
    assert not far.unfinished()
    far.manifests().begin("photos")  # of a run elsewhere, which goes on
    assert run_json("push", here, far.url)[1]["num_there"] == 4
    assert transfer(fill(tmp_path / "more", range(32, 40)), far.url).ok
    assert far.unfinished() == ["photos"]
    here = fill(here, range(40))
    code, report = run_json("pull", far.url, back)
    assert code == 0 and report["num_packs"] == 5 and manifest_of(back) == manifest_of(here)
    check(back, range(40))
    assert run_json("pull", far.url, back)[1]["num_packs"] == 0


def first_times(what: str) -> Callable[[str, int, bytes], bytes | None]:
    """A fault at the first answer of each status about each pack: nothing of it, half of it, or another bit."""
    seen: set[tuple[str, int]] = set()

    def change(path: str, status: int, data: bytes) -> bytes | None:
        if "/packs/" not in path or (path, status) in seen:
            return data
        seen.add((path, status))
        if what == "lost" or not data:
            return None
        return data[: len(data) // 2] if what == "half" else data[:-300] + bytes([data[-300] ^ 1]) + data[-299:]

    return change


@pytest.mark.parametrize("what", ["lost", "half", "other"])
def test_answers_that_are_lost_or_damaged(tmp_path: Path, far: Far, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    here = fill(tmp_path / "here", range(16))
    far.relay.change = lambda path, status, data: None if "/packs/" in path else data
    with monkeypatch.context() as patched, pytest.raises(RemoteError) as caught:
        patched.setattr("latentcache.remote.transfer.RETRY_S", 0.5)
        transfer(here, far.url)
    assert "run the command again" in caught.value.next_step
    far.relay.change = first_times("lost" if what == "other" else what)
    assert far.manifests().names() == [] and far.unfinished() == ["photos"]
    assert transfer(here, far.url).ok, "the second attempt of an upload learns that the pack is there"
    assert far.packs() == packs_of(here)
    far.relay.change = first_times(what)
    assert transfer(far.url, tmp_path / "back").ok
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


@pytest.mark.parametrize(("direction", "far"), [("push", "bucket"), ("pull", "service")], indirect=["far"])
def test_killed_in_the_middle_and_then_again(tmp_path: Path, far: Far, run_json: Run, direction: str) -> None:
    full, here = fill(tmp_path / "full", range(32), per_pack=1), tmp_path / "here"
    method, way, manifests, packs = "PUT", (full, far.url), far.manifests(), far.packs
    if direction == "pull":
        transfer(full, far.url)
        DiskStore(here).close()
        method, way, packs = "GET", (far.url, here), partial(packs_of, here)
        manifests = ManifestFolder(here / "manifests")
    far.relay.answer = lambda each, path: time.sleep(0.2) if "/packs/" in path and each == method else None
    process = subprocess.Popen([sys.executable, "-m", "latentcache", direction, *map(str, way)])
    while len(packs()) < 4:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    time.sleep(0.5)  # what was sent arrives
    far.relay.answer, before = None, len(packs())
    assert 4 <= before < 32 and manifests.read("photos") is None and [*manifests.unfinished()] == ["photos"]
    far.relay.requests.clear()
    code, report = run_json(direction, *way)
    assert code == 0 and (report["num_packs"], report["num_there"]) == (32 - before, before)
    asked = {path for each, path in far.relay.requests if "/packs/" in path and each == method}
    assert len(asked) <= 32 - before, "what is there is not sent again"
    assert manifests.read("photos") == manifest_of(full) and not manifests.unfinished() and packs() == packs_of(full)
    assert not list(here.rglob("*.tmp"))


def test_two_caches_are_pushed_at_once(tmp_path: Path, far: Far) -> None:
    """Nothing is lost, and their manifests are merged."""
    parts = [fill(tmp_path / f"{first}", range(first, first + 32), per_pack=4) for first in (0, 24)]
    with ThreadPoolExecutor(2) as threads:
        assert all(report.ok for report in threads.map(lambda part: transfer(part, far.url), parts))
    assert transfer(far.url, tmp_path / "back").ok
    assert dict(manifest_of(tmp_path / "back").rows) == dict(make_manifest(numbers=range(56)).rows)
    check(tmp_path / "back", range(56))


@pytest.mark.parametrize("which", [1, 2, 3])
def test_packs_that_are_compacted_during_a_pull(tmp_path: Path, service: Far, which: int) -> None:
    """After the first, the second or the third list of packs that the pull reads."""
    assert service.folder is not None
    folder, lists = fill(service.folder, range(16), per_pack=2), list[str]()

    def compact_then(path: str, status: int, data: bytes) -> bytes:
        lists.extend([path] if path.endswith("/packs") else [])
        if path.endswith("/packs") and len(lists) == which:
            compact(folder)
        return data

    service.relay.change = compact_then
    report = transfer(service.url, tmp_path / "back")
    assert report.ok and report.manifests == ["photos"], report.refused
    assert (report.num_packs, report.num_there) == (len(packs_of(tmp_path / "back")), 0), "what is gone is not there"
    check(tmp_path / "back", range(16))


def test_what_is_damaged_in_one_pack_and_whole_in_another_is_no_fault(tmp_path: Path, service: Far) -> None:
    folder, [image, _] = service.folder, entries_of(3)
    assert folder is not None
    fill(folder, range(16))
    damage(folder, image.tensors["moments"].numpy().tobytes())
    assert verify(folder).damaged.keys() == {key_of_image(3)}
    with DiskStore(folder) as store:
        store.add([image])
    report = transfer(service.url, tmp_path / "back")
    assert report.ok and report.manifests == ["photos"], report.refused
    check(tmp_path / "back", range(16))
