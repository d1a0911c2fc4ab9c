"""The doctor: everything that can be examined before a run, in one diagnosis."""

from __future__ import annotations

from pathlib import Path

import torch

from latentcache.doctor.deepspeed import examine_deepspeed_config
from latentcache.doctor.diagnosis import Diagnosis
from latentcache.doctor.environment import examine_environment
from latentcache.store.index import JOURNAL_MODE, SQLITE_VERSION


def diagnose(
    *, device: str = "auto", cache_path: Path | None = None, deepspeed: Path | None = None, training: bool = False
) -> Diagnosis:
    """Examine the environment; the file system of `cache_path`; a DeepSpeed config; and one training step on `device`.

    Raises ConfigError if the DeepSpeed config cannot be read. Everything else that is wrong is a finding. Where
    `device` is not here, nothing is trained on it.
    """
    config = Diagnosis() if deepspeed is None else examine_deepspeed_config(deepspeed)
    diagnosis = examine_environment(
        device=device, cache_path=cache_path, sqlite_version=SQLITE_VERSION, journal_mode=JOURNAL_MODE
    )
    diagnosis += config
    if training and "device" in diagnosis.facts:
        # The models take seconds to import, and the other checks do without them.
        from latentcache.doctor.training_check import try_training

        diagnosis += try_training(torch.device(diagnosis.facts["device"]))
    return diagnosis
