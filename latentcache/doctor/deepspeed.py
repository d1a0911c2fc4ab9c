"""Check of a DeepSpeed config for settings that are ignored, refused, or left for another program to fill in.

DeepSpeed silently accepts settings that have no effect. The rules were measured on DeepSpeed 0.19.8, which need not be
installed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from latentcache.doctor.diagnosis import Diagnosis, Finding
from latentcache.errors import ConfigError
from latentcache.utils.nested import named_leaves

ZERO = "zero_optimization"
OFFLOAD_DEVICES = ("none", "cpu", "nvme")


def examine_deepspeed_config(path: Path) -> Diagnosis:
    """Check the config in this file. Raises ConfigError if it cannot be read or is not a JSON object."""
    findings = check_deepspeed_config(_read(path))
    if not findings:
        findings.append(Finding("ok", "DeepSpeed config", f"{path}: no setting is ignored or left to fill in"))
    return Diagnosis(tuple(findings), {"deepspeed_config": str(path)})


def check_deepspeed_config(config: Mapping[str, Any]) -> list[Finding]:
    """Findings about a parsed config. The subject of each is the dotted name of a setting."""
    found = 'is "auto": the Hugging Face Trainer and accelerate fill it in. DeepSpeed alone uses its default, or fails'
    remedy = "give the value, unless one of those two starts the training"
    findings = [Finding("warning", path, found, remedy) for path, value in named_leaves(config, "") if value == "auto"]
    zero = config.get(ZERO, {})
    if isinstance(zero, Mapping):
        findings += _check_zero(zero)
        offloads = _device(zero.get("offload_optimizer")) != "none"
        if offloads and "optimizer" not in config and config.get("zero_force_ds_cpu_optimizer") is not False:
            found = (
                "is not false, the optimizer is offloaded, and the config names none: DeepSpeed refuses a torch "
                "optimizer passed to it"
            )
            remedy = "pass a DeepSpeedCPUAdam, name the optimizer in the config, or set this to false"
            findings.append(Finding("note", "zero_force_ds_cpu_optimizer", found, remedy))
    elif zero != "auto":  # reported above
        findings.append(Finding("error", ZERO, f"is {_shown(zero)}, not settings by name", 'write {"stage": 2}'))
    return findings


def _check_zero(settings: Mapping[str, Any]) -> Iterator[Finding]:
    stage = settings.get("stage", 0)
    if stage != "auto" and (isinstance(stage, bool) or stage not in (0, 1, 2, 3)):
        found = f"is {_shown(stage)}; DeepSpeed knows 0, 1, 2 and 3"
        yield Finding("error", f"{ZERO}.stage", found, "name one of them")
        return
    devices = {}
    for name in ("offload_param", "offload_optimizer"):
        subject, section = f"{ZERO}.{name}", settings.get(name)
        device = devices[name] = _device(section)
        if section not in (None, "auto") and not isinstance(section, Mapping):
            yield Finding("error", subject, f"is {_shown(section)}, not settings by name", 'write {"device": "cpu"}')
        elif device not in OFFLOAD_DEVICES:
            found = f"is {_shown(device)}; DeepSpeed knows none, cpu, nvme"
            remedy = "name one of them; the launcher chooses the GPU"
            yield Finding("error", f"{subject}.device", found, remedy)
        elif section and device == "nvme" and section.get("nvme_path") in (None, "auto", ""):
            found = "is missing, but device is nvme: DeepSpeed stops with an unrelated TypeError"
            yield Finding("error", f"{subject}.nvme_path", found, "name a folder on the NVMe disk, or use cpu")
    param, optimizer = devices.values()
    if stage in (0, 1, 2) and param != "none":
        found = f"stage is {stage}: only stage 3 partitions parameters, so this is ignored and they stay where they are"
        yield Finding("warning", f"{ZERO}.offload_param", found, "set stage to 3, or remove offload_param")
    if stage == 0 and optimizer != "none":
        found = "stage is 0: ZeRO is off, so this is ignored and the optimizer's state stays on the accelerator"
        remedy = "set stage to 1, 2 or 3, or remove offload_optimizer"
        yield Finding("warning", f"{ZERO}.offload_optimizer", found, remedy)
    if stage not in (0, 1, 2) and param in ("cpu", "nvme") and optimizer == "none":
        found = (
            f"device is none, but offload_param is on {param}: that works, but the larger part (an Adam optimizer's "
            "state) stays on the accelerator"
        )
        remedy = f"offload the optimizer first: set its device to {param}"
        yield Finding("note", f"{ZERO}.offload_optimizer", found, remedy)
    ratio = settings["offload_optimizer"].get("ratio") if optimizer != "none" else None
    if stage in (0, 1, 2) and isinstance(ratio, int | float) and ratio < 1:
        found = f"is {ratio}, but stage is {stage}: DeepSpeed refuses to offload part of the state below stage 3"
        yield Finding("error", f"{ZERO}.offload_optimizer.ratio", found, "set stage to 3, or ratio to 1.0")


def _shown(value: Any) -> str:
    """A JSON value, cut to one line."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _device(section: Any) -> Any:
    """The device of an offload section. DeepSpeed replaces "auto" by the default, none."""
    device = section.get("device", "none") if isinstance(section, Mapping) else "none"
    return "none" if device == "auto" else device


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        problem = f"is not valid JSON: {error}"
    else:
        if isinstance(value, dict):
            return value
        problem = f"holds {type(value).__name__}, not settings by name"
    raise ConfigError(f"the DeepSpeed config {problem}", source=str(path))
