"""The second device of the tests in this folder: simulated, and a CUDA device where there is one.

The simulated device is global and stays until the process ends. So these tests run in a process of their own:
`pytest -m sim tests/sim`, and on a machine with CUDA once with `-m "sim and not cuda"` and once with
`-m "sim and cuda"` (`scripts/test.py` does this).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

HERE = Path(__file__).parent


class _ScalarReads(TorchDispatchMode):
    """`num_reads` counts the values that the host has read from a device."""

    def __init__(self) -> None:
        super().__init__()
        self.num_reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.num_reads += func is torch.ops.aten._local_scalar_dense.default and args[0].device.type != "cpu"
        return func(*args, **(kwargs or {}))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.sim)
            callspec = getattr(item, "callspec", None)
            if callspec is not None and callspec.params.get("device") == "cuda":
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
def host_syncs(device: torch.device) -> Callable[[Callable[[], object]], int]:
    """How many values a call waits for, because the host reads them from the device."""

    def count(call: Callable[[], object]) -> int:
        # The simulated device counts them itself: not every operator runs under a mode there.
        with nullcontext(torch.get_device_module(device)) if device.type == "sim" else _ScalarReads() as reads:
            before = reads.num_reads
            call()
            return reads.num_reads - before

    return count
