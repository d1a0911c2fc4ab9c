"""Prune and compact of a bucket: what goes, when it goes, and that who reads or pushes meanwhile loses nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest
from helpers.remote_samples import entries_of, make_manifest
from transfers.test_transfers import check, fill, key_of_image, packs_of

from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.errors import StoreError
from latentcache.remote import upkeep
from latentcache.remote.bucket import BucketTransport
from latentcache.remote.manifests import RemoteManifests
from latentcache.remote.transfer import End, Move, transfer
from latentcache.remote.transport import ANY_VERSION, packs_in, removals_in
from latentcache.remote.upkeep import Tidying, TidyReport, verify
from latentcache.store.directory import pack_name

Run = Callable[..., Any]


def tidy(url: str, *, prune: bool = False, grace_h: float = 24.0, **more: Any) -> TidyReport:
    return Tidying(BucketTransport.open(url), prune=prune, grace_h=grace_h, **more).run()


def wait_a_second() -> None:
    """Object stores may count time in whole seconds."""
    time.sleep(1.1)


def keep_only(cache: Path, numbers: range) -> None:
    """A manifest of these samples alone, in the place of the one that is there."""
    rows = make_manifest(num_samples=numbers.stop).rows
    kept = {f"{n}.png": rows[f"{n}.png"] for n in numbers}
    ManifestFolder(cache / "manifests").write(replace(make_manifest("photos"), rows=kept))


def test_small_packs_become_one_and_go_after_the_grace_time(tmp_path: Path, s3_url: str, run_json: Run) -> None:
    here = fill(tmp_path / "here", range(32), per_pack=4)
    transfer(here, s3_url)
    code, planned = run_json("compact", s3_url, "--dry-run")
    assert code == 0 and (planned["num_packs"], planned["num_listed"], planned["num_entries"]) == (8, 8, 36)
    assert packs_in(BucketTransport.open(s3_url)).keys() == packs_of(here).keys()
    code, report = run_json("compact", s3_url)
    assert code == 0 and (report["num_listed"], report["num_written"], report["num_removed"]) == (8, 1, 0)
    packs = packs_in(BucketTransport.open(s3_url))
    assert len(packs) == 9, "who listed them before reads them still"
    again = tidy(s3_url)
    assert (again.num_packs, again.num_waiting, again.num_listed, again.num_written) == (1, 8, 0, 0)
    wait_a_second()
    assert tidy(s3_url, grace_h=0).num_removed == 8
    assert packs_in(BucketTransport.open(s3_url)).keys() == packs.keys() - packs_of(here).keys()
    assert removals_in(BucketTransport.open(s3_url)) == {}
    transfer(s3_url, tmp_path / "back")
    check(tmp_path / "back", range(32))
    assert transfer(here, s3_url).num_packs == 0, "its entries are there"


def test_what_no_manifest_needs_goes(tmp_path: Path, s3_url: str, run: Run, run_json: Run) -> None:
    here = fill(tmp_path / "here", range(32), per_pack=8)
    transfer(here, s3_url)
    keep_only(here, range(16, 28))
    transfer(here, s3_url, replace=True)
    assert tidy(s3_url, prune=True, dry_run=True).num_unused == 0, (
        "packs that are younger may be of a push that goes on"
    )
    wait_a_second()
    code, report = run_json("prune", s3_url, "--grace", "0")
    # Two packs hold nothing else; the last has half of it, and is rewritten with the small ones.
    assert code == 0 and report["num_unused"] == 18 + 4 and report["num_listed"] == 4 and report["num_written"] == 1
    wait_a_second()
    assert tidy(s3_url, prune=True, grace_h=0).num_removed == 4
    transfer(s3_url, tmp_path / "back")
    check(tmp_path / "back", range(16, 28))
    found = End.open(s3_url).find([key_of_image(number) for number in range(32)])
    assert found == {key_of_image(n) for n in range(16, 28)}
    code, _, err = run("prune", s3_url, "--max-bytes", "1GB")
    assert code == 2 and "a bucket does not know" in err
    for grace in ("-1", "inf", "nan", "1e9"):
        code, _, err = run("compact", s3_url, "--grace", grace)
        assert code == 2 and "--grace" in err


@pytest.mark.parametrize("hours", [48, -1])
def test_with_a_clock_that_is_wrong_nothing_is_done(
    tmp_path: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    class WrongClock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(hours=hours)

    transfer(fill(tmp_path / "here", range(16), per_pack=4), s3_url)
    before = BucketTransport.open(s3_url).list("")
    with monkeypatch.context() as patch:
        patch.setattr(upkeep, "datetime", WrongClock)
        for prune in (True, False):
            with pytest.raises(StoreError, match=r"this machine's clock is .* Set the clock"):
                tidy(s3_url, prune=prune)
    assert BucketTransport.open(s3_url).list("") == before
    assert tidy(s3_url).num_listed == 4


def test_what_is_not_finished_is_kept(tmp_path: Path, s3_url: str) -> None:
    here = fill(tmp_path / "here", range(8), None)
    with pytest.raises(StoreError, match="has no manifest"):
        transfer(here, s3_url)
        tidy(s3_url, prune=True)
    transfer(fill(tmp_path / "other", range(8, 16), "others"), s3_url)
    RemoteManifests(BucketTransport.open(s3_url)).begin("photos")
    with pytest.raises(StoreError, match=r"not finished: photos.*--unfinished"):
        tidy(s3_url, prune=True, grace_h=0)
    wait_a_second()
    assert tidy(s3_url, prune=True, grace_h=0, unfinished=True).num_unused == 9


def test_a_run_that_died_is_repeated(tmp_path: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its new packs, and before its list."""
    transfer(fill(tmp_path / "here", range(16), per_pack=4), s3_url)

    write = BucketTransport.write

    def died(self: BucketTransport, name: str, data: bytes, *, version: str | None) -> bool:
        if name.startswith("removals/"):
            raise KeyboardInterrupt
        return write(self, name, data, version=version)

    with monkeypatch.context() as patch:
        patch.setattr(BucketTransport, "write", died)
        with pytest.raises(KeyboardInterrupt):
            tidy(s3_url)
    assert len(packs_in(BucketTransport.open(s3_url))) == 5
    report = tidy(s3_url)
    assert (report.num_listed, report.num_written) == (4, 0), "the new pack is used"
    wait_a_second()
    tidy(s3_url, grace_h=0)
    transfer(s3_url, tmp_path / "back")
    check(tmp_path / "back", range(16))


