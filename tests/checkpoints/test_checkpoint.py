"""Checkpoints on the CPU: bit-identical resumes, refusals, atomic files, and imports."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.training_run import SCHEDULERS, Run, Trap, assert_same_bits
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.swa_utils import AveragedModel

from latentcache import import_checkpoint, load_checkpoint, load_optimizer_state, save_checkpoint
from latentcache.devices.optimizer import state_tensors
from latentcache.errors import CheckpointError
from latentcache.utils import durable_files


def weights(module: torch.nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for value in module.state_dict().values()]


FLAGS: list[dict[str, Any]] = [{}, {"fused": True}, {"foreach": True, "amsgrad": True}, {}]


@pytest.mark.parametrize(("scheduler", "flags"), [*zip(SCHEDULERS, FLAGS, strict=True)])
def test_resumes_bit_identically_whatever_becomes_of_the_file(
    scheduler: str, flags: dict[str, Any], tmp_path: Path
) -> None:
    whole = Run(scheduler=scheduler, **flags)
    whole_losses = whole.train(6)
    expected = whole.numbers()

    first = Run(scheduler=scheduler, **flags)
    losses = first.train(3)
    extra: dict[str, Any] = {"best": torch.full((5000,), 0.5), "seen": ("a", 2)}
    path = first.save(tmp_path / "checkpoint", epoch=1, step=3, extra=extra)
    second = Run(seed=99, scheduler=scheduler, **flags)
    state = second.load(path)
    with path.open("r+b") as file:  # while it was loaded, tensors were views of the file
        file.write(bytes(path.stat().st_size))
    losses += second.train(3)

    assert (state.epoch, state.step) == (1, 3)
    assert torch.equal(state.extra["best"], extra["best"]) and state.extra["seen"] == ("a", 2)
    assert_same_bits(losses, whole_losses)
    assert_same_bits(second.tensors(), whole.tensors())
    assert second.numbers() == expected


class Tied(torch.nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        if tie:
            self.head.weight = self.embedding.weight


def test_tied_weights_are_written_once_stay_tied_and_fit_untied_ones(tmp_path: Path) -> None:
    model, tied, untied = Tied(), Tied(), Tied(tie=False)
    path = save_checkpoint(tmp_path / "tied", model=model)
    for other in (tied, untied):
        load_checkpoint(path, model=other)
        assert torch.equal(other.head.weight, model.head.weight)
        assert torch.equal(other.embedding.weight, model.head.weight)
    assert tied.head.weight is tied.embedding.weight and untied.head.weight is not untied.embedding.weight
    saved = torch.load(path, weights_only=True)["parts"]["model"]
    assert saved["head.weight"].data_ptr() == saved["embedding.weight"].data_ptr()
    other = save_checkpoint(tmp_path / "untied", model=Tied(tie=False))
    with pytest.raises(CheckpointError, match=r"embedding\.weight, head\.weight are one tensor here, and have two"):
        load_checkpoint(other, model=tied)


class WithExtraState(torch.nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}


def test_every_offender_is_named_and_nothing_has_changed(tmp_path: Path) -> None:
    def linear(rows: int, kind: type[torch.nn.Linear] = torch.nn.Linear) -> torch.nn.Module:
        return kind(2, rows, bias=False)

    saved = torch.nn.ModuleDict({"a": linear(2), "b": linear(3), "c": linear(1), "old": linear(1)})
    path = save_checkpoint(tmp_path / "checkpoint", model=saved)
    live = torch.nn.ModuleDict({"a": linear(2).half(), "b": linear(2), "new": linear(1)})
    live["c"] = linear(1, WithExtraState)
    before = [param.detach().clone() for param in live.parameters()]
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, model=live)
    assert set(caught.value.offenders) == {
        "model.a.weight: float32 2x2 in the file, float16 2x2 here",
        "model.b.weight: float32 3x2 in the file, float32 2x2 here",
        "model.c._extra_state: missing in the file, present here",
        "model.new.weight: missing in the file, float32 1x2 here",
        "model.old.weight: float32 1x2 in the file, missing here",
    }
    assert all(line in str(caught.value) for line in caught.value.offenders)
    assert_same_bits(list(live.parameters()), before)


def test_parameters_at_other_places_are_named(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    first, second = (list(part.parameters()) for part in model)
    optimizer = torch.optim.Adam([{"params": first}, {"params": second}])
    folder = save_checkpoint(tmp_path / "checkpoint", model=model, optimizer=optimizer)
    other = torch.optim.Adam([{"params": second}, {"params": first[:1]}, {"params": []}])
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder, model=model, optimizer=other)
    assert caught.value.offenders == (
        "optimizer: 2 groups in the file, 3 here",
        "optimizer.0.bias: group 0, place 1 in the file, missing here",
        "optimizer.0.weight: group 0, place 0 in the file, group 1, place 0 here",
        "optimizer.1.bias: group 1, place 1 in the file, group 0, place 1 here",
        "optimizer.1.weight: group 1, place 0 in the file, group 0, place 0 here",
    )
    with pytest.raises(CheckpointError, match=r"optimizer: torch\.optim\.adam\.Adam in the file, .*SGD here"):
        load_checkpoint(folder, model=model, optimizer=torch.optim.SGD(model.parameters()))


def test_parameters_that_no_module_has_are_refused(tmp_path: Path) -> None:
    """The reverse of LLMs-from-scratch #172: a head that was replaced after the optimizer was built."""
    unet, text_encoder = torch.nn.Linear(2, 2), torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam([*unet.parameters(), *text_encoder.parameters()])
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path / "checkpoint", model=unet, optimizer=optimizer)
    assert len(caught.value.offenders) == 2
    assert "group 0 parameter 2 (3x3) is in no module of `model`" in caught.value.offenders[0]
    assert not (tmp_path / "checkpoint").exists()
    both = {"unet": unet, "text_encoder": text_encoder}
    save_checkpoint(tmp_path / "checkpoint", model=both, optimizer=optimizer)
    load_checkpoint(tmp_path / "checkpoint", model=both, optimizer=optimizer)


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(1, 1)
    assert save_checkpoint("~/run/last.pt", model=model, rng=False) == tmp_path / "run/last.pt"
    load_checkpoint("~/run/last.pt", model=model, rng=False)
    assert import_checkpoint("~/run/last.pt").content["step"] == 0


