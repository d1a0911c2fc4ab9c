"""Rows of equal shape, stacked into one tensor per field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from latentcache.errors import StoreError
from latentcache.store.base import ARRAY_DTYPES, DTYPES, Description, EntryArrays, Store, as_array, dtype_name

CPU = torch.device("cpu")
"""Named wherever memory is made: `torch.set_default_device` of the caller must not move it."""


def read_batch(
    store: Store,
    keys: Sequence[str],
    fields: Sequence[str] | None = None,
    out: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """One CPU tensor [n, *shape] per field (all fields by default), a row per key; keys may repeat.

    The rows are written into the tensors of `out` where given: contiguous CPU tensors of that shape and dtype. New
    tensors cannot be resized. No keys give no tensors. EntryMissingError, EntryDamagedError; StoreError if the entries'
    fields, shapes or dtypes differ. After an error nothing was written.
    """
    store.prefetch(keys)
    return stack(keys, store.rows(keys), fields, out)


def stack(
    keys: Sequence[str],
    rows: Sequence[EntryArrays],
    fields: Sequence[str] | None = None,
    out: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """The same of rows that were read. `keys` name the entries in errors."""
    if not rows:
        return {}
    first = rows[0].description
    if fields is None and all([row.description is first for row in rows]):
        return stack_columns(first, zip(*[row.arrays for row in rows], strict=True), len(rows), out)
    chosen = common_fields(keys, [row.description for row in rows], fields)
    named = [dict(zip(row.description, row.arrays, strict=True)) for row in rows]
    return stack_columns(chosen, ([arrays[name] for arrays in named] for name in chosen), len(rows), out)


def stack_columns(
    fields: Description,
    columns: Iterable[Sequence[np.ndarray]],
    num_rows: int,
    out: Mapping[str, torch.Tensor] | None,
) -> dict[str, torch.Tensor]:
    """The same of rows that are grouped by field: for each of `fields` the arrays [1, *shape] of all entries.

    StoreError if a tensor of `out` does not fit; then nothing is written.
    """
    tensors: dict[str, torch.Tensor] = {}
    arrays = []
    for name, (stored, shape) in fields.items():
        shape = (num_rows, *shape)
        tensor = out.get(name) if out else None
        if tensor is None:
            tensor, array = _new(stored, shape)
        else:
            array = _writable(name, tensor, DTYPES[stored], shape)
        tensors[name] = tensor
        arrays.append(array)
    for array, column in zip(arrays, columns, strict=True):
        # One call for all rows: one for each, from Python, takes longer than the copy of a small row.
        np.concatenate(column, out=array)
    return tensors


def _new(stored: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, np.ndarray]:
    """A tensor of numpy's memory, and that memory. It cannot be resized.

    Why not `torch.empty`: it and `Tensor.numpy` take 1.9 us, this takes 0.8, which a small batch feels. And from 4 MiB
    on numpy asks for huge pages: each page of new memory costs a fault, which for a small page takes longer than
    its copy.
    """
    array = np.empty(shape, ARRAY_DTYPES[stored])
    tensor, dtype = torch.from_numpy(array), DTYPES[stored]
    # `.data`: a view could not be detached in place.
    return tensor if tensor.dtype is dtype else tensor.view(dtype).data, array


def _writable(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """The tensor as an array. StoreError as for `check_output`."""
    if not isinstance(tensor, torch.Tensor):
        raise StoreError(f"out[{name!r}] is a {type(tensor).__name__}; give a torch.Tensor")
    if tensor.is_cpu and tensor.dtype is dtype and tensor.layout is torch.strided:
        array = as_array(tensor)
        # numpy checks this in half of torch's time, and each field of each batch needs it.
        if array.shape == shape and array.flags.c_contiguous:
            return array
    check_output(name, tensor, dtype, shape, CPU)
    return as_array(tensor)


def common_fields(
    keys: Sequence[str], descriptions: Sequence[Description], fields: Sequence[str] | None
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The requested fields. StoreError if entries lack one, or differ in its dtype or shape."""
    first = descriptions[0]
    names = list(first) if fields is None else list(dict.fromkeys(fields))
    for name in names:
        if name not in first:
            raise StoreError(f"entry {keys[0]} has no field {name!r}; it has {', '.join(first)}")
    chosen = {name: first[name] for name in names}
    for key, description in zip(keys, descriptions, strict=True):
        if description is first:
            continue
        if fields is None and description.keys() != first.keys():
            raise StoreError(
                f"entries of one batch must have the same fields: {keys[0]} has {', '.join(first)}, "
                f"{key} has {', '.join(description)}. Name the fields that both have."
            )
        for name, spec in chosen.items():
            if description.get(name) != spec:
                found = description.get(name)
                raise StoreError(
                    f"entries of one batch must have equal shapes and dtypes: field {name!r} is {_shown(spec)} in "
                    f"{keys[0]} and {'missing' if found is None else _shown(found)} in {key}. "
                    "Batch one bucket at a time."
                )
    return chosen


def _shown(spec: tuple[str, tuple[int, ...]]) -> str:
    return f"{spec[0]} {list(spec[1])}"


def check_output(
    name: str, given: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    """StoreError unless the tensor is a contiguous one of this dtype and shape on this device."""
    fits = given.shape == shape and given.dtype is dtype and given.layout is torch.strided and given.is_contiguous()
    if not fits or given.device != device:
        expected = str(dtype).removeprefix("torch.")
        raise StoreError(
            f"out[{name!r}] is {dtype_name(given)} {list(given.shape)} on {given.device}; "
            f"give a contiguous {device} tensor, {expected} {list(shape)}"
        )
