"""Rows of any lengths are padded as their rules say, and a rule that does not fit is refused."""

from __future__ import annotations

import pytest
import torch
from helpers.tensor_bits import bits, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from store_samples import text

from latentcache.errors import StoreError
from latentcache.store import MemoryStore
from latentcache.store.batch import DTYPES, columns_of, stack_columns
from latentcache.types import Padding


def batch_of(entries, rules):
    """Their batch, and which of its rows are their own."""
    keys = [entry.record.key for entry in entries]
    with MemoryStore() as store:
        store.add(entries)
        rows = store.rows(keys)
    return stack_columns(keys, columns_of(keys, rows, rules), rules)


def padded(tensors, rule):
    """What a batch of them must be, and which of its rows are their own."""
    length = rule.length or max(map(len, tensors))
    rows, own = [], []
    for tensor in tensors:
        rest = torch.tensor(rule.value).to(tensor.dtype).repeat(length - len(tensor), *tensor.shape[1:])
        first = len(tensor) - min(rule.num_last, len(tensor)) if rule.side == "right" else 0
        rows.append(torch.cat([bits(part) for part in (tensor[:first], rest, tensor[first:])]))
        own.append([True] * first + [False] * len(rest) + [True] * (len(tensor) - first))
    shape = (len(tensors), length, *tensors[0].shape[1:])
    return torch.stack(rows).reshape(-1).view(tensors[0].dtype).reshape(shape), torch.tensor(own)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    spare=st.none() | st.integers(0, 3),
    value=st.sampled_from([0, 1]),
    place=st.sampled_from([("left", 0), ("right", 0), ("right", 1), ("right", 5)]),
    dtype=st.sampled_from(sorted(DTYPES)),
)
@settings(max_examples=50)
def test_any_lengths_are_padded(lengths, spare, value, place, dtype):
    entries = [text(number, length, DTYPES[dtype]) for number, length in enumerate(lengths)] * 2
    rules = {"hidden": Padding(None if spare is None else max(lengths) + spare, value, *place), "mask": Padding()}
    expected, own = padded([entry.tensors["hidden"] for entry in entries], rules["hidden"])
    batch, masks = batch_of(entries, rules)
    assert batch.keys() == {"hidden", "mask", "moments"} and masks.keys() == {"hidden", "mask"}
    assert same_bits(batch["hidden"], expected) and same_bits(masks["hidden"], own)
    assert same_bits(batch["mask"], padded([entry.tensors["mask"] for entry in entries], Padding())[0])
    assert same_bits(batch["moments"], torch.stack([entry.tensors["moments"] for entry in entries]))


def test_what_does_not_fit_is_refused():
    entries = [text(1, 3), text(2, 5)]
    wide, other, scalar = text(3, 3, width=4), text(4, 3, more=torch.ones(1)), text(6, 3, scalar=torch.tensor(1.0))
    both = {"hidden": Padding(), "mask": Padding()}
    longest = entries[1].record.key
    for match, chosen, rules in (
        (f"{longest}: field hidden has length 5, .* allows 4", entries, both | {"hidden": Padding(4)}),
        ("equal shapes", [entries[0], wide], both),
        ("same fields", [entries[0], other], both),
        ("same fields", [other, entries[0]], both),
        ("'scalar' is a scalar", [scalar], both | {"scalar": Padding()}),
        ("mask: .* cannot hold the padding 0.5", entries, both | {"mask": Padding(value=0.5)}),
        ("mask: .* cannot hold the padding inf", entries, both | {"mask": Padding(value=float("inf"))}),
    ):
        with pytest.raises(StoreError, match=match):
            batch_of(chosen, rules)
