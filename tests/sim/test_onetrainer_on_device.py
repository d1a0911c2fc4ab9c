"""OneTrainer #459 in the cache module: after a cold cache, parts return to their devices through either API."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
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
NAMES = ("unet", *ENCODERS, "vae")


class Model:
    """A trainer's model: the UNet and the first text encoder are trained on the device, and all else is parked.

    Older releases move a part with `<part>_to`, newer ones with `materialize` and `evict`.
    """

    def __init__(self, device: torch.device, *, is_older: bool):
        self.device = device
        self.loaded = tiny_parts(0) | {"unet": tiny_denoiser(0)}
        self.vae, self.text_encoder, self.text_encoder_2 = (self.loaded[name] for name in ("vae", *ENCODERS))
        self.unet = self.loaded["unet"].to(device)
        self.unet_lora = torch.nn.Linear(4, 4).to(device)
        self.text_encoder.train().to(device)
        if is_older:
            for name in NAMES:
                setattr(self, f"{name}_to", partial(self.move, name))
        else:
            self.materialize, self.evict = partial(self.move, device=device), partial(self.move, device=CPU)

    def modules(self) -> dict[str, torch.nn.Module]:
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.nn.Module)}

    def placement(self) -> dict[str, tuple[torch.device, bool]]:
        return {name: (next(m.parameters()).device, m.training) for name, m in self.modules().items()}

    def move(self, name: str, device: torch.device) -> None:
        assert name in NAMES
        getattr(self, name).to(device)
        if name == "unet":
            self.unet_lora.to(device)

    def prepare(self, kind: str) -> None:
        """Move and set modes as OneTrainer does before it encodes."""
        needed = ("vae",) if kind == "image" else ENCODERS
        for name in NAMES:
            self.move(name, self.device if name in needed else CPU)
        for module in self.modules().values():
            module.eval()


@pytest.fixture(params=[True, False], ids=["older", "newer"])
def model(request: pytest.FixtureRequest, device: torch.device) -> Model:
    return Model(device, is_older=request.param)


def setup_of(model: Model, tmp_path: Path, cache: str = "cache") -> Setup:
    folder = tmp_path / "photos"
    concepts = [concept(folder if folder.exists() else write_photos(folder, 2))]
    return Setup(host("own"), tmp_path / cache, concepts, parts=model.loaded, device=model.device, before=model.prepare)


def train_step(model: Model, run: Any) -> torch.Tensor:
    """Predict like OneTrainer: the trained text encoder runs on tokens, and all else comes from the cache."""
    item = next(iter(run.pipeline))
    hidden_states = model.text_encoder(item["tokens_1"][None], output_hidden_states=True).hidden_states[-2]
    embeds = torch.cat([hidden_states, item["text_encoder_2_hidden_state"][None]], -1)
    time_ids = torch.zeros(1, 6, device=model.device)
    conditions = {"text_embeds": item["text_encoder_2_pooled_state"][None], "time_ids": time_ids}
    timesteps = torch.tensor([5], device=model.device)
    return model.unet(item["latent_image"][None], timesteps, embeds, added_cond_kwargs=conditions).sample.mean()


def test_a_cold_cache_leaves_the_model_as_it_was(model: Model, tmp_path: Path) -> None:
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
    failing = Run(setup_of(model, tmp_path, "failing"))
    (tmp_path / "photos" / "p00.png").rename(tmp_path / "p00.png")
    (tmp_path / "photos" / "p00.png").write_bytes(b"no image")
    for cache in failing.caches.values():
        PlacementGuard(lambda: model).around(cache)
    with pytest.raises(ItemsError, match=r"1 of 2 items"):
        failing.next_epoch()
    assert model.placement() == before, "after an error while encoding too"
    (tmp_path / "p00.png").replace(tmp_path / "photos" / "p00.png")
    unguarded = setup_of(model, tmp_path, "another").start()
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        train_step(model, unguarded)


class Conductor:
    def __init__(self, layers: torch.nn.Sequential):
        self.layers, self.is_active = layers, True

    def to(self, device: torch.device) -> None:
        self.is_active = device != CPU
        self.layers.to(CPU)
        self.layers[0].to(device)  # the layers on the device change during training


@pytest.mark.parametrize("is_older", [True, False])
def test_a_part_with_offloaded_layers_is_left_to_its_conductor(device: torch.device, is_older: bool) -> None:
    """If anything else moved them, the conductor would no longer know which layers are on the device."""
    unet = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).to(device))
    model = SimpleNamespace(unet=unet, unet_offload_conductor=Conductor(unet))
    move = model.unet_offload_conductor.to
    if is_older:
        model.unet_to = move
    else:
        model.materialize = lambda name: move(device)
    kept = PlacementGuard(model)
    kept.before()
    model.unet_offload_conductor.to(CPU)
    model.unet.eval()
    kept.after()
    assert model.unet_offload_conductor.is_active and model.unet.training
    assert [layer.weight.device for layer in model.unet] == [device, CPU]
