"""What several machines do to one bucket at once, in an order that the test chooses: no data is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from buckets.test_bucket_upkeep import keep_only, tidy
from helpers.remote_samples import entries_of
from obstore.store import MemoryStore
from transfers.test_transfers import check, fill, key_of_image, manifest_of, packs_of

from latentcache import Config, LatentCache
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.errors import StoreError
from latentcache.precache import run as precache_run
from latentcache.precache.plan import Plan
from latentcache.precache.run import run_precache
from latentcache.remote import index
from latentcache.remote.bucket import BucketTransport
from latentcache.remote.manifests import RemoteManifests
from latentcache.remote.transfer import End, Move, transfer
from latentcache.remote.transport import ANY_VERSION, packs_in, removals_in
from latentcache.remote.upkeep import Tidying, verify
from latentcache.store.directory import pack_name


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty bucket in memory; there are others below it."""
    stores: dict[str, MemoryStore] = {}

    def opened(url: str, **_: Any) -> BucketTransport:
        return BucketTransport(stores.setdefault(url, MemoryStore()), url)

    monkeypatch.setattr(BucketTransport, "open", opened)
    return "s3://tests/cache"


def listed_pack(tmp_path: Path, url: str) -> Path:
    """A bucket in which a pack is due for removal. Returns a cache whose manifest needs it."""
    here = fill(tmp_path / "here", range(16), per_pack=8)
    transfer(here, url)
    whole = manifest_of(here)
    assert whole is not None
    keep_only(here, range(8))
    transfer(here, url, replace=True)
    assert tidy(url, prune=True, grace_h=0).num_listed == 1
    ManifestFolder(here / "manifests").write(whole)
    return here


@pytest.mark.parametrize("prune", [True, False])
def test_a_push_does_not_count_on_a_pack_that_is_about_to_go(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, prune: bool
) -> None:
    """It begins and ends between the moment at which prune has read the manifests, and the removal."""
    here, remove_due = listed_pack(tmp_path, url), Tidying._remove_due

    def push_before(self: Tidying, *arguments: Any) -> set[str]:
        assert self._in_use
        assert transfer(here, url).ok
        return remove_due(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Tidying, "_remove_due", push_before)
        assert tidy(url, prune=prune, grace_h=0).num_removed == prune
    assert transfer(url, tmp_path / "back").ok
    check(tmp_path / "back", range(16))


