"""The environment of a run: versions, each visible device, the cache's disk; and all checks in one.

It is imported where latentcache cannot be installed, so it needs torch (any since 2.0) and nothing else: checks that
need more import it themselves.
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


class BadRange(NamedTuple):
    """Versions of a package that fail, the version to install, why they fail, and the source of that.

    `level` is that of the finding: a note where only some uses fail, which this cannot see.
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
        "works, but a pipeline of your own whose parts lie on several devices fails, e.g. a denoiser on the GPU with "
        "its text encoders on the CPU",
        "https://github.com/huggingface/diffusers/pull/14383",
        "note",
    ),
    BadRange("transformers", "<5.0", "5.0",
        "latentcache reads CLIP text encoders as transformers 5 builds them (without `text_model`)",
        "pyproject.toml",
    ),
    BadRange("accelerate", "<1.0", "1.0", "latentcache is written for accelerate>=1.0", "pyproject.toml"),
    BadRange("deepspeed", ">=0.14.1,<0.14.3", "0.14.3",
        "clipping multiplies gradients by a 0-dim tensor on the accelerator: with an offloaded optimizer the gradients "
        "are on the CPU, and the step fails with `Expected all tensors to be on the same device`",
        "https://github.com/deepspeedai/DeepSpeed/issues/5422",
    ),
)  # fmt: skip
"""A version is compared without its local part (`2.13.0+cpu`); `0.42.0.dev0` counts as 0.42."""


def diagnose(
    *, device: str = "auto", cache_path: Path | str | None = None, deepspeed: Path | None = None, training: bool = False
) -> Diagnosis:
    """Check the environment; the disk of `cache_path`; a DeepSpeed config; and one training step on `device`.

    Raises ConfigError if the DeepSpeed config cannot be read. Every other problem is a finding. Where `device` is
    unknown or not here, that is an error finding, and nothing is trained. Checks for which a package is missing or
    too old are not made, and a finding says so.
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
    """What the check finds; a note where a package is missing, `broken` where one has not what latentcache uses."""
    try:
        return check()
    except (ImportError, AttributeError) as error:
        remedy = "install latentcache here, with what it needs, to check this too"
        level: Level = "note" if isinstance(error, ModuleNotFoundError) else broken
        return Diagnosis((Finding(level, subject, f"not checked: {error}", remedy),))


def _check_name(device: str) -> Diagnosis:
    from latentcache.devices.placement import device_named

    try:
        named = str(device_named(device))
    except DeviceError as error:
        return Diagnosis((Finding("error", "device", str(error), "name one that is listed here, or cpu"),))
    return Diagnosis((Finding("ok", "device", f"{device} is {named}"),), {"device": named})


def _train(device: str) -> Diagnosis:
    # The models take seconds to import, and the other checks do not need them.
    from latentcache.doctor.training_check import try_training

    return try_training(torch.device(device))


# Software


def check_versions(installed: Mapping[str, str]) -> Iterator[Finding]:
    """One finding per package: its first bad range in the table, or ok."""
    for name, text in installed.items():
        number = _numbers(text)
        if not number:
            yield Finding("warning", name, f"{text}: not a version that can be compared", "compare it by hand")
            continue
        for bad in BAD_RANGES:
            if bad.package == name and _contains(bad.specifier, number):
                remedy = f"install {name}>={bad.fixed}"
                yield Finding(bad.level, name, f"{text}: {bad.reason} ({bad.source})", remedy)
                break
        else:
            yield Finding("ok", name, text)


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13): the release's numbers without zeros at the end, or none."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, re.sub(r"(\.0+)+$", "", found[0]).split("."))) if found else ()


def _contains(specifier: str, number: tuple[int, ...]) -> bool:
    """Whether a version is in a range such as `>=0.14.1,<0.14.3`."""
    bounds = [(bound[0], _numbers(bound.lstrip("<>="))) for bound in specifier.split(",")]
    return all(number < limit if sign == "<" else number >= limit for sign, limit in bounds)


# Devices


def examine_device(device: torch.device) -> Diagnosis:
    """Findings about one visible device: its memory, and the dtypes that it computes in. Their facts go by its name."""
    module = getattr(torch, device.type)
    get_name, get_memory = (getattr(module, name, None) for name in ("get_device_name", "mem_get_info"))
    try:
        torch.ones(1, device=device).add_(1).item()  # a device that is lost or full raises here
        works = [name for name in ("bfloat16", "float16") if multiplies(device, getattr(torch, name))]
        name = str(device) if get_name is None else get_name(device)
        free, total = (None, None) if get_memory is None else get_memory(device)
    except RuntimeError as error:
        remedy = "see whether another process uses it, and whether its own tools (nvidia-smi, rocm-smi) list it"
        return Diagnosis((Finding("error", str(device), f"does not answer: {error}", remedy),))
    memory = "free memory is not reported"
    if free is not None and total is not None:
        memory = f"{free / 1e9:.1f} GB free of {total / 1e9:.1f} GB"
    findings = [Finding("ok", str(device), f"{name}: {memory}; {', '.join(works) or 'no half precision'}")]
    if "bfloat16" not in works:
        remedy = "use float16 with a GradScaler, or float32 (encode.vae_dtype, encode.text_dtype)"
        findings.append(Finding("warning", str(device), "does not compute in bfloat16", remedy))
    elif device.type == "cuda" and module.get_device_capability(device) < (8, 0) and torch.version.hip is None:
        # Before Ampere NVIDIA's GPUs compute bfloat16 in float32.
        remedy = "train in float16 with a GradScaler, or in float32"
        findings.append(Finding("note", str(device), "bfloat16 is emulated: it works, slowly", remedy))
    return Diagnosis(tuple(findings), {"name": name, "free_bytes": free, "total_bytes": total, "dtypes": works})


def multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device multiplies matrices of this dtype, by doing so. OutOfMemoryError if it is full."""
    try:
        ones = torch.ones(8, 8, dtype=dtype, device=device)
        return bool(((ones @ ones).float() == 8).all().item())
    except (RuntimeError, TypeError) as error:  # MPS raises TypeError for dtypes that it lacks
        if type(error).__name__ == "OutOfMemoryError":  # torch before 2.5 has it elsewhere
            raise
        return False


