"""Encoders on another device: image-to-video clips, the dtype of a VAE, and models under offload hooks."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from diffusers import AutoencoderKL
from helpers.family_runs import family_config, loaded_models
from helpers.photo_files import write_photo
from helpers.tiny_models import save_diffusers_folder, tiny_encoders, wan_2_1_i2v

from latentcache import LatentCache, LoadedModels, Workspace, run_precache
from latentcache.config import Config
from latentcache.devices import placement
from latentcache.devices.placement import device_of, placed
from latentcache.errors import ModelError
from latentcache.families import family_named
from latentcache.families.base import inference
from latentcache.models.running import WEIGHTS_SHARE, encoders_placed, weight_bytes
from latentcache.models.tiny import tiny_parts
from latentcache.precache.report import Report
from latentcache.service.miss_encoder import MissEncoder

IMAGE_BYTES = 1024 * 1024 * 5 * 128 * 4
"""Estimated need of an image of 1024x1024 in float32."""
ENOUGH = 1 << 40

SetFree = Callable[..., None]


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
        ("folder", "sd15", None, "float16", "has no force_upcast"),  # like the published Stable Diffusion 1.5
        ("loaded", "sd15", None, "float16", "has no force_upcast"),
        ("folder", "sdxl", True, "float32", "has force_upcast"),  # like the published SDXL
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
    """With the hooks of diffusers' enable_model_cpu_offload, which move a model to the device when it runs."""
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
    """With enable_sequential_cpu_offload weights are on meta until a submodule runs, so no key can be computed."""
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
    with pytest.raises(ModelError, match=r"offloaded.*Pass the module before enabling offloading"):
        run_precache(make_config(**{"encode.device": str(device)}), models=LoadedModels(**parts))


# The free memory decides how many images a batch has


