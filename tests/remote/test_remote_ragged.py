"""Texts of natural length from a service, and from what was kept of it, are those of the disk and of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ragged_samples import in_memory, on_disk
from helpers.serving import RunningServer, serving

from latentcache import LatentCache

LENGTHS = (3, 9, 2, 7, 1, 5, 4, 8, 6)
SQUARE = ["0", "1", "3", "4", "6", "7"]


def plain(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with its tensors as dtypes, shapes and bytes: equal ones are equal to the last bit."""
    return {
        name: (value.dtype, value.shape, value.contiguous().view(torch.uint8).numpy().tobytes())
        if isinstance(value, torch.Tensor)
        else value
        for name, value in batch.items()
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return on_disk(tmp_path_factory.mktemp("ragged") / "cache", "wan", LENGTHS)


@pytest.fixture(scope="module")
def ragged_server(path: Path) -> Iterator[RunningServer]:
    with serving(path) as server:
        yield server


def test_disk_memory_service_and_local_tier_give_equal_batches(
    path: Path, ragged_server: RunningServer, tmp_path: Path
) -> None:
    store, manifests = in_memory("wan", LENGTHS)
    options = {"token": ragged_server.token, "local": tmp_path / "local"}
    with ExitStack() as stack:
        caches = [
            stack.enter_context(cache)
            for cache in (
                LatentCache(path),
                LatentCache(store=store, manifests=manifests),
                LatentCache(ragged_server.url, token=ragged_server.token),
                LatentCache(ragged_server.url, **options),
            )
        ]
        batches = [plain(cache.batch(SQUARE, device="cpu", scaled=True)) for cache in caches]
        assert {"prompt_embeds", "prompt_embeds_mask", "latents"} <= batches[0].keys()
        assert batches[1:] == batches[:1] * 3
        prompts = [plain(cache.prompt("a cat", device="cpu", negative=True)) for cache in caches]
        assert prompts[1:] == prompts[:1] * 3
        assert [cache.text_shapes() for cache in caches] == [{"prompt_embeds": (3, 6)}] * 4
        entries = [cache.get(cache.row("1")[1].captions[0].key) for cache in caches]
        assert [entry.ragged for entry in entries] == [{"prompt_embeds"}] * 4
        stored = [plain(dict(entry.tensors)) for entry in entries]
        assert stored[1:] == stored[:1] * 3
    with LatentCache(ragged_server.url, **options) as kept:
        assert plain(kept.batch(SQUARE, device="cpu", scaled=True)) == batches[0], "from the local tier"
