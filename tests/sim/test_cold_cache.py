"""OneTrainer #459, https://github.com/Nerogar/OneTrainer/issues/459: validation with a cold cache parks the model.

The cache fill moved every part away and only the encoder that it needed back. Where the cache was warm nothing moved,
so only the first validation failed: in the embedding of the text encoder, which is trained and gets tokens each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler

from latentcache.config import Config
from latentcache.devices.audit import AuditReport, audit
from latentcache.devices.placement import placed
from latentcache.errors import TrainableEncoderError
from latentcache.families.scaling import latents_from_moments
from latentcache.models.model_loader import LoadedModels
from latentcache.models.tiny import tiny_denoiser, tiny_parts
from latentcache.models.vae import encode_images
from latentcache.precache.run import run_precache

CPU = torch.device("cpu")
NUM_STEPS = 3


class Training:
    """A tiny SDXL whose UNet and, by default, first text encoder are trained; the rest is parked."""

    def __init__(self, device: torch.device, *, text_encoder_trained: bool = True):
        torch.manual_seed(0)
        self.device = device
        self.parts: dict[str, Any] = tiny_parts(1) | {"unet": tiny_denoiser(1)}
        self.unet, self.text_encoder, self.vae = (self.parts[name] for name in ("unet", "text_encoder", "vae"))
        self.text_encoder.requires_grad_(text_encoder_trained).train(text_encoder_trained)
        self.unet.train()
        trained = [self.unet, self.text_encoder]
        for module in trained:
            module.to(device)
        parameters = [p for module in trained for p in module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
        self.noise_schedule = DDPMScheduler()
        self.token_ids = self.parts["tokenizer"](
            ["a cat"], padding="max_length", max_length=77, truncation=True, return_tensors="pt"
        ).input_ids
        numbers = torch.Generator().manual_seed(2)
        self.batch = {
            "latents": torch.randn(1, 4, 8, 8, generator=numbers),
            "hidden_states_2": torch.randn(1, 77, 40, generator=numbers),
            "text_embeds": torch.randn(1, 40, generator=numbers),
            "time_ids": torch.tensor([[64.0, 64, 0, 0, 64, 64]]),
        }

    def modules(self) -> dict[str, torch.nn.Module]:
        return {name: part for name, part in self.parts.items() if isinstance(part, torch.nn.Module)}

    def predict(self) -> torch.Tensor:
        """The loss; as in OneTrainer, tokens always go to the training device."""
        batch = {name: tensor.to(self.device) for name, tensor in self.batch.items()}
        hidden_states = self.text_encoder(self.token_ids.to(self.device), output_hidden_states=True).hidden_states[-2]
        noise = torch.randn_like(batch["latents"])
        timesteps = torch.randint(0, 1000, (1,), device=self.device)
        predicted = self.unet(
            self.noise_schedule.add_noise(batch["latents"], noise, timesteps),
            timesteps,
            torch.cat([hidden_states, batch["hidden_states_2"]], -1),
            added_cond_kwargs={name: batch[name] for name in ("text_embeds", "time_ids")},
        ).sample
        return F.mse_loss(predicted, noise)

    def step(self) -> float:
        loss = self.predict()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def audited(self) -> AuditReport:
        """The placement that training needs: trained parts on the device in train mode, frozen ones parked."""
        trained = {"unet": True, "text_encoder": self.text_encoder.embeddings.token_embedding.weight.requires_grad}
        return audit(
            self.modules() | {"optimizer": self.optimizer},
            device={"unet": self.device, "text_encoder": self.device, "text_encoder_2": CPU, "vae": CPU},
            training=trained | {"vae": False, "text_encoder_2": False},
            dtypes=dict.fromkeys(self.modules(), torch.float32),
        )


def photos() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (1, 64, 64, 3), dtype=np.uint8)


def evict_all_and_fill(training: Training) -> torch.Tensor:
    """What OneTrainer's `before_cache_image_fun` did."""
    for module in training.modules().values():
        module.to(CPU)
    training.vae.to(training.device)
    moments = encode_images(training.vae, photos())
    for module in training.modules().values():
        module.eval()
    return latents_from_moments(moments)


def place_and_fill(training: Training) -> torch.Tensor:
    """What this project's fills do: only the encoder moves, and it is put back also after an error."""
    with placed(training.vae, training.device) as vae:
        return latents_from_moments(encode_images(vae, photos()))


def losses_with(fill: Callable[[Training], Any] | None, training: Training) -> tuple[list[float], torch.Tensor]:
    """The losses and weights of a short run, with a cache fill before its second step and an audit after it."""
    losses = [training.step()]
    if fill is not None:
        fill(training)
        training.audited().raise_for_errors()
    losses += [training.step() for _ in range(NUM_STEPS - 1)]
    parameters = training.optimizer.param_groups[0]["params"]
    return losses, torch.cat([parameter.detach().cpu().flatten() for parameter in parameters])


def test_onetrainer_459_validation_fails_when_the_cache_is_cold(device: torch.device) -> None:
    training = Training(device)
    training.step()
    evict_all_and_fill(training)
    with (
        pytest.raises(RuntimeError, match=r"Expected all tensors to be on the same device.*index_select"),
        torch.no_grad(),
    ):
        training.predict()
    report = training.audited()
    assert {"text_encoder", "unet", "vae"} == {f.part for f in report.errors if f.kind in ("parameter", "buffer")}
    assert "text_encoder.embeddings.token_embedding.weight" in {finding.path for finding in report.errors}
    assert {"unet", "text_encoder"} == {finding.part for finding in report.errors if finding.kind == "mode"}


def test_a_fill_leaves_training_bit_identical(device: torch.device) -> None:
    losses, weights = losses_with(None, Training(device))
    filled_losses, filled_weights = losses_with(place_and_fill, Training(device))
    assert filled_losses == losses and torch.equal(filled_weights, weights)


@pytest.fixture
def precaches(make_config: Callable[..., Config], device: torch.device) -> Iterator[Callable[[Training], None]]:
    """A whole cold fill of this project with the parts that are being trained with."""
    config = make_config(
        **{"encode.device": str(device), "encode.vae_dtype": "float32", "encode.text_dtype": "float32"}
    )

    def fill(training: Training) -> None:
        names = ("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
        report = run_precache(config, models=LoadedModels(**{name: training.parts[name] for name in names}))
        assert report.num_encoded > 0 and report.num_refused == 0

    yield fill


def test_a_whole_precache_in_the_middle_of_training_changes_nothing(
    precaches: Callable[[Training], None], device: torch.device
) -> None:
    losses, weights = losses_with(None, Training(device, text_encoder_trained=False))
    filled_losses, filled_weights = losses_with(precaches, Training(device, text_encoder_trained=False))
    assert filled_losses == losses and torch.equal(filled_weights, weights)


def test_a_text_encoder_that_is_trained_is_refused_and_stays_in_place(
    precaches: Callable[[Training], None], device: torch.device
) -> None:
    training = Training(device)
    training.step()
    with pytest.raises(TrainableEncoderError):
        precaches(training)
    assert training.audited().findings == ()
    training.step()
