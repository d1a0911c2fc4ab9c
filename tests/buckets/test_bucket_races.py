"""Prune of a bucket, and what several machines do to one at once: what goes, when it goes, and that no data is lost."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest
from helpers.remote_samples import (
    check,
    entries_by_key,
    entries_of,
    fill,
    key_of_image,
    make_manifest,
    manifest_of,
    packs_of,
    replace_packs,
)
from obstore.store import MemoryStore

from latentcache import LatentCache
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.errors import StoreError
from latentcache.remote import upkeep
from latentcache.remote.bucket import PROBES, BucketTransport
from latentcache.remote.manifests import RemoteManifests
from latentcache.remote.transfer import Move, transfer
from latentcache.remote.transport import ANY_VERSION, packs_in, removals_in
from latentcache.remote.upkeep import PruneReport, verify
from latentcache.store.directory import pack_name

Run = Callable[..., Any]


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty bucket in memory; there are others below it."""
    stores: dict[str, MemoryStore] = {}

    def opened(url: str, **_: Any) -> BucketTransport:
        return BucketTransport(stores.setdefault(url, MemoryStore()), url)

    monkeypatch.setattr(BucketTransport, "open", opened)
    return "s3://tests/cache"


def prune(url: str, *, grace_h: float = 0.0, **more: Any) -> PruneReport:
    return upkeep.prune(BucketTransport.open(url), grace_h=grace_h, **more)


def keep_only(cache: Path, numbers: range) -> None:
    """A manifest of these samples alone, in the place of the one that is there."""
    ManifestFolder(cache / "manifests").write(make_manifest("photos", numbers))


def send_packs(cache: Path, url: str) -> None:
    """Send packs alone, whatever is there."""
    for pack, data in packs_of(cache).items():
        BucketTransport.open(url).write(pack_name(pack), data, version=ANY_VERSION)


def test_what_no_manifest_needs_goes(tmp_path: Path, s3_url: str, run: Run, run_json: Run) -> None:
    here = fill(tmp_path / "here", range(32))
    transfer(here, s3_url)
    keep_only(here, range(16, 28))
    transfer(here, s3_url, replace=True)
    bucket = BucketTransport.open(s3_url)
    bucket.write(f"{PROBES}/{'0' * 32}", b"1", version=ANY_VERSION)  # of a process that was killed
    young = prune(s3_url, grace_h=24)
    assert (young.num_unused, young.num_listed) == (0, 0), "younger packs may be of a push that goes on"
    assert bucket.list(PROBES)
    code, planned = run_json("prune", s3_url, "--grace", "0", "--dry-run")
    assert code == 0 and planned["num_listed"] == 2 and removals_in(bucket) == {}
    code, report = run_json("prune", s3_url, "--grace", "0")
    # Two packs hold nothing else. The last has half of it, and stays.
    assert code == 0 and report["num_unused"] == 18 + 4 and report["num_listed"] == 2 and not bucket.list(PROBES)
    again = prune(s3_url, grace_h=24)
    assert (again.num_packs, again.num_waiting, again.num_listed) == (2, 2, 0), "who read them before reads them still"
    assert len(packs_in(bucket)) == 4
    code, out, _ = run("prune", s3_url, "--grace", "0")
    assert code == 0 and out.startswith("removed 2 packs (")
    assert len(packs_in(bucket)) == 2 and removals_in(bucket) == {}
    transfer(s3_url, tmp_path / "back")
    check(tmp_path / "back", range(16, 28))
    for refused in (["--max-bytes", "1GB"], ["--grace", "-1"], ["--grace", "nan"], ["--grace", "1e9"]):
        assert run("prune", s3_url, *refused)[0] == 2
    assert run("compact", s3_url)[0] == 2


def test_packs_go_whose_entries_lie_in_other_packs(tmp_path: Path, url: str) -> None:
    here = fill(tmp_path / "here", range(16), per_pack=4)
    transfer(here, url)
    send_packs(whole := fill(tmp_path / "whole", range(16), per_pack=16), url)
    assert prune(url).num_listed == 4
    assert prune(url).num_removed == 4 and packs_in(BucketTransport.open(url)).keys() == packs_of(whole).keys()
    transfer(url, tmp_path / "back")
    check(tmp_path / "back", range(16))
    assert transfer(here, url).num_packs == 0, "its entries are there"


