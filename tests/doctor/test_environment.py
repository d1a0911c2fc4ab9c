"""The environment on a machine without a GPU: real facts, and findings in order."""

from __future__ import annotations

import json
import platform
import shutil
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from latentcache.doctor import environment
from latentcache.doctor.environment import diagnose, examine_device, multiplies

CPU = torch.device("cpu")


def test_the_report_holds_this_machine(tmp_path: Path) -> None:
    found = diagnose(device="cpu", cache_path=tmp_path / "cache")
    assert found.ok
    facts = json.loads(json.dumps(found.to_json()))
    assert facts["python"] == platform.python_version() and facts["packages"]["torch"] == torch.__version__
    assert facts["device"] == "cpu" and facts["cuda_build"] == torch.version.cuda
    assert len(facts["devices"]) == torch.accelerator.device_count()
    assert facts["cache"]["free_bytes"] == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.05)
    assert {"Python", "torch", "device", "cache"} <= {finding["subject"] for finding in facts["findings"]}
    missing = diagnose(device="xpu:99")
    assert not missing.ok and "device" not in missing.facts
    assert [finding.subject for finding in missing.findings if finding.level == "error"] == ["device"]


def test_what_torch_warns_of_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reports a driver that is too old as a warning, which would be lost on the terminal."""

    def current_accelerator(check_available: bool = False) -> None:
        warnings.warn("CUDA initialization: the NVIDIA driver is too old", UserWarning, stacklevel=1)

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    with pytest.warns(UserWarning, match="too old"):  # from the look-up of `auto`, after the report's own
        found = diagnose(device="auto")
    assert [f.level for f in found.findings if f.subject == "accelerator"] == ["warning"]


def test_a_driver_beside_a_build_that_cannot_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert [f.level for f in diagnose(device="cpu").findings if f.subject == "CUDA"] == ["warning"]


def test_a_full_device_is_not_taken_for_one_without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "ones", Mock(side_effect=torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError):
        multiplies(CPU, torch.bfloat16)


def test_what_a_device_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    for works in ([torch.float16], []):
        monkeypatch.setattr(environment, "multiplies", lambda device, dtype, works=works: dtype in works)
        found = examine_device(CPU)
        assert [finding.level for finding in found.findings] == ["ok", "warning"]
        assert found.facts["dtypes"] == ["float16"] * len(works)
    monkeypatch.setattr(environment, "multiplies", lambda *_: torch.ones(2) + torch.ones(3))
    (finding,) = examine_device(CPU).findings
    assert finding.level == "error" and "does not answer" in finding.found