def _accelerators() -> Diagnosis:
    """What torch says of the driver, and findings about each visible device."""
    with warnings.catch_warnings(record=True) as caught:
        # torch warns here why an accelerator cannot be used, e.g. that a driver is too old.
        warnings.simplefilter("always")
        accelerator, num_devices = _visible()
    findings = [Finding("warning", "accelerator", str(w.message), "do what the message says") for w in caught]
    if torch.version.cuda is None and torch.version.hip is None and shutil.which("nvidia-smi"):
        found = f"torch {torch.__version__} has no CUDA, but there is an NVIDIA driver"
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
    """The type of the accelerator, and how many are visible. torch before 2.6 has no `torch.accelerator`."""
    if hasattr(torch, "accelerator"):
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return ("cpu", 0) if accelerator is None else (accelerator.type, torch.accelerator.device_count())
    for kind in ("cuda", "xpu"):
        module: Any = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return kind, module.device_count()
    return "cpu", 0


def _check_cache(path: Path) -> Diagnosis:
    """The space on the cache's disk, and whether it can be written."""
    there = Path(os.path.realpath(path))
    while not there.exists():
        there = there.parent
    space, writable = shutil.disk_usage(there), os.access(there, os.W_OK)
    found, remedy = f"{there}: {space.free / 1e9:.1f} GB free of {space.total / 1e9:.1f} GB", ""
    if not writable:
        found, remedy = f"{found}; it cannot be written: the cache can only be read", "change its permissions"
    elif space.free < LITTLE_BYTES:
        remedy = "free some: a sample of 1024x1024 takes about 1 MB"
    facts = {"path": str(there), "free_bytes": space.free, "total_bytes": space.total, "writable": writable}
    return Diagnosis((Finding("warning" if remedy else "ok", "cache", found, remedy),), {"cache": facts})
