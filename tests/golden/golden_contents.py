"""What a cache gives, as JSON: each entry, each sample's batch, each prompt, with digests in place of values."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from latentcache import LatentCache


def digest_of(tensor: torch.Tensor) -> list[Any]:
    """Dtype, shape, and the SHA-256 of the bytes: the test's own, so that a fault of the store's digests shows."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(data).hexdigest()]


def _readable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return digest_of(value)
    return [list(item) if isinstance(item, tuple) else item for item in value]


def contents(path: Path) -> dict[str, Any]:
    """Read everything through the public API. The cache is opened read-only."""
    with LatentCache(path, read_only=True) as cache:
        entries, batches = {}, {}
        for key in sorted(cache.store.keys()):
            entry = cache.get(key)
            record = entry.record
            tensors = {name: digest_of(tensor) for name, tensor in entry.tensors.items()}
            entries[key] = [record.kind, record.identity, record.provenance, tensors]
        for sample_id in cache.sample_ids():
            for flip in (False, True):
                batch = cache.batch([sample_id], device="cpu", flip=flip, scaled=True)
                # The cache is older than what a batch says of its dataset.
                held = {name: value for name, value in batch.items() if name not in ("dataset", "loss_weight")}
                batches[f"{sample_id} {flip}"] = {name: _readable(value) for name, value in held.items()}
        prompts = {
            text: {name: digest_of(tensor) for name, tensor in cache.prompt(text, device="cpu").items()}
            for text in ("a prompt", "")
        }
        manifests = {
            name: [manifest.role, manifest.repeats, [row.to_json() for row in manifest.rows.values()]]
            for name in cache.manifests.names()
            if (manifest := cache.manifests.read(name))
        }
    return {"entries": entries, "batches": batches, "prompts": prompts, "manifests": manifests}
