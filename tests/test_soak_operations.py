"""What the soak programs check: a lost, wrong or half-done thing is seen, and a power cut loses what was not synced."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import soak_operations

    monkeypatch.setattr(soak_operations.writer, "PACK_ENTRIES", soak_operations.writer.PACK_ENTRIES)
    chosen = soak_operations.operations(soak_operations.Precache(tmp_path / "photos", 1))
    return soak_operations.Scene(chosen["prune"], tmp_path / "scenes")


def a_pack(cache: Path) -> Path:
    return sorted(cache.glob("packs/*/*.safetensors"))[0]


def lose_a_pack(cache: Path) -> None:
    a_pack(cache).unlink()


def leave_half_a_manifest(cache: Path) -> None:
    manifest = cache / "manifests" / "train.safetensors"
    manifest.write_bytes(manifest.read_bytes().replace(b"caption 2", b"caption 3"))


def leave_a_folder(cache: Path) -> None:
    (cache / "index.damaged-12345678").mkdir()


@pytest.mark.parametrize(
    ("interrupt", "message"),
    [(lose_a_pack, "are lost"), (leave_half_a_manifest, "is no manifest"), (leave_a_folder, "the opening left")],
)
def test_a_scene_sees_what_is_not_as_it_must_be(scene: Any, interrupt: Callable[[Path], None], message: str) -> None:
    scene.new()
    scene.check()
    scene.finish()
    cache = scene.new()
    interrupt(cache)
    with pytest.raises(Exception, match=message):
        scene.check()


def test_a_scene_sees_a_wrong_entry_and_a_lost_acknowledged_one(scene: Any) -> None:
    scene.new()
    with pytest.raises(AssertionError, match="1 entries are lost"):
        scene.check(sealed={"0" * 64})
    scene.after = scene.before = dict.fromkeys(scene.before, "another digest")
    with pytest.raises(AssertionError, match="wrong entries"):
        scene.check()


@pytest.mark.skipif(sys.platform != "linux", reason="the recorded operations are those of Linux")
def test_a_power_cut_loses_only_what_was_not_synced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from file_operations import Change
    from soak_power import Disk, write_out

    root = tmp_path / "root"
    root.mkdir()
    (root / "old").write_bytes(b"old")
    number = os.stat(root / "old").st_ino
    disk = Disk(root)
    for change in (
        Change("create", "synced.tmp", "", 1, 0, b""),
        Change("write", "synced.tmp", "", 1, 0, b"whole"),
        Change("sync", "synced.tmp", "", 1, 0, b""),
        Change("rename", "synced.tmp", "synced", 0, 0, b""),
        Change("sync", "", "", 0, 0, b""),
        Change("create", "unsynced", "", 2, 0, b""),
        Change("write", "unsynced", "", 2, 0, b"x" * 2000),
        Change("write", "old", "", number, 1, b"LD"),
        Change("unlink", "synced", "", 0, 0, b""),
    ):
        disk.apply(change)
    seen: dict[str, set[bytes | None]] = {"synced": set(), "unsynced": set(), "old": set()}
    for seed in range(200):
        left = tmp_path / str(seed)
        write_out(disk.root, left, random.Random(seed), ordered=bool(seed % 2))
        assert {path.name for path in left.iterdir()} <= seen.keys(), "a name that was replaced durably is back"
        for name, values in seen.items():
            values.add((left / name).read_bytes() if (left / name).exists() else None)
    assert seen["synced"] == {b"whole", None} and seen["old"] == {b"old", b"oLD"}
    assert {None, b"", b"x" * 2000} < seen["unsynced"], "torn and short ones too"
