"""Known-bad versions: the window of DeepSpeed to the patch, and floors that agree with pyproject."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from latentcache.doctor.environment import BAD_RANGES, check_versions

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.mark.parametrize("version", ["0.14.1", "0.14.2", "0.14.2+cu121", "0.14.1.post1"])
def test_the_deepspeed_window_is_an_error_that_says_why(version: str) -> None:
    (finding,) = check_versions({"deepspeed": version})
    assert finding.level == "error" and finding.subject == "deepspeed" and version in finding.found
    assert "Expected all tensors to be on the same device" in finding.found and "issues/5422" in finding.found
    assert finding.remedy == "install deepspeed>=0.14.3"


@pytest.mark.parametrize("version", ["0.14.0", "0.14.3", "0.14.5", "0.19.8", "0.9.0"])
def test_the_versions_around_the_deepspeed_window_are_fine(version: str) -> None:
    (finding,) = check_versions({"deepspeed": version})
    assert (finding.level, finding.found, finding.remedy) == ("ok", version, "")


@pytest.mark.parametrize(
    ("package", "version", "says"),
    [
        ("torch", "2.0.1+cu118", "state_steps"),
        ("torch", "2.3.1", "torch>=2.4"),
        ("diffusers", "0.38.0", "diffusers>=0.39"),
        ("transformers", "4.57.1", "text_model"),
        ("accelerate", "0.34.2", "accelerate>=1.0"),
    ],
)
def test_old_versions_are_errors(package: str, version: str, says: str) -> None:
    (finding,) = check_versions({package: version})
    assert finding.level == "error" and says in finding.found and finding.remedy.startswith(f"install {package}>=")


def test_a_version_that_fails_in_some_uses_alone_is_no_error() -> None:
    """diffusers 0.39 is allowed, and only pipelines whose parts lie on several devices fail before 0.42."""
    for version in ("0.39.0", "0.41.0"):
        (finding,) = check_versions({"diffusers": version})
        assert finding.level == "note" and "several devices" in finding.found
        assert finding.remedy == "install diffusers>=0.42"


def test_floors_are_those_of_pyproject() -> None:
    """A floor that is raised in pyproject is raised here too, and every remedy is a version that is not bad."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    lines = [*project["optional-dependencies"]["encode"], *project["dependencies"]]
    required = {requirement.name: requirement.specifier for requirement in map(Requirement, lines)}
    highest = {bad.package: bad for bad in BAD_RANGES if bad.specifier.startswith("<") and bad.level == "error"}
    assert set(highest) == {"torch", "diffusers", "transformers", "accelerate"}
    for package, bad in highest.items():
        assert SpecifierSet(bad.specifier.replace("<", ">=")) == required[package]
    for bad in BAD_RANGES:
        (finding,) = check_versions({bad.package: bad.fixed})
        assert finding.level == "ok"
