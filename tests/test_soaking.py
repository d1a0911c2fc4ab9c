"""What the soak programs share: a case that fails is counted, and a program without cases does not pass."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from latentcache.loading.cache import LatentCache
from latentcache.store import DiskStore
from latentcache.store.upkeep import verify

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def soaking(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import soaking

    yield soaking


def test_a_failed_case_is_counted_and_the_others_run(
    soaking: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def program(soak: object) -> None:
        goal = soak.goal("three of four are below three")  # type: ignore[attr-defined]
        for number in range(soak.n):  # type: ignore[attr-defined]
            with goal.case(f"number {number}"):
                assert number < 3
        goal.count("figure", 7)

    parser = soaking.make_parser(None, 4, "cases")
    arguments = ["--folder", str(tmp_path), "--seed", "5"]
    assert soaking.run_soak(program, parser, [*arguments, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["n"], document["failures"], document["seed"]) == (4, 1, 5)
    assert document["goals"][0]["figure"] == 7 and document["goals"][0]["failed"][0].startswith("number 3: ")
    assert document.keys() >= {"goal", "versions", "date", "seconds"}
    assert soaking.run_soak(program, parser, [*arguments, "--n", "3"]) == 0
    assert "| three of four are below three (figure 7) | 3 | 0 | 5 | latentcache" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert soaking.run_soak(lambda soak: None, parser, arguments) == 1


def test_a_cache_is_real_and_its_copies_are_alike(soaking: ModuleType, tmp_path: Path) -> None:
    expected = soaking.make_cache(tmp_path / "cache", 6, 2)
    copy = soaking.clone(tmp_path / "cache", tmp_path / "copy")
    with DiskStore(copy) as store:
        assert soaking.contents(store) == expected and len(expected) == 12
        assert verify(store).ok and store.stats().num_packs == 3
    with LatentCache(copy) as cache:
        assert cache.batch(["0.png", "5.png"], device="cpu")["caption"] == ["caption 0", "caption 5"]
    assert soaking.leftovers(copy) == []
    (copy / "packs" / ".x.tmp").touch()
    assert soaking.leftovers(copy) == ["packs/.x.tmp"]