@pytest.fixture
def set_free(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> SetFree:
    """Sets how many bytes the device reports as free, and how many torch's allocator holds unused."""

    def set_free(num_bytes: float, cached: float = 0) -> None:
        module = torch.get_device_module(device)
        monkeypatch.setattr(module, "mem_get_info", lambda device=None: (int(num_bytes), ENOUGH))
        monkeypatch.setattr(module, "memory_reserved", lambda device=None: int(cached) + (1 << 20), raising=False)
        monkeypatch.setattr(module, "memory_allocated", lambda device=None: 1 << 20, raising=False)

    return set_free


def batch_size(report: Report) -> int:
    found = re.search(r"(\d+) images?: ", report.placement["vae"])
    assert found, report.placement["vae"]
    return int(found[1])


@pytest.mark.parametrize(
    ("settings", "free", "cached", "expected"),
    [
        ({"buckets": {}}, 6.9, 0, 6),
        ({"buckets": {}}, 0.1, 3.5, 3),  # memory that torch holds unused is free
        ({"buckets": {"rule": "kohya", "resolution": 2048, "max_side": 2048, "square": True}}, 6.9, 0, 1),
        ({"buckets": {"rule": "onetrainer", "resolution": 512, "square": True}}, 6.9, 0, 16),
        ({"buckets": {"rule": "diffusers", "sizes": [[2048, 1024]]}}, 6.9, 0, 3),
        ({"buckets": {"area": 64 * 64}, "control": {"area": 2048 * 2048}}, 6.9, 0, 1),
    ],
)
def test_a_batch_of_the_vae_has_as_many_images_as_fit(
    make_config: Callable[..., Config],
    photos: Path,
    device: torch.device,
    set_free: SetFree,
    settings: dict[str, Any],
    free: float,
    cached: float,
    expected: int,
) -> None:
    """The images' actual size counts. Each bucket rule has its own setting for it, and so have control images."""
    write_photo(photos / "square.png", 9, (64, 64))
    if "control" in settings:
        others = shutil.copytree(photos, photos / "../other")
        settings = {**settings, "control": {**settings["control"], "path": others}}
    set_free(free * IMAGE_BYTES / 0.8, cached * IMAGE_BYTES / 0.8)
    changes = {f"datasets.0.{name}": value for name, value in settings.items()}
    report = run_precache(make_config(**{"encode.device": str(device), **changes}), dry_run=True)
    assert batch_size(report) == expected


def test_no_batch_of_the_vae_has_a_tensor_of_two_billion_elements(
    make_config: Callable[..., Config], tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN before 9.3 fails on one with an error that does not mention memory. Here the limit is 3 photos."""
    assert placement.MAX_ELEMENTS == 2**31 - 1
    monkeypatch.setattr(placement, "MAX_ELEMENTS", 3 * 128 * 64 * 64)
    for number in range(4):
        write_photo(tmp_path / "square" / f"{number}.png", number, (64, 64))
    parts, sizes = tiny_parts(), list[int]()
    parts["vae"].encoder.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    dataset = {"source": {"kind": "folder", "path": tmp_path / "square"}, "buckets": {"area": 64 * 64}}
    types = {"encode.device": str(device), "encode.batch_size": 4, "encode.text_dtype": "float32"}
    config = make_config(**types, **{f"datasets.0.{name}": value for name, value in dataset.items()})
    report = run_precache(config, models=LoadedModels(**parts), workspace=Workspace())
    assert report.num_refused == 0 and batch_size(report) == 3 and sorted(sizes) == [1, 3]


def test_a_text_is_refused_where_float32_does_not_fit(
    make_config: Callable[..., Config], device: torch.device, set_free: SetFree
) -> None:
    """A retry in float32 needs twice the memory. The run continues without the text."""
    parts = tiny_parts()
    set_free(ENOUGH)

    def overflow(module: torch.nn.Module, given: Any, made: torch.Tensor) -> torch.Tensor:
        set_free(1000)
        return made * torch.nan

    [embeddings] = (each for name, each in parts["text_encoder_2"].named_modules() if name.endswith("embeddings"))
    embeddings.register_forward_hook(overflow)
    config = make_config(**{"encode.device": str(device), "encode.text_dtype": "bfloat16", "encode.batch_size": 1})
    report = run_precache(config, models=LoadedModels(**parts), workspace=Workspace())
    assert report.num_encoded == 5 and {refusal.reason for refusal in report.refused} == {"out-of-memory"}
    assert all("not even layer by layer" in refusal.detail for refusal in report.refused)


# Text encoders larger than the free memory, which run layer by layer


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)))


@pytest.mark.parametrize("name", ["sdxl", "flux", "qwen-image", "wan"])
def test_layer_by_layer_gives_the_same_bits(name: str, device: torch.device, set_free: SetFree) -> None:
    family, parts = family_named(name), tiny_encoders(name)
    encoders = {part: parts[part] for part in family.names("text_encoder")}
    recipe, texts = family.text_recipe(), family.tokenize(parts, ["a red cat on the table", "cats", ""])

    def encoded() -> dict[str, torch.Tensor]:
        with inference(device):
            return {field: tensor.cpu() for field, tensor in family.encode_text(parts, texts, recipe).items()}

    set_free(ENOUGH)
    with encoders_placed(encoders, device) as notes:
        assert notes == {}
        whole = encoded()
    before = {part: tensors_of(encoder) for part, encoder in encoders.items()}
    largest = max(encoders, key=lambda part: weight_bytes(encoders[part]))
    encoders[largest].train()
    set_free(0.9 * weight_bytes(encoders[largest]) / WEIGHTS_SHARE)
    with encoders_placed(encoders, device) as notes:
        assert "layer by layer" in notes[largest] and "are free" in notes[largest]
        assert {tensor.device.type for tensor in encoders[largest].parameters()} == {device.type, "meta"}
        assert not encoders[largest].training
        pieces = encoded()
        with encoders_placed(encoders, device) as inner:  # as a stage does with encoders that a service has placed
            assert inner == {}
        assert {tensor.device.type for tensor in encoders[largest].parameters()} == {device.type, "meta"}
        again = encoded()
    assert whole.keys() == pieces.keys()
    for field, tensor in whole.items():
        assert torch.equal(tensor, pieces[field]) and torch.equal(tensor, again[field]), field
    assert encoders[largest].training
    for part, encoder in encoders.items():
        assert device_of(encoder).type == "cpu"
        after = tensors_of(encoder)
        # Module.to replaces buffer objects, and gives parameters new memory.
        own = {each: t for each, t in before[part].items() if part == largest or isinstance(t, torch.nn.Parameter)}
        assert all(after[each] is tensor for each, tensor in own.items()), part
        assert "to" not in vars(encoder) and not hasattr(encoder, "hf_device_map")


def test_a_services_encoders_stay_until_others_need_the_room_or_they_are_idle(
    make_config: Callable[..., Config], photos: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Next to the VAE they would run layer by layer, and each prompt would take longer until the models are idle."""
    config, parts = make_config(**{"encode.device": str(device), "encode.text_dtype": "float32"}), tiny_parts()
    precached, ours, moves = Workspace(), Workspace(), []
    run_precache(config, models=LoadedModels(**parts), workspace=precached)
    beside_the_vae = int(0.9 * weight_bytes(parts["text_encoder_2"]) / WEIGHTS_SHARE)

    def free(_: object = None) -> tuple[int, int]:
        return (ENOUGH if device_of(parts["vae"]).type == "cpu" else beside_the_vae), ENOUGH

    def note_moves(module: torch.nn.Module, name: str) -> None:
        to = module.to

        def noting(*where: Any) -> torch.nn.Module:
            before = device_of(module)
            to(*where)
            if device_of(module) != before:
                moves.append((name, device_of(module).type))
            return module

        module.to = noting

    for name in ("vae", "text_encoder", "text_encoder_2"):
        note_moves(parts[name], name)
    monkeypatch.setattr(torch.get_device_module(device), "mem_get_info", free)
    texts, away = [("text_encoder", device.type), ("text_encoder_2", device.type)], [("vae", "cpu")]
    with MissEncoder(config, ours, models=LoadedModels(**parts), idle_s=1.0) as encoder:
        [(_, image)] = encoder.image((photos / "a.png").read_bytes())
        for task in (image, encoder.prompt("a red house"), encoder.prompt("a blue car")):
            [future] = encoder.submit([task]).values()
            future.result(60)
        assert moves == [("vae", device.type), *away, *texts]
        assert encoder.loaded == "text" and not hasattr(parts["text_encoder_2"], "hf_device_map")
        until = time.monotonic() + 60
        while encoder.loaded and time.monotonic() < until:
            time.sleep(0.05)
        assert sorted(moves[4:]) == [("text_encoder", "cpu"), ("text_encoder_2", "cpu")]
    assert len(list(ours.store.keys())) == 3
    for key in ours.store.keys():
        for name, tensor in ours.store.get(key).tensors.items():
            torch.testing.assert_close(tensor, precached.store.get(key).tensors[name], rtol=1e-4, atol=1e-4)
