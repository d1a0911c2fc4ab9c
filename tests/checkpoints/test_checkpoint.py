"""Checkpoints on the CPU: bit-identical resumption, what is refused, and folders that are whole or not there."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training_run import SCHEDULERS, Run, assert_same_bits
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.swa_utils import AveragedModel

from latentcache.checkpoints import folder as checkpoint_folder
from latentcache.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from latentcache.checkpoints.state_codec import TreeWriter, unpack
from latentcache.errors import CheckpointError


def weights(module: torch.nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for value in module.state_dict().values()]


@pytest.mark.parametrize("flags", [{}, {"fused": True}, {"foreach": True, "amsgrad": True}], ids=str)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_resumes_bit_identically(scheduler: str, flags: dict[str, Any], tmp_path: Path) -> None:
    whole = Run(scheduler=scheduler, **flags)
    whole_losses = whole.train(6)
    expected = whole.numbers()

    first = Run(scheduler=scheduler, **flags)
    losses = first.train(3)
    first.save(tmp_path / "checkpoint", epoch=1, step=3, extra={"best": torch.tensor(0.5), "seen": ("a", 2)})
    second = Run(seed=99, scheduler=scheduler, **flags)
    state = second.load(tmp_path / "checkpoint")
    losses += second.train(3)

    assert (state.epoch, state.step) == (1, 3)
    assert state.extra["seen"] == ("a", 2) and torch.equal(state.extra["best"], torch.tensor(0.5))
    assert_same_bits(losses, whole_losses)
    assert_same_bits(second.tensors(), whole.tensors())
    assert second.numbers() == expected


def test_values_come_from_the_file_and_flags_from_the_caller(tmp_path: Path) -> None:
    first = Run(fused=True, betas=(0.8, 0.9), weight_decay=0.3)
    first.train(1)
    first.save(tmp_path / "checkpoint")
    second = Run(foreach=True, maximize=True)
    second.load(tmp_path / "checkpoint")
    group = second.optimizer.param_groups[0]
    assert (group["betas"], group["weight_decay"]) == ((0.8, 0.9), 0.3)
    assert (group["fused"], group["foreach"], group["maximize"]) == (None, True, True)


@pytest.mark.parametrize("saved_as_tensor", [True, False])
@pytest.mark.parametrize("built_as_tensor", [True, False])
def test_a_tensor_lr_stays_the_callers_tensor(saved_as_tensor: bool, built_as_tensor: bool, tmp_path: Path) -> None:
    first = Run(lr=torch.tensor(0.25) if saved_as_tensor else 0.25, foreach=False)
    first.save(tmp_path / "checkpoint")
    lr = torch.tensor(0.5) if built_as_tensor else 0.5
    second = Run(lr=lr, foreach=False)
    second.load(tmp_path / "checkpoint")
    found = second.optimizer.param_groups[0]["lr"]
    assert float(found) == 0.25 and isinstance(found, torch.Tensor) == built_as_tensor
    assert found is lr or not built_as_tensor


class Tied(torch.nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        if tie:
            self.head.weight = self.embedding.weight


def test_tied_weights_are_written_once_and_stay_tied(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    folder = save_checkpoint(tmp_path / "checkpoint", model=model)
    load_checkpoint(folder, model=other)
    assert other.head.weight is other.embedding.weight
    assert torch.equal(other.head.weight, model.head.weight)
    [file] = folder.glob("model-*.safetensors")
    assert file.stat().st_size < 2 * model.head.weight.nbytes + 200


def test_tied_and_untied_do_not_fit_each_other(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "tied", model=Tied())
    save_checkpoint(tmp_path / "untied", model=Tied(tie=False))
    with pytest.raises(CheckpointError, match=r"embedding\.weight, head\.weight are one tensor in the file"):
        load_checkpoint(tmp_path / "tied", model=Tied(tie=False))
    with pytest.raises(CheckpointError, match=r"embedding\.weight, head\.weight are one tensor here"):
        load_checkpoint(tmp_path / "untied", model=Tied())


def test_every_offender_is_named_and_nothing_has_changed(tmp_path: Path) -> None:
    names = torch.nn.ModuleDict
    saved = names({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 3), "old": torch.nn.Linear(1, 1)})
    folder = save_checkpoint(tmp_path / "checkpoint", model=saved)
    live = names({"a": torch.nn.Linear(2, 2).half(), "b": torch.nn.Linear(2, 2), "new": torch.nn.Linear(1, 1)})
    before = weights(live)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder, model=live)
    assert set(caught.value.offenders) == {
        "model.a.bias: float32 2 in the file, float16 2 here",
        "model.a.weight: float32 2x2 in the file, float16 2x2 here",
        "model.b.bias: float32 3 in the file, float32 2 here",
        "model.b.weight: float32 3x2 in the file, float32 2x2 here",
        "model.new.bias: missing in the file",
        "model.new.weight: missing in the file",
        "model.old.bias: only in the file",
        "model.old.weight: only in the file",
    }
    assert all(line in str(caught.value) for line in caught.value.offenders)
    assert_same_bits(weights(live), before)


def test_optimizer_parameters_go_by_name_not_by_place(tmp_path: Path) -> None:
    def build(reverse: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        params = list(model.parameters())
        return model, torch.optim.Adam(params[::-1] if reverse else params)

    model, optimizer = build(reverse=False)
    model(torch.randn(3, 2)).square().sum().backward()
    optimizer.step()
    folder = save_checkpoint(tmp_path / "checkpoint", model=model, optimizer=optimizer)
    other, reversed_optimizer = build(reverse=True)
    load_checkpoint(folder, model=other, optimizer=reversed_optimizer)
    for param, twin in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[param]["exp_avg"], reversed_optimizer.state[twin]["exp_avg"])


def test_parameters_in_other_groups_are_named(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    first, second = (list(part.parameters()) for part in model)
    optimizer = torch.optim.Adam([{"params": first}, {"params": second}])
    folder = save_checkpoint(tmp_path / "checkpoint", model=model, optimizer=optimizer)
    other = torch.optim.Adam([{"params": second}, {"params": first[:1]}])
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder, model=model, optimizer=other)
    assert caught.value.offenders == (
        "optimizer.0.bias: only in the file",
        "optimizer.0.weight: group 0 in the file, group 1 here",
        "optimizer.1.bias: group 1 in the file, group 0 here",
        "optimizer.1.weight: group 1 in the file, group 0 here",
    )
    with pytest.raises(CheckpointError, match=r"optimizer: saved from torch.optim.adam.Adam, here is .*SGD"):
        load_checkpoint(folder, model=model, optimizer=torch.optim.SGD(model.parameters()))


def test_parameters_that_no_module_has_are_refused(tmp_path: Path) -> None:
    """LLMs-from-scratch #172 the other way round: a head replaced after the optimizer was built."""
    unet, text_encoder = torch.nn.Linear(2, 2), torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam([*unet.parameters(), *text_encoder.parameters()])
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path / "checkpoint", model=unet, optimizer=optimizer)
    assert caught.value.offenders == ("group 0 parameter 2 (3x3)", "group 0 parameter 3 (3)")
    assert not (tmp_path / "checkpoint").exists()
    both = {"unet": unet, "text_encoder": text_encoder}
    save_checkpoint(tmp_path / "checkpoint", model=both, optimizer=optimizer)
    load_checkpoint(tmp_path / "checkpoint", model=both, optimizer=optimizer)


