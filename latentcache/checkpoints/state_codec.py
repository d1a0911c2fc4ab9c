"""Nested state as JSON and tensors: what a state_dict holds, without pickle.

JSON keeps numbers, text, lists and dicts with text keys as they are. Everything else is an object with one key that
starts with `$`: `$tensor` (the name in the tensors), `$array` (the same, for NumPy), `$tuple`, `$set`, `$dict` (pairs,
for other keys), `$counter`, `$float` (nan, inf), `$bytes`, `$dtype`, `$device`. A tensor that occurs twice (tied
weights) is one name twice.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import KeyPath, MappingKey, tree_flatten_with_path, tree_map_with_path

_DTYPES = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
}  # fmt: skip
"""The dtypes that safetensors holds since 0.5."""


@dataclass(slots=True)
class TreeWriter:
    """Collects the tensors of a part's tree, on the CPU, and names what cannot be written."""

    part: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    offenders: list[str] = field(default_factory=list)
    _names: dict[tuple[Any, ...], str] = field(default_factory=dict)
    _storages: set[int] = field(default_factory=set)

    def pack(self, value: Any, name: str = "") -> Any:
        """The JSON form of `value`, at this dotted path in the part. What cannot be written is an offender."""
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name)
        if isinstance(value, np.generic):
            return self.pack(value.item(), name)
        if kind in _PACKERS and (kind is not np.ndarray or value.dtype.kind in "biuf"):
            return _PACKERS[kind](self, value, name)
        self._refuse(name, f"a {kind.__module__}.{kind.__qualname__}, which is neither tensor nor plain data")
        return None

    def _refuse(self, name: str, problem: str) -> None:
        self.offenders.append(f"{_joined(self.part, name) if name else self.part}: {problem}")

    def _items(self, values: Any, name: str) -> list[Any]:
        return [self.pack(value, _joined(name, index)) for index, value in enumerate(values)]

    def _pairs(self, value: Mapping[Any, Any], name: str) -> list[list[Any]]:
        return [[self.pack(key, f"{name} key"), self.pack(inner, _joined(name, key))] for key, inner in value.items()]

    def _dict(self, value: Mapping[Any, Any], name: str) -> dict[str, Any]:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.pack(inner, _joined(name, key)) for key, inner in value.items()}
        return {"$dict": self._pairs(value, name)}

    def _array(self, value: np.ndarray[Any, Any], name: str) -> dict[str, str]:
        return {"$array": self._tensor(torch.from_numpy(np.ascontiguousarray(value).copy()), name)["$tensor"]}

    def _tensor(self, tensor: torch.Tensor, name: str) -> dict[str, str]:
        problem = _why_unwritable(tensor)
        if problem:
            self._refuse(name, problem)
            return {"$tensor": name}
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and place in self._names:
            return {"$tensor": self._names[place]}
        unique = name or self.part
        while unique in self.tensors:
            unique += "'"
        self._names[place] = unique
        cpu = tensor.detach().to("cpu").contiguous()
        storage = cpu.untyped_storage()
        # safetensors takes no two tensors of one storage, and none that is a part of one.
        if storage.nbytes() != cpu.nbytes or (storage.nbytes() and storage.data_ptr() in self._storages):
            cpu = cpu.clone()
        self._storages.add(cpu.untyped_storage().data_ptr())
        self.tensors[unique] = cpu
        return {"$tensor": unique}


_PACKERS: dict[type, Callable[[TreeWriter, Any, str], Any]] = {
    float: lambda writer, value, name: value if math.isfinite(value) else {"$float": repr(value)},
    list: TreeWriter._items,
    tuple: lambda writer, value, name: {"$tuple": writer._items(value, name)},
    torch.Size: lambda writer, value, name: {"$tuple": writer._items(value, name)},
    set: lambda writer, value, name: {"$set": writer._items(sorted(value, key=repr), name)},
    dict: TreeWriter._dict,
    OrderedDict: TreeWriter._dict,
    defaultdict: TreeWriter._dict,
    Counter: lambda writer, value, name: {"$counter": writer._pairs(value, name)},
    bytes: lambda writer, value, name: {"$bytes": value.hex()},
    np.ndarray: TreeWriter._array,
    torch.dtype: lambda writer, value, name: {"$dtype": str(value).removeprefix("torch.")},
    torch.device: lambda writer, value, name: {"$device": str(value)},
}


