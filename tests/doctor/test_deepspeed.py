"""A DeepSpeed config: what the stage ignores, what DeepSpeed refuses, what was left to be filled in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from latentcache.doctor.deepspeed import check_deepspeed_config, examine_deepspeed_config
from latentcache.errors import ConfigError

CPU, NONE, NVME = {"device": "cpu"}, {"device": "none"}, {"device": "nvme", "nvme_path": "/nvme"}
OFFLOADED = {"stage": 2, "offload_optimizer": CPU}
AUTO = {
    "train_batch_size": "auto",
    "optimizer": {"params": {"lr": "auto", "betas": [0.9, "auto"]}},
    "zero_optimization": {"stage": "auto", "offload_param": {"device": "auto"}},
}
IN_ZERO = ("zero_optimization.stage", "zero_optimization.offload_param.device")


def zero(stage: Any = 3, **sections: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": stage, **sections}}


@pytest.mark.parametrize(
    "config",
    [
        {},
        zero(3, offload_param=CPU, offload_optimizer=CPU),
        zero(2, offload_param=NONE),
        zero(3, offload_param=NVME, offload_optimizer={**CPU, "ratio": 0.5}),
        zero(2, offload_optimizer={**CPU, "ratio": 1.0}),
        {"zero_force_ds_cpu_optimizer": False, "zero_optimization": OFFLOADED},
    ],
)
def test_sound_configs_have_no_findings(config: dict[str, Any]) -> None:
    assert check_deepspeed_config(config) == []


@pytest.mark.parametrize(
    ("config", "level", "subjects"),
    [
        (AUTO, "warning", ("train_batch_size", "optimizer.params.lr", "optimizer.params.betas.1", *IN_ZERO)),
        (zero(2, offload_param=CPU), "warning", ["zero_optimization.offload_param"]),
        (zero(0, offload_optimizer=CPU), "warning", ["zero_optimization.offload_optimizer"]),
        (zero(2, offload_optimizer={"device": "nvme"}), "error", ["zero_optimization.offload_optimizer.nvme_path"]),
        (zero(2, offload_optimizer={"device": "cuda"}), "error", ["zero_optimization.offload_optimizer.device"]),
        (zero(2, offload_optimizer={**CPU, "ratio": 0.5}), "error", ["zero_optimization.offload_optimizer.ratio"]),
        (zero(True), "error", ["zero_optimization.stage"]),
        (zero(3, offload_param=True), "error", ["zero_optimization.offload_param"]),
        ({"zero_optimization": [3]}, "error", ["zero_optimization"]),
        (zero(3, offload_param=CPU, offload_optimizer=NONE), "note", ["zero_optimization.offload_optimizer"]),
        ({"zero_optimization": OFFLOADED}, "note", ["zero_force_ds_cpu_optimizer"]),
    ],
)
def test_ignored_and_refused_settings(config: dict[str, Any], level: str, subjects: list[str]) -> None:
    found = check_deepspeed_config(config)
    assert {finding.subject: finding.level for finding in found} == dict.fromkeys(subjects, level)


def test_a_file_that_is_a_config_is_examined_and_another_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(zero(3)))
    assert [finding.level for finding in examine_deepspeed_config(path).findings] == ["ok"]
    for content in (b"[]", b"[" * 100_000, b"\xff"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="DeepSpeed config") as caught:
            examine_deepspeed_config(path)
        assert caught.value.source == str(path)
