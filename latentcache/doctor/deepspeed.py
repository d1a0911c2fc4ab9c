"""A DeepSpeed config: settings that are ignored, refused, or left for another program to fill in.

DeepSpeed accepts much that has no effect, without a message. The rules were measured on DeepSpeed 0.19.8; DeepSpeed
itself is not needed here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from latentcache.doctor.diagnosis import Diagnosis, Finding, Level
from latentcache.errors import ConfigError
from latentcache.utils.nested import named_leaves

STAGES = (0, 1, 2, 3)
ZERO = "zero_optimization"
OFFLOAD_DEVICES = ("none", "cpu", "nvme")

_Rule: TypeAlias = "tuple[Level, str, Callable[[Mapping[str, Any]], bool], str, str]"
"""Level, setting, when the finding is made of the facts, and formats of the finding and its remedy."""

_RULES: tuple[_Rule, ...] = (
    ("warning", "offload_param", lambda f: f["stage"] in (0, 1, 2) and f["param"] != "none",
     "device is {param}, but stage is {stage}: only stage 3 partitions parameters, so this is ignored and they stay on "
     "the accelerator", "set stage to 3, or remove offload_param"),
    ("warning", "offload_optimizer", lambda f: f["stage"] == 0 and f["optimizer"] != "none",
     "device is {optimizer}, but stage is 0: ZeRO is off, so this is ignored and the optimizer's state stays on the "
     "accelerator", "set stage to 1, 2 or 3, or remove offload_optimizer"),
    ("error", "offload_optimizer.ratio",
     lambda f: f["stage"] in (0, 1, 2) and isinstance(f["ratio"], int | float) and f["ratio"] < 1,
     "is {ratio}, but stage is {stage}: DeepSpeed refuses a part of the state below stage 3",
     "set stage to 3, or ratio to 1.0"),
    ("note", "offload_optimizer",
     lambda f: f["stage"] not in (0, 1, 2) and f["param"] in ("cpu", "nvme") and f["optimizer"] == "none",
     "device is none, but offload_param is on {param}: legal, and the larger share (an Adam optimizer's state) stays "
     "on the accelerator", "offload the optimizer first: set its device to {param}"),
)  # fmt: skip
"""About ZeRO. In the facts, `param` and `optimizer` are the devices that each is offloaded to."""


def examine_deepspeed_config(path: Path) -> Diagnosis:
    """Check the config in this file. Raises ConfigError if it cannot be read or is not a JSON object."""
    findings = check_deepspeed_config(_read(path))
    if not findings:
        findings.append(Finding("ok", "DeepSpeed config", f"{path}: nothing ignored, nothing left to fill in"))
    return Diagnosis(tuple(findings), {"deepspeed_config": str(path)})


def check_deepspeed_config(config: Mapping[str, Any]) -> list[Finding]:
    """Findings about a config as read from JSON. The subject of each is the dotted name of the setting."""
    findings = list(_auto_values(config))
    zero = config.get(ZERO, {})
    if isinstance(zero, Mapping):
        findings += _check_zero(config, zero)
    elif zero != "auto":  # which has a finding already
        findings.append(_no_section(ZERO, zero, '{"stage": 2}'))
    return findings


def _check_zero(config: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[Finding]:
    stage = settings.get("stage", 0)
    if stage != "auto" and (isinstance(stage, bool) or stage not in STAGES):
        found = f"is {_shown(stage)}; DeepSpeed knows 0, 1, 2 and 3"
        yield Finding("error", f"{ZERO}.stage", found, "name one of them")
        return
    sections: list[Mapping[str, Any]] = []
    for name in ("offload_param", "offload_optimizer"):
        section = settings.get(name)
        if section not in (None, "auto") and not isinstance(section, Mapping):
            yield _no_section(f"{ZERO}.{name}", section, '{"device": "cpu"}')
        sections.append(section if isinstance(section, Mapping) else {})
        device = _device(sections[-1])
        if device not in OFFLOAD_DEVICES:
            found = f"is {_shown(device)}; DeepSpeed knows none, cpu, nvme"
            remedy = "name one of them; which GPU it is, the launcher decides"
            yield Finding("error", f"{ZERO}.{name}.device", found, remedy)
        if device == "nvme" and sections[-1].get("nvme_path") in (None, "auto", ""):
            found = "is missing, and device is nvme: DeepSpeed stops with a TypeError that does not say so"
            yield Finding("error", f"{ZERO}.{name}.nvme_path", found, "name a folder on the NVMe disk, or use cpu")
    param, optimizer = sections
    facts = {
        "stage": stage,
        "param": _device(param),
        "optimizer": _device(optimizer),
        "ratio": optimizer.get("ratio"),
    }
    texts = {key: value[:60] if isinstance(value, str) else _shown(value) for key, value in facts.items()}
    for level, setting, applies, *formats in _RULES:
        if applies(facts):
            found, remedy = (text.format(**texts) for text in formats)
            yield Finding(level, f"{ZERO}.{setting}", found, remedy)
    forced = config.get("zero_force_ds_cpu_optimizer") is not False
    if facts["optimizer"] != "none" and "optimizer" not in config and forced:
        found = (
            "is not false, the optimizer is offloaded, and the config names none: DeepSpeed refuses a torch optimizer "
            "that it is given"
        )
        remedy = "give it a DeepSpeedCPUAdam, name the optimizer in the config, or set this to false"
        yield Finding("note", "zero_force_ds_cpu_optimizer", found, remedy)


def _auto_values(config: Mapping[str, Any]) -> Iterator[Finding]:
    found = (
        'is "auto": the Hugging Face Trainer and accelerate fill it in. DeepSpeed itself takes its own default without '
        "a message, or fails"
    )
    for path, value in named_leaves(config, ""):
        if value == "auto":
            yield Finding("warning", path, found, "give the value, unless one of those two starts the training")


def _no_section(setting: str, value: Any, example: str) -> Finding:
    return Finding("error", setting, f"is {_shown(value)}, not settings by name", f"write {example}")


def _shown(value: Any) -> str:
    """A JSON value as the file has it, cut to one line."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _device(section: Mapping[str, Any]) -> Any:
    """The device of an offload section. DeepSpeed drops "auto", which leaves the default."""
    device = section.get("device", "none")
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
