"""A cache of each family, filled by its tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers.family_runs import FamilyRun, family_run

from latentcache.families import FAMILIES

OWN_TESTS = ("ideogram4-projected",)
"""Families whose texts no pipeline of diffusers has."""
RECIPES: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {}) for name in FAMILIES if name not in OWN_TESTS),
    ("chroma", {"padding": "keep"}),
)
"""Families, with settings of `encode`."""


@pytest.fixture(scope="session", params=RECIPES, ids=["-".join([name, *more.values()]) for name, more in RECIPES])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FamilyRun]:
    name, settings = request.param
    made = family_run(tmp_path_factory.mktemp(name), name, **settings)
    yield made
    made.cache.close()
