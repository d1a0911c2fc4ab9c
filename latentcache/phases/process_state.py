"""The state of the whole process that a phase must leave as it found it: random streams, gradient mode, flags."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_flatten

from latentcache.devices.rng import rng_state, set_rng_state
from latentcache.phases.module_state import Snapshot

GlobalFlag: TypeAlias = "tuple[Callable[[], Any], Callable[[Any], object]]"
"""One global setting of torch: how it is read, and how it is set."""


class RandomStreams(Snapshot):
    """The states of Python's, NumPy's and torch's generators, on the CPU and on every accelerator."""

    def __init__(self) -> None:
        self._state = rng_state()

    def restore(self) -> None:
        """Set every generator to its state again."""
        set_rng_state(self._state)

    def changes(self) -> Iterator[str]:
        """The generators that are in another state."""
        now = rng_state()
        for name, state in self._state.items():
            if not _equal(state, now[name]):
                yield f"random state of {name}: it is another than at the beginning of the phase"


class GlobalFlags(Snapshot):
    """torch's global flags: gradients, autocast, default dtype, determinism, cuDNN, matmul and attention kernels."""

    def __init__(self, device: torch.device):
        self._flags = dict(_flags(device))
        self._values = {name: get() for name, (get, _) in self._flags.items()}

    def restore(self) -> None:
        """Set the flags that differ."""
        # A cast of EMA weights that autocast keeps would be trained with; without gradients it would cut the graph.
        torch.clear_autocast_cache()
        for name, (get, put) in self._flags.items():
            value = self._values[name]
            # A read that fails is of a legacy flag, while torch's newer name for it is set: that one comes later.
            if value is not _MIXED and get() not in (value, _MIXED):
                put(value)

    def changes(self) -> Iterator[str]:
        """The flags that differ."""
        for name, (get, _) in self._flags.items():
            found, value = get(), self._values[name]
            if found != value:
                yield f"{name}: is {found}, was {value}"


_MIXED = "set by its newer name"


def _flags(device: torch.device) -> Iterator[tuple[str, GlobalFlag]]:
    """Legacy names before newer ones (torch 2.9): setting a legacy one sets newer ones, which are put back after."""
    yield "grad mode", (torch.is_grad_enabled, torch.set_grad_enabled)
    yield "default dtype", (torch.get_default_dtype, torch.set_default_dtype)
    yield "autocast cache", (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled)
    for kind in dict.fromkeys(("cpu", device.type)):
        is_enabled, enable = partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)
        yield f"autocast on {kind}", (is_enabled, enable)
        get_dtype, set_dtype = partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)
        yield f"autocast dtype on {kind}", (get_dtype, set_dtype)
    yield "deterministic algorithms", (_determinism, lambda value: torch.use_deterministic_algorithms(**value))
    yield "float32 matmul precision", (_legacy(torch.get_float32_matmul_precision), torch.set_float32_matmul_precision)
    backends = torch.backends
    for owner, name, settings in (
        (backends.cudnn, "cudnn", ("enabled", "benchmark", "deterministic", "allow_tf32")),
        (
            backends.cuda.matmul,
            "matmul",
            (
                "allow_tf32",
                "allow_fp16_reduced_precision_reduction",
                "allow_bf16_reduced_precision_reduction",
                "allow_fp16_accumulation",
            ),
        ),
        (backends, "backends", ("fp32_precision",)),
        (backends.cuda.matmul, "matmul", ("fp32_precision",)),
        (backends.cudnn, "cudnn", ("fp32_precision",)),
        (getattr(backends.cudnn, "conv", None), "cudnn.conv", ("fp32_precision",)),
        (getattr(backends.cudnn, "rnn", None), "cudnn.rnn", ("fp32_precision",)),
        (getattr(backends.mkldnn, "matmul", None), "mkldnn.matmul", ("fp32_precision",)),
    ):
        for setting in settings:
            if owner is not None and hasattr_quietly(owner, setting):
                yield f"{name}.{setting}", (_legacy(partial(getattr, owner, setting)), partial(setattr, owner, setting))
    for kernel in ("flash", "mem_efficient", "math", "cudnn"):
        get = getattr(backends.cuda, f"{kernel}_sdp_enabled", None)
        if get is not None:
            yield f"{kernel} attention", (get, getattr(backends.cuda, f"enable_{kernel}_sdp"))


def hasattr_quietly(owner: Any, name: str) -> bool:
    """Whether this torch has the setting. One whose reading fails is there."""
    try:
        return hasattr(owner, name)
    except RuntimeError:
        return True


def _legacy(get: Callable[[], Any]) -> Callable[[], Any]:
    """Reading a legacy flag is a RuntimeError while its newer names say something that it cannot express."""

    def read() -> Any:
        try:
            return get()
        except RuntimeError:
            return _MIXED

    return read


def _determinism() -> Mapping[str, bool]:
    return {
        "mode": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
    }


def _equal(one: Any, other: Any) -> bool:
    leaves, shape = tree_flatten(one)
    other_leaves, other_shape = tree_flatten(other)
    if shape != other_shape:
        return False
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else bool((a == b).all()) if hasattr(a, "all") else a == b
        for a, b in zip(leaves, other_leaves, strict=True)
    )
