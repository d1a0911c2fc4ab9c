"""What the package requires fits beside what trainers pin: `pip install latentcache` changes none of their releases.

The files beside this one have the trainers' requirements: those with a release, and those that both sides name.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

HERE = Path(__file__).parent
PROJECT = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TRAINERS = sorted(path.stem for path in HERE.glob("*.txt"))
OLD_STACK = {"diffusers", "huggingface-hub", "safetensors", "transformers"}
REFUSED = {
    ("encode", "sd-scripts"): OLD_STACK,
    ("encode", "musubi-tuner"): OLD_STACK,
    ("remote", "sd-scripts"): {"huggingface-hub"},
    ("remote", "musubi-tuner"): {"huggingface-hub"},
    ("remote", "simpletuner"): {"urllib3"},
}
"""By extra and trainer, what pip would have to replace. docs/guide/adopt.md says so."""


def can_both_hold(ours: SpecifierSet, theirs: SpecifierSet) -> bool:
    """Whether some release satisfies both: one that they name, or the next after it."""
    named = [specifier.version.removesuffix(".*") for specifier in (*ours, *theirs)]
    return not named or any(each in ours and each in theirs for name in named for each in (name, f"{name}.1"))


def conflicts(lines: list[str], trainer: str) -> set[str]:
    """The packages of which no release satisfies both `lines` and the trainer."""
    text = (HERE / f"{trainer}.txt").read_text(encoding="utf-8")
    pins = [Requirement(line) for line in text.splitlines() if not line.startswith("#")]
    theirs = {canonicalize_name(pin.name): pin.specifier for pin in pins}
    ours = [Requirement(line) for line in lines]
    shared = {canonicalize_name(each.name): each.specifier for each in ours if canonicalize_name(each.name) in theirs}
    assert shared, f"{trainer} has none of {lines}: the names are wrong"
    return {name for name, specifier in shared.items() if not can_both_hold(specifier, theirs[name])}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_core_fits_beside_a_trainer_and_which_extras_do_not(trainer: str) -> None:
    assert conflicts(PROJECT["dependencies"], trainer) == set()
    [python] = re.findall(r"^# python (.+)$", (HERE / f"{trainer}.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert can_both_hold(SpecifierSet(PROJECT["requires-python"]), SpecifierSet(python))
    for extra in ("encode", "remote"):
        found = conflicts(PROJECT["optional-dependencies"][extra], trainer)
        assert found == REFUSED.get((extra, trainer), set()), extra
