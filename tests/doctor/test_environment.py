"""The doctor on a machine without a GPU: its facts, bad versions, DeepSpeed configs, exit codes, and an old torch."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from latentcache.doctor import environment
from latentcache.doctor.deepspeed import check_deepspeed_config
from latentcache.doctor.environment import BAD_RANGES, check_versions, diagnose, examine_device, multiplies

CPU, DOCTOR = torch.device("cpu"), ("doctor", "--device", "cpu")
ROOT = Path(__file__).parents[2]


def test_the_report_holds_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = diagnose(device="cpu", cache_path=tmp_path / "cache")
    assert found.ok
    facts = json.loads(json.dumps(found.to_json()))
    assert facts["python"] == platform.python_version() and facts["packages"]["torch"] == torch.__version__
    assert facts["device"] == "cpu" and facts["cuda_build"] == torch.version.cuda
    assert len(facts["devices"]) == torch.accelerator.device_count()
    assert facts["cache"]["free_bytes"] == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.05)
    assert {"Python", "torch", "device", "cache"} <= {finding["subject"] for finding in facts["findings"]}
    too_long = tmp_path / ("x" * 300)  # it cannot be looked up, as a folder that only its owner may enter
    assert diagnose(device="cpu", cache_path=too_long / "cache").facts["cache"]["path"] == str(tmp_path)
    missing = diagnose(device="xpu:99")
    assert not missing.ok and "device" not in missing.facts
    assert [finding.subject for finding in missing.findings if finding.level == "error"] == ["device"]
    (tmp_path / "nvidia-smi").touch(mode=0o755)  # a driver, and a build of torch that cannot use it
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert [f.level for f in diagnose(device="cpu").findings if f.subject == "CUDA"] == ["warning"]


def test_what_a_device_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as full, pytest.raises(torch.OutOfMemoryError):  # not a device without bfloat16
        full.setattr(torch, "ones", Mock(side_effect=torch.OutOfMemoryError("full")))
        multiplies(CPU, torch.bfloat16)
    for works in ([torch.float16], []):
        monkeypatch.setattr(environment, "multiplies", lambda device, dtype, works=works: dtype in works)
        found = examine_device(CPU)
        assert [finding.level for finding in found.findings] == ["ok", "warning"]
        assert found.facts["dtypes"] == ["float16"] * len(works)
    monkeypatch.setattr(environment, "multiplies", lambda *_: torch.ones(2) + torch.ones(3))
    (finding,) = examine_device(CPU).findings
    assert finding.level == "error" and "does not respond" in finding.found


@pytest.mark.parametrize(
    ("package", "version", "level", "says"),
    [
        *(("deepspeed", version, "ok", version) for version in ("0.14.0", "0.14.3")),
        *(("deepspeed", version, "error", "issues/5422") for version in ("0.14.1", "0.14.2+cu121")),
        ("torch", "2.0.1+cu118", "error", "state_steps"),
        # Before 0.42 only pipelines with parts on several devices fail.
        *(("diffusers", version, "note", "several devices") for version in ("0.39.0", "0.41.0")),
        ("accelerate", "0.34.2", "error", "accelerate>=1.0"),
    ],
)
def test_versions_that_are_known_to_be_bad(package: str, version: str, level: str, says: str) -> None:
    (finding,) = check_versions({package: version})
    assert (finding.subject, finding.level) == (package, level) and says in finding.found
    assert finding.remedy.startswith(f"install {package}>=") or level == "ok"


def test_floors_are_those_of_pyproject() -> None:
    """A minimum version that is raised in pyproject is raised here too, and no remedy is a bad version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["optional-dependencies"]["encode"], *project["dependencies"]]
    required = {requirement.name: requirement.specifier for requirement in map(Requirement, lines)}
    highest = {bad.package: bad for bad in BAD_RANGES if bad.specifier.startswith("<") and bad.level == "error"}
    assert set(highest) == {"torch", "diffusers", "transformers", "accelerate"}
    for package, bad in highest.items():
        assert SpecifierSet(bad.specifier.replace("<", ">=")) == required[package]
    for bad in BAD_RANGES:
        (finding,) = check_versions({bad.package: bad.fixed})
        assert finding.level == "ok"


# A DeepSpeed config

HOST, NONE, NVME = {"device": "cpu"}, {"device": "none"}, {"device": "nvme", "nvme_path": "/nvme"}
OFFLOADED = {"stage": 2, "offload_optimizer": HOST}
AUTO = {
    "train_batch_size": "auto",
    "optimizer": {"params": {"lr": "auto", "betas": [0.9, "auto"]}},
    "zero_optimization": {"stage": "auto", "offload_param": {"device": "auto"}},
}
IN_ZERO = ("zero_optimization.stage", "zero_optimization.offload_param.device")


