"""A DeepSpeed config: what the stage ignores, what DeepSpeed refuses, what was left to be filled in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from latentcache.doctor.deepspeed import check_deepspeed_config, examine_deepspeed_config
from latentcache.errors import ConfigError

SOUND: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999]}},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": True},
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
}


def levels(config: dict[str, Any]) -> dict[str, str]:
    return {finding.subject: finding.level for finding in check_deepspeed_config(config)}


def zero(stage: Any = 3, **sections: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": stage, **sections}}


CPU, NONE = {"device": "cpu"}, {"device": "none"}


def test_sound_configs_have_no_findings() -> None:
    nvme = {"device": "nvme", "nvme_path": "/nvme"}
    for config in (
        SOUND,
        {},
        zero(2, offload_param=NONE),
        zero(3, offload_param=nvme, offload_optimizer=CPU),
        zero(3, offload_param=None, offload_optimizer={**CPU, "ratio": 0.5}),
        zero(2, offload_optimizer={**CPU, "ratio": 1.0}),
        {"zero_force_ds_cpu_optimizer": False, "zero_optimization": {"stage": 2, "offload_optimizer": CPU}},
    ):
        assert levels(config) == {}, config


def test_every_auto_and_an_optimizer_of_torch_are_named() -> None:
    config = {
        "train_batch_size": "auto",
        "optimizer": {"params": {"lr": "auto", "betas": [0.9, "auto"]}},
        "zero_optimization": {"stage": "auto", "offload_param": {"device": "auto"}, "reduce_bucket_size": "auto"},
    }
    names = ("train_batch_size", "optimizer.params.lr", "optimizer.params.betas.1")
    in_zero = ("stage", "offload_param.device", "reduce_bucket_size")
    assert levels(config) == dict.fromkeys((*names, *(f"zero_optimization.{name}" for name in in_zero)), "warning")
    offloaded = {"zero_optimization": {"stage": 2, "offload_optimizer": CPU}}
    assert levels(offloaded) == {"zero_force_ds_cpu_optimizer": "note"}, "DeepSpeed refuses a torch optimizer"


@pytest.mark.parametrize(
    ("config", "subject", "level", "says"),
    [
        (zero(2, offload_param=CPU), "offload_param", "warning", "stage is 2"),
        (zero(0, offload_optimizer=CPU), "offload_optimizer", "warning", "stage is 0"),
        (zero(2, offload_optimizer={"device": "nvme"}), "offload_optimizer.nvme_path", "error", "TypeError"),
        (zero(2, offload_optimizer={"device": "cuda"}), "offload_optimizer.device", "error", "nvme"),
        (zero(4), "stage", "error", "is 4"),
        (zero(True), "stage", "error", "is true"),
        (zero(3, offload_param=True), "offload_param", "error", "is true"),
        ({"zero_optimization": [3]}, "", "error", "not settings"),
        (zero(2, offload_optimizer={"device": "cpu", "ratio": 0.5}), "offload_optimizer.ratio", "error", "below stage"),
        (zero(3, offload_param=CPU, offload_optimizer=NONE), "offload_optimizer", "note", "larger share"),
    ],
)
def test_ignored_and_refused_settings(config: dict[str, Any], subject: str, level: str, says: str) -> None:
    (finding,) = check_deepspeed_config(config)
    assert finding.subject == f"zero_optimization.{subject}".rstrip(".")
    assert finding.level == level and says in finding.found and finding.remedy


def test_a_file_that_is_a_config_is_examined_and_another_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(SOUND))
    assert [finding.level for finding in examine_deepspeed_config(path).findings] == ["ok"]
    for content in (b"[]", b"[" * 100_000, b"\xff"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="DeepSpeed config") as caught:
            examine_deepspeed_config(path)
        assert caught.value.source == str(path)
