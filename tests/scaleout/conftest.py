"""A Ray cluster of two nodes on this machine, each with a GPU that is not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

ROOT = Path(__file__).parents[2]
NODE = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 80 << 20}  # Ray's least is 75 MiB


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """`cluster.address` is what `--ray` takes."""
    environment = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
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
