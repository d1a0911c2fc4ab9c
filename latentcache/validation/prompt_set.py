"""Validation prompts as the embeddings that sampling needs, out of the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from latentcache.devices.placement import DeviceLike
from latentcache.errors import SampleError
from latentcache.loading.cache import LatentCache

Pair = tuple[str, bool]
"""A text, and whether it is a negative prompt: with clip_skip the two are encoded differently."""


@dataclass(frozen=True, slots=True)
class PromptEmbeddings:
    """What SDXL's pipeline takes in place of a prompt: embeddings [1, T, D] and pooled embeddings [1, P].

    With `negative_prompt` None the negative ones are zeros, as the pipeline has it with `force_zeros_for_empty_prompt`.
    """

    prompt: str
    negative_prompt: str | None
    prompt_embeds: torch.Tensor
    pooled_prompt_embeds: torch.Tensor
    negative_prompt_embeds: torch.Tensor
    negative_pooled_prompt_embeds: torch.Tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        """The four tensors by the names of the pipeline's arguments."""
        names = ("prompt_embeds", "pooled_prompt_embeds", "negative_prompt_embeds", "negative_pooled_prompt_embeds")
        return {name: getattr(self, name) for name in names}


def prompt_embeddings(
    cache: LatentCache,
    prompts: Sequence[str],
    negative_prompt: str | None,
    *,
    device: DeviceLike,
    dtype: torch.dtype | None = None,
    encode: Callable[[Sequence[Pair]], object] | None = None,
) -> list[PromptEmbeddings]:
    """The embeddings of these prompts, in their order, on the requesting device; `dtype` follows a requesting module.

    `encode` is called once with all pairs (text, is negative) that the cache cannot hand back, and has to cache them
    (`precache.prompts.cache_prompts`); then they are read again. It is not called when nothing is missing. Without it
    SampleError names the first such prompt and the command that caches it.
    """
    pairs: list[Pair] = [(prompt, False) for prompt in prompts]
    if prompts and negative_prompt is not None:
        pairs.append((negative_prompt, True))
    found, missing = _read(cache, pairs, device, dtype)
    if missing and encode is not None:
        encode(list(missing))
        cache.refresh()
        again, missing = _read(cache, missing, device, dtype)
        found |= again
    for error in missing.values():
        raise error
    embeddings = []
    for prompt in prompts:
        positive = found[prompt, False]
        if negative_prompt is None:
            negative = {name: torch.zeros_like(tensor) for name, tensor in positive.items()}
        else:
            negative = found[negative_prompt, True]
        tensors = {f"negative_{name}": tensor for name, tensor in negative.items()} | positive
        embeddings.append(PromptEmbeddings(prompt, negative_prompt, **tensors))
    return embeddings


def _read(
    cache: LatentCache, pairs: Iterable[Pair], device: DeviceLike, dtype: torch.dtype | None
) -> tuple[dict[Pair, dict[str, torch.Tensor]], dict[Pair, SampleError]]:
    """The tensors of each pair, and why the others cannot be had: not cached, lost or damaged."""
    found: dict[Pair, dict[str, torch.Tensor]] = {}
    missing: dict[Pair, SampleError] = {}
    for text, negative in dict.fromkeys(pairs):
        try:
            found[text, negative] = cache.prompt(text, device=device, dtype=dtype, negative=negative)
        except SampleError as error:
            missing[text, negative] = error
    return found, missing
