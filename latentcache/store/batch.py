"""Stacks rows into one tensor per field, and pads fields of natural length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from latentcache.errors import StoreError
from latentcache.store.entry import ARRAY_DTYPES, EntryArrays, as_array
from latentcache.types import Entry, Padding, Record

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ARRAY_DTYPES}
"""The dtypes that can be stored, by name."""
CPU = torch.device("cpu")
"""Passed wherever memory is allocated, so that the caller's `torch.set_default_device` has no effect on it."""
Empty = Callable[[tuple[int, ...], np.dtype], np.ndarray]
"""Returns an uninitialized array of this shape and dtype: `numpy.empty`, or one that reuses a buffer."""
Column = tuple[str, Sequence[np.ndarray]]
"""One field of several entries: its dtype name, and an array [1, *shape] per entry."""


def stack(keys: Sequence[str], rows: Sequence[EntryArrays]) -> dict[str, torch.Tensor]:
    """Stack rows into one new CPU tensor [n, *shape] per field. `keys` identify the entries in errors.

    StoreError if the entries' fields, shapes or dtypes differ.
    """
    return stack_columns(keys, columns_of(keys, rows, {}), {})[0]


def own_fields(values: EntryArrays) -> dict[str, torch.Tensor]:
    """The fields of one entry as CPU tensors that the caller owns: two thirds of the time of stacking one row."""
    fields = {}
    for (name, (stored, _)), array in zip(values.description.items(), values.arrays, strict=True):
        tensor, dtype = torch.from_numpy(np.array(array[0])), DTYPES[stored]
        fields[name] = tensor if tensor.dtype is dtype else tensor.view(dtype).data  # as in `_new_tensor`
    return fields


def own_tensors(record: Record, values: EntryArrays, ragged: frozenset[str]) -> Entry:
    """The entry with tensors that the caller owns."""
    return Entry(record, own_fields(values), ragged)


def columns_of(keys: Sequence[str], rows: Sequence[EntryArrays], padding: Mapping[str, Padding]) -> dict[str, Column]:
    """Group rows by field. `keys` identify the entries in errors.

    StoreError if the entries differ in their fields, dtypes or shapes. Fields in `padding` may differ in length.
    """
    first = rows[0].description
    for name in padding:
        if name in first and not first[name][1]:
            raise StoreError(f"field {name!r} is a scalar, so there is no length to pad")
    for key, row in zip(keys, rows, strict=True):
        if row.description is first:
            continue
        if row.description.keys() != first.keys():
            raise StoreError(
                f"the entries of a batch must have the same fields: {keys[0]} has {', '.join(first)}, "
                f"{key} has {', '.join(row.description)}"
            )
        for name, (dtype, shape) in row.description.items():
            own, start = first[name], name in padding  # a padded field may have any length
            if (dtype, len(shape), shape[start:]) != (own[0], len(own[1]), own[1][start:]):
                raise StoreError(
                    f"the entries of a batch must have equal shapes and dtypes: field {name!r} is {own[0]} "
                    f"{list(own[1])} in {keys[0]} and {dtype} {list(shape)} in {key}. "
                    "Batch one bucket at a time, and give a padding rule for fields of natural length."
                )
    arrays = zip(*[row.arrays for row in rows], strict=True)
    return {name: (spec[0], column) for (name, spec), column in zip(first.items(), arrays, strict=True)}


def stack_columns(
    keys: Sequence[str], columns: Mapping[str, Column], padding: Mapping[str, Padding], empty: Empty = np.empty
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Stack columns into one CPU tensor [n, *shape] per field, and a mask per padded field: bool [n, length].

    A mask is False on padding. `keys` identify the entries in errors. StoreError if an entry is longer than its rule's
    length, or if the field's dtype cannot hold the rule's value.
    """
    tensors, masks = {}, {}
    for name, (dtype, arrays) in columns.items():
        if name in padding:
            tensors[name], masks[name] = _padded(keys, name, dtype, arrays, padding[name], empty)
        else:  # one call for all rows: a Python call per row costs more than copying a small row
            tensors[name], target = _new_tensor(dtype, (len(arrays), *arrays[0].shape[1:]), empty)
            np.concatenate(arrays, out=target)
    return tensors, masks


def _padded(
    keys: Sequence[str], name: str, dtype: str, arrays: Sequence[np.ndarray], rule: Padding, empty: Empty
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad arrays [1, length, *rest] into a tensor [n, longest, *rest], with a mask that is False on padding."""
    lengths = [array.shape[1] for array in arrays]
    longest = max(lengths)
    length = longest if rule.length is None else rule.length
    if longest > length:
        key = keys[lengths.index(longest)]
        raise StoreError(f"entry {key}: field {name} has length {longest}, but its padding rule allows {length}")
    try:
        if not DTYPES[dtype].is_floating_point and rule.value != int(rule.value):
            raise ValueError("it is not an integer")
        filled = torch.float32 if dtype.startswith("float8") else DTYPES[dtype]  # torch 2.4 cannot fill float8
        value = as_array(torch.full((), rule.value, dtype=filled, device=CPU).to(DTYPES[dtype]))
    except (RuntimeError, ValueError, OverflowError) as error:
        raise StoreError(f"field {name}: its dtype {dtype} cannot hold the padding {rule.value}: {error}") from error
    tensor, target = _new_tensor(dtype, (len(arrays), length, *arrays[0].shape[2:]), empty)
    mask = np.ones(target.shape[:2], bool)
    for row, kept, array, num in zip(target, mask, arrays, lengths, strict=True):
        first = 0 if rule.side == "left" else max(0, num - rule.num_last)
        last = first + length - num
        row[:first], row[first:last], row[last:] = array[0, :first], value, array[0, first:]
        kept[first:last] = False
    return tensor, torch.from_numpy(mask)


def _new_tensor(stored: str, shape: tuple[int, ...], empty: Empty) -> tuple[torch.Tensor, np.ndarray]:
    """A tensor over memory from `empty`, and the same memory as an array. The tensor cannot be resized.

    `torch.empty` and `Tensor.numpy` take 1.9 us and this takes 0.8, which matters for a small batch. From 4 MiB on,
    numpy also requests huge pages: a page fault on a small page takes longer than the copy into it.
    """
    array = empty(shape, ARRAY_DTYPES[stored])
    tensor, dtype = torch.from_numpy(array), DTYPES[stored]
    # `.data` because a view cannot be detached in place.
    return tensor if tensor.dtype is dtype else tensor.view(dtype).data, array