def test_names_do_not_depend_on_torch_compile(tmp_path: Path) -> None:
    def build() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

    whole, inner, plain = torch.compile(build(), backend="eager"), build(), build()
    inner[0] = torch.compile(inner[0], backend="eager")
    save_checkpoint(tmp_path / "whole", model=whole)
    for number, target in enumerate((plain, inner)):
        load_checkpoint(tmp_path / "whole", model=target)
        assert_same_bits(weights(target), weights(whole))
        save_checkpoint(tmp_path / str(number), model=target, optimizer=torch.optim.SGD(target.parameters()))


def test_a_checkpoint_inside_a_phase_is_refused(tmp_path: Path) -> None:
    run = Run()
    run.ema.store(run.model.parameters())
    run.ema.copy_to(run.model.parameters())
    with pytest.raises(CheckpointError, match="EMA weights are in the model now"):
        run.save(tmp_path / "inside")
    run.ema.restore(run.model.parameters())
    run.save(tmp_path / "outside")
    run.ema.store(run.model.parameters())  # a later restore would undo the load
    with pytest.raises(CheckpointError, match="EMA weights are in the model now"):
        run.load(tmp_path / "outside")


def test_an_averaged_module_is_an_ema_and_scalers_must_both_be_enabled(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    ema, other = AveragedModel(model), AveragedModel(torch.nn.Linear(2, 2))
    ema.update_parameters(model)
    on, off = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    save_checkpoint(tmp_path / "checkpoint", model=model, ema=ema, scaler=on)
    with pytest.raises(CheckpointError, match="scaler: enabled=True in the file"):
        load_checkpoint(tmp_path / "checkpoint", model=model, ema=other, scaler=off)
    load_checkpoint(tmp_path / "checkpoint", model=model, ema=other)
    assert_same_bits(weights(other), weights(ema))


class Migrating(torch.nn.Module):
    """Converts state that its earlier versions saved, as torch's modules do."""

    _version = 2

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([value]))
        self.register_buffer("table", (value * torch.eye(2)).to_sparse())

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *args: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] * 10
        super()._load_from_state_dict(state, prefix, metadata, *args)


def test_a_module_with_versions_and_a_sparse_buffer_comes_back(tmp_path: Path) -> None:
    saved, live = torch.nn.Sequential(Migrating(3.0)), torch.nn.Sequential(Migrating(1.0))
    load_checkpoint(save_checkpoint(tmp_path / "last.pt", model={"net": saved}), model={"net": live})
    assert live[0].weight.item() == 3 and torch.equal(live[0].table.to_dense(), 3 * torch.eye(2))


class Named(torch.Tensor):
    """A subclass whose own data are not its values, like quantised and sharded tensors."""


