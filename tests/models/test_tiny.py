from __future__ import annotations

import torch

from latentcache.models.tiny import tiny_denoiser, tiny_parts


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
