"""The environment that tensors meet in: Python, torch, the driver, every visible device, the cache's disk."""

from __future__ import annotations

import ctypes
import platform
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from latentcache.devices.placement import device_named, free_memory
from latentcache.doctor.diagnosis import Diagnosis, Finding
from latentcache.doctor.filesystem import check_filesystem, filesystem_of
from latentcache.doctor.versions import check_versions, installed_versions
from latentcache.errors import DeviceError

HALF_DTYPES = (torch.bfloat16, torch.float16)
WAL_SAFE_SQLITE = (3, 51, 3)
"""From here on two connections may write and checkpoint at once in WAL mode: https://www.sqlite.org/wal.html."""


@dataclass(frozen=True, slots=True)
class DeviceState:
    """One visible device. Bytes are None where the device does not tell; a dtype is absent if it does not work."""

    device: torch.device
    name: str
    free_bytes: int | None
    total_bytes: int | None
    dtypes: tuple[torch.dtype, ...]
    emulated: tuple[torch.dtype, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "device": str(self.device),
            "name": self.name,
            "free_bytes": self.free_bytes,
            "total_bytes": self.total_bytes,
            "bf16": torch.bfloat16 in self.dtypes,
            "fp16": torch.float16 in self.dtypes,
            "emulated": [str(dtype).removeprefix("torch.") for dtype in self.emulated],
        }


def examine_environment(
    *,
    device: str = "auto",
    cache_path: Path | None = None,
    sqlite_version: str | None = None,
    journal_mode: str | None = None,
) -> Diagnosis:
    """Look at everything that needs no model. Whoever owns SQLite hands its version and the index's journal mode in.

    A `device` that is unknown or not here is an error finding, so that the report can say why.
    """
    diagnosis = _software() + _accelerators() + _asked(device)
    if sqlite_version is not None and journal_mode is not None:
        facts = {"sqlite": {"version": sqlite_version, "journal_mode": journal_mode}}
        diagnosis += Diagnosis((check_sqlite(sqlite_version, journal_mode),), facts)
    if cache_path is None:
        return diagnosis + Diagnosis((Finding("note", "cache", "no path given", "--cache.path DIR looks at its disk"),))
    system = filesystem_of(cache_path)
    return diagnosis + Diagnosis(tuple(check_filesystem(system, journal_mode)), {"cache": system.to_json()})


def check_sqlite(version: str, journal_mode: str) -> Finding:
    """The SQLite that Python is linked to, and the journal mode that the cache's index has because of it."""
    fixed = ".".join(map(str, WAL_SAFE_SQLITE))
    if tuple(map(int, version.split("."))) >= WAL_SAFE_SQLITE:
        return Finding("ok", "SQLite", f"{version}: journal mode {journal_mode}")
    reason = "can corrupt a database in WAL mode when two connections write and checkpoint at once (WAL-reset bug)"
    if journal_mode == "wal":
        remedy = f"use a Python that is linked to SQLite >= {fixed}"
        return Finding("error", "SQLite", f"{version}: journal mode wal, but this version {reason}", remedy)
    return Finding(
        "note",
        "SQLite",
        f"{version}: {reason}, so the index uses journal mode {journal_mode}: safe, and slower to write",
        f"nothing needs doing; with SQLite >= {fixed} the index uses wal",
    )


def check_driver(build: str | None, driver: tuple[int, int] | None) -> Finding | None:
    """Does the NVIDIA driver run torch's CUDA build? `build` is e.g. "12.6", `driver` the newest CUDA it runs.

    A driver runs builds of its own major version and of older ones:
    https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
    None where neither is there.
    """
    if build is None and driver is None:
        return None
    if build is None:
        found = f"torch {torch.__version__} has no CUDA, but there is an NVIDIA driver for CUDA {_dotted(driver)}"
        return Finding("warning", "CUDA", found, "install a CUDA build of torch: https://pytorch.org/get-started")
    if driver is None:
        found = f"torch is built for CUDA {build}; there is no NVIDIA driver (libcuda.so.1)"
        return Finding("note", "CUDA", found, "install the driver if this machine has an NVIDIA GPU")
    wanted = tuple(int(part) for part in build.split(".")[:2])
    text = f"torch is built for CUDA {build}, the driver runs CUDA {_dotted(driver)}"
    if driver[0] < wanted[0]:
        remedy = f"update the NVIDIA driver, or install a build of torch for CUDA {driver[0]}.x"
        return Finding("error", "CUDA", f"{text}: too old", remedy)
    if driver < wanted:
        remedy = "update the NVIDIA driver if a kernel is missing or fails to compile"
        return Finding("note", "CUDA", f"{text}: an older one of the same major version, which runs it", remedy)
    return Finding("ok", "CUDA", text)


