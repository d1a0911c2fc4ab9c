"""A DeepSpeed config: settings that are ignored, refused, or left for somebody else to fill in.

DeepSpeed accepts much that has no effect, and says nothing. The rules were measured on DeepSpeed 0.19.8; DeepSpeed
itself is not needed here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from latentcache.doctor.diagnosis import Diagnosis, Finding, shown
from latentcache.errors import ConfigError

OFFLOAD_DEVICES = ("none", "cpu", "nvme")
STAGES = (0, 1, 2, 3)
ZERO = "zero_optimization"
OFFLOADS = ("offload_param", "offload_optimizer")


def examine_deepspeed_config(path: Path) -> Diagnosis:
    """Check the config in this file. Raises ConfigError if it cannot be read or is not a JSON object."""
    config, repeated = _read(path)
    findings = [
        Finding("error", key, "is given twice: DeepSpeed refuses the config", "keep one of the two") for key in repeated
    ]
    findings += check_deepspeed_config(config)
    if not findings:
        findings.append(Finding("ok", "DeepSpeed config", f"{path}: nothing ignored, nothing left to fill in"))
    return Diagnosis(tuple(findings), {"deepspeed_config": str(path)})


def check_deepspeed_config(config: Mapping[str, Any]) -> list[Finding]:
    """Findings about a config as read from JSON. The subject of each is the dotted name of the setting."""
    findings = [*_auto_values(config), *_precision(config)]
    zero = config.get(ZERO, {})
    if isinstance(zero, bool):
        remedy = f'write {{"{ZERO}": {{"stage": {int(zero)}}}}}'
        return [*findings, Finding("warning", ZERO, f"is {shown(zero)}: an outdated form", remedy)]
    if not isinstance(zero, Mapping):
        if zero == "auto":
            return findings  # said above
        return [*findings, Finding("error", ZERO, f"is {shown(zero)}, not settings by name", 'write {"stage": 2}')]
    stage = zero.get("stage", 0)
    if stage != "auto" and (isinstance(stage, bool) or stage not in STAGES):
        found = f"is {shown(stage)}; DeepSpeed knows 0, 1, 2 and 3"
        return [*findings, Finding("error", f"{ZERO}.stage", found, "name one of them")]
    sections: dict[str, Mapping[str, Any]] = {}
    for name in OFFLOADS:
        section = zero.get(name)
        if isinstance(section, Mapping):
            sections[name] = section
            findings += _offload(f"{ZERO}.{name}", section)
        elif section is not None and section != "auto":
            found = f"is {shown(section)}, not settings by name"
            findings.append(Finding("error", f"{ZERO}.{name}", found, 'write {"device": "cpu"}'))
    findings += _outdated(zero)
    if stage != "auto":
        findings += _ignored_below(stage, sections)
    findings += _mixes(sections)
    findings += _own_optimizer(config, sections.get("offload_optimizer", {}))
    return findings


def _auto_values(value: Any, path: tuple[str, ...] = ()) -> Iterator[Finding]:
    """Every "auto", with its dotted name."""
    if value == "auto":
        yield Finding(
            "warning",
            ".".join(path),
            'is "auto": the Hugging Face Trainer and accelerate fill it in. DeepSpeed itself takes its own default '
            "without a word, or fails",
            "give the value, unless one of those two starts the training",
        )
    elif isinstance(value, Mapping):
        for name, child in value.items():
            yield from _auto_values(child, (*path, name))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, child in enumerate(value):
            yield from _auto_values(child, (*path, str(index)))


def _precision(config: Mapping[str, Any]) -> Iterator[Finding]:
    # `bfloat16` is the older name of the section, which DeepSpeed still reads.
    on = [name for name in ("fp16", "bf16", "bfloat16") if _is_on(config.get(name))]
    if "fp16" in on and len(on) > 1:
        found = f"is true, and so is {on[1]}.enabled: DeepSpeed refuses both"
        yield Finding("error", "fp16.enabled", found, "keep bf16 if the GPU computes in it, else fp16")


def _is_on(section: Any) -> bool:
    return isinstance(section, Mapping) and section.get("enabled") is True


def _device(section: Mapping[str, Any]) -> Any:
    """The device of an offload section. "auto" is dropped by DeepSpeed: what is left is the default."""
    device = section.get("device", "none")
    return "none" if device == "auto" else device


def _offload(path: str, section: Mapping[str, Any]) -> Iterator[Finding]:
    """What is wrong with one offload section by itself."""
    device = _device(section)
    if device not in OFFLOAD_DEVICES:
        found = f"is {shown(device)}; DeepSpeed knows {', '.join(OFFLOAD_DEVICES)}"
        yield Finding("error", f"{path}.device", found, "name one of them; which GPU it is, the launcher decides")
    if device == "nvme" and section.get("nvme_path") in (None, "auto", ""):
        found = "is missing, and device is nvme: DeepSpeed stops with a TypeError that does not say so"
        yield Finding("error", f"{path}.nvme_path", found, "name a folder on the NVMe disk, or use device cpu")
    if device == "none" and section.get("pin_memory") is True:
        found = "is true, but device is none: nothing is offloaded, so nothing is pinned"
        yield Finding("warning", f"{path}.pin_memory", found, "remove the section, or set device to cpu")
    if device == "none" and section.get("nvme_path") not in (None, "auto"):
        found = f"is {shown(section['nvme_path'])}, but device is none: nothing is offloaded"
        yield Finding("warning", f"{path}.nvme_path", found, "remove it, or set device to nvme")


def _outdated(zero: Mapping[str, Any]) -> Iterator[Finding]:
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if old in zero:
            remedy = f'write "{new}": {{"device": "cpu"}}' if zero[old] is True else "remove it"
            yield Finding("warning", f"{ZERO}.{old}", "is outdated", remedy)


def _ignored_below(stage: int, sections: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Settings that this stage does not read, and those that it refuses."""
    device = _device(sections.get("offload_param", {}))
    if device != "none" and stage < 3:
        yield Finding(
            "warning",
            f"{ZERO}.offload_param",
            f"device is {shown(device)}, but stage is {stage}: only stage 3 partitions parameters, so this is ignored "
            "and they stay on the accelerator",
            "set stage to 3, or remove offload_param",
        )
    optimizer = sections.get("offload_optimizer", {})
    device = _device(optimizer)
    if device != "none" and stage == 0:
        yield Finding(
            "warning",
            f"{ZERO}.offload_optimizer",
            f"device is {shown(device)}, but stage is 0: ZeRO is off, so this is ignored and the optimizer's state "
            "stays on the accelerator",
            "set stage to 1, 2 or 3, or remove offload_optimizer",
        )
    ratio = optimizer.get("ratio", 1.0)
    if stage < 3 and isinstance(ratio, int | float) and ratio < 1:
        found = f"is {shown(ratio)}, but stage is {stage}: DeepSpeed refuses a part of the state below stage 3"
        yield Finding("error", f"{ZERO}.offload_optimizer.ratio", found, "set stage to 3, or ratio to 1.0")


