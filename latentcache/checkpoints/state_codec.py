"""Nested state as JSON and tensors: what a state_dict holds, without pickle.

JSON keeps numbers, text, lists and dicts with text keys as they are. Everything else is an object with one key that
starts with `$`: `$tensor` (the name in the tensors), `$array` (the same, for NumPy), `$tuple`, `$set`, `$dict` (pairs,
for other keys), `$counter`, `$float` (nan, inf), `$bytes`, `$dtype`, `$device`. One tensor that is met twice (tied
weights) is one name twice.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

_DTYPES = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
}
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
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if kind is np.ndarray and value.dtype.kind in "biuf":
            return {"$array": self._tensor(torch.from_numpy(np.ascontiguousarray(value).copy()), name)["$tensor"]}
        if kind is list:
            return self._items(value, name)
        if kind in (tuple, torch.Size):
            return {"$tuple": self._items(value, name)}
        if kind is set:
            return {"$set": self._items(sorted(value, key=repr), name)}
        if kind is Counter:
            return {"$counter": self._pairs(value, name)}
        if kind in (dict, OrderedDict, defaultdict):
            if all(type(key) is str and not key.startswith("$") for key in value):
                return {key: self.pack(inner, _joined(name, key)) for key, inner in value.items()}
            return {"$dict": self._pairs(value, name)}
        if kind is bytes:
            return {"$bytes": value.hex()}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        self._refuse(name, f"a {kind.__module__}.{kind.__qualname__}, which is neither tensor nor plain data")
        return None

    def _refuse(self, name: str, problem: str) -> None:
        self.offenders.append(f"{_joined(self.part, name) if name else self.part}: {problem}")

    def _items(self, values: Any, name: str) -> list[Any]:
        return [self.pack(value, _joined(name, index)) for index, value in enumerate(values)]

    def _pairs(self, value: Mapping[Any, Any], name: str) -> list[list[Any]]:
        return [[self.pack(key, f"{name} key"), self.pack(inner, _joined(name, key))] for key, inner in value.items()]

    def _tensor(self, tensor: torch.Tensor, name: str) -> dict[str, str]:
        problem = why_unwritable(tensor)
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


def _joined(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def why_unwritable(tensor: torch.Tensor) -> str | None:
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
    """The value that `TreeWriter.pack` was given. KeyError, TypeError or ValueError for what it did not write."""
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


_LEAVES = {
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


def devices_of(value: Any) -> Any:
    """The tree with each tensor replaced by its device, and everything else by None."""
    if isinstance(value, torch.Tensor):
        return value.device
    if isinstance(value, Mapping):
        return {key: devices_of(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [devices_of(inner) for inner in value]
    return None


def placed(value: Any, devices: Any) -> Any:
    """A copy of the tree with each tensor on the device in its place; where there is none, it stays."""
    if isinstance(value, torch.Tensor):
        return value.to(devices) if isinstance(devices, torch.device) else value
    if isinstance(value, dict):
        return type(value)({key: placed(inner, _inner(devices, key)) for key, inner in value.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(placed(inner, _inner(devices, index)) for index, inner in enumerate(value))
    return value


def place_items(value: Any, devices: Any) -> None:
    """As `placed`, in the lists and dicts of the tree itself, one tensor after another."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        if isinstance(inner, torch.Tensor):
            value[key] = placed(inner, _inner(devices, key))
        else:
            place_items(inner, _inner(devices, key))


def _inner(devices: Any, key: Any) -> Any:
    if isinstance(devices, dict):
        return devices.get(key)
    return devices[key] if isinstance(devices, list) and key < len(devices) else None


def _spec(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {'x'.join(map(str, tensor.shape)) or 'scalar'}"