def test_a_pack_that_another_prune_removed_and_a_push_sent_again_stays(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both happen between the moment at which a prune has read the manifests, and its removal."""
    here, remove_due = listed_pack(tmp_path, url), Tidying._remove_due
    [listed] = removals_in(BucketTransport.open(url))

    def others_before(self: Tidying, *arguments: Any) -> Any:
        assert self._in_use
        with monkeypatch.context() as patch:
            patch.setattr(Tidying, "_remove_due", remove_due)
            assert tidy(url, prune=True, grace_h=0).num_removed == 1
        assert transfer(here, url).num_packs == 1 and listed in packs_in(BucketTransport.open(url))
        return remove_due(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Tidying, "_remove_due", others_before)
        assert tidy(url, prune=True, grace_h=0).num_removed == 0
    assert transfer(url, tmp_path / "back").ok
    check(tmp_path / "back", range(16))


def test_a_precache_does_not_count_on_a_pack_that_is_about_to_go(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, make_config: Callable[..., Config]
) -> None:
    """Nor on one that is listed after its plan, and goes before it ends."""
    config = make_config(**{"cache.path": url})
    first = run_precache(config)
    manifests = RemoteManifests(BucketTransport.open(url))
    whole = manifests.read("photos")
    assert whole is not None and first.num_encoded

    def lose_most() -> None:
        manifests.write(replace(whole, rows=dict(list(whole.rows.items())[:1])))
        assert tidy(url, prune=True, grace_h=0).num_listed

    lose_most()
    remove_due = Tidying._remove_due

    def precache_before(self: Tidying, *arguments: Any) -> set[str]:
        assert self._in_use
        report = run_precache(config)
        assert report.num_encoded and report.manifests_waiting == []
        return remove_due(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Tidying, "_remove_due", precache_before)
        assert tidy(url, prune=True, grace_h=0).num_removed
    plan = precache_run.make_plan

    def plan_then_lose(*arguments: Any, **options: Any) -> Plan:
        planned = plan(*arguments, **options)
        assert not planned.reasons
        lose_most()
        assert tidy(url, prune=True, grace_h=0).num_removed
        return planned

    with LatentCache(url, local=tmp_path / "other") as cache:
        assert cache.store.find(whole.keys()) == whole.keys()
    monkeypatch.setattr(index, "LISTED_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(precache_run, "make_plan", plan_then_lose)
        assert "photos" in run_precache(config).manifests_waiting
    assert run_precache(config).manifests_waiting == []
    with LatentCache(url, local=tmp_path / "other") as cache:
        assert cache.store.find(whole.keys()) == whole.keys()


def test_a_pack_that_was_counted_on_before_it_was_listed_stays(tmp_path: Path, url: str) -> None:
    whole = manifest_of(listed_pack(tmp_path, url))
    assert whole is not None
    RemoteManifests(BucketTransport.open(url)).write(whole)  # of a push that looked before
    listed = removals_in(BucketTransport.open(url)).items()
    assert listed and tidy(url, grace_h=0).num_removed == 0
    assert listed.isdisjoint(removals_in(BucketTransport.open(url)).items())
    assert transfer(url, tmp_path / "back").ok


def test_what_a_listed_pack_alone_has_is_read_until_it_goes(tmp_path: Path, url: str) -> None:
    here = listed_pack(tmp_path, url)
    whole = manifest_of(here)
    assert whole is not None
    RemoteManifests(BucketTransport.open(url)).write(whole)
    key = key_of_image(12)
    with LatentCache(url, local=tmp_path / "local") as cache:
        assert cache.get(key).record.key == key and not cache.store.find([key])
    assert transfer(url, tmp_path / "back", dry_run=True).ok
    report = transfer(url, tmp_path / "back")
    assert report.ok and report.manifests == ["photos"]
    check(tmp_path / "back", range(16))


def compacted_between_lists(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next time that packs and removals are listed a compaction ends after the first of the two lists."""
    listing, first = BucketTransport.list, list[str]()

    def compact_after(self: BucketTransport, folder: str) -> dict[str, Any]:
        found = listing(self, folder)
        if folder in ("packs", "removals") and not first:
            first.append(folder)
            assert tidy(url).num_listed
        return found

    monkeypatch.setattr(BucketTransport, "list", compact_after)


def test_a_compaction_between_two_lists_hides_nothing(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = fill(tmp_path / "here", range(16), None, per_pack=4)
    transfer(here, url)
    keys = [entry.record.key for number in range(16) for entry in entries_of(number)]
    with monkeypatch.context() as patch, LatentCache(url, local=tmp_path / "local") as cache:
        assert cache.store.find(keys) == set(keys)
        compacted_between_lists(url, patch)
        assert cache.store.find([*keys, "0" * 64]) == set(keys)


def test_a_pull_and_verify_miss_nothing_while_a_compaction_ends(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = fill(tmp_path / "here", range(16), None, per_pack=4)
    for number in range(2):
        transfer(here, f"{url}/{number}")
    with monkeypatch.context() as patch:
        compacted_between_lists(f"{url}/0", patch)
        assert transfer(f"{url}/0", tmp_path / "back").ok
    check(tmp_path / "back", range(16))
    with monkeypatch.context() as patch:
        compacted_between_lists(f"{url}/1", patch)
        assert verify(BucketTransport.open(f"{url}/1")).num_entries == 18


def test_compact_removes_no_entry_that_lies_only_in_listed_packs(tmp_path: Path, url: str) -> None:
    """Each of two runs copied these packs, or found their entries elsewhere; no manifest has them yet."""
    transfer(fill(tmp_path / "here", range(16), None, per_pack=8), url)
    listed = sorted(packs_in(BucketTransport.open(url)))
    for pack in listed:
        BucketTransport.open(url).write(f"removals/{pack}", b"", version=ANY_VERSION)
    report = tidy(url, grace_h=0)
    assert (report.num_removed, report.num_waiting) == (0, 2)
    assert sorted(packs_in(BucketTransport.open(url))) == listed


def test_a_push_ends_its_own_note_alone(tmp_path: Path, url: str) -> None:
    first, second = (fill(tmp_path / name, range(8)) for name in ("first", "second"))
    End.open(url, is_target=True, source=str(second)).manifests.begin("photos")  # of a push that takes long
    assert transfer(first, url).ok
    assert RemoteManifests(BucketTransport.open(url)).unfinished() == ["photos"]
    with pytest.raises(StoreError, match="not finished: photos"):
        tidy(url, prune=True, grace_h=0)
    assert transfer(second, url).manifests == [], "there is nothing to change"
    assert RemoteManifests(BucketTransport.open(url)).unfinished() == []
    assert tidy(url, prune=True, grace_h=0).num_removed == 0


def test_notes_of_machines_that_are_gone_are_given_up(tmp_path: Path, url: str) -> None:
    transfer(fill(tmp_path / "here", range(8)), url)
    RemoteManifests(BucketTransport.open(url), source="another").begin("photos")
    tidy(url, prune=True, unfinished=True, grace_h=24.0)
    assert RemoteManifests(BucketTransport.open(url)).unfinished() == ["photos"], "it may be at work"
    tidy(url, prune=True, unfinished=True, grace_h=0)
    assert RemoteManifests(BucketTransport.open(url)).unfinished() == []


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
    here = fill(tmp_path / "here", range(16), per_pack=4)
    for pack, data in list(packs_of(here).items())[:2]:
        BucketTransport.open(url).write(pack_name(pack), data, version=ANY_VERSION)
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
