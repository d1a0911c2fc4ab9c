from __future__ import annotations

import torch

from latentcache.models.tiny import tiny_denoiser, tiny_parts, tiny_pipeline


def test_a_seed_gives_one_set_of_weights_and_another_seed_another():
    first, again, other = tiny_parts(3), tiny_parts(3), tiny_parts(4)
    for part in ("vae", "text_encoder", "text_encoder_2"):
        states = [parts[part].state_dict() for parts in (first, again, other)]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        assert any(not torch.equal(states[0][name], states[2][name]) for name in states[0])


def test_building_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    tiny_parts(1), tiny_denoiser(1)
    assert torch.equal(torch.get_rng_state(), before)


def test_it_has_the_settings_of_sdxl(parts):
    config = parts["vae"].config
    assert (config.scaling_factor, config.force_upcast, config.latent_channels) == (0.13025, True, 4)
    assert len(parts["tokenizer"]) == 514
    assert (parts["tokenizer"].pad_token, parts["tokenizer_2"].pad_token) == ("<|endoftext|>", "!")
    assert parts["tokenizer_2"].pad_token_id == 0
    assert not any(p.requires_grad for name in ("vae", "text_encoder") for p in parts[name].parameters())


# diffusers 0.42's Euler scheduler asks numpy 2 for a tensor's array without a copy.
def test_the_pipeline_makes_an_image(parts):
    image = tiny_pipeline(parts)(
        "a cat",
        num_inference_steps=1,
        height=64,
        width=64,
        output_type="pt",
        generator=torch.Generator().manual_seed(0),
    ).images
    assert image.shape == (1, 3, 64, 64)
    assert image.isfinite().all()
