"""What the benchmarks share, and the benchmark of writing at a tiny size. What it measures is no test."""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def benchmarking(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import benchmarking

    yield benchmarking


def parsed(benchmarking: ModuleType, *arguments: str) -> argparse.Namespace:
    return benchmarking.parse(benchmarking.make_parser(None), arguments)


def test_few_repetitions_are_for_tiny_sizes_only(benchmarking: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed(benchmarking).repetitions == 7
    assert parsed(benchmarking, "--tiny", "--repetitions", "1").repetitions == 1
    for arguments in (["--repetitions", "6"], ["--tiny", "--repetitions", "0"]):
        with pytest.raises(SystemExit):
            parsed(benchmarking, *arguments)
        assert "at least" in capsys.readouterr().err


def test_methods_take_turns_and_each_begins_a_round(benchmarking: ModuleType) -> None:
    calls: list[str] = []
    collecting: list[bool] = []

    def method(name: str) -> None:
        calls.append(name)
        collecting.append(gc.isenabled())

    methods = {name: (lambda name=name: method(name)) for name in "abc"}
    seconds = benchmarking.in_turns(methods, 3)
    assert "".join(calls) == "abc" + "bca" + "cab" and not any(collecting) and gc.isenabled()
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3, "c": 3}
    calls.clear()
    benchmarking.in_turns(methods, 1, warm=True)
    assert "".join(calls) == "aabbcc"


def test_the_collector_is_as_it_was_after_a_method_raises(benchmarking: ModuleType) -> None:
    with pytest.raises(ZeroDivisionError):
        benchmarking.in_turns({"a": lambda: 1 / 0}, 1)
    assert gc.isenabled()


def test_a_clock_of_ones_own_and_ratios_by_round(benchmarking: ModuleType) -> None:
    values = {"slow": iter([6.0, 40.0, 9.0]), "quick": iter([2.0, 10.0, 3.0])}
    methods = {name: (lambda values=values: next(values)) for name, values in values.items()}
    seconds = benchmarking.in_turns(methods, 3, clock=lambda method: method())
    assert seconds == {"slow": [6.0, 40.0, 9.0], "quick": [2.0, 10.0, 3.0]}
    assert benchmarking.ratios(seconds["slow"], seconds["quick"]) == {"median": 3.0, "min": 3.0, "max": 4.0}


def test_a_result_is_one_document_or_a_text(benchmarking: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    result = {"figure": 1.5, "environment": benchmarking.environment("cpu")}
    benchmarking.emit(result, parsed(benchmarking, "--json", "--folder", "somewhere"), str)
    document = json.loads(capsys.readouterr().out)
    assert document["figure"] == 1.5 and document["settings"]["folder"] == "somewhere"
    assert document["environment"]["device"] == "cpu" and document["environment"]["torch"] == torch.__version__
    assert document["environment"]["memory_bytes"] > 1 << 28 and document["environment"]["num_cores"] >= 1
    benchmarking.emit(result, parsed(benchmarking), lambda shown: f"figure {shown['figure']}")
    assert capsys.readouterr().out == "figure 1.5\n"


@pytest.mark.parametrize("name", ["torch_load", "npz", "safetensors_file"])
def test_files_to_compare_with_hold_what_was_saved(benchmarking: ModuleType, tmp_path: Path, name: str) -> None:
    tensors = {"latents": torch.randn(4, 8, 8).half(), "pooled_prompt_embeds": torch.randn(20).half()}
    file_format = benchmarking.FILE_FORMATS[name]
    path = tmp_path / f"sample{file_format.suffix}"
    file_format.save(tensors, path)
    assert os.listdir(tmp_path) == [path.name]
    loaded = file_format.load(path)
    assert loaded.keys() == tensors.keys() and all(torch.equal(loaded[key], tensors[key]) for key in tensors)


@pytest.mark.parametrize("one_file", [False, True])
def test_peers_hold_the_samples_in_two_files_each_or_in_one(
    benchmarking: ModuleType, tmp_path: Path, one_file: bool
) -> None:
    import benchmarking_samples

    samples = benchmarking_samples.Samples(3, benchmarking_samples.TINY_SHAPES)
    names = list(benchmarking_samples.PEERS)
    loads = benchmarking_samples.make_peers(tmp_path, samples, names, one_file=one_file)
    assert list(loads) == names
    for name, load in loads.items():
        for number in range(3):
            loaded, expected = load(number), samples.tensors(number)
            assert loaded.keys() == expected.keys(), name
            assert all(torch.equal(loaded[field], expected[field]) for field in expected), name
        if name in benchmarking.FILE_FORMATS:
            assert len(os.listdir(tmp_path / name)) == (3 if one_file else 6)
