"""Models that the caller has put under accelerate's offload hooks: their hooks move them, and a run leaves them so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook

from latentcache import LoadedModels, Workspace, run_precache
from latentcache.config import Config
from latentcache.devices.placement import placed
from latentcache.errors import ModelError
from latentcache.models.running import encoders_placed
from latentcache.models.tiny import tiny_parts

ENCODERS = ("text_encoder", "text_encoder_2", "vae")


def test_a_run_leaves_hooked_models_where_they_were(make_config: Callable[..., Config], device: torch.device) -> None:
    """As diffusers' enable_model_cpu_offload has them: the hook of a model brings it to the device when it runs."""
    types = {"encode.vae_dtype": "float32", "encode.text_dtype": "float32", "encode.batch_size": 1}
    config = make_config(**{"encode.device": str(device), **types})

    def stored(parts: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
        workspace = Workspace()
        run_precache(config, models=LoadedModels(**parts), workspace=workspace)
        return {key: dict(workspace.store.get(key).tensors) for key in workspace.store.keys()}

    expected, parts, hook = stored(tiny_parts()), tiny_parts(), None
    for name in ENCODERS:
        _, hook = cpu_offload_with_hook(parts[name], device, prev_module_hook=hook)
    found = stored(parts)
    assert {t.device.type for name in ENCODERS for t in parts[name].parameters()} == {"cpu"}
    assert found.keys() == expected.keys()
    assert all(torch.equal(t, found[key][name]) for key, tensors in expected.items() for name, t in tensors.items())


@torch.no_grad()
def test_sequentially_offloaded_models_run_under_their_hooks_and_a_run_says_what_to_do(
    make_config: Callable[..., Config], device: torch.device
) -> None:
    """As enable_sequential_cpu_offload has them: on meta, until a submodule runs. So nobody can read them for a key."""
    parts = tiny_parts()
    pixels, tokens = torch.zeros(1, 3, 32, 32, device=device), torch.tensor([[1, 2, 3]], device=device)
    expected = [parts["vae"].encode(pixels.cpu())[0].mean, parts["text_encoder"](tokens.cpu())[0]]
    for name in ENCODERS:
        cpu_offload(parts[name], device, offload_buffers=True)
    with placed(parts["vae"], device) as vae, encoders_placed({"text_encoder": parts["text_encoder"]}, device):
        found = [vae.encode(pixels)[0].mean, parts["text_encoder"](tokens)[0]]
    for name in ENCODERS:
        assert {t.device.type for t in parts[name].parameters()} == {"meta"}
    torch.testing.assert_close([each.cpu() for each in found], expected)
    with pytest.raises(ModelError, match=r"offloaded.*Pass the module before offloading is enabled"):
        run_precache(make_config(**{"encode.device": str(device)}), models=LoadedModels(**parts))
