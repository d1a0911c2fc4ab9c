"""Precaching on a Ray cluster: what one process makes, and what is left after deaths of all kinds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.photo_files import write_photo
from helpers.quick_encoder import QuickEncoder

from latentcache.config import Config
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.errors import ClusterError
from latentcache.precache.report import Report
from latentcache.precache.run import run_precache
from latentcache.scaleout.ray import MAX_ATTEMPTS, RayCluster, precache
from latentcache.store.disk import DiskStore
from latentcache.utils.progress import Progress

MakeConfig = Callable[..., Config]
GPU = {"ray.num_gpus": 1, "ray.num_cpus": 0.1, "ray.wait_s": 250}


class QuickCluster(RayCluster):
    encoder = QuickEncoder


class Encoding(Progress):
    """Calls `act` with how many entries were encoded, each time."""

    def __init__(self, act: Callable[[int], None]):
        self._act, self._num_encoded = act, 0
        self._stage = ""

    def start(self, stage: str, total: int | None) -> None:
        self._stage = stage

    def advance(self, count: int = 1) -> None:
        if self._stage == "encode":
            self._num_encoded += count
            self._act(self._num_encoded)


def quickly(config: Config, cluster: Any, encoder: type = QuickEncoder, **options: Any) -> Report:
    elsewhere = QuickCluster(config, cluster.address)
    elsewhere.encoder = encoder
    return run_precache(elsewhere.config, remote_encoders=elsewhere, **options)


def times_encoded(tmp_path: Path) -> Counter[str]:
    return Counter((tmp_path / "encoded.txt").read_text().split())


def more_photos(photos: Path, number: int) -> None:
    for seed in range(number):
        write_photo(photos / f"more{seed}.png", 100 + seed, (80, 144) if seed % 3 else (144, 80))


def durable(config: Config) -> set[str]:
    with DiskStore(config.cache.path, read_only=True) as store:
        return set(store.keys())


def test_a_cluster_makes_what_one_process_makes(
    make_config: MakeConfig, photos: Path, cluster: Any, tmp_path: Path
) -> None:
    more_photos(photos, 8)
    (photos / "cut.png").write_bytes((photos / "a.png").read_bytes()[:-200])
    changes = {"encode.batch_size": 2, "datasets.0.flip": True}
    alone = make_config(**changes, **{"cache.path": tmp_path / "alone"})
    shared = make_config(**changes, **GPU)
    one, many = run_precache(alone), precache(shared, address=cluster.address)
    assert (many.num_encoded, many.num_refused) == (one.num_encoded, 1)
    assert many.refused == one.refused and many.misses_by_reason == one.misses_by_reason
    with DiskStore(alone.cache.path) as first, DiskStore(shared.cache.path) as second:
        keys = set(first.keys())
        assert keys == set(second.keys()) and len(keys) == one.num_encoded
        for key in keys:
            a, b = first.get(key), second.get(key)
            assert a.record.identity == b.record.identity and a.tensors.keys() == b.tensors.keys()
            assert all(torch.equal(a.tensors[name], b.tensors[name]) for name in a.tensors)
        assert len(list(second.path.glob("packs/*/*"))) >= 2, "of each encoder, and more where that takes long"
    of_one, of_many = (ManifestFolder(Path(config.cache.path) / "manifests") for config in (alone, shared))
    assert of_one.names() == of_many.names() and of_one.read("photos") == of_many.read("photos")
    (photos / "cut.png").unlink()  # only decoding finds that it is cut, and each run decodes it again
    again = precache(shared, address="127.0.0.1:1")
    assert (again.num_misses, again.num_hits) == (0, one.num_encoded), "and no cluster is needed for that"


def test_what_kills_each_encoder_ends_the_run_and_what_was_sealed_stays(
    make_config: MakeConfig, photos: Path, cluster: Any, tmp_path: Path
) -> None:
    more_photos(photos, 12)
    for number, name in enumerate(("fatal", "unlucky")):
        write_photo(photos / f"{name}.png", 900 + number, (80, 144))
    config = make_config(**GPU, **{"encode.batch_size": 4})
    with pytest.raises(ClusterError, match=rf"{MAX_ATTEMPTS} of them died .*\.png .*run the same command again"):
        quickly(config, cluster)
    sealed = durable(config)
    assert sealed, "texts, at least"

    (photos / "fatal.png").unlink()
    before = times_encoded(tmp_path)
    report = quickly(config, cluster)
    assert report.refused == [] and report.num_encoded == report.num_misses
    assert len(durable(config)) == report.num_hits + report.num_misses
    after = times_encoded(tmp_path)
    assert all(after[key] == before[key] for key in sealed), "nothing that was sealed is encoded twice"


def test_a_killed_driver_is_run_again(make_config: MakeConfig, photos: Path, cluster: Any, tmp_path: Path) -> None:
    more_photos(photos, 80)
    config = make_config(**GPU, **{"encode.batch_size": 2})
    (tmp_path / "config.json").write_text(config.model_dump_json(exclude_defaults=True))
    driver = (
        "import sys, test_ray_precache; from latentcache.config_file import load_config; "
        "from types import SimpleNamespace; "
        "test_ray_precache.quickly(load_config(sys.argv[1]), SimpleNamespace(address=sys.argv[2]))"
    )
    paths = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    process = subprocess.Popen(
        [sys.executable, "-c", driver, str(tmp_path / "config.json"), cluster.address],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    try:
        deadline = time.monotonic() + 200
        while not list(Path(config.cache.path).glob("packs/*/*.safetensors")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    report = quickly(config, cluster)
    assert 0 < report.num_hits < 90 and report.refused == []
    assert len(durable(config)) == report.num_hits + report.num_misses
    twice = [key for key, times in times_encoded(tmp_path).items() if times > 1]
    assert len(twice) < report.num_misses, "only what was not sealed"


def test_stopping_seals_what_is_done(make_config: MakeConfig, photos: Path, cluster: Any, tmp_path: Path) -> None:
    more_photos(photos, 60)
    config, stop = make_config(**GPU, **{"encode.batch_size": 2, "ray.max_encoders": 1}), threading.Event()

    report = quickly(config, cluster, progress=Encoding(lambda num_encoded: stop.set()), stop=stop)
    assert report.interrupted and 0 < report.num_encoded < report.num_misses
    assert len(durable(config)) == report.num_encoded == len(times_encoded(tmp_path))
