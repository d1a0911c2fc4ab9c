"""The environment on a machine without a GPU: real facts, NVIDIA's rules for drivers, findings in order."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from latentcache.doctor.environment import (
    DeviceState,
    check_device,
    check_driver,
    diagnose,
    driver_cuda_version,
    multiplies,
)

CPU = torch.device("cpu")


def test_the_report_holds_this_machine(tmp_path: Path) -> None:
    found = diagnose(device="cpu", cache_path=tmp_path / "cache")
    assert found.ok
    facts = found.to_json()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["python"] == platform.python_version() and facts["packages"]["torch"] == torch.__version__
    assert facts["device"] == "cpu" and facts["cuda_build"] == torch.version.cuda
    assert len(facts["devices"]) == torch.accelerator.device_count()
    assert facts["cache"]["free_bytes"] == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.05)
    assert all(set(finding) == {"level", "subject", "found", "remedy"} for finding in facts["findings"])
    subjects = [finding["subject"] for finding in facts["findings"]]
    assert subjects[0] == "Python" and {"torch", "device", "cache"} <= set(subjects)


@pytest.mark.parametrize("name", ["gpu", "xpu:99"])
def test_a_device_that_is_not_here_is_an_error_finding(name: str) -> None:
    found = diagnose(device=name)
    assert not found.ok and "device" not in found.facts
    (finding,) = [f for f in found.findings if f.level == "error"]
    assert finding.subject == "device" and name.split(":")[0] in finding.found and "cpu" in finding.remedy


def test_what_torch_warns_of_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reports a driver that is too old as a warning, which would be lost on the terminal."""
    import warnings

    def current_accelerator(check_available: bool = False) -> None:
        warnings.warn("CUDA initialization: the NVIDIA driver is too old", UserWarning, stacklevel=1)

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    with pytest.warns(UserWarning, match="too old"):  # from the look-up of `auto`, after the report's own
        found = diagnose(device="auto")
    assert [f.level for f in found.findings if f.subject == "accelerator"] == ["warning"]


@pytest.mark.parametrize(
    ("build", "driver", "level", "says"),
    [
        ("12.6", (12, 6), "ok", "the driver runs CUDA 12.6"),
        ("12.6", (13, 0), "ok", "the driver runs CUDA 13.0"),
        ("12.8", (12, 2), "note", "same major version"),
        ("13.0", (12, 9), "error", "too old"),
        ("12.1.105", (11, 8), "error", "too old"),
        (None, (12, 4), "warning", "has no CUDA"),
        ("12.6", None, "note", "no NVIDIA driver"),
    ],
)
def test_the_driver_against_the_build(build: str | None, driver: tuple[int, int] | None, level: str, says: str) -> None:
    finding = check_driver(build, driver)
    assert finding is not None and finding.level == level and says in finding.found
    assert bool(finding.remedy) == (level != "ok")


def test_a_driver_is_asked_without_cuda(tmp_path: Path) -> None:
    """A library with the driver's one function stands in for it: called for real, through the same loader."""
    assert driver_cuda_version("libno-such-driver.so.1") is None
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build a stand-in for libcuda")
    for code, expected in ((0, (12, 4)), (999, None)):
        source, library = tmp_path / f"driver{code}.c", tmp_path / f"libdriver{code}.so"
        source.write_text(f"int cuDriverGetVersion(int *version) {{ *version = 12040; return {code}; }}")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
        assert driver_cuda_version(str(library)) == expected


def test_a_full_device_is_not_taken_for_one_without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    def ones(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch, "ones", ones)
    with pytest.raises(torch.OutOfMemoryError):
        multiplies(CPU, torch.bfloat16)


@pytest.mark.parametrize(
    ("bf16", "emulated", "levels"),
    [(True, [], ["ok"]), (True, ["bfloat16"], ["ok", "note"]), (False, [], ["ok", "warning"])],
)
def test_half_precision_of_a_device(bf16: bool, emulated: list[str], levels: list[str]) -> None:
    state = DeviceState("cuda:1", "T4", 10**9, 16 * 10**9, bf16, True, emulated)
    findings = list(check_device(state))
    assert [finding.level for finding in findings] == levels
    assert {finding.subject for finding in findings} == {"cuda:1"}
    assert "1.0 GB free of 16.0 GB; " in findings[0].found and ("bfloat16" in findings[0].found) == bf16