def driver_cuda_version(library: str = "libcuda.so.1") -> tuple[int, int] | None:
    """The newest CUDA version that the installed NVIDIA driver runs, or None without a driver. Needs no CUDA build."""
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return None
    number = ctypes.c_int()
    # cuDriverGetVersion works before cuInit; 12040 is CUDA 12.4.
    if driver.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10


def device_state(device: torch.device) -> DeviceState:
    """Name, memory and half precision of a device. Raises RuntimeError if the device does not answer."""
    module = torch.get_device_module(device)
    ask_name = getattr(module, "get_device_name", None)
    ask_memory = getattr(module, "mem_get_info", None)
    torch.ones(1, device=device).add_(1).item()  # a device that is lost or full says so here
    dtypes = tuple(dtype for dtype in HALF_DTYPES if multiplies(device, dtype))
    return DeviceState(
        device=device,
        name=str(device) if ask_name is None else ask_name(device),
        free_bytes=free_memory(device),
        total_bytes=None if ask_memory is None else ask_memory(device)[1],
        dtypes=dtypes,
        emulated=(torch.bfloat16,) if torch.bfloat16 in dtypes and _emulates_bf16(device) else (),
    )


def multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device multiplies matrices of this dtype, by doing so. OutOfMemoryError if it is full."""
    try:
        ones = torch.ones(8, 8, dtype=dtype, device=device)
        return bool(((ones @ ones).float() == 8).all().item())
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError):  # MPS raises TypeError for dtypes that it lacks
        return False


def _emulates_bf16(device: torch.device) -> bool:
    """NVIDIA GPUs before Ampere compute bfloat16 in float32. Only CUDA tells."""
    if device.type != "cuda":
        return False
    module = torch.get_device_module(device)
    with module.device(device):
        return not module.is_bf16_supported(including_emulation=False)


def _software() -> Diagnosis:
    python, system = platform.python_version(), platform.platform()
    installed = installed_versions()
    findings = [Finding("ok", "Python", f"{python} on {system}"), *check_versions(installed)]
    return Diagnosis(tuple(findings), {"python": python, "platform": system, "packages": installed})


def _accelerators() -> Diagnosis:
    """The driver against the build, and a finding per visible device."""
    driver = driver_cuda_version()
    findings = [finding for finding in (check_driver(torch.version.cuda, driver),) if finding is not None]
    with warnings.catch_warnings(record=True) as caught:
        # torch says here why an accelerator cannot be used, e.g. a driver that is too old.
        warnings.simplefilter("always")
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        count = 0 if accelerator is None else torch.accelerator.device_count()
    findings += [Finding("warning", "accelerator", str(w.message), "see what it says") for w in caught]
    states = []
    for index in range(count):
        device = torch.device(accelerator.type, index)  # type: ignore[union-attr]
        try:
            state = device_state(device)
        except RuntimeError as error:
            remedy = "see whether another process holds it, and whether its own tools (nvidia-smi, rocm-smi) list it"
            findings.append(Finding("error", str(device), f"does not answer: {error}", remedy))
            continue
        states.append(state)
        findings += check_device(state)
    if count == 0:
        findings.append(Finding("note", "devices", "no accelerator is visible: everything runs on the CPU"))
    versions = {"cuda_build": torch.version.cuda, "driver_cuda": _dotted(driver), "hip_build": torch.version.hip}
    return Diagnosis(tuple(findings), {**versions, "devices": [state.to_json() for state in states]})


def check_device(state: DeviceState) -> Iterator[Finding]:
    """Findings about one visible device: its memory, and the dtypes that it computes in."""
    memory = "free memory is not told"
    if state.free_bytes is not None and state.total_bytes is not None:
        memory = f"{state.free_bytes / 1e9:.1f} GB free of {state.total_bytes / 1e9:.1f} GB"
    works = ", ".join(str(dtype).removeprefix("torch.") for dtype in state.dtypes) or "no half precision"
    yield Finding("ok", str(state.device), f"{state.name}: {memory}; {works}")
    if torch.bfloat16 in state.emulated:
        remedy = "train in float16 with a GradScaler, or in float32"
        yield Finding("note", str(state.device), "bfloat16 is emulated: it works, slowly", remedy)
    elif torch.bfloat16 not in state.dtypes:
        remedy = "use float16 with a GradScaler, or float32 (encode.vae_dtype, encode.text_dtype)"
        yield Finding("warning", str(state.device), "does not compute in bfloat16", remedy)


def _asked(name: str) -> Diagnosis:
    try:
        device = device_named(name)
    except DeviceError as error:
        return Diagnosis((Finding("error", "device", str(error), "name one that is listed here, or cpu"),))
    return Diagnosis((Finding("ok", "device", f"{name} is {device}"),), {"device": str(device)})


def _dotted(version: tuple[int, int] | None) -> str | None:
    return None if version is None else ".".join(map(str, version))
