"""Every family: what a cache returns is what the family's own pipeline makes, on a tiny model, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from helpers.family_references import SCALED_LATENTS, generator
from helpers.family_runs import TEXTS, FamilyRun, equal, family_run, recorded
from helpers.loss_cases import noise_of, timestep_of
from helpers.tiny_models import randomised, tiny_model
from PIL import Image

from latentcache.config import ValidationConfig
from latentcache.families import family_named
from latentcache.families.scaling import latents_from_moments
from latentcache.models.vae import vae_facts
from latentcache.validation.loss import validation_loss
from latentcache.validation.noise_schedule import NoiseSchedule

pytestmark = pytest.mark.extended

PAIR = TEXTS[:2]
"""Of unequal length. The run encoded the two together, as the pipelines do here: alone the last bits may differ."""
GRADIENTS = {"krea2": 2e-6}
"""Largest difference of a gradient from that of live encoding. Of all others there is none."""


def test_the_denoiser_gets_and_learns_what_it_does_with_its_pipeline(run: FamilyRun) -> None:
    check_first_call(run)
    check_training_step(run)


@pytest.mark.parametrize(
    ("name", "settings", "of_denoiser"),
    [
        ("flux", {"max_length": 256}, {"guidance_embeds": False}),  # FLUX.1 schnell
        ("qwen-image-edit", {}, {"zero_cond_t": True}),  # 2511: control images at timestep 0, found by their shapes
    ],
)
def test_a_denoiser_with_other_settings_gets_what_they_ask_for(
    name: str, settings: dict[str, Any], of_denoiser: dict[str, Any], tmp_path: Path
) -> None:
    run = family_run(tmp_path, name, **settings)
    run.parts["transformer"] = type(run.denoiser).from_config(run.denoiser.config, **of_denoiser).eval()
    randomised(run.denoiser, 1).requires_grad_(False)
    check_first_call(run)
    assert name != "flux" or run.batch(PAIR)["prompt_embeds"].shape[1] == 256
    run.cache.close()


def check_first_call(run: FamilyRun) -> None:
    """What `predict` hands to the denoiser, and what that gives, are those of the pipeline's own first call."""
    for texts in run.groups(PAIR):
        call, noisy, timesteps = run.first_call(texts)
        batch = run.batch(texts)
        with torch.no_grad(), recorded(run.denoiser) as calls:
            run.family.predict(run.denoiser, noisy, timesteps, batch)
        [own] = calls
        assert own.arguments.keys() == call.arguments.keys()
        kept = batch.get("prompt_embeds_mask")
        if "image_slots" in batch:  # the denoiser puts control images over these rows
            kept = ~call.arguments["img_mask"][:, : call.arguments["encoder_hidden_states"].shape[1]]
        for name, value in call.arguments.items():
            found = own.arguments[name]
            # Padding may have other values: then the output shows that they do not count.
            has_rows = isinstance(value, torch.Tensor) and value.ndim > 2
            if kept is not None and has_rows and value.shape[:2] == kept.shape:
                found, value = found[kept], value[kept]
            assert equal(found, value), name
        assert equal(own.output, call.output)


def check_training_step(run: FamilyRun) -> None:
    """The loss and all gradients on a cached batch are those on what the pipeline encodes now."""
    texts = run.groups(PAIR)[0]
    family, cached = run.family, run.batch(texts)
    call, _, _ = run.first_call(texts)
    conditions = family.conditions(run.denoiser, torch.zeros(run.latent_shape(len(texts))), cached)

    class Live:
        """The denoiser with all conditions from the pipeline's own call."""

        config = run.denoiser.config
        text_conditioner = getattr(run.denoiser, "text_conditioner", None)

        def __call__(self, *arguments: Any, **options: Any) -> Any:
            given = {name: call.arguments.get(name) for name in conditions}
            return run.denoiser(*arguments, **{**options, **given})

    live = torch.cat([SCALED_LATENTS[family.name](run.pipeline, run.pixels(text)) for text in texts])
    stored = torch.cat([run.latents(text) for text in texts])
    live_batch = cached | (run.live_pictures(*texts) if run.has_pictures else {})
    loss, wanted = gradients(run, lambda noisy, steps: family.predict(Live(), noisy, steps, live_batch), live)
    cached_loss, found = gradients(run, lambda noisy, steps: family.predict(run.denoiser, noisy, steps, cached), stored)
    assert torch.equal(cached_loss, loss) and loss > 0
    assert found.keys() == wanted.keys() and sum(each.abs().sum() > 0 for each in found.values()) > len(found) / 2
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max() <= GRADIENTS.get(family.name, 0), name