def partition_of_zero_3() -> torch.nn.Module:
    model = torch.nn.Linear(2, 2)
    model.weight.ds_id = 0
    return model


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"extra": {"x": np.zeros(2)}}, "extra.x: a numpy.ndarray"),
        ({"extra": {"x": torch.zeros(2, device="meta")}}, "extra.x: on meta"),
        ({"extra": {"x": torch.zeros(2).as_subclass(Named)}}, "extra.x: a Named, whose values are not a plain tensor"),
        ({"step": 0.5}, r"step 0\.5: both must be whole numbers"),
        ({"ema": []}, "ema: is a list: give a module, or an EMA with shadow_params"),
        (
            {"model": {"unet": torch.nn.Sequential(torch.nn.Linear(1, 1)), "unet.0": torch.nn.Linear(1, 1)}},
            r"the name unet\.0 clashes with tensor names inside unet",
        ),
        ({"model": partition_of_zero_3()}, r"weight: a partition of DeepSpeed ZeRO-3; save through the engine"),
    ],
)
def test_what_cannot_be_written_is_named(arguments: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=problem):
        save_checkpoint(tmp_path / "checkpoint", **({"model": torch.nn.Linear(1, 1)} | arguments))
    assert os.listdir(tmp_path) == []


def test_extra_values_come_back_as_they_were_and_counters_as_plain_numbers(tmp_path: Path) -> None:
    value = [None, True, -1, 1 << 70, 2.5, "é", (1, [2]), {3: {"a": ()}, (4,): b"5"}, Counter("aab"), {6}]
    model, counters = torch.nn.Linear(1, 1), {"epoch": torch.tensor(2), "step": np.int64(5)}
    numbers = torch.randn(4, dtype=torch.complex64)
    tensors = [
        *(torch.tensor(1.5), torch.zeros(0, 3), torch.arange(12.0).reshape(3, 4).T, torch.arange(10)[3:5]),
        *(torch.zeros(2, 2, dtype=torch.float8_e4m3fn), torch.tensor([True, False])),
        *(torch.tensor([float("nan"), float("inf")]), torch.randn(3, requires_grad=True), torch.zeros(1 << 20)[:0]),
        *(numbers, numbers.conj(), numbers.imag, numbers.conj().imag),  # other views of one memory
    ]
    path = save_checkpoint(
        tmp_path / "c", model=model, rng=False, extra={"plain": value, "tensors": tensors}, **counters
    )
    state = load_checkpoint(path, model=model, rng=False)
    assert state.extra["plain"] == value and repr(state.extra["plain"]) == repr(value)
    assert (state.epoch, state.step) == (2, 5) and type(state.epoch) is type(state.step) is int
    for found, tensor in zip(state.extra["tensors"], tensors, strict=True):
        assert (found.dtype, found.shape, found.requires_grad) == (tensor.dtype, tensor.shape, False)
        there, here = (each.detach().resolve_conj().resolve_neg().contiguous() for each in (found, tensor))
        assert torch.equal(there.reshape(-1).view(torch.uint8), here.reshape(-1).view(torch.uint8))
    assert path.stat().st_size < 100_000, "an empty view takes no space"


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_file_is_replaced_or_as_it_was(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = tmp_path / "run" / "last.pt", torch.nn.Linear(2, 2)
    for step in range(3):
        save_checkpoint(path, model=model, step=step)
        assert load_checkpoint(path, model=model).step == step
        assert os.listdir(path.parent) == ["last.pt"]

    def failing(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    before = path.read_bytes()
    monkeypatch.setattr(durable_files.os, fails, failing)
    with pytest.raises(CheckpointError, match=r"last\.pt: .* bytes cannot be written"):
        save_checkpoint(path, model=model, step=3)
    monkeypatch.undo()
    assert os.listdir(path.parent) == ["last.pt"] and path.read_bytes() == before


KILLED = """
import os, signal, sys, torch, latentcache
model = torch.nn.Linear(500, 500)
torch.save = lambda content, file: (file.write(b"half"), file.flush(), os.kill(os.getpid(), signal.SIGKILL))
latentcache.save_checkpoint(sys.argv[1], model=model, step=2)
"""


def test_a_writer_that_is_killed_leaves_the_earlier_checkpoint_and_the_next_save_sweeps(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    path = save_checkpoint(tmp_path / "last.pt", model=model, step=1)
    (tmp_path / ".others.1234.tmp").write_bytes(b"another program's")
    killed = subprocess.run([sys.executable, "-c", KILLED, path], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 3
    assert load_checkpoint(path, model=model).step == 1
    save_checkpoint(path, model=model, step=3)
    assert sorted(os.listdir(tmp_path)) == [".others.1234.tmp", "last.pt"]


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
def test_damage_is_found_before_anything_is_loaded(
    place: float, bit: int, cut: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A flipped bit is detected, unless no reader reads that byte."""
    saved, other = (torch.nn.Linear(4, 4) for _ in range(2))
    path = save_checkpoint(tmp_path_factory.getbasetemp() / "damaged.pt", model=saved)
    data = bytearray(path.read_bytes())
    offset = int(place * len(data))
    data[offset] ^= 1 << bit
    path.write_bytes(data[:offset] if cut else data)
    before = weights(other)
    try:
        load_checkpoint(path, model=other)
    except CheckpointError:
        assert_same_bits(weights(other), before)
    else:
        assert not cut
        assert_same_bits(weights(other), weights(saved))


# Other programs' files: read without running code from them, or refused with the reason


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def test_the_layouts_of_other_programs_are_known(tmp_path: Path) -> None:
    """VAR #127 (the optimizer is two levels down, with other flags than in the second run), Lightning, a flat model."""
    run, fused = Run(), Run(fused=True, lr=0.5)
    run.train(1)
    states = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    trainer = {"var_wo_ddp": states["model"], "var_opt": {"optimizer": states["optimizer"]}}
    found = import_checkpoint(saved(tmp_path / "ar-ckpt-last.pth", {"epoch": 3, "trainer": trainer}))
    assert (found.epoch, found.step, found.ema, found.model) == (3, None, None, None)
    load_optimizer_state(fused.optimizer, found.content["trainer"]["var_opt"]["optimizer"])
    group = fused.optimizer.param_groups[0]
    assert (group["fused"], group["lr"]) == (True, run.optimizer.param_groups[0]["lr"])
    assert_same_bits(*([each.value for each in state_tensors(one)] for one in (fused.optimizer, run.optimizer)))
    content = {"state_dict": states["model"], "optimizer_states": [states["optimizer"]], "global_step": 40}
    found = import_checkpoint(saved(tmp_path / "last.ckpt", content))
    assert (found.epoch, found.step) == (None, 40)
    assert found.optimizer is not None and found.optimizer["param_groups"][0]["lr"] == group["lr"]
    flat = import_checkpoint(saved(tmp_path / "model.bin", states["model"]))
    for model in (found.model, flat.model):
        assert model is not None and torch.equal(model["0.weight"], run.model[0].weight)
    assert flat.optimizer is None


@pytest.mark.parametrize("new_format", [True, False], ids=["zip", "before torch 1.6"])
def test_a_file_that_needs_code_is_refused_and_does_not_run_it(new_format: bool, tmp_path: Path) -> None:
    torch.save({"x": Trap(tmp_path / "was-run")}, tmp_path / "bad.ckpt", _use_new_zipfile_serialization=new_format)
    with pytest.raises(CheckpointError, match="needs code to be run") as caught:
        import_checkpoint(tmp_path / "bad.ckpt")
    assert not new_format or any("pathlib" in name for name in caught.value.offenders)
    path, model = tmp_path / "last.pt", torch.nn.Linear(1, 1)
    save_checkpoint(path, model=model)
    torch.save({**torch.load(path, weights_only=True), "x": Trap(tmp_path / "was-run")}, path)  # one of ours, forged
    with pytest.raises(CheckpointError, match="needs code to be run"):
        load_checkpoint(path, model=model)
    assert not (tmp_path / "was-run").exists()


def test_names_that_someone_trusts_can_be_allowed(tmp_path: Path) -> None:
    path = saved(tmp_path / "args.pt", {"args": argparse.Namespace(lr=1), "step": 5})
    with pytest.raises(CheckpointError, match=r"(?s)safe_globals.*argparse\.Namespace"):
        import_checkpoint(path)
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert import_checkpoint(path).step == 5


def test_each_file_that_cannot_be_used_is_refused_with_its_reason(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    (tmp_path / "folder").mkdir()
    whole = saved(tmp_path / "foreign.pt", model.state_dict()).read_bytes()
    saved(tmp_path / "alike.pt", {"note": "latentcache checkpoint"})
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.pt").touch()
    loads: dict[str, Callable[[Path], Any]] = {
        "load": partial(load_checkpoint, model=model),
        "import": import_checkpoint,
        "save": partial(save_checkpoint, model=model),
    }
    for how, name, detail in (
        ("load", "folder", "is a folder"),
        ("load", "foreign.pt", "was not written by save_checkpoint; use import_checkpoint"),
        ("load", "alike.pt", "has format None"),
        ("load", "none.pt", "there is no such file"),
        ("import", "cut.pt", "is damaged, or not written by torch"),
        ("import", "empty.pt", "is damaged, or not written by torch"),
        ("import", "none.pt", "cannot be read"),
        ("import", "model.safetensors", "read it with safetensors"),
        ("save", "folder", "cannot be written"),
    ):
        with pytest.raises(CheckpointError, match=detail) as caught:
            loads[how](tmp_path / name)
        assert "weights_only" not in str(caught.value), "no advice to read it without restrictions"
