"""Text encoders that are larger than the device's free memory run there layer by layer, and give the same bits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
import torch
from helpers.tiny_models import tiny_encoders

from latentcache.config import Config
from latentcache.devices.placement import device_of
from latentcache.families import FAMILIES, family_named
from latentcache.families.base import inference
from latentcache.models.model_loader import LoadedModels
from latentcache.models.running import WEIGHTS_SHARE, encoders_placed, weight_bytes
from latentcache.models.tiny import tiny_parts
from latentcache.precache.run import run_precache
from latentcache.precache.workspace import Workspace
from latentcache.service.miss_encoder import MissEncoder

TEXTS = ["a red cat on the table", "cats", ""]


@pytest.fixture
def set_free_memory(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets how many bytes of the device are free, as code that asks for it learns."""

    def set_free(num_bytes: float) -> None:
        found = (int(num_bytes), 1 << 40)
        monkeypatch.setattr(torch.get_device_module(device), "mem_get_info", lambda device=None: found)

    return set_free


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)))


@pytest.mark.parametrize("name", FAMILIES)
def test_layer_by_layer_gives_the_same_bits(
    name: str, device: torch.device, set_free_memory: Callable[[float], None]
) -> None:
    family = family_named(name)
    parts = tiny_encoders(name)
    encoders = {part: parts[part] for part in family.names("text_encoder")}
    recipe = family.text_recipe()
    texts = family.tokenize(parts, TEXTS)

    def encoded() -> dict[str, torch.Tensor]:
        with inference(device):
            return {field: tensor.cpu() for field, tensor in family.encode_text(parts, texts, recipe).items()}

    set_free_memory(1 << 40)
    with encoders_placed(encoders, device) as notes:
        assert notes == {}
        whole = encoded()
    before = {part: tensors_of(encoder) for part, encoder in encoders.items()}
    largest = max(encoders, key=lambda part: weight_bytes(encoders[part]))
    encoders[largest].train()
    set_free_memory(0.9 * weight_bytes(encoders[largest]) / WEIGHTS_SHARE)
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


def test_a_run_says_so_and_stores_the_same(
    make_config: Callable[..., Config], device: torch.device, set_free_memory: Callable[[float], None]
) -> None:
    config = make_config(**{"encode.device": str(device), "encode.text_dtype": "float32", "encode.batch_size": 1})
    parts, stores = tiny_parts(), {}
    total = weight_bytes(parts["text_encoder_2"])
    for kind, free in (("whole", 1 << 40), ("pieces", 0.9 * total / WEIGHTS_SHARE)):
        set_free_memory(free)
        workspace = Workspace()
        report = run_precache(config, models=LoadedModels(**parts), workspace=workspace)
        assert ("text_encoder_2" in report.placement) == (kind == "pieces")
        stores[kind] = {key: workspace.store.get(key).tensors for key in workspace.store.keys()}
    text = report.to_text(verbose=True)
    assert "text_encoder_2" in text and "GB are free" in text
    assert stores["whole"].keys() == stores["pieces"].keys()
    for key, tensors in stores["whole"].items():
        assert all(torch.equal(tensor, stores["pieces"][key][field]) for field, tensor in tensors.items())


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
            assert encoder.loaded == {kind}
        for name in ("text_encoder", "text_encoder_2"):
            assert device_of(parts[name]).type == device.type and not hasattr(parts[name], "hf_device_map")