def gradients(run: FamilyRun, predict: Any, latents: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of one training step on one or two samples."""
    schedule = NoiseSchedule.of(run.parts["scheduler"])
    index = torch.tensor([812, 455])[: len(latents)]
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(12))
    noisy, target = schedule.noised(latents, noise, index), schedule.target(latents, noise, index)
    run.denoiser.requires_grad_(True).zero_grad()
    loss = (predict(noisy.contiguous(), schedule.timesteps[index]) - target).square().mean()
    loss.backward()
    found = {name: each.grad.clone() for name, each in run.denoiser.named_parameters() if each.grad is not None}
    run.denoiser.requires_grad_(False).zero_grad()
    return loss.detach(), found


def test_the_validation_loss_is_that_of_live_encoding(run: FamilyRun) -> None:
    """Of each sample alone, and of texts of unequal lengths in one call of the denoiser."""
    family, schedule = run.family, NoiseSchedule.of(run.parts["scheduler"])
    given: dict[str, Any] = {"scheduler": run.parts["scheduler"], "datasets": ["photos"]}
    alone, together = (
        validation_loss(
            run.denoiser, run.cache, settings=ValidationConfig(num_timesteps=2, batch_size=batch_size), **given
        )
        for batch_size in (1, 4)
    )
    assert not alone.skipped
    for text in TEXTS:
        sample_id, losses = run.rows[text].sample_id, []
        with torch.no_grad():
            moments = family.encode_image(run.parts["vae"], run.pixels(text)).contiguous()
            latents = run.scaling.apply(latents_from_moments(moments))
            for first in (0, 500):
                index = timestep_of(sample_id, first, first + 500)
                noise, at = noise_of(sample_id, index, latents), torch.tensor([index])
                noisy = schedule.noised(latents, noise, at)
                predicted = family.predict(run.denoiser, noisy, schedule.timesteps[at], run.batch([text]))
                target = noise if schedule.prediction_type == "epsilon" else noise - latents
                losses.append((predicted - target).square().mean(dim=tuple(range(1, target.ndim))).item())
        assert alone.by_sample["photos"][sample_id] == sum(losses) / 2, text
        assert together.by_sample["photos"][sample_id] == pytest.approx(sum(losses) / 2, rel=1e-4)


PICTURES = [
    np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    for seed, size in enumerate([(64, 96), (96, 64)])
]
"""Control images, of other shapes than the image, which is 64x64."""


@pytest.mark.parametrize(("name", "num"), [("flux", 1), ("flux2", 2), ("flux2-dev", 1)])
def test_control_latents_are_tokens_as_in_the_pipeline(name: str, num: int) -> None:
    """Of pipelines that edit and read texts without pictures: their own call, to the last bit."""
    family, parts = family_named(name), tiny_model(name)
    noise = torch.randn((1, 16, 8, 8) if name == "flux" else (1, 128, 4, 4), generator=generator())
    shown: list[Any] = [Image.fromarray(each) for each in PICTURES[:num]]
    size: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 1, "output_type": "latent"}
    if name == "flux":  # FLUX.1 Kontext
        pipeline = diffusers.FluxKontextPipeline(**parts)
        size |= {"max_area": 64 * 64, "_auto_resize": False, "guidance_scale": 3.5, "image": shown[0]}
        size["latents"] = pipeline._pack_latents(noise, *noise.shape)
    else:
        pipeline = family.pipeline(**parts)
        size |= {"image": shown, "latents": noise, **family.guidance_kwargs(3.5 if name == "flux2-dev" else 1.0)}
    pipeline.set_progress_bar_config(disable=True)
    with recorded(parts["transformer"]) as live:
        pipeline(prompt="a red cat", **size)
    batch = family.encode_text(parts, family.tokenize(parts, ["a red cat"]), family.text_recipe())
    for number, image in enumerate(shown, 1):
        # Pixels as the pipeline makes them: `/ 255 * 2 - 1`, whose last bit may differ from that of `/ 127.5 - 1`.
        pixels = diffusers.image_processor.VaeImageProcessor().preprocess(image)
        with torch.no_grad():
            moments = family.encode_image(parts["vae"], pixels)
        batch[f"control_latents_{number}"] = vae_facts(parts["vae"]).scaling.apply(latents_from_moments(moments))
    timesteps = pipeline.scheduler.timesteps[:1].float()
    with recorded(parts["transformer"]) as own, torch.no_grad():
        found = family.predict(parts["transformer"], noise, timesteps, batch)
        changed = {**batch, "control_latents_1": 2 * batch["control_latents_1"]}
        other = family.predict(parts["transformer"], noise, timesteps, changed)
    assert own[0].arguments["hidden_states"].shape[1] == 16 + num * 24
    assert equal(own[0].arguments, live[0].arguments) and equal(own[0].output, live[0].output)
    assert found.shape == noise.shape and (found - other).abs().max() > 1e-3


def test_padding_does_not_change_what_the_denoiser_predicts(run: FamilyRun) -> None:
    """In a batch with longer and shorter texts, and alone."""
    texts = (TEXTS[1], TEXTS[2], TEXTS[0])  # neither sorted by length nor when that is undone in the wrong direction
    noisy = torch.randn(run.latent_shape(len(texts)), generator=generator())
    timesteps = torch.tensor([812.0, 455.0, 230.0])
    with torch.no_grad():
        together = run.family.predict(run.denoiser, noisy, timesteps, run.batch(texts))
        for number, text in enumerate(texts):
            part = slice(number, number + 1)
            alone = run.family.predict(run.denoiser, noisy[part], timesteps[part], run.batch([text]))
            # The order of additions may differ: measured 1e-5 at most.
            torch.testing.assert_close(alone, together[part], rtol=0, atol=3e-5)
        other = run.family.predict(run.denoiser, noisy, timesteps, run.batch(texts[::-1]))
    assert (other - together).abs().max() > 1e-2, "the text reaches the output"


def test_tokenizing_ahead_has_tokenizers_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer keeps how it padded and cut last: two threads would change what the other one gets."""
    family = family_named("flux")
    seen: dict[str, set[int]] = {"tokenize": set(), "encode_text": set()}
    own = {name: getattr(family, name) for name in seen}
    for name, used in seen.items():

        def noted(parts: Any, *rest: Any, name: str = name, used: set[int] = used) -> Any:
            used.update(id(parts[each]) for each in family.names("tokenizer"))
            return own[name](parts, *rest)

        monkeypatch.setattr(family, name, noted)
    family_run(tmp_path, "flux").cache.close()
    assert seen["tokenize"] and seen["encode_text"] and not seen["tokenize"] & seen["encode_text"]