def test_names_do_not_depend_on_torch_compile(tmp_path: Path) -> None:
    def build() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

    whole, inner, plain = torch.compile(build(), backend="eager"), build(), build()
    inner[0] = torch.compile(inner[0], backend="eager")
    assert any("_orig_mod." in key for key in inner.state_dict())
    save_checkpoint(tmp_path / "whole", model=whole)
    for number, target in enumerate((plain, inner)):
        load_checkpoint(tmp_path / "whole", model=target)
        assert_same_bits(weights(target), weights(whole))
        save_checkpoint(tmp_path / str(number), model=target, optimizer=torch.optim.SGD(target.parameters()))


def test_an_averaged_module_is_an_ema_too(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    ema, other = AveragedModel(model), AveragedModel(torch.nn.Linear(2, 2))
    ema.update_parameters(model)
    save_checkpoint(tmp_path / "checkpoint", model=model, ema=ema)
    load_checkpoint(tmp_path / "checkpoint", model=model, ema=other)
    assert_same_bits(weights(other), weights(ema))


def test_a_checkpoint_inside_a_phase_is_refused(tmp_path: Path) -> None:
    run = Run()
    run.ema.store(run.model.parameters())
    run.ema.copy_to(run.model.parameters())
    with pytest.raises(CheckpointError, match="EMA weights are in the model now"):
        run.save(tmp_path / "checkpoint")
    run.ema.restore(run.model.parameters())
    run.save(tmp_path / "checkpoint")


def test_an_ema_of_other_shapes_is_refused(tmp_path: Path) -> None:
    run, other = Run(), Run()
    run.save(tmp_path / "checkpoint")
    other.ema.shadow_params[0] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=r"ema\.shadow_params\.0: float32 16x4 in the file, float32 1 here"):
        other.load(tmp_path / "checkpoint")