def test_with_a_clock_that_is_wrong_nothing_is_done(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class WrongClock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(hours=-1)

    transfer(fill(tmp_path / "here", range(16), per_pack=4), url)
    before = BucketTransport.open(url).list("")
    monkeypatch.setattr(upkeep, "datetime", WrongClock)
    with pytest.raises(StoreError, match=r"this machine's clock is .* Set the clock"):
        prune(url)
    assert BucketTransport.open(url).list("") == before


def test_what_is_not_finished_is_kept(tmp_path: Path, url: str) -> None:
    transfer(fill(tmp_path / "here", range(8), None), url)
    with pytest.raises(StoreError, match="has no manifest"):
        prune(url)
    transfer(fill(tmp_path / "other", range(8, 16), "others"), url)
    manifests = RemoteManifests(BucketTransport.open(url), source="another machine")
    manifests.begin("photos")
    with pytest.raises(StoreError, match=r"not finished: photos.*--unfinished"):
        prune(url)
    assert prune(url, unfinished=True, grace_h=24.0).num_unused == 0
    assert manifests.unfinished() == ["photos"], "it may be at work"
    assert prune(url, unfinished=True).num_unused == 9 and manifests.unfinished() == []


def listed_pack(tmp_path: Path, url: str) -> Path:
    """A bucket in which a pack is due for removal. Returns a cache whose manifest needs it."""
    here = fill(tmp_path / "here", range(16))
    transfer(here, url)
    keep_only(here, range(8))
    transfer(here, url, replace=True)
    assert prune(url).num_listed == 1
    keep_only(here, range(16))
    return here


def once_manifests_are_read(patch: pytest.MonkeyPatch, others: Callable[[], None]) -> None:
    """What other machines do after the next reader of the manifest, a prune, has read it."""
    read, done = BucketTransport.read, list[str]()

    def reading(self: BucketTransport, name: str, *arguments: Any) -> Any:
        found = read(self, name, *arguments)
        if name == "manifests/photos.safetensors" and not done:
            done.append(name)
            others()
        return found

    patch.setattr(BucketTransport, "read", reading)


@pytest.mark.parametrize("has_gone", [False, True])
def test_a_push_does_not_count_on_a_pack_that_is_about_to_go(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, has_gone: bool
) -> None:
    """Nor does a prune remove one that another prune removed, and the push sent again."""
    here, removed = listed_pack(tmp_path, url), list[int]()

    def others() -> None:
        removed.append(prune(url).num_removed if has_gone else 0)
        assert transfer(here, url).ok

    with monkeypatch.context() as patch:
        once_manifests_are_read(patch, others)
        removed.append(prune(url).num_removed)
    assert removed == ([1, 0] if has_gone else [0, 1])
    assert transfer(url, tmp_path / "back").ok
    check(tmp_path / "back", range(16))


def test_what_a_listed_pack_alone_has_is_read_and_stays_where_it_is_needed(tmp_path: Path, url: str) -> None:
    whole = manifest_of(listed_pack(tmp_path, url))
    assert whole is not None
    bucket = BucketTransport.open(url)
    RemoteManifests(bucket).write(whole)  # of a push that looked before
    key = key_of_image(12)
    with LatentCache(url, local=tmp_path / "local") as cache:
        assert cache.get(key).record.key == key and not cache.store.find([key])
        assert cache.store.add(entries_of(12)) == 2, "as a precache does: it does not count on what is about to go"
    assert transfer(url, tmp_path / "back", dry_run=True).ok
    report = transfer(url, tmp_path / "back")
    assert report.ok and report.manifests == ["photos"]
    check(tmp_path / "back", range(16))
    listed = removals_in(bucket).items()
    assert listed and prune(url).num_removed == 0
    assert listed.isdisjoint(removals_in(bucket).items())
    assert transfer(url, tmp_path / "again").ok


def moved_between_lists(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next time that packs and removals are listed, entries move to new packs after the first of the two lists."""
    listing, first = BucketTransport.list, list[str]()

    def move_after(self: BucketTransport, folder: str) -> dict[str, Any]:
        found = listing(self, folder)
        if folder in ("packs", "removals") and not first:
            first.append(folder)
            assert replace_packs(BucketTransport.open(url))
        return found

    monkeypatch.setattr(BucketTransport, "list", move_after)


def test_entries_that_move_between_two_lists_are_found(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = fill(tmp_path / "here", range(16), None, per_pack=4)
    for number in range(3):
        transfer(here, f"{url}/{number}")
    keys = entries_by_key(range(16)).keys()
    with monkeypatch.context() as patch, LatentCache(f"{url}/0", local=tmp_path / "local") as cache:
        assert cache.store.find(keys) == keys
        moved_between_lists(f"{url}/0", patch)
        assert cache.store.find([*keys, "0" * 64]) == keys
    with monkeypatch.context() as patch:
        moved_between_lists(f"{url}/1", patch)
        assert transfer(f"{url}/1", tmp_path / "back").ok
    check(tmp_path / "back", range(16))
    with monkeypatch.context() as patch:
        moved_between_lists(f"{url}/2", patch)
        assert verify(BucketTransport.open(f"{url}/2")).num_entries == 18


def test_a_pull_ends_the_note_of_one_that_died_behind_its_manifest(tmp_path: Path) -> None:
    here, there = fill(tmp_path / "here", range(8)), tmp_path / "there"
    transfer(here, there)
    manifests = ManifestFolder(there / "manifests", source=str(here))
    manifests.begin("photos")
    assert transfer(here, there, dry_run=True).ok and list(manifests.unfinished()) == ["photos"]
    assert transfer(here, there).ok and manifests.unfinished() == {}


def test_what_goes_during_a_push_is_sent_again(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there when it began, and what it has sent itself."""
    transfer(fill(tmp_path / "old", range(24, 32), None), url)
    here = fill(tmp_path / "here", range(8), per_pack=4)
    send_packs(here, url)
    fill(here, range(16), per_pack=4)
    move = Move._move_manifest

    def meanwhile(self: Move, *args: Any) -> None:
        bucket = BucketTransport.open(url)
        bucket.remove(map(pack_name, packs_in(bucket)))
        move(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Move, "_move_manifest", meanwhile)
        assert transfer(here, url).ok
    assert transfer(url, tmp_path / "back").ok
    check(tmp_path / "back", range(16))