def test_damage_is_reported_once_and_its_pack_stays(tmp_path: Path, s3_url: str) -> None:
    here = fill(tmp_path / "here", range(16), per_pack=4)
    transfer(here, s3_url)
    needle = entries_of(5)[0].tensors["moments"].numpy().tobytes()
    pack, data = next((pack, data) for pack, data in packs_of(here).items() if needle in data)
    broken = bytearray(data)
    broken[data.index(needle)] ^= 1
    BucketTransport.open(s3_url).write(pack_name(pack), bytes(broken), version=ANY_VERSION)
    report = tidy(s3_url)
    assert report.damaged.keys() == {key_of_image(5)} and (report.num_listed, report.num_written) == (4, 1)
    again = tidy(s3_url)
    assert (again.damaged, again.num_entries, again.num_listed) == ({}, 0, 0), "it comes to rest"
    assert verify(BucketTransport.open(s3_url)).known_damaged.keys() == {key_of_image(5)}
    wait_a_second()
    tidy(s3_url, grace_h=0)
    assert removals_in(BucketTransport.open(s3_url)).keys() == {pack}, "what is damaged is not made again yet"
    assert transfer(here, s3_url).ok
    wait_a_second()
    tidy(s3_url, grace_h=0)
    assert pack not in packs_in(BucketTransport.open(s3_url))
    transfer(s3_url, tmp_path / "back")
    check(tmp_path / "back", range(16))


def test_pushes_pulls_and_compaction_at_once(tmp_path: Path, s3_url: str) -> None:
    parts = [fill(tmp_path / f"{n}", range(16 * n, 16 * n + 16), per_pack=4) for n in range(3)]
    transfer(parts[0], s3_url)
    problems: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                problems.append(error)

        return run

    def pull() -> None:
        for number in range(3):
            source, target = End.open(s3_url), End.open(tmp_path / f"pulled{number}", is_target=True)
            assert Move(source, target).run().ok
            target.close()

    works = [
        lambda: [tidy(s3_url) for _ in range(3)],
        pull,
        *(lambda part=part: transfer(part, s3_url) for part in parts[1:]),
    ]
    threads = [threading.Thread(target=guarded(work)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert problems == []
    wait_a_second()
    tidy(s3_url, grace_h=0)
    transfer(s3_url, tmp_path / "back")
    check(tmp_path / "back", range(48))
