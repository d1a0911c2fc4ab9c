"""Known-bad versions: the window of DeepSpeed to the patch, and floors that agree with pyproject."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from latentcache.doctor.environment import BAD_RANGES, check_versions

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.mark.parametrize(
    ("package", "version", "level", "says"),
    [
        *(("deepspeed", version, "ok", version) for version in ("0.14.0", "0.14.3")),
        *(("deepspeed", version, "error", "issues/5422") for version in ("0.14.1", "0.14.2+cu121")),
        ("torch", "2.0.1+cu118", "error", "state_steps"),
        ("torch", "2.3.1", "error", "torch>=2.4"),
        ("diffusers", "0.38.0", "error", "diffusers>=0.39"),
        # Only pipelines whose parts lie on several devices fail before 0.42.
        *(("diffusers", version, "note", "several devices") for version in ("0.39.0", "0.41.0")),
        ("transformers", "4.57.1", "error", "text_model"),
        ("accelerate", "0.34.2", "error", "accelerate>=1.0"),
    ],
)
def test_versions_that_are_known_to_be_bad(package: str, version: str, level: str, says: str) -> None:
    (finding,) = check_versions({package: version})
    assert (finding.subject, finding.level) == (package, level) and says in finding.found
    assert finding.remedy.startswith(f"install {package}>=") or level == "ok"


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