def test_a_scaler_that_is_off_does_not_fit_one_that_is_on(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    on, off = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    save_checkpoint(tmp_path / "checkpoint", model=model, scaler=on)
    with pytest.raises(CheckpointError, match="scaler: enabled=True in the file"):
        load_checkpoint(tmp_path / "checkpoint", model=model, scaler=off)


def test_a_part_that_is_not_in_the_file(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    save_checkpoint(tmp_path / "checkpoint", model=model, rng=False)
    with pytest.raises(CheckpointError, match="has no optimizer, rng, it has extra, model"):
        load_checkpoint(tmp_path / "checkpoint", model=model, optimizer=torch.optim.SGD(model.parameters()))
    load_checkpoint(tmp_path / "checkpoint", model=model, rng=False)


def test_random_streams_that_are_not_here_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    model = torch.nn.Linear(1, 1)
    folder = save_checkpoint(tmp_path / "checkpoint", model=model)
    document = json.loads((folder / "checkpoint.json").read_bytes())
    document["parts"]["rng"]["accelerator"] = {"type": "cuda", "states": []}
    rewrite(folder, document)
    with caplog.at_level(logging.WARNING, "latentcache"):
        load_checkpoint(folder, model=model)
    assert "saved with cuda, here is no accelerator" in caplog.text


def rewrite(folder: Path, document: dict[str, Any]) -> None:
    """As an attacker would: with digests that fit."""
    del document["digest"]
    data = checkpoint_folder._sealed_bytes(document)
    (folder / "checkpoint.json").write_bytes(data)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (lambda: 1, "extra.x: a builtins.function"),
        (Path("."), "extra.x: a pathlib.PosixPath"),
        (torch.zeros(2, device="meta"), "extra.x: on meta"),
        (torch.zeros(2, dtype=torch.complex64), "extra.x: dtype torch.complex64"),
        (torch.zeros(2, 2).to_sparse(), "extra.x: layout torch.sparse_coo"),
    ],
    ids=["function", "path", "meta", "complex", "sparse"],
)
def test_what_cannot_be_written_is_named(value: object, problem: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=problem):
        save_checkpoint(tmp_path / "checkpoint", model=torch.nn.Linear(1, 1), extra={"x": value})
    assert os.listdir(tmp_path) == []


def test_partitions_of_zero_3_are_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    model.weight.ds_id = 0
    with pytest.raises(CheckpointError, match=r"weight: a partition of DeepSpeed ZeRO-3; save through the engine"):
        save_checkpoint(tmp_path / "checkpoint", model=model)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=4) | st.integers() | st.tuples(st.integers()), inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), st.integers(), max_size=3).map(Counter)
        | st.sets(st.integers(), max_size=1)  # more have no order that repr keeps
    ),
    max_leaves=12,
)


@given(PLAIN)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    writer = TreeWriter("extra")
    tree = json.loads(json.dumps(writer.pack(value), allow_nan=False))
    assert writer.offenders == []
    found = unpack(tree, writer.tensors)
    assert found == value and repr(found) == repr(value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.zeros(0, 3),
        torch.arange(12.0).reshape(3, 4).T,
        torch.arange(10)[3:5],
        torch.zeros(2, 2, dtype=torch.float8_e4m3fn),
        torch.tensor([True, False]),
        torch.tensor([float("nan"), float("inf")]),
        torch.randn(3, requires_grad=True),
    ],
    ids=["scalar", "empty", "transposed", "view", "fp8", "bool", "nan", "requires-grad"],
)
def test_tensors_come_back_bit_by_bit_in_memory_of_their_own(tensor: torch.Tensor, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "c", model=torch.nn.Linear(1, 1), extra=[tensor, tensor.detach().reshape(-1)])
    found, flat = load_checkpoint(folder, model=torch.nn.Linear(1, 1)).extra
    assert (found.dtype, found.shape, found.requires_grad) == (tensor.dtype, tensor.shape, False)
    expected = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    assert torch.equal(found.reshape(-1).view(torch.uint8), expected)
    assert torch.equal(flat.view(torch.uint8), expected)
    assert found.untyped_storage().nbytes() == found.nbytes


