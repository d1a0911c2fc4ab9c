"""The doctor's facts about a device, and its training check there."""

from __future__ import annotations

import pytest
import torch

from latentcache.doctor import training_check
from latentcache.doctor.environment import diagnose
from latentcache.doctor.training_check import try_training
from latentcache.models.tiny import tiny_denoiser


def test_the_device_is_listed_and_named(device: torch.device) -> None:
    found = diagnose(device=str(device))
    assert found.facts["device"] == str(device)
    [state] = [each for each in found.facts["devices"] if each["device"] == str(device)]
    assert state["name"] and state["dtypes"] == ["bfloat16", "float16"]
    assert state["free_bytes"] is None or 0 < state["free_bytes"] <= state["total_bytes"]
    assert {finding.level for finding in found.findings if finding.subject == str(device)} <= {"ok", "note"}


def test_one_step_audits_clean_and_a_model_that_was_not_moved_is_an_error(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = try_training(device)
    assert found.ok and [finding.level for finding in found.findings] == ["ok"]
    training = found.facts["training"]
    assert training["device"] == str(device) and training["audit"]["findings"] == ()
    on_cpu = try_training(torch.device("cpu")).facts["training"]
    assert training["loss"] == pytest.approx(on_cpu["loss"], rel=1e-3)

    denoiser = tiny_denoiser()
    denoiser.to = lambda _: denoiser
    monkeypatch.setattr(training_check, "tiny_denoiser", lambda: denoiser)
    (finding,) = try_training(device).findings
    assert finding.level == "error" and str(device) in finding.found and "cpu" in finding.found
    assert "same device" in finding.found
