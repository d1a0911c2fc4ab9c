"""The second device of the tests in this folder: a simulated one, and a CUDA device if there is one.

The simulated device is global and stays until the process ends. So these tests run in their own process:
`pytest -m sim tests/sim`, or on a machine with CUDA once with `-m "sim and not cuda"` and once with
`-m "sim and cuda"`, as `scripts/test.py` does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts: see `deterministic`


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.sim)
            if getattr(getattr(item, "callspec", None), "params", {}).get("device") == "cuda":
                item.add_marker(pytest.mark.cuda)


@pytest.fixture(params=["sim", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """A second device, index 0."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("this machine has no CUDA device")
        if hasattr(torch, "sim"):
            pytest.skip("the simulated device is in this process: run these alone, with -m 'sim and cuda'")
    else:
        if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
            pytest.skip(f"torch {torch.__version__} has no helper for backends in Python (torch 2.10 has)")
        from simulated import install

        install()
    return torch.device(request.param, 0)


@pytest.fixture
def deterministic(device: torch.device) -> Iterator[None]:
    """For two runs that are compared bit by bit: some of CUDA's default kernels sum in another order each time."""
    torch.use_deterministic_algorithms(device.type == "cuda")
    yield
    torch.use_deterministic_algorithms(False)
