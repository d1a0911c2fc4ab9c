"""Check of the environment: versions, visible devices, the cache's disk; and `diagnose`, which runs all checks.

This module needs only torch 2.0 or newer, so that it also runs where latentcache cannot be installed. Checks that need
more import it themselves.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from latentcache.doctor.deepspeed import examine_deepspeed_config
from latentcache.doctor.diagnosis import Diagnosis, Finding, Level
from latentcache.errors import DeviceError
from latentcache.provenance import installed_versions

PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "safetensors", "peft", "deepspeed", "bitsandbytes")
LITTLE_BYTES = 1_000_000_000
"""Free disk space below which to warn."""


class BadRange(NamedTuple):
    """Versions of a package that fail, the version to install, the reason, and its source.

    `level` is the finding's: a note if only some uses fail, which a check of versions cannot see.
    """

    package: str
    specifier: str
    fixed: str
    reason: str
    source: str
    level: Level = "error"


BAD_RANGES = (
    BadRange("torch", "<2.1", "2.6",
        "loading an optimizer's state leaves `step` on the CPU, and a fused optimizer then fails on `state_steps`",
        "https://github.com/pytorch/pytorch/pull/102619",
    ),
    BadRange("torch", "<2.4", "2.4", "latentcache is written for torch>=2.4", "pyproject.toml"),
    BadRange("diffusers", "<0.39", "0.42", "latentcache is written for diffusers>=0.39", "pyproject.toml"),
    BadRange("diffusers", "<0.42", "0.42",
        "works, but your own pipelines fail if their parts are on several devices, e.g. the denoiser on the GPU and "
        "the text encoders on the CPU",
        "https://github.com/huggingface/diffusers/pull/14383",
        "note",
    ),
    BadRange("transformers", "<5.0", "5.0",
        "latentcache reads CLIP text encoders as transformers 5 builds them (without `text_model`)",
        "pyproject.toml",
    ),
    BadRange("accelerate", "<1.0", "1.0", "latentcache is written for accelerate>=1.0", "pyproject.toml"),
    BadRange("deepspeed", ">=0.14.1,<0.14.3", "0.14.3",
        "clipping multiplies gradients by a 0-dim tensor on the accelerator. With an offloaded optimizer the gradients "
        "are on the CPU, and the step fails with `Expected all tensors to be on the same device`",
        "https://github.com/deepspeedai/DeepSpeed/issues/5422",
    ),
)  # fmt: skip
"""Versions are compared without local part (`2.13.0+cpu`), and `0.42.0.dev0` counts as 0.42."""


def diagnose(
    *, device: str = "auto", cache_path: Path | str | None = None, deepspeed: Path | None = None, training: bool = False
) -> Diagnosis:
    """Check the environment, the disk of `cache_path`, a DeepSpeed config, and one training step on `device`.

    Raises ConfigError if the DeepSpeed config cannot be read. Every other problem is a finding, also an unknown or
    absent `device`, on which nothing is trained. Checks whose packages are missing or too old are skipped, with a
    finding.
    """
    config = Diagnosis() if deepspeed is None else examine_deepspeed_config(deepspeed)
    python, system, packages = platform.python_version(), platform.platform(), installed_versions(PACKAGES)
    software = (Finding("ok", "Python", f"{python} on {system}"), *check_versions(packages))
    diagnosis = Diagnosis(software, {"python": python, "platform": system, "packages": packages}) + _accelerators()
    diagnosis += _checked("device", lambda: _check_name(device))
    if isinstance(cache_path, str):  # a service, or a bucket
        found = Finding("note", "cache", f"{cache_path} has no disk here", "`latentcache status` reads it")
        diagnosis += Diagnosis((found,))
    elif cache_path is not None:
        diagnosis += _check_cache(cache_path)
    diagnosis += config
    if training and not any(each.level == "error" and each.subject == "device" for each in diagnosis.findings):
        named = diagnosis.facts.get("device", device)
        diagnosis += _checked("training check", lambda: _train(named), broken="error")
    return diagnosis


def _checked(subject: str, check: Callable[[], Diagnosis], broken: Level = "warning") -> Diagnosis:
    """Run a check. A missing package is a note, one without a function that latentcache uses is at level `broken`."""
    try:
        return check()
    except (ImportError, AttributeError) as error:
        remedy = "install latentcache here, with its dependencies, to check this too"
        level: Level = "note" if isinstance(error, ModuleNotFoundError) else broken
        return Diagnosis((Finding(level, subject, f"not checked: {error}", remedy),))


def _check_name(device: str) -> Diagnosis:
    from latentcache.devices.placement import device_named

    try:
        named = str(device_named(device))
    except DeviceError as error:
        return Diagnosis((Finding("error", "device", str(error), "name one of the devices listed here, or cpu"),))
    return Diagnosis((Finding("ok", "device", f"{device} is {named}"),), {"device": named})


def _train(device: str) -> Diagnosis:
    # Importing models takes seconds, and the other checks do not need them.
    from latentcache.doctor.training_check import try_training

    return try_training(torch.device(device))


# Software


def check_versions(installed: Mapping[str, str]) -> Iterator[Finding]:
    """Yield one finding per package: its first matching range in the table, or ok."""
    for name, text in installed.items():
        number = _numbers(text)
        if not number:
            yield Finding("warning", name, f"{text}: not a version number", "check it by hand")
            continue
        for bad in BAD_RANGES:
            if bad.package == name and _contains(bad.specifier, number):
                remedy = f"install {name}>={bad.fixed}"
                yield Finding(bad.level, name, f"{text}: {bad.reason} ({bad.source})", remedy)
                break
        else:
            yield Finding("ok", name, text)


def _numbers(version: str) -> tuple[int, ...]:
    """The release numbers without trailing zeros: (2, 13) for `2.13.0+cpu`. Empty if there are none."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, re.sub(r"(\.0+)+$", "", found[0]).split("."))) if found else ()


