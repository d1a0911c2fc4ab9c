"""Iterates over the tensors inside nested values, with dotted names.

Unlike this, `torch.utils._pytree` does not enter sets, dataclasses and mappings other than dict (e.g. transformers'
BatchEncoding), and does not terminate on a container that contains itself. Batches and optimizer states have them all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch


def named_tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in `value`: itself, or nested in mappings, lists, tuples, sets and dataclasses.

    `{"a": [x, y]}` named `batch` gives `batch.a.0` and `batch.a.1`. Other leaves are skipped.
    """
    for path, leaf in named_leaves(value, name):
        if isinstance(leaf, torch.Tensor):
            yield path, leaf


def named_leaves(value: Any, name: str, _above: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield everything in `value` that is not a container. A container inside itself is entered once."""
    if id(value) in _above:
        return
    children = _children(value)
    if children is None:
        yield name, value
        return
    for key, child in children:
        yield from named_leaves(child, f"{name}.{key}" if name else str(key), (*_above, id(value)))


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
