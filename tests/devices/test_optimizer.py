"""Loading and repairing optimizer state without a second device: dtypes, flags, memory, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from latentcache.devices.optimizer import load_optimizer_state, repair_optimizer, state_tensors
from latentcache.errors import CheckpointError, DeviceError


class LoadsByItself(torch.optim.AdamW):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


def trained(
    dtype: torch.dtype = torch.float32, kind: type[torch.optim.AdamW] = torch.optim.AdamW, **flags: Any
) -> torch.optim.Optimizer:
    model = torch.nn.Linear(3, 2).to(dtype)
    optimizer = kind(model.named_parameters(), **flags)
    model(torch.ones(1, 3, dtype=dtype)).sum().backward()
    optimizer.step()
    return optimizer


def test_state_in_place_stays_the_same_objects() -> None:
    lr = torch.tensor(0.1)
    optimizer = trained(lr=lr, fused=True)
    tensors = [state.value for state in state_tensors(optimizer)]
    assert repair_optimizer(optimizer).moved == ()
    assert all(a is state.value for a, state in zip(tensors, state_tensors(optimizer), strict=True))
    assert optimizer.param_groups[0]["lr"] is lr
    assert {state.param_name for state in state_tensors(optimizer)} == {"weight", "bias"}


@pytest.mark.parametrize(("saved", "built"), [(torch.tensor(0.25), 0.5), (0.25, torch.tensor(0.5))])
def test_a_tensor_lr_stays_the_callers_tensor(saved: Any, built: Any) -> None:
    optimizer = trained(lr=built, foreach=False)
    load_optimizer_state(optimizer, trained(lr=saved, foreach=False).state_dict())
    found = optimizer.param_groups[0]["lr"]
    assert float(found) == 0.25 and type(found) is type(built) and (found is built or isinstance(built, float))


def test_torch_rounds_float32_moments_of_bfloat16_parameters_and_these_do_not() -> None:
    def with_exact_moments() -> torch.optim.Optimizer:
        optimizer = trained(torch.bfloat16)
        for param, state in optimizer.state.items():
            state["exp_avg"] = torch.full_like(param, 1 / 3, dtype=torch.float32)
        return optimizer

    plain = with_exact_moments()
    plain.load_state_dict(plain.state_dict())
    assert {state["exp_avg"].dtype for state in plain.state.values()} == {torch.bfloat16}

    repaired, loaded = with_exact_moments(), trained(torch.bfloat16)
    seen: list[torch.optim.Optimizer] = []
    for each in (repaired, loaded):  # hooks do not change this, and a repair runs none
        each.register_load_state_dict_post_hook(seen.append)
    repair_optimizer(repaired)
    assert not seen
    load_optimizer_state(loaded, repaired.state_dict())
    for optimizer in (repaired, loaded):
        for state in optimizer.state.values():
            assert torch.equal(state["exp_avg"], torch.full_like(state["exp_avg"], 1 / 3))
            assert state["exp_avg"].dtype == torch.float32
            assert state["exp_avg_sq"].dtype == torch.bfloat16


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, LoadsByItself])
def test_what_is_loaded_shares_no_memory_with_its_source(is_fused: bool, kind: type[torch.optim.AdamW]) -> None:
    source, optimizer = (trained(torch.bfloat16, kind, fused=is_fused) for _ in range(2))
    source.param_groups[0]["history"] = [1.0]
    for state in source.state.values():
        state["step"] = state["step"].double()  # as plain optimizers count if float64 is the default dtype
    load_optimizer_state(optimizer, source.state_dict())
    states = [*zip(state_tensors(source), state_tensors(optimizer), strict=True)]
    for a, b in states:
        dtype = torch.float32 if a.key == "step" and is_fused else a.value.dtype  # fused kernels accept no other
        assert b.value.dtype == dtype and torch.equal(a.value, b.value)
    assert {a.value.data_ptr() for a, _ in states}.isdisjoint(b.value.data_ptr() for _, b in states)
    optimizer.param_groups[0]["history"].append(2.0)
    assert source.param_groups[0]["history"] == [1.0]


def test_the_optimizers_own_hooks_see_what_is_loaded() -> None:
    """They may revert what a hook of `state_dict` did."""
    source, optimizer, seen = trained(), trained(), []

    def halved(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, "state": torch.utils._pytree.tree_map(lambda value: value / 2, state_dict["state"])}

    def renamed(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict["param_groups"] = [{**group, "name": "all"} for group in state_dict["param_groups"]]

    optimizer.register_load_state_dict_pre_hook(halved)
    optimizer.register_load_state_dict_pre_hook(renamed)
    optimizer.register_load_state_dict_post_hook(seen.append)
    load_optimizer_state(optimizer, source.state_dict())
    values = zip(state_tensors(source), state_tensors(optimizer), strict=True)
    assert all(torch.equal(a.value / 2, b.value) for a, b in values)
    assert optimizer.param_groups[0]["name"] == "all" and seen == [optimizer]


def test_what_cannot_be_repaired_or_loaded_is_named_and_nothing_has_changed() -> None:
    with pytest.raises(DeviceError, match=r"Linear is not a torch\.optim\.Optimizer"):
        repair_optimizer(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1, device="meta").parameters())
    with pytest.raises(DeviceError, match="2 of 2 optimizer parameters are on meta"):
        repair_optimizer(optimizer)
    optimizer = torch.optim.AdamW(torch.nn.Linear(3, 2, bias=False).parameters(), lr=0.7)
    with pytest.raises(CheckpointError, match=r"has groups of \[2\] parameters, the optimizer has \[1\]"):
        load_optimizer_state(optimizer, trained().state_dict())
    for nothing in (None, {"optimizer": trained().state_dict()}):  # as import_checkpoint may give
        with pytest.raises(CheckpointError, match="has no `state` and `param_groups`"):
            load_optimizer_state(optimizer, nothing)
    assert optimizer.param_groups[0]["lr"] == 0.7 and not optimizer.state