def _joined(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _why_unwritable(tensor: torch.Tensor) -> str | None:
    """Why a tensor's values cannot be written as a plain tensor, or None if they can."""
    if hasattr(tensor, "full_tensor"):
        return "a sharded DTensor; save with torch.distributed.checkpoint"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return f"a {type(tensor).__name__}, whose values are not a plain tensor; leave that part out of the checkpoint"
    if tensor.device.type == "meta":
        return "on meta and holds no values; remove the offload hooks, or load the part first"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return f"layout {tensor.layout}, quantised {tensor.is_quantized}; only dense tensors can be written"
    if tensor.dtype not in _DTYPES:
        return f"dtype {tensor.dtype}; safetensors holds {', '.join(sorted(map(str, _DTYPES)))}"
    return None


def unpack(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of `TreeWriter.pack`. KeyError, TypeError or ValueError for what it did not write."""
    if isinstance(value, list):
        return [unpack(inner, tensors) for inner in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: unpack(inner, tensors) for key, inner in value.items()}
    content = value[tag]
    if tag in ("$dict", "$counter"):
        pairs = {unpack(key, tensors): unpack(inner, tensors) for key, inner in content}
        return Counter(pairs) if tag == "$counter" else pairs
    if tag in ("$tuple", "$set"):
        items = [unpack(inner, tensors) for inner in content]
        return tuple(items) if tag == "$tuple" else set(items)
    return _LEAVES[tag](content, tensors)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch.{name} is no dtype")
    return dtype


_LEAVES: dict[str, Callable[[Any, Mapping[str, torch.Tensor]], Any]] = {
    "$tensor": lambda content, tensors: tensors[content],
    "$array": lambda content, tensors: tensors[content].numpy(),
    "$float": lambda content, tensors: float(content),
    "$bytes": lambda content, tensors: bytes.fromhex(content),
    "$dtype": lambda content, tensors: _dtype(content),
    "$device": lambda content, tensors: torch.device(content),
}


def differences(saved: Any, live: Any, name: str) -> list[str]:
    """Where tensors and the lengths of lists differ in kind, shape or dtype, each with its dotted path."""
    if isinstance(saved, torch.Tensor) and isinstance(live, torch.Tensor):
        return [] if _spec(saved) == _spec(live) else [f"{name}: {_spec(saved)} in the file, {_spec(live)} here"]
    if isinstance(saved, Mapping) and isinstance(live, Mapping):
        found = [f"{name}.{key}: only in the file" for key in saved.keys() - live.keys()]
        found += [f"{name}.{key}: missing in the file" for key in live.keys() - saved.keys()]
        for key in saved.keys() & live.keys():
            found += differences(saved[key], live[key], f"{name}.{key}")
        return sorted(found)
    if isinstance(saved, (list, tuple)) and isinstance(live, (list, tuple)):
        if len(saved) != len(live):
            return [f"{name}: {len(saved)} items in the file, {len(live)} here"]
        return [
            line for i, (a, b) in enumerate(zip(saved, live, strict=True)) for line in differences(a, b, f"{name}.{i}")
        ]
    if isinstance(saved, torch.Tensor) or isinstance(live, torch.Tensor):
        return [f"{name}: {type(saved).__name__} in the file, {type(live).__name__} here"]
    return []


def devices_of(tree: Any) -> dict[KeyPath, torch.device]:
    """The device of each tensor in nested dicts, lists and tuples, by its path."""
    return {path: leaf.device for path, leaf in tree_flatten_with_path(tree)[0] if isinstance(leaf, torch.Tensor)}


def to_devices(tree: Any, devices: Mapping[KeyPath, torch.device]) -> Any:
    """A copy of the tree with each tensor on the device of its path; where there is none, it stays."""

    def place(path: KeyPath, leaf: Any) -> Any:
        return leaf.to(devices[path]) if isinstance(leaf, torch.Tensor) and path in devices else leaf

    return tree_map_with_path(place, tree)


def move_items(tree: Any, devices: Mapping[KeyPath, torch.device]) -> None:
    """As `to_devices`, in the lists and dicts of the tree itself, one tensor after another."""
    for path in devices_of(tree).keys() & devices.keys():
        parent = reduce(lambda node, key: key.get(node), path[:-1], tree)
        last: Any = path[-1]
        if isinstance(parent, (dict, list)):
            key = last.key if isinstance(last, MappingKey) else last.idx
            parent[key] = parent[key].to(devices[path])


def _spec(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {'x'.join(map(str, tensor.shape)) or 'scalar'}"
