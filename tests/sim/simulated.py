"""A second device, `sim`, for machines without one: real values, CPU memory, and CUDA's rules on mixing devices.

torch's helper for Python backends makes PrivateUse1 a device. Every operator on it arrives at `_run`, which checks the
devices as CUDA does (device_rules.py), runs the CPU kernel on the same memory, and labels the results. The device is
global and cannot be removed, so it needs its own process.

Not supported are `torch.Generator(device="sim")`, storages (also those read from a file), `pin_memory()` and streams.
A view has its base's memory but its own storage object, so a deep copy separates the two. `device.type` is `sim`, so
code that compares with `cuda` takes its other branch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from device_rules import common_device, kernels_of_their_own
from torch.utils._pytree import tree_map_only

NAME, NUM_DEVICES = "sim", 2

AUTOCAST_LOW = """linear matmul mm bmm addmm baddbmm addbmm conv1d conv2d conv3d conv_transpose2d.input
    scaled_dot_product_attention"""
AUTOCAST_FLOAT32 = """layer_norm group_norm softmax.int log_softmax.int mse_loss l1_loss smooth_l1_loss nll_loss
    cross_entropy_loss exp log pow.Tensor_Scalar sum cumsum norm.Scalar"""
"""The operators of torch's "CUDA Op-Specific Behavior" (docs: torch.amp) that diffusion models use."""

_kept_alive: list[torch.library.Library] = []


class SimBackend:
    """The module `torch.sim`."""

    def __init__(self) -> None:
        self.generators = [torch.Generator().manual_seed(1000 + index) for index in range(NUM_DEVICES)]
        self._current = 0

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def _lazy_init(self) -> None:
        """There is nothing to initialise."""

    def device_count(self) -> int:
        return NUM_DEVICES

    def current_device(self) -> int:
        return self._current

    def set_device(self, device: torch.device | str | int) -> None:
        self._current = self.index_of(device)

    def index_of(self, device: torch.device | str | int | None) -> int:
        if device is None:
            return self._current
        index = device if isinstance(device, int) else torch.device(device).index
        return self._current if index is None else index

    def get_device_name(self, device: torch.device | str | int | None = None) -> str:
        return f"simulated device {self.index_of(device)}"

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.generators:
            generator.manual_seed(seed)

    def get_rng_state(self, device: torch.device | str | int | None = None) -> torch.Tensor:
        return self.generators[self.index_of(device)].get_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device | str | int | None = None) -> None:
        self.generators[self.index_of(device)].set_state(state)

    def synchronize(self, device: torch.device | str | int | None = None) -> None:
        """Every operator has ended when it returns."""

    def empty_cache(self) -> None:
        """There is no caching allocator."""

    def mem_get_info(self, device: torch.device | str | int | None = None) -> tuple[int, int]:
        return 1 << 33, 1 << 34

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return True


def install() -> SimBackend:
    """Make `sim:0` and `sim:1` devices of this process and return their backend. Idempotent."""
    present = getattr(torch, NAME, None)
    if present is not None:
        return present
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    backend = SimBackend()
    _setup_privateuseone_for_python_backend(NAME, backend_module=backend)
    # As on CUDA, `Module.to` keeps Parameter objects, and `parameter.data = other` may change the device. Torch allows
    # the latter only for its own devices, so both swap the tensor that the Python object holds.
    torch.__future__.set_swap_module_params_on_conversion(True)
    _let_data_change_device()
    _let_buffers_be_deep_copied()

    fallback, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _kept_alive.extend((fallback, aten))
    fallback.fallback(_run, "PrivateUse1")
    for op in kernels_of_their_own():
        aten.impl(op._name.partition("::")[2].removesuffix(".default"), functools.partial(_run, op), "PrivateUse1")
    for name, kernel in _KERNELS.items():
        aten.impl(name, kernel, "PrivateUse1")
    _register_autocast(aten)
    # Files are read to the CPU only.
    torch.serialization.register_package(5, _location_of, lambda storage, location: None)
    return backend


