"""A part of `scripts/soak_attacks.py`: whatever lies in a cache, errors are typed, and nothing else changes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import soaking
from attack_limits import PLANTS, sparse
from soak_attacks import GROWN, Case, Scene, run_case

from latentcache.config import Config
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.errors import SampleError, UnsafeStoreError
from latentcache.loading.cache import LatentCache
from latentcache.precache.explanation import explain
from latentcache.precache.run import run_precache
from latentcache.store import DiskStore

TARGETS = (
    *("CACHE.json", "packs", "manifests", "manifests/photos.safetensors", "manifests/photos.unfinished", "index"),
    *("index/cache.db", "index/cache.db-journal", "index/open.lock", "upkeep.lock", "readers.lock", "claims.lock"),
    *("packs/00", "damaged", "index.replaced-12345678", ".CACHE.json.12345678.tmp", "a folder of packs", "a pack"),
)
PER_TARGET = 5


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    def make(cache: Path) -> None:
        soaking.make_cache(cache, 4, 4, name="photos")

    scene = Scene(tmp_path_factory.mktemp("matrix"), make)
    for command in (*scene.commands, "batch"):  # imports are no case's
        assert not scene.call(command)
        scene.restore()
    return scene


@pytest.mark.parametrize("target", TARGETS)
def test_errors_are_typed_and_nothing_else_changes(scene: Scene, target: str) -> None:
    """Each target with some of what can lie there, and each of these with another command."""
    first = PER_TARGET * TARGETS.index(target)
    names = {"a folder of packs": "packs/??", "a pack": "packs/??/*.safetensors"}
    scene.restore()
    if target in names:
        target = next(iter(scene.cache.glob(names[target]))).relative_to(scene.cache).as_posix()
    plants, commands = [*PLANTS, GROWN], [*scene.commands, "batch"]
    for turn in range(first, first + PER_TARGET):
        plant, command = plants[turn % len(plants)], commands[(turn + turn // len(plants)) % len(commands)]
        run_case(scene, Case(target, plant, command), max_wait_s=60)
        scene.restore()


# What the matrix found -----------------------------------------------------------------------------------------------


def link_outside(path: Path, outside: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to(outside / "folder")


def test_manifests_are_not_written_through_a_link(config: Config, outside: Path) -> None:
    link_outside(config.cache.path / "manifests", outside)
    with pytest.raises(UnsafeStoreError, match=r"manifests: is .*link|manifests: is no folder"):
        run_precache(config)
    with pytest.raises(UnsafeStoreError, match="manifests: is a link; remove it"):
        ManifestFolder(config.cache.path / "manifests").begin("photos")


@pytest.mark.parametrize("read_only", [True, False])
def test_packs_are_not_read_or_swept_through_a_link(config: Config, outside: Path, read_only: bool) -> None:
    link_outside(config.cache.path / "packs", outside)
    with pytest.raises(UnsafeStoreError, match="packs: is no folder; remove it, then run `latentcache rebuild`"):
        DiskStore(config.cache.path, read_only=read_only)


def test_an_index_is_not_made_through_a_link(config: Config, outside: Path) -> None:
    with LatentCache(config.cache.path, read_only=True) as cache:
        before = soaking.contents(cache.store)
    for name in ("index", "memo"):
        link_outside(config.cache.path / name, outside)
    run_precache(config)
    with LatentCache(config.cache.path) as cache:
        assert soaking.contents(cache.store) == before


def test_a_memo_with_a_strange_journal_is_not_used(config: Config) -> None:
    (config.cache.path / "memo" / "cache.db-journal").write_bytes(b"[" * 100_000)
    assert not explain(config, "a.png").is_refused


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("keeps_bytes", [True, False])
def test_a_pack_that_goes_on_for_200_gb_is_mapped_as_far_as_it_is_one(config: Config, keeps_bytes: bool) -> None:
    with LatentCache(config.cache.path, read_only=True) as cache:
        (pack,) = config.cache.path.glob("packs/*/*.safetensors")
        sparse(pack, pack.read_bytes() if keeps_bytes else b"")
        if keeps_bytes:
            assert cache.batch(["a.png"], device="cpu")["sample_id"] == ["a.png"]
        else:
            with pytest.raises(SampleError, match="is damaged"):
                cache.batch(["a.png"], device="cpu")
    assert run_precache(config).num_encoded
    with LatentCache(config.cache.path, read_only=True) as cache:
        assert cache.batch(["a.png"], device="cpu")["sample_id"] == ["a.png"]
