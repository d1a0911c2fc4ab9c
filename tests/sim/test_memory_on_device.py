"""What a device's memory allows: the batches of the VAE, and text encoders layer by layer, with the same bits."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.photo_files import write_photo
from helpers.tiny_models import tiny_encoders

from latentcache.config import Config
from latentcache.devices import placement
from latentcache.devices.placement import device_of
from latentcache.families import family_named
from latentcache.families.base import inference
from latentcache.models.model_loader import LoadedModels
from latentcache.models.running import WEIGHTS_SHARE, encoders_placed, weight_bytes
from latentcache.models.tiny import tiny_parts
from latentcache.precache.report import Report
from latentcache.precache.run import run_precache
from latentcache.precache.workspace import Workspace
from latentcache.service.miss_encoder import MissEncoder

IMAGE_BYTES = 1024 * 1024 * 5 * 128 * 4
"""What an image of 1024x1024 is taken to need in float32."""
ENOUGH = 1 << 40

SetFree = Callable[..., None]


@pytest.fixture
def set_free(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> SetFree:
    """Sets how many bytes the device reports as free, and how many torch's allocator has and does not use."""

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
        ({"buckets": {}}, 0.1, 3.5, 3),  # what torch has and does not use is free
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
    """The size counts that the images have: each rule names it otherwise, and control images have one of their own."""
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
    """cuDNN before 9.3 ends the run with an error that says nothing of memory. Here the limit is that of 3 photos."""
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
    """A retry needs the encoders in float32: twice the memory. The run goes on without it."""
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


# Text encoders that are larger than the free memory


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
        with encoders_placed(encoders, device) as inner:  # as a stage does inside of what a service has placed
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
        # Module.to gives buffers new objects, and its parameters new memory.
        own = {each: t for each, t in before[part].items() if part == largest or isinstance(t, torch.nn.Parameter)}
        assert all(after[each] is tensor for each, tensor in own.items()), part
        assert "to" not in vars(encoder) and not hasattr(encoder, "hf_device_map")


def test_a_services_encoders_stay_until_others_need_the_room_or_they_are_idle(
    make_config: Callable[..., Config], photos: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the VAE they would run layer by layer, and each prompt would take longer until the models are idle."""
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
