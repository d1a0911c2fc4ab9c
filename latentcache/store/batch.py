"""Rows stacked into one tensor per field; those of natural length are padded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch

from latentcache.errors import StoreError
from latentcache.store.base import EntryArrays, Store
from latentcache.store.entry import ARRAY_DTYPES, DTYPES, as_array, dtype_name
from latentcache.types import Padding

CPU = torch.device("cpu")
"""Named wherever memory is made: `torch.set_default_device` of the caller must not move it."""
Empty = Callable[[tuple[int, ...], np.dtype], np.ndarray]
"""Gives an array of this shape and dtype, whose values are arbitrary: `numpy.empty`, or a buffer that is used again."""
Column = tuple[str, Sequence[np.ndarray]]
"""One field of several entries: the name of its dtype, and an array [1, *shape] an entry."""
_Spec = tuple[str, tuple[int, ...]]


def read_batch(store: Store, keys: Sequence[str]) -> dict[str, torch.Tensor]:
    """One new CPU tensor [n, *shape] per field, a row per key; keys may repeat. No keys give no tensors.

    EntryMissingError, EntryDamagedError; StoreError if the entries' fields, shapes or dtypes differ.
    """
    return stack(keys, store.rows(keys)) if keys else {}


def stack(keys: Sequence[str], rows: Sequence[EntryArrays]) -> dict[str, torch.Tensor]:
    """One CPU tensor per field of rows that were read; see `read_batch`. `keys` name the entries in errors."""
    return stack_columns(keys, columns_of(keys, rows, {}), {})[0]


def columns_of(keys: Sequence[str], rows: Sequence[EntryArrays], padding: Mapping[str, Padding]) -> dict[str, Column]:
    """The rows grouped by field. `keys` name the entries in errors.

    StoreError if entries lack a field, or differ in its dtype or shape; lengths of fields in `padding` may differ.
    """
    first = rows[0].description
    for name in padding:
        if name in first and not first[name][1]:
            raise StoreError(f"field {name!r} is a scalar in each entry, and has no length that could be padded")
    for key, row in zip(keys, rows, strict=True):
        if row.description is first:
            continue
        if row.description.keys() != first.keys():
            raise StoreError(
                f"entries of one batch must have the same fields: {keys[0]} has {', '.join(first)}, "
                f"{key} has {', '.join(row.description)}"
            )
        for name, there in row.description.items():
            if not _is_alike(first[name], there, any_length=name in padding):
                raise StoreError(
                    f"entries of one batch must have equal shapes and dtypes: field {name!r} is {_shown(first[name])} "
                    f"in {keys[0]} and {_shown(there)} in {key}. "
                    "Batch one bucket at a time, and give a padding rule for fields of natural length."
                )
    arrays = zip(*[row.arrays for row in rows], strict=True)
    return {name: (spec[0], column) for (name, spec), column in zip(first.items(), arrays, strict=True)}


def _is_alike(here: _Spec, there: _Spec, *, any_length: bool) -> bool:
    if any_length:
        return here[0] == there[0] and len(here[1]) == len(there[1]) and here[1][1:] == there[1][1:]
    return here == there


def _shown(spec: _Spec) -> str:
    return f"{spec[0]} {list(spec[1])}"


def stack_columns(
    keys: Sequence[str],
    columns: Mapping[str, Column],
    padding: Mapping[str, Padding],
    out: Mapping[str, torch.Tensor] | None = None,
    memory: Callable[[Iterable[int]], Empty] | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """One CPU tensor [n, *shape] per field, and of each field that is padded which rows are its own: bool [n, length].

    `keys` name the entries in errors. `memory` is told the bytes of each tensor, and gives what makes them. StoreError
    if an entry is longer than its rule's length, and if a tensor of `out` does not fit; then nothing is written.
    """
    shapes, values, masks = {}, {}, {}
    for name, (dtype, arrays) in columns.items():
        shape = arrays[0].shape[1:]
        if name in padding:
            values[name] = _padding_value(name, dtype, padding[name].value)
            shape = (_padded_length(keys, name, arrays, padding[name]), *shape[1:])
        shapes[name] = (len(arrays), *shape)
    empty: Empty = np.empty
    if memory is not None:
        empty = memory([ARRAY_DTYPES[dtype].itemsize * math.prod(shapes[name]) for name, (dtype, _) in columns.items()])
    tensors, targets = {}, {}
    for name, (dtype, _) in columns.items():
        given = out.get(name) if out else None
        if given is None:
            tensors[name], targets[name] = new_tensor(dtype, shapes[name], empty)
        else:
            check_output(name, given, DTYPES[dtype], shapes[name], CPU)
            tensors[name], targets[name] = given, as_array(given)
    for name, (_, arrays) in columns.items():
        if name in padding:
            masks[name] = _fill_padded(targets[name], arrays, padding[name], values[name])
        else:  # one call for all rows: one for each, from Python, takes longer than the copy of a small row
            np.concatenate(arrays, out=targets[name])
    return tensors, masks


def concatenated(column: Column) -> list[torch.Tensor]:
    """Arrays [1, length, *rest] as tensors [length, *rest]: views of one new tensor."""
    dtype, arrays = column
    lengths = [array.shape[1] for array in arrays]
    tensor, array = new_tensor(dtype, (sum(lengths), *arrays[0].shape[2:]), np.empty)
    np.concatenate([each[0] for each in arrays], out=array)
    return list(torch.split(tensor, lengths))


def _padded_length(keys: Sequence[str], name: str, arrays: Sequence[np.ndarray], rule: Padding) -> int:
    lengths = [array.shape[1] for array in arrays]
    longest = max(lengths)
    length = longest if rule.length is None else rule.length
    if longest > length:
        key = keys[lengths.index(longest)]
        raise StoreError(f"entry {key}: field {name} has length {longest}, the batch is padded to {length}")
    return length


def _padding_value(name: str, dtype: str, value: float) -> np.ndarray:
    """The value in this dtype, as an array without dimensions. StoreError naming the field if the dtype has none."""
    try:
        if not DTYPES[dtype].is_floating_point and value != int(value):
            raise ValueError("it is no whole number")
        return as_array(torch.full((), value, dtype=DTYPES[dtype], device=CPU))
    except (RuntimeError, ValueError, OverflowError) as error:
        raise StoreError(f"field {name}: {value} cannot be padded with in {dtype}: {error}") from error


def _fill_padded(target: np.ndarray, arrays: Sequence[np.ndarray], rule: Padding, value: np.ndarray) -> torch.Tensor:
    """Write arrays [1, length, *rest] to `target` [n, longest, *rest], with `value` where the rule has padding.

    Returns which rows of the target are not padding: bool [n, longest].
    """
    mask = np.ones(target.shape[:2], bool)
    for row, kept, array in zip(target, mask, arrays, strict=True):
        length = array.shape[1]
        first = 0 if rule.side == "left" else max(0, length - rule.num_last)
        last = first + len(row) - length
        row[:first], row[first:last], row[last:] = array[0, :first], value, array[0, first:]
        kept[first:last] = False
    return torch.from_numpy(mask)


def new_tensor(stored: str, shape: tuple[int, ...], empty: Empty) -> tuple[torch.Tensor, np.ndarray]:
    """A tensor of the memory that `empty` gives, and that memory as an array. The tensor cannot be resized.

    Why not `torch.empty`: it and `Tensor.numpy` take 1.9 us, this takes 0.8, which a small batch feels. And from 4 MiB
    on numpy asks for huge pages: each page of new memory costs a fault, which for a small page takes longer than
    its copy.
    """
    array = empty(shape, ARRAY_DTYPES[stored])
    tensor, dtype = torch.from_numpy(array), DTYPES[stored]
    # `.data`: a view could not be detached in place.
    return tensor if tensor.dtype is dtype else tensor.view(dtype).data, array


def check_output(
    name: str, given: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    """StoreError unless the tensor is a contiguous one of this dtype and shape on this device."""
    if not isinstance(given, torch.Tensor):
        raise StoreError(f"out[{name!r}] is a {type(given).__name__}; give a torch.Tensor")
    fits = given.shape == shape and given.dtype is dtype and given.layout is torch.strided and given.is_contiguous()
    if not fits or given.device != device:
        expected = str(dtype).removeprefix("torch.")
        raise StoreError(
            f"out[{name!r}] is {dtype_name(given)} {list(given.shape)} on {given.device}; "
            f"give a contiguous {device} tensor, {expected} {list(shape)}"
        )
