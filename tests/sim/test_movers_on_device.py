"""Models whose trainer moves their weights: no false alarm while a step works, and what was forgotten is named."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from diffusers.hooks import apply_group_offloading
from helpers.offloading_trainers import Denoiser, conducted, fetched, streamed, swapped

from latentcache import Phases, audit, guard
from latentcache.errors import DeviceError, DeviceMismatchError


def grouped(device: torch.device, *, level: str) -> Denoiser:
    model = Denoiser()
    blocks = {"num_blocks_per_group": 2} if level == "block_level" else {}
    apply_group_offloading(model, onload_device=device, offload_type=level, **blocks)
    return model


MAKERS: dict[str, Callable[[torch.device], Denoiser]] = {
    "musubi": partial(swapped, moves_norms=False),
    "kohya": partial(swapped, moves_norms=True),
    "simpletuner": streamed,
    "ai-toolkit": fetched,
    "onetrainer": conducted,
    "diffusers blocks": partial(grouped, level="block_level"),
    "diffusers leaves": partial(grouped, level="leaf_level"),
}
TRAIN = [name for name in MAKERS if "diffusers" not in name and "onetrainer" not in name]


def inputs(device: torch.device) -> torch.Tensor:
    return torch.linspace(-1, 1, 15, device=device).reshape(5, 3)


@pytest.mark.parametrize("name", MAKERS)
def test_a_model_that_works_has_no_errors_and_passes_the_guard(name: str, device: torch.device) -> None:
    expected = Denoiser()(inputs(torch.device("cpu")))
    model = MAKERS[name](device)
    if name in TRAIN:
        optimizer = torch.optim.SGD(model.inp.parameters(), lr=0.0)
        parts = {"unet": model, "optimizer": optimizer, "batch": inputs(device)}
    else:
        model.requires_grad_(False)
        parts = {"unet": model, "batch": inputs(device)}
    for _ in range(2):
        for report in (audit(parts), audit(parts, device=device)):
            assert not report.findings, report.to_text()
            assert any("moved by" in note for note in report.notes) == ("diffusers" not in name)
        with guard(model):
            found = model(inputs(device))
        torch.testing.assert_close(found.cpu(), expected)
        assert not audit(parts).findings, "between forward and backward"
        if name in TRAIN:
            found.sum().backward()
            optimizer.step()
    state = audit({"unet": model}, device="cpu")
    assert name.startswith("diffusers") or not state.ok, "declared to be parked, and parts of it are on the device"


@pytest.mark.parametrize("name", MAKERS)
def test_what_was_forgotten_beside_them_is_named(name: str, device: torch.device) -> None:
    if "diffusers" in name:
        pytest.skip("its hooks govern every module of this model")
    model = MAKERS[name](device)
    path = "blocks.2.norm" if name == "ai-toolkit" else "inp"
    model.get_submodule(path).to("cpu")
    report = audit({"unet": model}, device=device)
    assert [each.name for each in report.errors] == [f"{path}.weight", f"{path}.bias"]
    with guard(model), pytest.raises(DeviceMismatchError) as caught:
        model(inputs(device))
    assert caught.value.module == path


@pytest.mark.parametrize("name", ["musubi", "kohya"])
def test_a_second_validation_forward_in_training_mode_is_a_real_mismatch(name: str, device: torch.device) -> None:
    model = MAKERS[name](device)
    with torch.no_grad(), guard(model):
        model(inputs(device))
        with pytest.raises(DeviceMismatchError) as caught:
            model(inputs(device))
        assert caught.value.module.startswith("blocks.0.")
        model.around.forward_only = True
        model.around.prepare_block_devices_before_forward()
        for _ in range(3):
            model(inputs(device))


def test_what_moves_itself_in_another_way_can_be_named(device: torch.device) -> None:
    model = Denoiser().to(device)
    model.blocks[4].to("cpu")
    assert len(audit({"unet": model}, device=device).errors) == 7
    report = audit({"unet": model}, device=device, managed=["unet.blocks"])
    assert report.ok and "7 left where they are, moved by what `managed` names" in report.to_text()
    model.inp.to("cpu")
    assert len(audit({"unet": model}, device=device, managed=["unet.blocks"]).errors) == 2
    with pytest.raises(DeviceError, match=r"managed: nothing in the parts is called unet\.block"):
        audit({"unet": model}, managed=["unet.block"])
    with pytest.raises(DeviceError, match="managed: there is no submodule 'block'"), guard(model, managed=["block"]):
        pass


@pytest.mark.parametrize("name", ["musubi", "kohya"])
def test_a_validation_under_block_swap_leaves_training_as_it_was(name: str, device: torch.device) -> None:
    def trained(*, validates: bool) -> list[torch.Tensor]:
        model = MAKERS[name](device)
        optimizer = torch.optim.AdamW(model.inp.parameters(), lr=0.1)
        phases = Phases({"transformer": model, "optimizer": optimizer}, device=device)
        phases.start()
        assert phases.not_moved() == {"transformer": "its weights are moved by BlockSwapper"}
        for _ in range(3):
            model(inputs(device)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if validates:
                with phases.enter("validate"):
                    outputs = [model(inputs(device)) for _ in range(3)]
                    assert all(torch.equal(outputs[0].cpu(), each.cpu()) for each in outputs[1:])
                with pytest.raises(ZeroDivisionError), phases.enter("sample"):
                    model(inputs(device))
                    raise ZeroDivisionError
        return [parameter.detach().cpu() for parameter in model.parameters()]

    for ours, theirs in zip(trained(validates=True), trained(validates=False), strict=True):
        assert torch.equal(ours, theirs)
    model = MAKERS[name](device)
    with torch.no_grad():
        model(inputs(device))
        with pytest.raises((DeviceMismatchError, RuntimeError)), guard(model):  # without a phase
            model(inputs(device))
