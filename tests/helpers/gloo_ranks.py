"""Two gloo processes, each running a worker script that ends with `report`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed

ROOT = Path(__file__).parents[2]
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
WORLD_SIZE = 2


def run_ranks(worker: Path, folder: Path) -> list[dict[str, Any]]:
    """Return what each rank printed. Skips the test without gloo. The rendezvous is a file, as a port may get taken."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this build of torch has no gloo")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": LOOPBACK,
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(worker), str(rank), str(WORLD_SIZE), str(folder / "rendezvous")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def report(found: dict[str, Any]) -> NoReturn:
    """End a worker: print its result as the last line, and exit without shutting Python down.

    gloo's threads outlive `destroy_process_group`, and sometimes abort the process at exit ("terminate called without
    an active exception"), probably pytorch/pytorch#179291.
    """
    print(json.dumps(found), flush=True)
    os._exit(0)