def _mixes(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Both offloads together: legal, but seldom meant."""
    if not sections:
        return
    devices = {name: _device(sections.get(name, {})) for name in OFFLOADS}
    if devices["offload_param"] in ("cpu", "nvme") and devices["offload_optimizer"] == "none":
        yield Finding(
            "note",
            f"{ZERO}.offload_optimizer",
            f"device is none, but offload_param is on {devices['offload_param']}: legal, and the larger share (an Adam "
            "optimizer's state) stays on the accelerator",
            f"offload the optimizer first: set its device to {devices['offload_param']}",
        )
    offloaded = [name for name in OFFLOADS if devices[name] in ("cpu", "nvme")]
    pinned = {name: sections[name].get("pin_memory") for name in offloaded}
    if len(set(map(str, pinned.values()))) > 1:
        found = " and ".join(
            f"{name}: {'not given' if value is None else shown(value)}" for name, value in pinned.items()
        )
        yield Finding(
            "note",
            f"{ZERO}.offload_param.pin_memory",
            f"differs from that of offload_optimizer ({found}): legal; where it is not given, it is true in "
            "DeepSpeed 0.19.8 and false in older versions",
            "give both the same value: true is faster, false needs less page-locked memory",
        )


def _own_optimizer(config: Mapping[str, Any], section: Mapping[str, Any]) -> Iterator[Finding]:
    if _device(section) == "none" or "optimizer" in config or config.get("zero_force_ds_cpu_optimizer") is False:
        return
    yield Finding(
        "note",
        "zero_force_ds_cpu_optimizer",
        "is not false, the optimizer is offloaded, and the config names none: DeepSpeed refuses a torch optimizer that "
        "you hand it",
        "hand it a DeepSpeedCPUAdam, name the optimizer in the config, or set this to false",
    )


def _read(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The config, and the names that a section holds twice."""
    repeated: list[str] = []

    def section(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        repeated.extend(sorted({name for name in names if names.count(name) > 1}))
        return dict(pairs)

    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=section)
    except OSError as error:
        raise ConfigError(f"the DeepSpeed config cannot be read: {error.strerror}", source=str(path)) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the DeepSpeed config is not valid JSON: {error}", source=str(path)) from error
    if not isinstance(value, dict):
        raise ConfigError(f"the DeepSpeed config holds {type(value).__name__}, not settings by name", source=str(path))
    return value, repeated
