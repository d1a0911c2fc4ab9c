"""The environment of a run: Python, torch, the driver, each visible device, the cache's disk; and all checks in one."""

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
from latentcache.doctor.deepspeed import examine_deepspeed_config
from latentcache.doctor.diagnosis import Diagnosis, Finding
from latentcache.doctor.filesystem import check_filesystem, filesystem_of
from latentcache.doctor.versions import check_versions, installed_versions
from latentcache.errors import DeviceError
from latentcache.store.index import JOURNAL_MODE, SQLITE_VERSION

HALF_DTYPES = (torch.bfloat16, torch.float16)
WAL_SAFE_SQLITE = (3, 51, 3)
"""From here on two connections may write and checkpoint at once in WAL mode: https://www.sqlite.org/wal.html."""


@dataclass(frozen=True, slots=True)
class DeviceState:
    """One visible device. Bytes are None where the device does not report them; `dtypes` are those that work."""

    device: torch.device
    name: str
    free_bytes: int | None
    total_bytes: int | None
    dtypes: tuple[torch.dtype, ...]
    emulated: tuple[torch.dtype, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values: `bf16` and `fp16` say whether the device computes in them."""
        return {
            "device": str(self.device),
            "name": self.name,
            "free_bytes": self.free_bytes,
            "total_bytes": self.total_bytes,
            "bf16": torch.bfloat16 in self.dtypes,
            "fp16": torch.float16 in self.dtypes,
            "emulated": [str(dtype).removeprefix("torch.") for dtype in self.emulated],
        }


def diagnose(
    *, device: str = "auto", cache_path: Path | None = None, deepspeed: Path | None = None, training: bool = False
) -> Diagnosis:
    """Check the environment; the file system of `cache_path`; a DeepSpeed config; and one training step on `device`.

    Raises ConfigError if the DeepSpeed config cannot be read. Every other problem is a finding. Where `device` is
    unknown or not here, that is an error finding, and nothing is trained.
    """
    config = Diagnosis() if deepspeed is None else examine_deepspeed_config(deepspeed)
    diagnosis = _software() + _accelerators() + _requested(device)
    sqlite = {"version": SQLITE_VERSION, "journal_mode": JOURNAL_MODE}
    diagnosis += Diagnosis((check_sqlite(SQLITE_VERSION, JOURNAL_MODE),), {"sqlite": sqlite})
    if cache_path is None:
        diagnosis += Diagnosis((Finding("note", "cache", "no path given", "--cache.path DIR looks at its disk"),))
    else:
        system = filesystem_of(cache_path)
        diagnosis += Diagnosis(tuple(check_filesystem(system, JOURNAL_MODE)), {"cache": system.to_json()})
    diagnosis += config
    if training and "device" in diagnosis.facts:
        # The models take seconds to import, and the other checks do not need them.
        from latentcache.doctor.training_check import try_training

        diagnosis += try_training(torch.device(diagnosis.facts["device"]))
    return diagnosis


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
        f"nothing to do; with SQLite >= {fixed} the index uses wal",
    )


def check_driver(build: str | None, driver: tuple[int, int] | None) -> Finding | None:
    """Whether the NVIDIA driver runs torch's CUDA build. `build` is e.g. "12.6", `driver` the newest CUDA it runs.

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
    needed = tuple(int(part) for part in build.split(".")[:2])
    text = f"torch is built for CUDA {build}, the driver runs CUDA {_dotted(driver)}"
    if driver[0] < needed[0]:
        remedy = f"update the NVIDIA driver, or install a build of torch for CUDA {driver[0]}.x"
        return Finding("error", "CUDA", f"{text}: too old", remedy)
    if driver < needed:
        remedy = "update the NVIDIA driver if a kernel is missing or fails to compile"
        return Finding("note", "CUDA", f"{text}: an older one of the same major version, which runs the build", remedy)
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
    get_name = getattr(module, "get_device_name", None)
    get_memory = getattr(module, "mem_get_info", None)
    torch.ones(1, device=device).add_(1).item()  # a device that is lost or full raises here
    dtypes = tuple(dtype for dtype in HALF_DTYPES if multiplies(device, dtype))
    return DeviceState(
        device=device,
        name=str(device) if get_name is None else get_name(device),
        free_bytes=free_memory(device),
        total_bytes=None if get_memory is None else get_memory(device)[1],
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
    """NVIDIA GPUs before Ampere compute bfloat16 in float32. Only CUDA reports it."""
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
        # torch warns here why an accelerator cannot be used, e.g. that a driver is too old.
        warnings.simplefilter("always")
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        devices = []
        if accelerator is not None:
            devices = [torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())]
    findings += [Finding("warning", "accelerator", str(w.message), "do what the message says") for w in caught]
    states = []
    for device in devices:
        try:
            state = device_state(device)
        except RuntimeError as error:
            remedy = "see whether another process uses it, and whether its own tools (nvidia-smi, rocm-smi) list it"
            findings.append(Finding("error", str(device), f"does not answer: {error}", remedy))
            continue
        states.append(state)
        findings += check_device(state)
    if not devices:
        findings.append(Finding("note", "devices", "no accelerator is visible: everything runs on the CPU"))
    versions = {"cuda_build": torch.version.cuda, "driver_cuda": _dotted(driver), "hip_build": torch.version.hip}
    return Diagnosis(tuple(findings), {**versions, "devices": [state.to_json() for state in states]})


def check_device(state: DeviceState) -> Iterator[Finding]:
    """Findings about one visible device: its memory, and the dtypes that it computes in."""
    memory = "free memory is not reported"
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


def _requested(name: str) -> Diagnosis:
    try:
        device = device_named(name)
    except DeviceError as error:
        return Diagnosis((Finding("error", "device", str(error), "name one that is listed here, or cpu"),))
    return Diagnosis((Finding("ok", "device", f"{name} is {device}"),), {"device": str(device)})


def _dotted(version: tuple[int, int] | None) -> str | None:
    return None if version is None else ".".join(map(str, version))