def _run(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Check the devices of a call, run the CPU kernel on the same memory, and label the results."""
    base = op._schema.name.partition("::")[2]
    if base.startswith("_foreach_") and base not in {"_foreach_copy_", "_foreach_copy"}:
        return _run_each(op, args, kwargs)
    device = common_device(op, args, kwargs)
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
        kwargs["device"] = torch.device("cpu")
    if torch.Tag.nondeterministic_seeded in op.tags and device is not None and device.type == NAME:
        with _stream_of(device):
            return _labelled(op, args, kwargs, device)
    return _labelled(op, args, kwargs, device)


def _labelled(op: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any], device: torch.device | None) -> Any:
    """The CPU kernel's results as tensors of `device`. Tensors passed in are returned as the same objects."""
    index = torch.get_device_module(NAME).index_of(device) if device is not None else 0
    results = {a.name for a in op._schema.arguments if a.kwarg_only and a.alias_info and a.alias_info.is_write}
    outputs = {name: value for name, value in kwargs.items() if name in results and isinstance(value, torch.Tensor)}
    memory: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def borrowed(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in memory:
            memory[id(tensor)] = (tensor, on_cpu(tensor))
        return memory[id(tensor)][1]

    cpu_args = tree_map_only(torch.Tensor, borrowed, args)
    cpu_kwargs = tree_map_only(torch.Tensor, borrowed, {k: v for k, v in kwargs.items() if k not in outputs})
    # The kernel may resize an `out=` tensor, which labelled memory cannot be, so it gets a fresh one.
    fresh = {name: torch.empty(0, dtype=tensor.dtype) for name, tensor in outputs.items()}
    given = _callable_with_numbers(op, args)(*cpu_args, **cpu_kwargs, **fresh)

    for name, output in outputs.items():
        if fresh[name].shape == output.shape:
            on_cpu(output).copy_(fresh[name])
        else:
            output.data = on_device(fresh[name], index)
    theirs = {id(fresh[name]): output for name, output in outputs.items()}
    for tensor, alias in memory.values():
        theirs[id(alias)] = tensor
        moved = alias.numel() and tensor.numel() and alias.data_ptr() != tensor.data_ptr()
        if alias is not tensor and (alias.shape != tensor.shape or alias.stride() != tensor.stride() or moved):
            tensor.data = on_device(alias, tensor.device.index)

    def labelled(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in theirs:
            return theirs[id(tensor)]
        return tensor if device is None or device.type == "cpu" else on_device(tensor, index)

    return tree_map_only(torch.Tensor, labelled, given)


def _callable_with_numbers(op: torch._ops.OpOverload, args: Any) -> Callable[..., Any]:
    """The operator, or all its overloads if a Python number is passed for a tensor (`tensor % 3`)."""
    for argument, value in zip(op._schema.arguments, args, strict=False):
        if isinstance(value, int | float | complex) and isinstance(argument.type, torch.TensorType):
            return op.overloadpacket
    return op


def _run_each(op: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a foreach operator tensor by tensor, like CUDA's slow path for several devices."""
    many = {i for i, value in enumerate(args) if _is_tensor_list(value)}
    lengths = {len(args[i]) for i in many} | {len(v) for v in kwargs.values() if _is_tensor_list(v)}
    given, (length,) = [], lengths
    scalars = {i for i, value in enumerate(args) if isinstance(value, list | tuple) and i not in many}
    names = [argument.name for argument in op._schema.arguments]
    scalars |= {i for i in range(len(args)) if names[i] == "scalars"}
    for at in range(length):
        one = [v[at : at + 1] if i in many or i in scalars else v for i, v in enumerate(args)]
        one_kwargs = {k: v[at : at + 1] if isinstance(v, list | tuple) else v for k, v in kwargs.items()}
        device = common_device(op, one, one_kwargs)
        given.append(_labelled(op, one, one_kwargs, device))
    if not op._schema.returns:
        return None
    return [result[0] for result in given]


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, torch.Tensor) for item in value)


@contextmanager
def _stream_of(device: torch.device) -> Iterator[None]:
    """Let random operators draw from the device's own stream, by making it the CPU's default one meanwhile."""
    backend = torch.get_device_module(NAME)
    stream = backend.generators[backend.index_of(device)]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.set_state(stream.get_state())
        yield
        stream.set_state(torch.default_generator.get_state())


def _copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    on_cpu(self).copy_(on_cpu(source))
    return self


def _convolution(*args: Any) -> torch.Tensor:
    return _run(torch.ops.aten.convolution.default, *args)


def _convolution_backward(
    grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, *geometry: Any
) -> tuple[torch.Tensor | None, ...]:
    *geometry_only, mask = geometry
    transposed, groups = geometry_only[3], geometry_only[5]
    bias_sizes = [weight.shape[1] * groups if transposed else weight.shape[0]] if mask[2] else None
    return _run(torch.ops.aten.convolution_backward.default, grad, input, weight, bias_sizes, *geometry_only, mask)


_KERNELS: dict[str, Callable[..., Any]] = {
    "copy_": _copy_,
    "convolution_overrideable": _convolution,
    "convolution_backward_overrideable": _convolution_backward,
}


def _register_autocast(aten: torch.library.Library) -> None:
    through = torch.library.Library("_", "IMPL")
    _kept_alive.append(through)
    through.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for names, dtype in ((AUTOCAST_LOW, None), (AUTOCAST_FLOAT32, torch.float32)):
        for name in names.split():
            base, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, base), overload or "default")
            aten.impl(name, functools.partial(_run_autocast, op, dtype), "AutocastPrivateUse1")


