"""Rows stacked into one tensor per field; those of natural length are padded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

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
    return stack(keys, store.rows(keys), fields, out, padding)


def stack(
    keys: Sequence[str],
    rows: Sequence[EntryArrays],
    fields: Sequence[str] | None = None,
    out: Mapping[str, torch.Tensor] | None = None,
    padding: Mapping[str, Padding] | None = None,
) -> dict[str, torch.Tensor]:
    """One CPU tensor per field of rows that were read, as `read_batch` gives them. `keys` name the entries in errors.

    StoreError if an entry is longer than its rule's length, and for padding that the field's dtype cannot have.
    """
    if not rows:
        return {}
    rules = padding or {}
    chosen = common_fields(keys, [without_lengths(row.description, rules) for row in rows], fields)
    for name in chosen.keys() & rules.keys():
        if f"{name}_lengths" in chosen:
            raise StoreError(f"field {name!r} cannot be padded: the entries have a field {name}_lengths too")
    named = [dict(zip(row.description, row.arrays, strict=True)) for row in rows]
    columns = [[arrays[name] for arrays in named] for name in chosen]
    padded = Padded.of(keys, chosen, columns, rules)
    tensors = stack_columns(padded.fields, columns, len(rows), out, padded=padded)
    lengths = {f"{name}_lengths": torch.tensor(each, device=CPU) for name, each in padded.lengths.items()}
    return tensors | lengths


def without_lengths(description: Description, padding: Iterable[str]) -> Description:
    """The description without the lengths of the fields that are padded. StoreError if one of them is a scalar."""
    padded = {name: description[name] for name in padding if name in description}
    for name, (_, shape) in padded.items():
        if not shape:
            raise StoreError(f"field {name!r} is a scalar in each entry, and has no length that could be padded")
    return {**description, **{name: (dtype, shape[1:]) for name, (dtype, shape) in padded.items()}}


@dataclass(frozen=True, slots=True)
class Padded:
    """How the rows of a batch are padded. `fields` has the batch's lengths.

    By field that is padded: the rule, the value (an array without dimensions), and the lengths of the rows.
    """

    fields: Description
    padding: Mapping[str, Padding]
    values: Mapping[str, np.ndarray]
    lengths: Mapping[str, list[int]]

    @classmethod
    def of(
        cls,
        keys: Sequence[str],
        fields: Description,
        columns: Iterable[Sequence[np.ndarray]],
        padding: Mapping[str, Padding],
    ) -> Padded:
        """That of rows that are grouped by field, in arrays [1, length, *rest]; `fields` are as `without_lengths`.

        `keys` name the entries in errors. StoreError as for `stack_padded`.
        """
        whole, values, lengths = dict(fields), {}, {}
        for (name, (dtype, tail)), column in zip(fields.items(), columns, strict=True):
            if name in padding:
                lengths[name] = [array.shape[1] for array in column]
                whole[name] = dtype, (padded_length(keys, name, lengths[name], padding[name]), *tail)
                values[name] = padding_value(name, dtype, padding[name].value)
        return cls(whole, {name: padding[name] for name in lengths}, values, lengths)

    def fill(self, name: str, target: np.ndarray, column: Sequence[np.ndarray]) -> None:
        """Write the rows of this field to `target` [n, length, *rest], and padding between them."""
        fill_padded(target, column, self.padding[name], self.values[name])

    def row_bytes(self) -> list[int]:
        """Bytes of a row of each field, in their order."""
        return [ARRAY_DTYPES[dtype].itemsize * math.prod(shape) for dtype, shape in self.fields.values()]

    def masks(self) -> dict[str, torch.Tensor]:
        """For each field that is padded which rows are not padding: bool [n, length]."""
        return {
            name: mask_of(lengths, self.fields[name][1][0], self.padding[name])
            for name, lengths in self.lengths.items()
        }


def concatenated(dtype: str, column: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Arrays [1, length, *rest] as tensors [length, *rest]: views of one new tensor."""
    lengths = [array.shape[1] for array in column]
    tensor, array = new_tensor(dtype, (sum(lengths), *column[0].shape[2:]), np.empty)
    np.concatenate([each[0] for each in column], out=array)
    return list(torch.split(tensor, lengths))


def pad_tensors(
    keys: Sequence[str], name: str, tensors: Sequence[torch.Tensor], rule: Padding
) -> tuple[torch.Tensor, torch.Tensor]:
    """CPU tensors [length, *rest] of one field, padded to one tensor, and its mask; errors as for `stack_padded`."""
    fields = {name: (dtype_name(tensors[0]), tuple(tensors[0].shape[1:]))}
    column = [as_array(tensor)[None] for tensor in tensors]
    padded = Padded.of(keys, fields, [column], {name: rule})
    return stack_columns(padded.fields, [column], len(column), None, padded=padded)[name], padded.masks()[name]


def padded_length(keys: Sequence[str], name: str, lengths: Sequence[int], rule: Padding) -> int:
    """The length of a batch of these rows. StoreError naming the first of `keys` that is longer than the rule's."""
    longest = max(lengths)
    length = longest if rule.length is None else rule.length
    if longest > length:
        key = keys[lengths.index(longest)]
        raise StoreError(f"entry {key}: field {name} has length {longest}, the batch is padded to {length}")
    return length


def padding_value(name: str, dtype: str, value: float) -> np.ndarray:
    """The value in this dtype, as an array without dimensions. StoreError naming the field if the dtype has none."""
    try:
        if not DTYPES[dtype].is_floating_point and value != int(value):
            raise ValueError("it is no whole number")
        return as_array(torch.full((), value, dtype=DTYPES[dtype], device=CPU))
    except (RuntimeError, ValueError, OverflowError) as error:
        raise StoreError(f"field {name}: {value} cannot be padded with in {dtype}: {error}") from error


def fill_padded(target: np.ndarray, column: Sequence[np.ndarray], rule: Padding, value: np.ndarray) -> None:
    """Write arrays [1, length, *rest] to `target` [n, longest, *rest], with `value` where the rule has padding."""
    longest = target.shape[1]
    for row, array in zip(target, column, strict=True):
        first, last = _gap(array.shape[1], longest, rule)
        row[:first] = array[0, :first]
        row[first:last] = value
        row[last:] = array[0, first:]


def mask_of(lengths: Sequence[int], longest: int, rule: Padding) -> torch.Tensor:
    """Which rows of a batch of these lengths are not padding: bool [n, longest]."""
    mask = np.ones((len(lengths), longest), bool)
    for row, length in zip(mask, lengths, strict=True):
        first, last = _gap(length, longest, rule)
        row[first:last] = False
    return torch.from_numpy(mask)


def _gap(length: int, longest: int, rule: Padding) -> tuple[int, int]:
    """Where the padding of a row begins and ends."""
    first = 0 if rule.side == "left" else max(0, length - rule.num_last)
    return first, first + longest - length


def stack_columns(
    fields: Description,
    columns: Iterable[Sequence[np.ndarray]],
    num_rows: int,
    out: Mapping[str, torch.Tensor] | None,
    empty: Empty | None = None,
    padded: Padded | None = None,
) -> dict[str, torch.Tensor]:
    """The same of rows that are grouped by field: for each of `fields` the arrays [1, *shape] of all entries.

    `empty` gives the memory of new tensors; `padded`, whose `fields` these are, pads its own. StoreError if a tensor of
    `out` does not fit; then nothing is written.
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
    names = iter(fields)
    for array, column in zip(arrays, columns, strict=True):
        if padded is not None and (name := next(names)) in padded.padding:
            padded.fill(name, array, column)
            continue
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
