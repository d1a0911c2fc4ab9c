"""Versions of the packages that decide whether devices agree, and a table of ranges that are known to fail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from latentcache.doctor.diagnosis import Finding

PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "safetensors", "peft", "deepspeed", "bitsandbytes")


class BadRange(NamedTuple):
    """Versions of a package that fail, the version to install, why they fail, and the source of that."""

    package: str
    specifier: str
    fixed: str
    reason: str
    source: str

    @property
    def remedy(self) -> str:
        """What to do."""
        return f"install {self.package}>={self.fixed}"


BAD_RANGES = (
    BadRange("torch", "<2.1", "2.6",
        "loading an optimizer's state leaves `step` on the CPU, and a fused optimizer then fails on `state_steps`",
        "https://github.com/pytorch/pytorch/pull/102619",
    ),
    BadRange("torch", "<2.6", "2.6", "latentcache is written for torch>=2.6", "pyproject.toml"),
    BadRange("diffusers", "<0.42", "0.42",
        "a pipeline whose parts lie on several devices fails, e.g. a UNet on the GPU with its text encoders on the CPU",
        "https://github.com/huggingface/diffusers/pull/14383",
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


def installed_versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """The version of each package that is installed. Nothing is imported."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def check_versions(installed: Mapping[str, str]) -> list[Finding]:
    """One finding per package: its first bad range in the table, or ok."""
    return [_check(name, text) for name, text in installed.items()]


def _check(name: str, text: str) -> Finding:
    try:
        number = Version(text)
    except InvalidVersion:
        return Finding("warning", name, f"{text}: not a version that can be compared", "compare it by hand")
    for bad in BAD_RANGES:
        if bad.package == name and SpecifierSet(bad.specifier).contains(number, prereleases=True):
            return Finding("error", name, f"{text}: {bad.reason} ({bad.source})", bad.remedy)
    return Finding("ok", name, text)