def _run_autocast(op: torch._ops.OpOverload, dtype: torch.dtype | None, *args: Any, **kwargs: Any) -> Any:
    """The operator with its floating tensors cast to `dtype`, or to autocast's own when that is None."""
    wanted = dtype or torch.get_autocast_dtype(NAME)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        casts = tensor.is_floating_point() and tensor.device.type == NAME and tensor.dtype != torch.float64
        return tensor.to(wanted) if casts else tensor

    off = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    with torch._C._ExcludeDispatchKeyGuard(off):
        return op(*tree_map_only(torch.Tensor, cast, args), **tree_map_only(torch.Tensor, cast, kwargs))


def _let_data_change_device() -> None:
    base = torch._C.TensorBase.data

    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        if value.device.type == self.device.type or torch._has_compatible_shallow_copy_type(self, value):
            base.__set__(self, value)
            return
        gradient = self.grad if self.is_leaf else None
        if gradient is not None:
            self.grad = None
        # A new object, because `value` itself must not be swapped, and no view, which would keep its base.
        new = value.detach()
        new.requires_grad_(self.requires_grad)
        torch._C._swap_tensor_impl(self, new)
        if gradient is not None:
            # On CUDA the gradient stays where it was; a swapped tensor refuses one of another device.
            self.grad = gradient.to(self.device)

    torch.Tensor.data = property(lambda self: base.__get__(self), set_data)


def _let_buffers_be_deep_copied() -> None:
    """Replace torch's way, which clones a buffer's storage with the device's allocator: there is none."""
    base = torch.Tensor.__deepcopy__

    def deep_copied(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        if self.device.type != NAME:
            return base(self, memo)
        return memo.setdefault(id(self), self.detach().clone())

    torch.Tensor.__deepcopy__ = deep_copied


def _location_of(storage: Any) -> str | None:
    return f"{NAME}:{storage.device.index or 0}" if storage.device.type == NAME else None


# Dense tensors with CPU memory and another device: one storage, two labels. A DLPack capsule names its tensor's device.
# With the other device's number in it, it becomes a tensor of that device over the same memory, so views and in-place
# operators keep their aliasing.

CPU, EXTENSION_DEVICE = 1, 12
"""`DLDeviceType` in dlpack.h: kDLCPU and kDLExtDev, which is torch's PrivateUse1."""


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("index", ctypes.c_int32))


class _TensorStart(ctypes.Structure):
    """The first two fields of `DLTensor`."""

    _fields_ = (("data", ctypes.c_void_p), ("device", _Device))


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as a CPU tensor. A CPU tensor is given back as it is."""
    if tensor.device.type == "cpu":
        return tensor
    if not tensor.numel():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return _relabelled(tensor, CPU, 0)


def on_device(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """The CPU tensor's memory as a tensor of the extension device `index`. Others are given back as they are."""
    if tensor.device.type != "cpu":
        return tensor
    return _relabelled(tensor.resolve_conj().resolve_neg(), EXTENSION_DEVICE, index)


def _relabelled(tensor: torch.Tensor, device_type: int, index: int) -> torch.Tensor:
    capsule = torch._C._to_dlpack(tensor)
    start = ctypes.cast(_pointer_of(capsule, b"dltensor"), ctypes.POINTER(_TensorStart)).contents
    start.device.type, start.device.index = device_type, index
    return torch._C._from_dlpack(capsule)