def _contains(specifier: str, number: tuple[int, ...]) -> bool:
    """Whether a version is in a range such as `>=0.14.1,<0.14.3`."""
    bounds = [(bound[0], _numbers(bound.lstrip("<>="))) for bound in specifier.split(",")]
    return all(number < limit if sign == "<" else number >= limit for sign, limit in bounds)


# Devices


def examine_device(device: torch.device) -> Diagnosis:
    """Findings about one visible device: its memory, and the half-precision dtypes that it computes in."""
    module = getattr(torch, device.type)
    get_name, get_memory = (getattr(module, name, None) for name in ("get_device_name", "mem_get_info"))
    try:
        torch.ones(1, device=device).add_(1).item()  # raises if the device is lost or full
        works = [name for name in ("bfloat16", "float16") if multiplies(device, getattr(torch, name))]
        name = str(device) if get_name is None else get_name(device)
        free, total = (None, None) if get_memory is None else get_memory(device)
    except RuntimeError as error:
        remedy = "check if another process uses it, and if its own tools (nvidia-smi, rocm-smi) list it"
        return Diagnosis((Finding("error", str(device), f"does not respond: {error}", remedy),))
    memory = "free memory is not reported"
    if free is not None and total is not None:
        memory = f"{free / 1e9:.1f} GB free of {total / 1e9:.1f} GB"
    findings = [Finding("ok", str(device), f"{name}: {memory}; {', '.join(works) or 'no half precision'}")]
    if "bfloat16" not in works:
        remedy = "use float16 with a GradScaler, or float32 (encode.vae_dtype, encode.text_dtype)"
        findings.append(Finding("warning", str(device), "does not compute in bfloat16", remedy))
    elif device.type == "cuda" and module.get_device_capability(device) < (8, 0) and torch.version.hip is None:
        # NVIDIA's GPUs before Ampere compute bfloat16 in float32.
        remedy = "train in float16 with a GradScaler, or in float32"
        findings.append(Finding("note", str(device), "bfloat16 is emulated, and slow", remedy))
    return Diagnosis(tuple(findings), {"name": name, "free_bytes": free, "total_bytes": total, "dtypes": works})


def multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    """Try whether the device multiplies matrices of this dtype. Raises OutOfMemoryError if it is full."""
    try:
        ones = torch.ones(8, 8, dtype=dtype, device=device)
        return bool(((ones @ ones).float() == 8).all().item())
    except (RuntimeError, TypeError) as error:  # MPS raises TypeError for unsupported dtypes
        if type(error).__name__ == "OutOfMemoryError":  # by name, because torch before 2.5 has it in another module
            raise
        return False


def _accelerators() -> Diagnosis:
    """Warnings of torch about the driver, and findings about each visible device."""
    with warnings.catch_warnings(record=True) as caught:
        # torch warns if an accelerator cannot be used, e.g. because its driver is too old.
        warnings.simplefilter("always")
        accelerator, num_devices = _visible()
    findings = [Finding("warning", "accelerator", str(w.message), "follow the message") for w in caught]
    if torch.version.cuda is None and torch.version.hip is None and shutil.which("nvidia-smi"):
        found = f"torch {torch.__version__} is built without CUDA, but an NVIDIA driver is installed"
        remedy = "install a CUDA build of torch: https://pytorch.org/get-started"
        findings.append(Finding("warning", "CUDA", found, remedy))
    devices = []
    for index in range(num_devices):
        device = torch.device(accelerator, index)
        examined = examine_device(device)
        findings += examined.findings
        devices.append({"device": str(device), **examined.facts})
    if not num_devices:
        findings.append(Finding("note", "devices", "no accelerator is visible: everything runs on the CPU"))
    facts = {"cuda_build": torch.version.cuda, "hip_build": torch.version.hip, "devices": devices}
    return Diagnosis(tuple(findings), facts)


def _visible() -> tuple[str, int]:
    """The accelerator's type, and how many are visible. torch before 2.6 has no `torch.accelerator`."""
    if hasattr(torch, "accelerator"):
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return ("cpu", 0) if accelerator is None else (accelerator.type, torch.accelerator.device_count())
    for kind in ("cuda", "xpu"):
        module: Any = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return kind, module.device_count()
    return "cpu", 0


def _check_cache(path: Path) -> Diagnosis:
    """The free space on the cache's disk, and whether the folder is writable."""
    there = Path(os.path.realpath(path))
    while not os.path.exists(there):  # False, unlike Path.exists, for what may not be looked into
        there = there.parent
    space, writable = shutil.disk_usage(there), os.access(there, os.W_OK)
    found, remedy = f"{there}: {space.free / 1e9:.1f} GB free of {space.total / 1e9:.1f} GB", ""
    if not writable:
        found, remedy = f"{found}; it is not writable, so the cache can only be read", "change its permissions"
    elif space.free < LITTLE_BYTES:
        remedy = "free some space: a sample of 1024x1024 takes about 1 MB"
    facts = {"path": str(there), "free_bytes": space.free, "total_bytes": space.total, "writable": writable}
    return Diagnosis((Finding("warning" if remedy else "ok", "cache", found, remedy),), {"cache": facts})
