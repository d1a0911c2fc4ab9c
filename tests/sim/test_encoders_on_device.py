"""Encoders on another device: clips of image to video, the dtype of a VAE, models that the caller has under hooks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from diffusers import AutoencoderKL
from helpers.family_runs import family_config, loaded_models
from helpers.tiny_models import save_diffusers_folder, tiny_encoders, wan_2_1_i2v

from latentcache import LatentCache, LoadedModels, Workspace, run_precache
from latentcache.config import Config
from latentcache.devices.placement import placed
from latentcache.errors import ModelError
from latentcache.families import family_named
from latentcache.models.running import encoders_placed
from latentcache.models.tiny import tiny_parts


def test_all_that_a_clip_has_is_made_on_the_device(device: torch.device, tmp_path: Path) -> None:
    family, parts = family_named("wan-i2v"), wan_2_1_i2v()
    seen: set[torch.device] = set()
    for name in ("vae", "image_encoder"):
        module = parts[name].encoder if name == "vae" else parts[name]
        module.register_forward_pre_hook(lambda module, _: seen.add(next(module.parameters()).device))
    caches = []
    for place in ("cpu", str(device)):
        config = family_config(tmp_path, with_clips=True, device=place)
        config = config.model_copy(update={"cache": config.cache.model_copy(update={"path": tmp_path / place[:3]})})
        seen.clear()
        assert run_precache(config, models=loaded_models(family, parts)).num_refused == 0
        assert seen == {torch.device(place)}
        caches.append(LatentCache(config.cache.path))
    for name in ("0.png", "1.png", "2.png"):
        ours, theirs = (cache.batch([name], device="cpu", dtype=torch.float32) for cache in caches)
        for field in ("latents", "condition", "image_embeds"):
            torch.testing.assert_close(ours[field], theirs[field], rtol=0, atol=2e-2)
    for cache in caches:
        cache.close()


@pytest.mark.parametrize(
    ("form", "family", "stated", "expected", "reason"),
    [
        ("folder", "sd15", None, "float16", "has no force_upcast"),  # as Stable Diffusion 1.5 is published
        ("loaded", "sd15", None, "float16", "has no force_upcast"),
        ("folder", "sdxl", True, "float32", "has force_upcast"),  # as SDXL is published
        ("file", "sdxl", False, "float16", "has no force_upcast"),
        ("loaded", "sdxl", None, "float32", "does not say"),
    ],
)
def test_the_dtype_follows_the_file(
    make_config: Callable[..., Config],
    tmp_path: Path,
    device: torch.device,
    form: str,
    family: str,
    stated: bool | None,
    expected: str,
    reason: str,
) -> None:
    folder = save_diffusers_folder(tiny_encoders(family), tmp_path / "model", family)
    file = folder / "vae" / "config.json"
    own = {name: value for name, value in json.loads(file.read_text()).items() if name != "force_upcast"}
    file.write_text(json.dumps(own if stated is None else {**own, "force_upcast": stated}))
    settings: dict[str, Any] = {"encode.device": str(device), "encode.text_dtype": "float32", "model.family": family}
    models = None
    if form == "loaded":
        vae = AutoencoderKL.from_pretrained(folder / "vae").requires_grad_(False)
        models = LoadedModels(family=family_named(family), **{**tiny_encoders(family), "vae": vae})
    elif form == "file":
        settings["model.vae"] = str(folder / "vae" / "diffusion_pytorch_model.safetensors")
    config = make_config(**settings, **{"model.path": str(folder)})
    report = run_precache(config, models=models)
    assert report.num_refused == 0 and reason in report.placement["vae"]
    with LatentCache(config.cache.path) as cache:
        records = [cache.store.record(key) for key in cache.store.keys()]
    assert {each.provenance["computed_dtype"] for each in records if each.kind == "image"} == {expected}


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
