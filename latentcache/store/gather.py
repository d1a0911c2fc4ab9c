"""Rows of equal shape, stacked into one tensor per field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from latentcache.errors import StoreError
from latentcache.store.base import DTYPES, dtype_name, row_bytes

Description = Mapping[str, tuple[str, tuple[int, ...]]]
"""Field -> (dtype name, shape)."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Output tensors [n, *shape] by field, and the same memory as uint8 [n, bytes of a row]."""

    tensors: dict[str, torch.Tensor]
    rows: dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Source:
    """Where one entry's bytes can be read: flat uint8 by field. Entries with equal fields share one description."""

    description: Description
    fields: Mapping[str, np.ndarray]


def stack(
    keys: Sequence[str],
    sources: Sequence[Source],
    fields: Sequence[str] | None,
    out: Mapping[str, torch.Tensor] | None,
) -> dict[str, torch.Tensor]:
    """One tensor per field, a row per source: `base.Store.read_batch`."""
    if not sources:
        return {}
    batch = output(common_fields(keys, [source.description for source in sources], fields), len(sources), out)
    copy = np.copyto
    for name, target in batch.rows.items():
        for row, source in zip(target, sources, strict=True):
            copy(row, source.fields[name])
    return batch.tensors


def common_fields(
    keys: Sequence[str], descriptions: Sequence[Description], fields: Sequence[str] | None
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The fields asked for. StoreError if entries lack one, or differ in its dtype or shape."""
    first = descriptions[0]
    names = list(first) if fields is None else list(dict.fromkeys(fields))
    for name in names:
        if name not in first:
            raise StoreError(f"entry {keys[0]} has no field {name!r}; it has {', '.join(first)}")
    wanted = {name: first[name] for name in names}
    for key, description in zip(keys, descriptions, strict=True):
        if description is first:
            continue
        if fields is None and description.keys() != first.keys():
            raise StoreError(
                f"entries of one batch must have the same fields: {keys[0]} has {', '.join(first)}, "
                f"{key} has {', '.join(description)}. Name the fields that both have."
            )
        for name, spec in wanted.items():
            if description.get(name) != spec:
                found = description.get(name)
                raise StoreError(
                    f"entries of one batch must have equal shapes and dtypes: field {name!r} is {_shown(spec)} in "
                    f"{keys[0]} and {'missing' if found is None else _shown(found)} in {key}. "
                    "Batch one bucket at a time."
                )
    return wanted


def _shown(spec: tuple[str, tuple[int, ...]]) -> str:
    return f"{spec[0]} {list(spec[1])}"


def output(fields: Description, num_rows: int, out: Mapping[str, torch.Tensor] | None) -> Batch:
    """Tensors for `num_rows` rows: those of `out` where given, else new ones. StoreError if one does not fit."""
    tensors = {}
    for name, (dtype, shape) in fields.items():
        given = None if out is None else out.get(name)
        if given is None:
            # torch aligns to 64 bytes; numpy may not, and copies are then 2.5 times slower.
            tensors[name] = torch.empty((num_rows, *shape), dtype=DTYPES[dtype])
            continue
        fits = given.is_cpu and given.layout == torch.strided and given.is_contiguous()
        if not fits or given.dtype is not DTYPES[dtype] or given.shape != (num_rows, *shape):
            raise StoreError(
                f"out[{name!r}] is {dtype_name(given)} {list(given.shape)} on {given.device}; "
                f"give a contiguous cpu tensor, {dtype} {[num_rows, *shape]}"
            )
        tensors[name] = given
    return Batch(tensors, {name: row_bytes(tensor) for name, tensor in tensors.items()})
