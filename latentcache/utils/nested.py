"""The tensors inside nested values, by dotted name.

`torch.utils._pytree` does not enter sets, dataclasses and mappings that are no dict (transformers' BatchEncoding), and
does not end on a container that contains itself. Batches and optimizer state may have all of these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch


def named_tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in `value`: a tensor, or mappings, lists, tuples, sets and dataclasses of them, at any depth.

    `{"a": [x, y]}` named `batch` gives `batch.a.0` and `batch.a.1`. Other values yield nothing.
    """
    for path, leaf in named_leaves(value, name):
        if isinstance(leaf, torch.Tensor):
            yield path, leaf


def named_leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Everything in `value` that is no container. A container that contains itself is entered once."""
    yield from _leaves(value, name, ())


def _leaves(value: Any, name: str, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    if id(value) in above:
        return
    children = _children(value)
    if children is None:
        yield name, value
        return
    for key, child in children:
        yield from _leaves(child, f"{name}.{key}" if name else str(key), (*above, id(value)))


def _children(value: Any) -> Iterable[tuple[Any, Any]] | None:
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    if isinstance(value, list | tuple | set | frozenset):
        return enumerate(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None
