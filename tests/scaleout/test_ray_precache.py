"""Precaching on a Ray cluster: entries equal those of one process, and deaths of all kinds lose nothing sealed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from helpers.family_walks import assert_same_entries, walk_config
from helpers.photo_files import write_photo
from helpers.quick_encoder import FaultyEncoder, QuickEncoder
from helpers.serving import wait_until

from latentcache.config import Config, RayConfig
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.errors import ClusterError
from latentcache.precache.report import Report
from latentcache.precache.run import run_precache
from latentcache.scaleout.ray import MAX_ATTEMPTS, RayCluster, precache
from latentcache.store.disk import DiskStore
from latentcache.utils.progress import Progress

FOLDERS = (Path(__file__).parents[2], Path(__file__).parents[1], Path(__file__).parent)
"""From which encoders and drivers import: the package, helpers, and this file."""
NODE = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 80 << 20}  # Ray's least is 75 MiB
MakeConfig = Callable[..., Config]
GPU = {"ray.num_gpus": 1, "ray.num_cpus": 0.1, "ray.wait_s": 250, "encode.batch_size": 2}
ONE = {**GPU, "ray.max_encoders": 1}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes on this machine, each with a pretended GPU. `cluster.address` is for `--ray`."""
    environment = {
        "PYTHONPATH": os.pathsep.join([*map(str, FOLDERS), os.environ.get("PYTHONPATH", "")]),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "OMP_NUM_THREADS": "1",
        "RAY_worker_niceness": "0",  # Ray's is 15: with other tests at work an encoder gets no time to start
    }
    with patch.dict(os.environ, environment):
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **NODE})
        try:
            cluster.add_node(**NODE)
            yield cluster
        finally:
            cluster.shutdown()


class Encoding(Progress):
    """Calls `act` with the number of encoded entries whenever it changes."""

    def __init__(self, act: Callable[[int], None]):
        super().__init__()
        self._act, self._num_encoded, self._stage = act, 0, ""

    def start(self, stage: str, total: int | None) -> None:
        self._stage = stage

    def advance(self, count: int = 1) -> None:
        if self._stage == "encode":
            self._num_encoded += count
            self._act(self._num_encoded)


def quickly(config: Config, address: str, encoder: type = QuickEncoder, **options: Any) -> Report:
    remote = RayCluster(config, address)
    remote.encoder = encoder
    return run_precache(remote.config, remote_encoders=remote, **options)


def times_encoded(tmp_path: Path) -> Counter[str]:
    return Counter((tmp_path / "encoded.txt").read_text().split())


def more_photos(photos: Path, number: int) -> None:
    for seed in range(number):
        write_photo(photos / f"more{seed}.png", 100 + seed, (80, 144) if seed % 3 else (144, 80))


def durable(config: Config) -> set[str]:
    with DiskStore(config.cache.path, read_only=True) as store:
        return set(store.keys())


@pytest.mark.parametrize(
    ("family", "cut", "num_encoders"), [("flux", "after/2.png", 2), ("wan-i2v", "b.webp", 1)], ids=["flux", "wan-i2v"]
)
def test_a_cluster_makes_what_one_process_makes(
    family: str, cut: str, num_encoders: int, cluster: Any, tmp_path: Path
) -> None:
    """Including control images, masks, clips and their first frames, and a refused file."""
    config = walk_config(tmp_path, family)
    damaged = tmp_path / "data" / cut
    damaged.write_bytes(damaged.read_bytes()[:-200])
    ray = RayConfig(num_gpus=1, num_cpus=0.1, max_encoders=num_encoders, wait_s=250)
    alone, shared = (
        config.model_copy(update={"cache": config.cache.model_copy(update={"path": tmp_path / name}), "ray": ray})
        for name in ("alone", "shared")
    )
    one, many = run_precache(alone), precache(shared, address=cluster.address)
    assert (many.num_encoded, many.num_refused) == (one.num_encoded, 1)
    assert many.refused == one.refused and many.misses_by_reason == one.misses_by_reason
    with DiskStore(alone.cache.path) as first, DiskStore(shared.cache.path) as second:
        assert_same_entries(second, first)
        assert len(list(second.path.glob("packs/*/*"))) >= num_encoders, "of each, and more where that takes long"
    of_one, of_many = (ManifestFolder(tmp_path / name / "manifests") for name in ("alone", "shared"))
    assert of_one.names() == of_many.names()
    assert all(of_one.read(name) == of_many.read(name) for name in of_one.names())
    damaged.unlink()  # only decoding finds that it is cut, and each run decodes it again
    again = precache(shared, address="127.0.0.1:1")
    assert again.num_misses == 0 and again.num_hits, "and no cluster is needed for that"


