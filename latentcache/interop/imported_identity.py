"""The identity of imported entries, which no encoded entry can have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from latentcache.families.sdxl import SCALING_FACTOR
from latentcache.identity import SCHEMA, canonical_json, digest, key_of
from latentcache.provenance import now
from latentcache.store.base import dtype_name, flat_bytes
from latentcache.types import Entry, Geometry, Kind, Record


def imported_common(format_name: str) -> dict[str, Any]:
    """The `common` of an imported manifest. Of the encoding, only the scale of the latents is known."""
    return {
        "schema": SCHEMA,
        "salt": "",
        "imported": {"format": format_name, "time": now()},
        "policy": {},
        "image_encoding": {"scaling_factor": SCALING_FACTOR, "shift_factor": None},
        "text_encoding": {},
    }


def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """BLAKE3 of names, dtypes, shapes and bytes of contiguous CPU tensors: 64 hexadecimal digits."""
    described = [[name, dtype_name(tensor), list(tensor.shape)] for name, tensor in sorted(tensors.items())]
    parts = [canonical_json(described), *(flat_bytes(tensor).tobytes() for _, tensor in sorted(tensors.items()))]
    return digest(b"".join(parts))


def unverified_entry(
    kind: Kind,
    tensors: Mapping[str, torch.Tensor],
    *,
    format_name: str,
    output: str | None,
    source: str | None,
    geometry: Geometry | None,
    provenance: Mapping[str, Any],
) -> Entry:
    """An entry whose identity says that it was imported: an encoded entry never has its key.

    `source` is the digest of the image's bytes or of the caption, where they are known. `output` is `mean` or `sample`
    for latents, None for text.
    """
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    dtype = dtype_name(next(iter(tensors.values())))
    identity = {
        "kind": kind,
        "schema": SCHEMA,
        "imported": {
            "format": format_name,
            "digest": tensors_digest(tensors),
            "output": output,
            "dtype": dtype,
        },
        "source": source,
        "geometry": None if geometry is None else geometry.to_json(),
        "trust": "unverified",
    }
    return Entry(Record(key_of(identity), kind, identity, provenance), tensors)
