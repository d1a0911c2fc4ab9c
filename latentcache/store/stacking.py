"""Rows of equal shape, stacked into one tensor per field."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch

from latentcache.errors import StoreError
from latentcache.store.base import ARRAY_DTYPES, DTYPES, Description, EntryArrays, Store, as_array, dtype_name
from latentcache.types import Padding

CPU = torch.device("cpu")
"""Named wherever memory is made: `torch.set_default_device` of the caller must not move it."""
Empty = Callable[[tuple[int, ...], np.dtype], np.ndarray]
"""Gives an array of this shape and dtype, whose values are arbitrary: `numpy.empty`, or a buffer that is used again."""


def read_batch(
    store: Store,
    keys: Sequence[str],
    fields: Sequence[str] | None = None,
    out: Mapping[str, torch.Tensor] | None = None,
    padding: Mapping[str, Padding] | None = None,
) -> dict[str, torch.Tensor]:
    """One CPU tensor [n, *shape] per field (all fields by default), a row per key; keys may repeat.

    A ragged field is padded as `padding` says for it, and the batch has `<field>_lengths` [n] (int64). Without a rule
    its lengths must be equal.

    The rows are written into the tensors of `out` where given: contiguous CPU tensors of that shape and dtype. New
    tensors cannot be resized. No keys give no tensors. EntryMissingError, EntryDamagedError; StoreError if the entries'
    fields, shapes or dtypes differ. After an error nothing was written.
    """
    rows = store.rows(keys)
    return stack(keys, rows, fields, out) if not padding else stack_padded(keys, rows, fields, out, padding)


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


def stack_padded(
    keys: Sequence[str],
    rows: Sequence[EntryArrays],
    fields: Sequence[str] | None,
    out: Mapping[str, torch.Tensor] | None,
    padding: Mapping[str, Padding],
) -> dict[str, torch.Tensor]:
    """As `stack`, with the fields of `padding` padded: [n, length, *rest], and `<field>_lengths` [n] (int64).

    StoreError if an entry is longer than the rule's length, and for a value that the field's dtype cannot have.
    """
    if not rows:
        return {}
    chosen = common_fields(keys, [_without_lengths(row.description, padding) for row in rows], fields)
    named = [dict(zip(row.description, row.arrays, strict=True)) for row in rows]
    plain = {name: spec for name, spec in chosen.items() if name not in padding}
    tensors: dict[str, torch.Tensor] = {}
    for name in chosen.keys() - plain.keys():
        if f"{name}_lengths" in chosen:
            raise StoreError(f"field {name!r} cannot be padded: the entries have a field {name}_lengths too")
        dtype, tail = chosen[name]
        lengths = [arrays[name].shape[1] for arrays in named]
        blank = _blank(keys, lengths, (name, dtype, tail), padding[name])
        if out and name in out:
            check_output(name, out[name], blank.dtype, tuple(blank.shape), CPU)
        tensors |= {name: blank, f"{name}_lengths": torch.tensor(lengths, dtype=torch.int64, device=CPU)}
    # All has been checked but the outputs of the other fields, which are checked before anything is written.
    tensors |= stack_columns(plain, ([arrays[name] for arrays in named] for name in plain), len(rows), out)
    for name in chosen.keys() - plain.keys():
        _fill(tensors[name], [arrays[name][0] for arrays in named], padding[name])
        if out and name in out:
            tensors[name] = out[name].copy_(tensors[name])
    return tensors


def _without_lengths(description: Description, padding: Mapping[str, Padding]) -> Description:
    """The description without the lengths of the fields that are padded."""
    padded = {name: spec for name, spec in description.items() if name in padding}
    for name, (_, shape) in padded.items():
        if not shape:
            raise StoreError(f"field {name!r} is a scalar in each entry, and has no length that could be padded")
    return {**description, **{name: (dtype, shape[1:]) for name, (dtype, shape) in padded.items()}}


def _blank(
    keys: Sequence[str], lengths: Sequence[int], field: tuple[str, str, tuple[int, ...]], rule: Padding
) -> torch.Tensor:
    """A batch of nothing but padding. `field`: its name, dtype, and shape without the length."""
    name, dtype, tail = field
    longest = max(lengths)
    length = longest if rule.length is None else rule.length
    if longest > length:
        key = keys[lengths.index(longest)]
        raise StoreError(f"entry {key}: field {name} has length {longest}, the batch is padded to {length}")
    try:
        if not DTYPES[dtype].is_floating_point and rule.value != int(rule.value):
            raise ValueError("it is no whole number")
        return torch.full((len(lengths), length, *tail), rule.value, dtype=DTYPES[dtype], device=CPU)
    except (RuntimeError, ValueError, OverflowError) as error:
        raise StoreError(f"field {name}: {rule.value} cannot be padded with in {dtype}: {error}") from error


def _fill(tensor: torch.Tensor, arrays: Sequence[np.ndarray], rule: Padding) -> None:
    padded = as_array(tensor)
    for row, array in zip(padded, arrays, strict=True):
        # Rows before the padding, and those after it: with num_last the last ones of each entry.
        num_after = len(array) if rule.side == "left" else min(rule.num_last, len(array))
        num_before = len(array) - num_after
        row[:num_before], row[len(row) - num_after :] = array[:num_before], array[num_before:]


def stack_columns(
    fields: Description,
    columns: Iterable[Sequence[np.ndarray]],
    num_rows: int,
    out: Mapping[str, torch.Tensor] | None,
    empty: Empty | None = None,
) -> dict[str, torch.Tensor]:
    """The same of rows that are grouped by field: for each of `fields` the arrays [1, *shape] of all entries.

    `empty` gives the memory of new tensors. StoreError if a tensor of `out` does not fit; then nothing is written.
    """
    tensors: dict[str, torch.Tensor] = {}
    arrays = []
    for name, (stored, shape) in fields.items():
        shape = (num_rows, *shape)
        tensor = out.get(name) if out else None
        if tensor is None:
            tensor, array = new_tensor(stored, shape, empty or np.empty)
        else:
            array = _writable(name, tensor, DTYPES[stored], shape)
        tensors[name] = tensor
        arrays.append(array)
    for array, column in zip(arrays, columns, strict=True):
        # One call for all rows: one for each, from Python, takes longer than the copy of a small row.
        np.concatenate(column, out=array)
    return tensors


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
                    "Batch one bucket at a time, and give a padding rule for fields of natural length."
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