def test_what_kills_each_encoder_ends_the_run_and_what_was_sealed_stays(
    make_config: MakeConfig, photos: Path, cluster: Any, tmp_path: Path
) -> None:
    more_photos(photos, 12)
    for number, name in enumerate(("fatal", "unlucky")):
        write_photo(photos / f"{name}.png", 900 + number, (80, 144))
    config = make_config(**ONE)
    with pytest.raises(ClusterError, match=rf"{MAX_ATTEMPTS} of them died .*\.png .*run the same command again"):
        quickly(config, cluster.address)
    sealed = durable(config)
    assert sealed, "texts, at least"

    (photos / "fatal.png").unlink()
    before = times_encoded(tmp_path)
    report = quickly(config, cluster.address)
    assert report.refused == [] and report.num_encoded == report.num_misses
    assert len(durable(config)) == report.num_hits + report.num_misses
    after = times_encoded(tmp_path)
    assert all(after[key] == before[key] for key in sealed), "nothing that was sealed is encoded twice"


def test_a_lost_node_costs_what_it_had_not_sealed(make_config: MakeConfig, photos: Path, cluster: Any) -> None:
    more_photos(photos, 60)
    config = make_config(**GPU)
    node = cluster.add_node(**NODE)

    def remove(num_encoded: int) -> None:
        if num_encoded >= 20 and node in cluster.list_all_nodes():
            cluster.remove_node(node, allow_graceful=False)

    report = quickly(config, cluster.address, progress=Encoding(remove))
    assert node not in cluster.list_all_nodes()
    assert report.refused == [] and report.num_encoded == report.num_misses == len(durable(config))


def test_a_killed_driver_is_run_again(make_config: MakeConfig, photos: Path, cluster: Any, tmp_path: Path) -> None:
    more_photos(photos, 40)
    config = make_config(**ONE)
    (tmp_path / "config.json").write_text(config.model_dump_json(exclude_defaults=True))
    driver = (
        "import sys, test_ray_precache; from latentcache.config_file import load_config; "
        "test_ray_precache.quickly(load_config(sys.argv[1]), sys.argv[2])"
    )
    process = subprocess.Popen([sys.executable, "-c", driver, str(tmp_path / "config.json"), cluster.address])
    try:
        packs = partial(Path(config.cache.path).glob, "packs/*/*.safetensors")
        wait_until(lambda: process.poll() is not None or list(packs()), 200)
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    report = quickly(config, cluster.address)
    assert 0 < report.num_hits < 50 and report.refused == []
    assert len(durable(config)) == report.num_hits + report.num_misses
    twice = [key for key, times in times_encoded(tmp_path).items() if times > 1]
    assert len(twice) < report.num_misses, "only what was not sealed"


def test_stopping_seals_what_is_done(make_config: MakeConfig, photos: Path, cluster: Any, tmp_path: Path) -> None:
    more_photos(photos, 60)
    config, stop = make_config(**ONE), threading.Event()
    report = quickly(config, cluster.address, progress=Encoding(lambda num_encoded: stop.set()), stop=stop)
    assert report.interrupted and 0 < report.num_encoded < report.num_misses
    assert len(durable(config)) == report.num_encoded == len(times_encoded(tmp_path))


def test_what_a_cluster_cannot_do_is_an_error(
    make_config: MakeConfig, cluster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ClusterError, match=r"TypeError: a fault of an encoder.*; the log has the traceback"):
        quickly(make_config(**ONE), cluster.address, FaultyEncoder)
    assert "quick_encoder.py" in caplog.text and "in _encode" in caplog.text
    config = make_config(**(GPU | {"ray.accelerator_type": "H100", "ray.wait_s": 1}))
    with pytest.raises(ClusterError, match=r"an encoder needs 1 GPUs of type H100 .* have CPU 2, GPU 2"):
        quickly(config, cluster.address)
