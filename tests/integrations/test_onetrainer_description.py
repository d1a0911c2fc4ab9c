"""The identities of a model's parts."""

from __future__ import annotations

import pytest
import torch

from latentcache.integrations.onetrainer.description import part_identity


def test_tensors_that_a_hooked_layer_has_not_registered_count() -> None:
    """A trainer's extra embeddings, in a list that torch knows nothing of."""

    class Embeddings(torch.nn.Module):
        def __init__(self, extra: list[torch.Tensor]):
            super().__init__()
            self.extra = extra

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return torch.cat(self.extra)[tokens]

    def hooked(value: float) -> tuple[torch.nn.Module, torch.Tensor]:
        encoder, extra = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.full((2, 2), value)
        torch.nn.init.ones_(encoder[0].weight), torch.nn.init.zeros_(encoder[0].bias)
        encoder[0].forward = Embeddings([extra]).forward  # type: ignore[method-assign]
        return encoder, extra

    (one, extra), (same, _), (other, _) = hooked(1.0), hooked(1.0), hooked(1.1)
    first = part_identity("text_encoder", one)
    assert first == part_identity("text_encoder", same) != part_identity("text_encoder", other)
    extra.mul_(1.1)
    assert part_identity("text_encoder", one) == part_identity("text_encoder", other)


@pytest.mark.parametrize("hooked", [False, True])
def test_weights_that_differ_below_the_precision_of_others_are_told_apart(hooked: bool) -> None:
    """Of a part with several dtypes, or of a float32 LoRA on a float16 encoder, nothing is rounded."""

    def part(value: float) -> torch.nn.Module:
        layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).half()
        with torch.no_grad():
            for parameter in layers.parameters():
                parameter.fill_(0.1)
        fine = torch.nn.Linear(2, 2)
        with torch.no_grad():
            for parameter in fine.parameters():
                parameter.fill_(value)
        if hooked:
            layers[1].forward = fine.forward  # type: ignore[method-assign]
        else:
            layers[1] = fine
        return layers

    rounded = float(torch.tensor(0.1).half())
    one, same, other = part(rounded), part(rounded), part(rounded + 1e-6)
    assert part_identity("text_encoder", one) == part_identity("text_encoder", same)
    assert part_identity("text_encoder", one) != part_identity("text_encoder", other)
