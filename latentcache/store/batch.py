"""Rows stacked into one tensor per field; those of natural length are padded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from latentcache.errors import StoreError
from latentcache.store.base import Store
from latentcache.store.entry import ARRAY_DTYPES, EntryArrays, as_array
from latentcache.types import Entry, Padding, Record

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ARRAY_DTYPES}
"""The dtypes that can be stored, by name."""
CPU = torch.device("cpu")
"""Named wherever memory is made: `torch.set_default_device` of the caller must not move it."""
Empty = Callable[[tuple[int, ...], np.dtype], np.ndarray]
"""Gives an array of this shape and dtype, whose values are arbitrary: `numpy.empty`, or a buffer that is used again."""
Column = tuple[str, Sequence[np.ndarray]]
"""One field of several entries: the name of its dtype, and an array [1, *shape] an entry."""


def read_batch(store: Store, keys: Sequence[str]) -> dict[str, torch.Tensor]:
    """One new CPU tensor [n, *shape] per field, a row per key; keys may repeat. No keys give no tensors.

    EntryMissingError, EntryDamagedError; StoreError if the entries' fields, shapes or dtypes differ.
    """
    return stack(keys, store.rows(keys)) if keys else {}


def stack(keys: Sequence[str], rows: Sequence[EntryArrays]) -> dict[str, torch.Tensor]:
    """One CPU tensor per field of rows that were read; see `read_batch`. `keys` name the entries in errors."""
    return stack_columns(keys, columns_of(keys, rows, {}), {})[0]


def own_tensors(record: Record, values: EntryArrays, ragged: frozenset[str]) -> Entry:
    """The entry with tensors that the caller owns."""
    return Entry(record, {name: tensor[0] for name, tensor in stack([record.key], [values]).items()}, ragged)


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
        for name, (dtype, shape) in row.description.items():
            own, start = first[name], name in padding  # a padded field may have any length
            if (dtype, len(shape), shape[start:]) != (own[0], len(own[1]), own[1][start:]):
                raise StoreError(
                    f"entries of one batch must have equal shapes and dtypes: field {name!r} is {own[0]} "
                    f"{list(own[1])} in {keys[0]} and {dtype} {list(shape)} in {key}. "
                    "Batch one bucket at a time, and give a padding rule for fields of natural length."
                )
    arrays = zip(*[row.arrays for row in rows], strict=True)
    return {name: (spec[0], column) for (name, spec), column in zip(first.items(), arrays, strict=True)}


def stack_columns(
    keys: Sequence[str], columns: Mapping[str, Column], padding: Mapping[str, Padding], empty: Empty = np.empty
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """One CPU tensor [n, *shape] per field, and of each field that is padded which rows are its own: bool [n, length].

    `keys` name the entries in errors. StoreError if an entry is longer than its rule's length, or if the field's dtype
    cannot hold the rule's value.
    """
    tensors, masks = {}, {}
    for name, (dtype, arrays) in columns.items():
        if name in padding:
            tensors[name], masks[name] = _padded(keys, name, dtype, arrays, padding[name], empty)
        else:  # one call for all rows: one for each, from Python, takes longer than the copy of a small row
            tensors[name], target = _new_tensor(dtype, (len(arrays), *arrays[0].shape[1:]), empty)
            np.concatenate(arrays, out=target)
    return tensors, masks


def _padded(
    keys: Sequence[str], name: str, dtype: str, arrays: Sequence[np.ndarray], rule: Padding, empty: Empty
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arrays [1, length, *rest] in a tensor [n, longest, *rest], and which of its rows are not padding."""
    lengths = [array.shape[1] for array in arrays]
    longest = max(lengths)
    length = longest if rule.length is None else rule.length
    if longest > length:
        key = keys[lengths.index(longest)]
        raise StoreError(f"entry {key}: field {name} has length {longest}, the batch is padded to {length}")
    try:
        if not DTYPES[dtype].is_floating_point and rule.value != int(rule.value):
            raise ValueError("it is no whole number")
        filled = torch.float32 if dtype.startswith("float8") else DTYPES[dtype]  # torch 2.4 cannot fill float8
        value = as_array(torch.full((), rule.value, dtype=filled, device=CPU).to(DTYPES[dtype]))
    except (RuntimeError, ValueError, OverflowError) as error:
        raise StoreError(f"field {name}: {rule.value} cannot be padded with in {dtype}: {error}") from error
    tensor, target = _new_tensor(dtype, (len(arrays), length, *arrays[0].shape[2:]), empty)
    mask = np.ones(target.shape[:2], bool)
    for row, kept, array, num in zip(target, mask, arrays, lengths, strict=True):
        first = 0 if rule.side == "left" else max(0, num - rule.num_last)
        last = first + length - num
        row[:first], row[first:last], row[last:] = array[0, :first], value, array[0, first:]
        kept[first:last] = False
    return tensor, torch.from_numpy(mask)


def _new_tensor(stored: str, shape: tuple[int, ...], empty: Empty) -> tuple[torch.Tensor, np.ndarray]:
    """A tensor of the memory that `empty` gives, and that memory as an array. The tensor cannot be resized.

    Why not `torch.empty`: it and `Tensor.numpy` take 1.9 us, this takes 0.8, which a small batch feels. And from 4 MiB
    on numpy asks for huge pages: each page of new memory costs a fault, which for a small page takes longer than
    its copy.
    """
    array = empty(shape, ARRAY_DTYPES[stored])
    tensor, dtype = torch.from_numpy(array), DTYPES[stored]
    # `.data`: a view could not be detached in place.
    return tensor if tensor.dtype is dtype else tensor.view(dtype).data, array