def zero(stage: Any = 3, **sections: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": stage, **sections}}


@pytest.mark.parametrize(
    ("config", "level", "subjects"),
    [
        ({}, "ok", []),
        (zero(3, offload_param=HOST, offload_optimizer=HOST), "ok", []),
        (zero(2, offload_param=NONE), "ok", []),
        (zero(3, offload_param=NVME, offload_optimizer={**HOST, "ratio": 0.5}), "ok", []),
        (zero(2, offload_optimizer={**HOST, "ratio": 1.0}), "ok", []),
        ({"zero_force_ds_cpu_optimizer": False, "zero_optimization": OFFLOADED}, "ok", []),
        (AUTO, "warning", ("train_batch_size", "optimizer.params.lr", "optimizer.params.betas.1", *IN_ZERO)),
        (zero(2, offload_param=HOST), "warning", ["zero_optimization.offload_param"]),
        (zero(0, offload_optimizer=HOST), "warning", ["zero_optimization.offload_optimizer"]),
        (zero(2, offload_optimizer={"device": "nvme"}), "error", ["zero_optimization.offload_optimizer.nvme_path"]),
        (zero(2, offload_optimizer={"device": "cuda"}), "error", ["zero_optimization.offload_optimizer.device"]),
        (zero(2, offload_optimizer={**HOST, "ratio": 0.5}), "error", ["zero_optimization.offload_optimizer.ratio"]),
        (zero(True), "error", ["zero_optimization.stage"]),
        (zero(3, offload_param=True), "error", ["zero_optimization.offload_param"]),
        ({"zero_optimization": [3]}, "error", ["zero_optimization"]),
        (zero(3, offload_param=HOST, offload_optimizer=NONE), "note", ["zero_optimization.offload_optimizer"]),
        ({"zero_optimization": OFFLOADED}, "note", ["zero_force_ds_cpu_optimizer"]),
    ],
)
def test_ignored_and_refused_settings(config: dict[str, Any], level: str, subjects: list[str]) -> None:
    found = check_deepspeed_config(config)
    assert {finding.subject: finding.level for finding in found} == dict.fromkeys(subjects, level)


def test_the_file_of_a_deepspeed_config(run: Any, run_json: Any, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    assert run_json(*DOCTOR, "--deepspeed", path)[0] == 2  # missing
    for content in (b"[]", b"[" * 100_000, b"\xff"):
        path.write_bytes(content)
        code, _, err = run(*DOCTOR, "--deepspeed", path)
        assert code == 2 and f"{path}: the DeepSpeed config" in err
    path.write_text(json.dumps(zero(2, offload_param=HOST)))
    code, out, _ = run(*DOCTOR, "--deepspeed", path)
    assert code == 0 and "warning  zero_optimization.offload_param" in out
    path.write_text(json.dumps(zero(4)))
    code, out, _ = run(*DOCTOR, "--deepspeed", path)
    assert code == 1 and "error    zero_optimization.stage" in out


def test_a_training_step_is_audited(run_json: Any) -> None:
    random_state = torch.random.get_rng_state()
    code, report = run_json(*DOCTOR, "--training")
    assert code == 0 and {"ok"} == {each["level"] for each in report["findings"] if each["subject"] == "training check"}
    training = report["training"]
    assert training["device"] == "cpu" and 0 < training["loss"] < 10
    assert training["audit"]["findings"] == []
    # For each parameter 3 tensors of optimizer state, the gradient and itself; and the batch.
    assert training["audit"]["num_tensors"] > 1000
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert run_json(*DOCTOR, "--training")[1]["training"]["loss"] == training["loss"]


BLOCK = """
import sys
from importlib.metadata import packages_distributions

OF_TORCH = {"torch", "torchgen", "functorch", "triton", "nvidia", "typing_extensions", "filelock", "sympy", "mpmath"}
OF_TORCH |= {"networkx", "jinja2", "markupsafe", "fsspec", "setuptools", "latentcache"}
sys.modules.update(dict.fromkeys(packages_distributions().keys() - OF_TORCH))
"""
OLD_TORCH = """
import torch
for name in ("accelerator", "get_device_module", "OutOfMemoryError"):
    delattr(torch, name)
"""
OLD = {"torch": "2.1.2+cu121", "transformers": "4.40.0", "deepspeed": "0.14.2"}


def doctor(folder: Path, before: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    """`python -m latentcache.doctor --json` after the code `before`, among the old packages in `folder`."""
    code = f"import sys\nsys.path[:0] = {[str(folder), str(ROOT)]!r}\n{before}\n"
    code += f"sys.argv[1:] = {['--json', *arguments]!r}\n"
    code += "import runpy\nrunpy.run_module('latentcache.doctor', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_versions_are_judged_where_torch_is_alone(tmp_path: Path) -> None:
    for name, version in OLD.items():
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    config = tmp_path / "ds.json"
    config.write_text('{"train_batch_size": "auto"}')
    flags = ("--deepspeed", str(config), "--cache.path", str(tmp_path))
    code, found = doctor(tmp_path, BLOCK + OLD_TORCH, *flags)
    by_subject = {each["subject"]: each for each in found["findings"]}
    assert code == 1 and not found["ok"]
    assert {name: by_subject[name]["level"] for name in OLD} == dict.fromkeys(OLD, "error")
    assert by_subject["train_batch_size"]["level"] == "warning" and "cache" in by_subject
    unchecked = {each["subject"] for each in found["findings"] if each["found"].startswith("not checked: ")}
    assert unchecked == {"device"} and found["packages"].items() >= OLD.items()
    code, found = doctor(tmp_path / "none", BLOCK, "--training", "--device", "cpu")
    levels = {each["subject"]: each["level"] for each in found["findings"]}
    assert code == 0 and found["ok"] and (levels["torch"], levels["training check"]) == ("ok", "note")
