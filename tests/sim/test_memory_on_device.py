"""What a device's memory allows: the batches of the VAE, and text encoders layer by layer, with the same bits."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.photo_files import write_photo
from helpers.tiny_models import tiny_encoders

from latentcache.config import Config
from latentcache.devices.placement import device_of
from latentcache.families import FAMILIES, family_named
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

SetFree = Callable[..., None]
TEXTS = ["a red cat on the table", "cats", ""]


@pytest.fixture
def set_free(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> SetFree:
    """Sets how many bytes the device reports as free, and how many torch's allocator has and does not use."""

    def set_free(num_bytes: float, cached: int = 0) -> None:
        module = torch.get_device_module(device)
        monkeypatch.setattr(module, "mem_get_info", lambda device=None: (int(num_bytes), 1 << 40))
        monkeypatch.setattr(module, "memory_reserved", lambda device=None: cached + (1 << 20), raising=False)
        monkeypatch.setattr(module, "memory_allocated", lambda device=None: 1 << 20)

    return set_free


def batch_size(report: Report) -> int:
    found = re.search(r"(\d+) images?: ", report.placement["vae"])
    assert found, report.placement["vae"]
    return int(found[1])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"buckets": {}}, 6),
        ({"buckets": {"rule": "kohya", "resolution": 2048, "max_side": 2048, "square": True}}, 1),
        ({"buckets": {"rule": "onetrainer", "resolution": 512, "square": True}}, 16),
        ({"buckets": {"rule": "diffusers", "sizes": [[2048, 1024]]}}, 3),
        ({"buckets": {"area": 64 * 64}, "control": {"area": 2048 * 2048}}, 1),
    ],
)
def test_a_batch_of_the_vae_has_as_many_images_as_fit(
    make_config: Callable[..., Config],
    photos: Path,
    device: torch.device,
    set_free: SetFree,
    settings: dict[str, Any],
    expected: int,
) -> None:
    """The size counts that the images have: each rule names it otherwise, and control images have one of their own."""
    write_photo(photos / "square.png", 9, (64, 64))
    if "control" in settings:
        settings = {
            **settings,
            "control": {**settings["control"], "path": shutil.copytree(photos, photos / "../other")},
        }
    set_free(6.9 * IMAGE_BYTES / 0.8)
    changes = {f"datasets.0.{name}": value for name, value in settings.items()}
    report = run_precache(make_config(**{"encode.device": str(device), **changes}), dry_run=True)
    assert batch_size(report) == expected


def test_memory_that_torch_has_and_does_not_use_is_free(
    make_config: Callable[..., Config], photos: Path, tmp_path: Path, device: torch.device, set_free: SetFree
) -> None:
    write_photo(photos / "square.png", 9, (64, 64))
    set_free(1000, cached=int(3.5 * IMAGE_BYTES / 0.8))
    config = make_config(**{"encode.device": str(device), "datasets.0.buckets": {}})
    assert batch_size(run_precache(config, dry_run=True)) == 3


def test_no_batch_of_the_vae_has_a_tensor_of_two_billion_elements(
    make_config: Callable[..., Config], tmp_path: Path, device: torch.device, set_free: SetFree
) -> None:
    """cuDNN before 9.3 ends the run with an error that says nothing of memory."""
    for number in range(4):
        write_photo(tmp_path / "large" / f"{number}.png", number, (64, 64))
    set_free(1 << 40)
    parts, sizes = tiny_parts(), []

    def quickly(images: torch.Tensor) -> torch.Tensor:
        sizes.append(len(images))
        return torch.nn.functional.avg_pool2d(images[:, :1], 8).expand(-1, 8, -1, -1)

    parts["vae"].encoder.forward = quickly
    config = make_config(
        **{
            "encode.device": str(device),
            "encode.batch_size": 4,
            "encode.text_dtype": "float32",
            "datasets.0.source": {"kind": "folder", "path": tmp_path / "large"},
            "datasets.0.buckets": {"rule": "kohya", "resolution": 2048, "square": True},
        }
    )
    report = run_precache(config, models=LoadedModels(**parts), workspace=Workspace())
    assert report.num_refused == 0 and sum(sizes) == 4
    assert max(sizes) == 3 and max(sizes) * 128 * 2048 * 2048 < 2**31
    assert batch_size(report) == 3
    sizes.clear()
    with MissEncoder(config, Workspace(), models=LoadedModels(**parts)) as encoder:
        tasks = [encoder.image(path.read_bytes())[0][1] for path in sorted((tmp_path / "large").iterdir())]
        for future in encoder.submit(tasks).values():
            future.result(120)
    assert sum(sizes) == 4 and max(sizes) <= 3


def test_a_text_is_refused_where_float32_does_not_fit(
    make_config: Callable[..., Config], device: torch.device, set_free: SetFree
) -> None:
    """A retry needs the encoders in float32: twice the memory. The run goes on without it."""
    parts = tiny_parts()
    set_free(1 << 40)

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


def one_of_each_encoder() -> list[str]:
    """Families that have all classes of text encoders, those with several first."""
    chosen: list[str] = []
    seen: set[str] = set()
    for family in sorted(map(family_named, FAMILIES), key=lambda family: -len(family.names("text_encoder"))):
        classes = {family.parts[part].class_name for part in family.names("text_encoder")}
        chosen += [] if classes <= seen else [family.name]
        seen |= classes
    return chosen


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)))


@pytest.mark.parametrize("name", one_of_each_encoder())
def test_layer_by_layer_gives_the_same_bits(name: str, device: torch.device, set_free: SetFree) -> None:
    family = family_named(name)
    parts = tiny_encoders(name)
    encoders = {part: parts[part] for part in family.names("text_encoder")}
    recipe = family.text_recipe()
    texts = family.tokenize(parts, TEXTS)

    def encoded() -> dict[str, torch.Tensor]:
        with inference(device):
            return {field: tensor.cpu() for field, tensor in family.encode_text(parts, texts, recipe).items()}

    set_free(1 << 40)
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
        again = encoded()
        with encoders_placed(encoders, device) as inner:  # as a stage does inside of what a service has placed
            assert inner == {}
        assert {tensor.device.type for tensor in encoders[largest].parameters()} == {device.type, "meta"}
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


def test_a_service_makes_room_for_text_encoders_that_fit_alone(
    make_config: Callable[..., Config], photos: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer by layer each prompt takes longer, and so it would stay until the models are idle."""
    config, parts = make_config(**{"encode.device": str(device), "encode.text_dtype": "float32"}), tiny_parts()
    beside_the_vae = int(0.9 * weight_bytes(parts["text_encoder_2"]) / WEIGHTS_SHARE)

    def free(_: object = None) -> tuple[int, int]:
        return (1 << 40 if device_of(parts["vae"]).type == "cpu" else beside_the_vae), 1 << 40

    monkeypatch.setattr(torch.get_device_module(device), "mem_get_info", free)
    with MissEncoder(config, Workspace(), models=LoadedModels(**parts)) as encoder:
        [(_, image)] = encoder.image((photos / "a.png").read_bytes())
        for task, kind in ((image, "image"), (encoder.prompt("a red house"), "text")):
            [future] = encoder.submit([task]).values()
            future.result(60)
            assert encoder.loaded == kind
        for name in ("text_encoder", "text_encoder_2"):
            assert device_of(parts[name]).type == device.type and not hasattr(parts[name], "hf_device_map")
