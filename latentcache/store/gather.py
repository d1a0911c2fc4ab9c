"""Rows of equal shape, stacked into one tensor per field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from latentcache.errors import StoreError
from latentcache.store.base import DTYPES, dtype_name, flat_bytes

Description = Mapping[str, tuple[str, tuple[int, ...]]]
"""Field -> (dtype name, shape)."""
CPU = torch.device("cpu")
"""Named wherever memory is made: `torch.set_default_device` of the caller must not move it."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where one entry's bytes can be read: flat uint8 of each field, in the order of `description`.

    Entries with equal fields share one description. There may be very many of these in memory.
    """

    description: Description
    parts: tuple[np.ndarray, ...]


def stack(
    keys: Sequence[str],
    sources: Sequence[Source],
    fields: Sequence[str] | None,
    out: Mapping[str, torch.Tensor] | None,
) -> dict[str, torch.Tensor]:
    """One tensor per field, a row per source: `base.Store.read_batch`."""
    if not sources:
        return {}
    first = sources[0].description
    columns: Iterable[Sequence[np.ndarray]]
    if fields is None and all([source.description is first for source in sources]):
        tensors = output(first, len(sources), out)
        columns = zip(*[source.parts for source in sources], strict=True)
    else:
        descriptions = [source.description for source in sources]
        tensors = output(common_fields(keys, descriptions, fields), len(sources), out)
        parts = [dict(zip(source.description, source.parts, strict=True)) for source in sources]
        columns = [[part[name] for part in parts] for name in tensors]
    for tensor, column in zip(tensors.values(), columns, strict=True):
        # One call for all rows: one for each, from Python, takes longer than the copy of a small row.
        np.concatenate(column, out=flat_bytes(tensor))
    return tensors


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


def output(fields: Description, num_rows: int, out: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """Tensors for `num_rows` rows: those of `out` where given, else new ones. StoreError if one does not fit."""
    tensors, given = {}, out or {}
    for name, (dtype, shape) in fields.items():
        tensor, shape = given.get(name), (num_rows, *shape)
        if tensor is None:
            # torch aligns to 64 bytes; numpy may not, and copies are then 2.5 times slower.
            tensor = torch.empty(shape, dtype=DTYPES[dtype], device=CPU)
        else:
            check_output(name, tensor, DTYPES[dtype], shape, CPU)
        tensors[name] = tensor
    return tensors


def check_output(
    name: str, given: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    """StoreError unless the tensor is a contiguous one of this dtype and shape on this device."""
    # The attributes that cost least come first: this is done for each field of each batch.
    fits = given.shape == shape and given.dtype is dtype and given.layout is torch.strided and given.is_contiguous()
    if not fits or not (given.is_cpu if device is CPU else given.device == device):
        wanted = str(dtype).removeprefix("torch.")
        raise StoreError(
            f"out[{name!r}] is {dtype_name(given)} {list(given.shape)} on {given.device}; "
            f"give a contiguous {device} tensor, {wanted} {list(shape)}"
        )