def test_replacing_leaves_one_checkpoint_and_no_other_file(tmp_path: Path) -> None:
    folder, model = tmp_path / "last", torch.nn.Linear(2, 2)
    (tmp_path / "last").mkdir()  # an empty folder is no obstacle
    for step in range(3):
        save_checkpoint(folder, model=model, step=step)
        assert load_checkpoint(folder, model=model).step == step
        assert {name.split("-")[0] for name in os.listdir(folder)} == {"checkpoint.json", "model", "rng"}
        assert len(os.listdir(folder)) == 3
    assert os.listdir(tmp_path) == ["last"]
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {(folder.stat().st_mode & 0o666)}


@pytest.mark.parametrize("exists", [True, False], ids=["replacing", "new"])
@pytest.mark.parametrize("fails", ["save_file", "write_sealed", "file_digest"])
@pytest.mark.parametrize("call", [1, 2])
def test_a_save_that_fails_leaves_what_was_there(
    exists: bool, fails: str, call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = tmp_path / "last", torch.nn.Linear(2, 2)
    if exists:
        save_checkpoint(folder, model=model, step=1)
    expected = weights(model)
    before = sorted(tmp_path.rglob("*"))
    real, num_calls = getattr(checkpoint_folder, fails), 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == call or fails == "write_sealed":
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(checkpoint_folder, fails, failing)
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save_checkpoint(folder, model=model, step=2)
    monkeypatch.undo()
    assert sorted(tmp_path.rglob("*")) == before
    if exists:
        other = torch.nn.Linear(2, 2)
        assert load_checkpoint(folder, model=other).step == 1
        assert_same_bits(weights(other), expected)


def test_what_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    for name in ("file", "folder/photo.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    for name, problem in (("file", "is a file"), ("folder", "holds files but no"), ("link", "is a link")):
        with pytest.raises(CheckpointError, match=problem):
            save_checkpoint(tmp_path / name, model=model)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load_checkpoint(tmp_path / "folder", model=model)
    assert (tmp_path / "folder/photo.png").read_text() == "mine"


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    dead, alive = (tmp_path / f".step.{name}.tmp" for name in ("dead", "alive"))
    dead.mkdir()
    (dead / "model.safetensors").write_bytes(b"half")
    alive.mkdir()
    fd = os.open(alive, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    save_checkpoint(tmp_path / "step", model=model)
    assert sorted(os.listdir(tmp_path)) == [".step.alive.tmp", "step"]
    os.close(fd)


def test_two_writers_of_one_folder_are_distinguished(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "step", model=torch.nn.Linear(1, 1))
    fd = os.open(folder, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(CheckpointError, match="another process is writing it"):
        save_checkpoint(folder, model=torch.nn.Linear(1, 1))
    os.close(fd)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
@pytest.mark.parametrize("part", ["model", "optimizer", "ema", "rng", "checkpoint.json"])
def test_damage_is_found_before_anything_is_loaded(damage: str, part: str, tmp_path: Path) -> None:
    run, other = Run(), Run(seed=4)
    run.train(1)
    other.train(1)
    folder = run.save(tmp_path / "checkpoint")
    [path] = folder.glob(f"{part}*")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(data if damage == "flip" else data[:-7])
    before = other.tensors()
    with pytest.raises(CheckpointError, match=r"is damaged|cannot be read|is gone|holds no checkpoint"):
        other.load(folder)
    assert_same_bits(other.tensors(), before)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d["files"]["model"].update(name="../model.safetensors"), "names the file '../model.safetensors'"),
        (lambda d: d["parts"].update(extra={"$tensor": "nothing"}), "extra is not what latentcache writes"),
        (lambda d: d["parts"].update(extra={"$eval": "1"}), "extra is not what latentcache writes"),
        (lambda d: d["parts"].update(extra={"$dtype": "load"}), "extra is not what latentcache writes"),
    ],
    ids=["traversal", "no tensor", "no tag", "no dtype"],
)
def test_a_forged_document_is_refused(change: Any, problem: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "checkpoint", model=torch.nn.Linear(1, 1))
    document = json.loads((folder / "checkpoint.json").read_bytes())
    change(document)
    rewrite(folder, document)
    with pytest.raises(CheckpointError, match=problem):
        load_checkpoint(folder, model=torch.nn.Linear(1, 1))


def test_another_format_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.json").write_text('{"format": 2}')
    with pytest.raises(CheckpointError, match="has format 2, this latentcache reads 1"):
        load_checkpoint(tmp_path, model=torch.nn.Linear(1, 1))
