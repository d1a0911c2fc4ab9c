"""The guard next to the kernels: what it refuses torch refuses, what torch takes it takes."""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_module
from helpers.tiny_models import tiny_pipeline

from latentcache.devices.audit import audit
from latentcache.devices.guard import guard
from latentcache.errors import DeviceMismatchError


def test_the_guard_lets_a_whole_pipeline_run(device: torch.device) -> None:
    pipe = tiny_pipeline().to(device)
    with guard(pipe.unet), guard(pipe.text_encoder), guard(pipe.text_encoder_2), guard(pipe.vae.decoder):
        images = pipe("a cat", num_inference_steps=1, height=32, width=32, output_type="pt").images
    assert images.device == device and bool(images.isfinite().all())


def test_a_model_split_over_devices_runs_under_the_guard(device: torch.device) -> None:
    class Split(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(2, 2).to(device), torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).cpu())

    with guard(Split()) as split:
        assert split(torch.zeros(1, 2, device=device)).device.type == "cpu"


def test_a_head_made_after_to_is_named(device: torch.device) -> None:
    """rasbt/LLMs-from-scratch #172."""
    model, x = (
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).to(device),
        torch.zeros(1, 4).to(device),
    )
    model[1] = torch.nn.Linear(4, 2)
    assert {each.name for each in audit({"model": model}, device=device).errors} == {"1.weight", "1.bias"}
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        model(x)
    with guard(model), pytest.raises(DeviceMismatchError) as caught:
        model(x)
    assert (caught.value.module, caught.value.argument) == ("1", "input")
    model.to(device)
    with guard(model):
        assert model(x).device == device


def test_inputs_that_an_offload_hook_moves_pass(device: torch.device) -> None:
    x = torch.zeros(1, 4)
    aligned = cpu_offload(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), execution_device=device)
    with guard(aligned):
        aligned(x)
    remove_hook_from_module(aligned, recurse=True)
    offloaded, hook = cpu_offload_with_hook(torch.nn.Linear(4, 4), execution_device=device)
    with guard(offloaded):
        assert offloaded(x).device == device
        # The weights stay there now, and accelerate no longer moves the inputs.
        with pytest.raises(DeviceMismatchError, match="input"):
            offloaded(x)
        hook.offload()
        assert offloaded(x).device == device
