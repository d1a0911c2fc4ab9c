"""Packs and manifests that move between directories: what moves, what does not, what is refused, and by which name."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from helpers.pack_damage import damage
from helpers.remote_samples import check, entries_by_key, entries_of, fill, make_manifest, manifest_of, packs_of

from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.dataset.row_table import Ref
from latentcache.errors import DatasetError, StorageFullError, StoreError
from latentcache.remote.transfer import merged, transfer
from latentcache.store import DiskStore
from latentcache.store.upkeep import rebuild, verify
from latentcache.types import Refusal

Run = Callable[..., Any]


def ids_of(cache: Path) -> set[str]:
    manifest = manifest_of(cache)
    return set() if manifest is None else set(manifest.rows)


def test_a_sample_that_was_refused_keeps_no_manifest_back(tmp_path: Path) -> None:
    """It names entries that were never made: an image that could not be decoded."""
    source = fill(tmp_path / "a", range(8))
    rows, lost = dict(make_manifest(numbers=range(10)).rows), ("8.png", "9.png")  # these have no entries
    refusal = Refusal("8.png", "8.png", "truncated", "it cannot be decoded")
    refused = {sample_id: replace(rows[sample_id], refusal=replace(refusal, sample_id=sample_id)) for sample_id in lost}
    folder = ManifestFolder(source / "manifests")
    folder.write(replace(make_manifest("photos"), rows=rows | refused))
    for dry_run in (True, False):
        report = transfer(source, tmp_path / "b", dry_run=dry_run)
        assert report.ok and report.manifests == ["photos"], report.refused
    assert manifest_of(tmp_path / "b") == manifest_of(source)
    folder.write(replace(make_manifest("photos"), rows=rows))
    reason = transfer(source, tmp_path / "c").refused["photos"]
    assert "of its entries are missing both here" in reason and "'8.png'" in reason


def test_what_is_missing_moves_whole_and_once_and_a_dry_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a full disk, which leaves nothing half written."""
    source, target = fill(tmp_path / "a", range(32)), tmp_path / "b"
    before = {path: path.stat().st_mtime_ns for path in source.rglob("*") if path.is_file()}
    planned = transfer(source, target, dry_run=True)
    assert not target.exists()
    target.mkdir()
    assert transfer(source, target, dry_run=True) == planned and not list(target.iterdir())
    with monkeypatch.context() as patch:
        full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        patch.setattr("latentcache.store.disk.write_all", full)
        with pytest.raises(StorageFullError, match="free some space"):
            transfer(source, target)
    assert packs_of(target) == {} and not list(target.rglob("*.tmp"))
    report = transfer(source, target)
    assert report.ok and report == replace(planned, dry_run=False)
    assert report.num_packs == 4 and report.manifests == ["photos"]
    assert packs_of(target) == packs_of(source) and report.num_bytes == sum(map(len, packs_of(source).values()))
    assert before == {path: path.stat().st_mtime_ns for path in source.rglob("*") if path.is_file()}
    check(target, range(32))
    again = transfer(source, target)
    assert (again.num_packs, again.num_bytes, again.num_there, again.manifests) == (0, 0, 4, [])
    assert ManifestFolder(target / "manifests").unfinished() == {}
    fill(source, range(40))
    planned, there = transfer(source, target, dry_run=True), packs_of(target)
    assert (planned.num_packs, planned.num_there, planned.manifests) == (1, 4, ["photos"]) and packs_of(target) == there
    assert transfer(source, target) == replace(planned, dry_run=False)
    assert manifest_of(target) == manifest_of(source)
    check(target, range(40))
    assert rebuild(target).num_entries == 45, "the packs alone are the cache"


def test_a_push_ends_its_own_note_alone(tmp_path: Path, run_json: Run) -> None:
    """What a precache has encoded into the target, and has in no manifest yet, stays."""
    source, target = fill(tmp_path / "a", range(8)), fill(tmp_path / "b", range(8, 16), None)
    notes = ManifestFolder(target / "manifests")
    notes.begin("photos")
    assert transfer(source, target).ok
    code, error = run_json("prune", target)
    assert code == 2 and "not finished: photos" in error["error"]
    check(target, range(16))
    notes.write(make_manifest("photos", range(16)))
    assert notes.unfinished() == {} and run_json("prune", target)[1]["num_entries"] == 0
    notes.begin("photos")
    assert run_json("prune", target, "--unfinished", "--dry-run")[0] == 0 and notes.unfinished()
    assert run_json("prune", target, "--unfinished")[0] == 0 and notes.unfinished() == {}


