"""OneTrainer #459 in the cache module: parts come back to their devices after a cold cache, through either API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.pipeline_host import host
from helpers.pipeline_sdxl import Run, Setup, concept, write_photos

from latentcache.errors import ItemsError
from latentcache.integrations.onetrainer import PlacementGuard
from latentcache.models.tiny import tiny_denoiser, tiny_parts

CPU = torch.device("cpu")
ENCODERS = ("text_encoder", "text_encoder_2")


class Model:
    """A trainer's model: the UNet and the first text encoder are trained on the device, all else is parked."""

    def __init__(self, device: torch.device):
        parts = tiny_parts(0)
        self.device = device
        self.tokenizer, self.tokenizer_2 = parts["tokenizer"], parts["tokenizer_2"]
        self.vae, self.text_encoder, self.text_encoder_2 = (parts[name] for name in ("vae", *ENCODERS))
        self.unet = tiny_denoiser(0)
        self.unet_lora = torch.nn.Linear(4, 4)
        self.unet.train().to(device)
        self.unet_lora.train().to(device)
        self.text_encoder.train().to(device)

    def parts(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "device"}

    def modules(self) -> dict[str, torch.nn.Module]:
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.nn.Module)}

    def placement(self) -> dict[str, tuple[torch.device, bool]]:
        return {name: (next(m.parameters()).device, m.training) for name, m in self.modules().items()}

    def move(self, name: str, device: torch.device) -> None:
        getattr(self, name).to(device)
        if name == "unet":
            self.unet_lora.to(device)

    def eval(self) -> None:
        for module in self.modules().values():
            module.eval()


class OlderModel(Model):
    """`vae_to`, `text_encoder_to`, ... and `to`."""

    def to(self, device: torch.device) -> None:
        for name in ("vae", "unet", *ENCODERS):
            self.move(name, device)

    def prepare(self, kind: str) -> None:
        self.to(CPU)
        for name in ("vae",) if kind == "image" else ENCODERS:
            getattr(self, f"{name}_to")(self.device)
        self.eval()


for _name in ("vae", "unet", *ENCODERS):
    setattr(OlderModel, f"{_name}_to", lambda self, device, name=_name: self.move(name, device))


class NewerModel(Model):
    """`materialize`, `evict` and `materialize_only`."""

    NAMES = ("unet", *ENCODERS, "vae")

    def materialize(self, *names: str) -> None:
        for name in names or self.NAMES:
            assert name in self.NAMES
            self.move(name, self.device)

    def evict(self, *names: str) -> None:
        for name in names or self.NAMES:
            assert name in self.NAMES
            self.move(name, CPU)

    def materialize_only(self, *names: str) -> None:
        self.evict(*(name for name in self.NAMES if name not in names))
        self.materialize(*names)

    def prepare(self, kind: str) -> None:
        self.materialize_only(*(("vae",) if kind == "image" else ENCODERS))
        self.eval()


@pytest.fixture(params=[OlderModel, NewerModel])
def model(request: pytest.FixtureRequest, device: torch.device) -> Any:
    return request.param(device)


def setup_of(model: Any, tmp_path: Path, **changes: Any) -> Setup:
    folder = tmp_path / "photos"
    return Setup(
        host("own"),
        tmp_path / "cache",
        [concept(folder if folder.exists() else write_photos(folder, 2))],
        parts=model.parts(),
        device=model.device,
        before=model.prepare,
        changes=changes,
    )


def train_step(model: Any, run: Any) -> torch.Tensor:
    """As OneTrainer predicts: tokens on the device, the trained text encoder live, all else from the cache."""
    item = next(iter(run.pipeline))
    hidden_states = model.text_encoder(item["tokens_1"][None], output_hidden_states=True).hidden_states[-2]
    embeds = torch.cat([hidden_states, item["text_encoder_2_hidden_state"][None]], -1)
    conditions = {
        "text_embeds": item["text_encoder_2_pooled_state"][None],
        "time_ids": torch.zeros(1, 6, device=model.device),
    }
    timesteps = torch.tensor([5], device=model.device)
    return model.unet(item["latent_image"][None], timesteps, embeds, added_cond_kwargs=conditions).sample.mean()


def test_without_restoring_the_bug_is_there(model: Any, tmp_path: Path) -> None:
    run = setup_of(model, tmp_path).start()
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        train_step(model, run)


def test_a_cold_cache_leaves_the_model_as_it_was(model: Any, tmp_path: Path) -> None:
    kept = PlacementGuard(model)
    before = model.placement()
    run = Run(setup_of(model, tmp_path))
    for cache in run.caches.values():
        kept.around(cache)
    run.next_epoch()
    assert run.encoded["vae"] == 2 and model.placement() == before
    assert before["unet"] == (model.device, True) and before["vae"] == (CPU, False)
    train_step(model, run).backward()
    assert next(model.unet.parameters()).grad.device == model.device
    for item in run.items:
        for name, value in item.items():
            assert not isinstance(value, torch.Tensor) or value.device == model.device, name
    warm = setup_of(model, tmp_path).start()
    assert warm.encoded.total() == 0 and model.placement() == before
    train_step(model, warm)


def test_an_error_while_encoding_leaves_it_so_too(model: Any, tmp_path: Path) -> None:
    kept = PlacementGuard(lambda: model)
    before = model.placement()
    run = Run(setup_of(model, tmp_path))
    (tmp_path / "photos" / "p00.png").write_bytes(b"no image")
    for cache in run.caches.values():
        kept.around(cache)
    with pytest.raises(ItemsError, match=r"1 of 2 items"):
        run.next_epoch()
    assert model.placement() == before


@pytest.mark.parametrize("older", [True, False])
def test_a_part_with_offloaded_layers_is_left_to_its_conductor(device: torch.device, older: bool) -> None:
    """If another function moved them, the conductor would take layers on the device for layers that are away."""

    class Conductor:
        def __init__(self, layers: torch.nn.Sequential):
            self.layers, self.is_active = layers, True

        def to(self, device: torch.device) -> None:
            self.is_active = device != CPU
            self.layers.to(CPU)
            self.layers[0].to(device)  # which ones are there changes while it trains

    class Offloaded:
        def __init__(self) -> None:
            self.unet = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
            self.unet_offload_conductor = Conductor(self.unet)
            self.unet[1].to(device)
            if older:
                self.unet_to = self.unet_offload_conductor.to

        def materialize(self, name: str) -> None:
            assert name == "unet" and not older
            self.unet_offload_conductor.to(device)

    model = Offloaded()
    kept = PlacementGuard(model)
    kept.before()
    model.unet_offload_conductor.to(CPU)
    model.unet.eval()
    kept.after()
    assert model.unet_offload_conductor.is_active and model.unet.training
    assert [layer.weight.device for layer in model.unet] == [device, CPU]
