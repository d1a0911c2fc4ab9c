"""Dense tensors whose memory is the CPU's and whose device is another: one storage, two labels.

DLPack carries a tensor with the device it is said to be on. A capsule with the other device's number gives a tensor
of that device over the same memory, so views and in-place operators keep their aliasing.
"""

from __future__ import annotations

import ctypes

import torch

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


def storage_on_cpu(storage: torch.UntypedStorage | torch.TypedStorage) -> torch.UntypedStorage:
    """The storage's memory as a CPU storage."""
    untyped = storage if isinstance(storage, torch.UntypedStorage) else storage._untyped_storage
    if untyped.device.type == "cpu":
        return untyped
    if not untyped.nbytes():
        return torch.UntypedStorage(0)
    memory = (ctypes.c_uint8 * untyped.nbytes()).from_address(untyped.data_ptr())
    memory.owner = untyped  # the memory lives as long as the storage that it came from
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _relabelled(tensor: torch.Tensor, device_type: int, index: int) -> torch.Tensor:
    capsule = torch._C._to_dlpack(tensor)
    start = ctypes.cast(_pointer_of(capsule, b"dltensor"), ctypes.POINTER(_TensorStart)).contents
    start.device.type, start.device.index = device_type, index
    return torch._C._from_dlpack(capsule)