def test_only_what_a_manifest_needs(tmp_path: Path) -> None:
    source = fill(tmp_path / "a", range(16), "first")
    fill(source, range(16, 32), "second")
    report = transfer(source, tmp_path / "b", manifests=["second"])
    assert (report.num_packs, report.num_there, report.manifests) == (2, 2, ["second"])
    assert ManifestFolder(tmp_path / "b" / "manifests").names() == ["second"]
    check(tmp_path / "b", range(16, 32))
    with pytest.raises(StoreError, match=r"no manifest 'third'; there are: first, second"):
        transfer(source, tmp_path / "c", manifests=["first", "third"])
    with pytest.raises(StoreError, match="there is no cache here"):
        transfer(tmp_path / "absent", tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_caches_of_several_workers_become_one_up_to_an_error(tmp_path: Path, run_json: Run) -> None:
    parts = [fill(tmp_path / f"{first}", range(first, first + 16)) for first in (0, 8, 24)]
    code, document = run_json("merge", tmp_path / "all", *parts, tmp_path / "none", tmp_path / "never")
    *moved, failed = document["transfers"]
    assert code == 1 and not document["ok"] and all(each["ok"] for each in moved)
    assert [each["num_packs"] for each in moved] == [2, 1, 2], "a pack that is there in another is not"
    assert failed["source"] == str(tmp_path / "none") and "none" in failed["refused"]["the whole"]
    assert ids_of(tmp_path / "all") == {f"{n}.png" for n in range(40)}
    check(tmp_path / "all", range(40))
    assert run_json("merge", tmp_path / "other", parts[0])[0] == 0


def test_of_a_sample_in_both_manifests_the_later_one_counts() -> None:
    ours, theirs = make_manifest("photos", range(4)), make_manifest("photos", range(3))
    changed = replace(theirs.rows["1.png"], captions=(Ref.of_text("another", "9" * 64),))
    both = merged(replace(theirs, rows={**theirs.rows, "1.png": changed}), ours)
    assert dict(both.rows) == dict(ours.rows)
    with pytest.raises(DatasetError, match=r"another role.*--replace"):
        merged(theirs, replace(ours, role="validation"))
    with pytest.raises(DatasetError, match=r"another number of variants and another loss_weight.*--replace"):
        merged(theirs, replace(ours, variants=2, loss_weight=0.5))


def test_manifests_of_other_encodings_are_not_mixed(tmp_path: Path, run: Run) -> None:
    source, target = fill(tmp_path / "a", range(8)), fill(tmp_path / "b", range(8, 16))
    other = replace(make_manifest("photos", range(8)), common={**make_manifest().common, "salt": "other"})
    ManifestFolder(source / "manifests").write(other)
    code, out, _ = run("push", source, target)
    assert code == 1 and "another encoding" in out and "--replace" in out and "refused     photos" in out
    assert manifest_of(target) == make_manifest("photos", range(8, 16))
    assert run("push", source, target, "--replace")[0] == 0
    assert manifest_of(target) == other


def test_a_pack_that_is_damaged_at_its_source(tmp_path: Path, run_json: Run) -> None:
    source, target = fill(tmp_path / "a", range(32)), tmp_path / "b"
    [image, _] = entries_of(3)
    damage(source, image.tensors["moments"].numpy().tobytes())
    code, report = run_json("push", source, target)
    ((name, reason), (manifest, lacks)) = report["refused"].items()
    assert code == 1 and name in packs_of(source) and image.record.key in reason and "latentcache verify" in reason
    assert manifest == "photos" and "1 of its entries" in lacks and "'3.png'" in lacks
    assert report["manifests"] == [] and manifest_of(target) is None
    with DiskStore(target) as store:
        everything = entries_by_key(range(32)).keys()
        assert store.find(everything) == everything - {image.record.key}
    # What `verify` and `precache` do: the entry is marked, and encoded again.
    assert not verify(source).ok
    with DiskStore(source) as store:
        store.add([image])
    code, report = run_json("push", source, target)
    assert code == 0 and report["num_packs"] == 1 and report["manifests"] == ["photos"]
    check(target, range(32))
    # What the target itself lost comes back, as an entry alone.
    [image, _] = entries_of(5)
    damage(target, image.tensors["moments"].numpy().tobytes())
    assert verify(target).damaged.keys() == {image.record.key}
    again = transfer(source, target)
    assert again.ok and again.num_packs == 1 and again.num_bytes < 10_000
    check(target, range(32))
    # A sync brings each what it lacks.
    other = fill(tmp_path / "c", range(32, 48))
    for moves in (True, False):
        code, document = run_json("sync", other, target)
        assert code == 0 and [each["num_packs"] > 0 for each in document["transfers"]] == [moves] * 2
    for cache in (target, other):
        check(cache, range(48))
        assert ids_of(cache) == {f"{n}.png" for n in range(48)}
