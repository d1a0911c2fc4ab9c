"""The machine's memory, as the system and a container's control group report it."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from latentcache.utils import host_memory as module
from latentcache.utils.host_memory import collector_paused, disk_memory, free_host_memory, host_memory


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "_GROUP", tmp_path)
    return tmp_path


def test_a_container_has_what_its_group_may_use(group: Path) -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert host_memory() == total
    for limit, expected in (("max", total), (str(3 << 20), 3 << 20), (str(total + 1), total)):
        (group / "memory.max").write_text(limit + "\n")
        assert host_memory() == expected


def test_free_memory_is_what_the_group_leaves(group: Path) -> None:
    free = free_host_memory()
    assert 1 << 20 < free <= host_memory()
    (group / "memory.max").write_text(str(5 << 20))
    (group / "memory.current").write_text(str(3 << 20))
    assert free_host_memory() == 2 << 20
    (group / "memory.current").write_text(str(6 << 20))
    assert free_host_memory() == 0


@pytest.mark.parametrize("num_bytes", [1, 4096, (2 << 20) + 1, 5 << 20])
def test_memory_for_a_disk_starts_on_a_page_and_lives_as_long_as_its_views(num_bytes: int) -> None:
    array = np.frombuffer(disk_memory(num_bytes), np.uint8)
    gc.collect()
    assert array.nbytes == num_bytes and array.ctypes.data % mmap.PAGESIZE == 0 and not array.any()
    array[:] = 7
    assert array.sum(dtype=np.int64) == 7 * num_bytes


def test_a_kernel_without_huge_pages_still_gives_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.mmap, "MADV_HUGEPAGE", 12345, raising=False)  # what no kernel knows
    assert len(disk_memory(4096)) == 4096


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("raises", [True, False])
def test_the_collector_is_as_it_was(enabled: bool, raises: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with collector_paused():
            assert not gc.isenabled()
            with collector_paused():
                pass
            assert not gc.isenabled()
            if raises:
                raise ValueError
    except ValueError:
        assert raises
    finally:
        after = gc.isenabled()
        (gc.enable if before else gc.disable)()
    assert after == enabled
