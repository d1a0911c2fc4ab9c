from __future__ import annotations

import pytest
import torch
from store_samples import key, samples

from latentcache.store import MemoryStore


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_pinned_entries_are_pinned():
    with MemoryStore(pin=True) as store:
        store.add(samples(0))
        assert torch.from_numpy(store.rows([key(0)])[0].arrays[0]).is_pinned()
        assert torch.equal(store.get(key(0)).tensors["moments"], samples(0)[0].tensors["moments"])


def test_pinning_pins_what_is_added(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    with MemoryStore(pin=True) as store:
        store.add(samples(0, 1))
    assert len(pinned) == 2
