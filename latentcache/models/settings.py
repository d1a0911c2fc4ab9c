"""How encoders run while a cache is filled: memory format, cuDNN's choice of kernels, compilation. All is restored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from diffusers import AutoencoderKL

from latentcache.errors import ModelError
from latentcache.models.model_loader import TextParts

RECOMPILE_LIMIT = 256
"""Graphs of one module: one for each bucket and batch size. Beyond it torch would go on without compiling."""


@contextmanager
def vae_settings(vae: AutoencoderKL, *, compile: bool = False) -> Iterator[None]:
    """The VAE's encoder with the settings for its device and dtype; the weights' memory format and flags are restored.

    The settings, with their reasons:
    * channels_last for half precision on an accelerator: torch's and cuDNN's advice for convolutions in float16 and
      bfloat16, as tensor cores read it without transposing. Not in float32, for which it is not given. Not on a CPU:
      there an entry equals the live pipeline's output bit by bit, and oneDNN rounds otherwise in channels_last.
    * cuDNN's benchmark is off. It times kernels to choose one, again for each bucket and batch size, and the winner
      may differ between runs: one key, other last bits.
    * no autocast (`models.inference`): an entry's identity states the dtype of computation.
    * `compile`: off by default. Each bucket and batch size costs a compilation, one graph each, and the last bits are
      not those of the eager encoder. ModelError if it fails.
    """
    parameter = next(vae.parameters())
    half = parameter.device.type != "cpu" and parameter.dtype in (torch.float16, torch.bfloat16)
    with _benchmark_off(), _channels_last(vae, enabled=half), _compiled("vae", [vae.encoder] if compile else []):
        yield


@contextmanager
def text_settings(parts: TextParts, *, compile: bool = False) -> Iterator[None]:
    """The text encoders, compiled with `compile` as in `vae_settings`: one graph for each batch size."""
    with _compiled("text_encoder", [parts.text_encoder, parts.text_encoder_2] if compile else []):
        yield


@contextmanager
def _benchmark_off() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def _channels_last(module: AutoencoderKL, *, enabled: bool) -> Iterator[None]:
    """The weights in channels_last. A module in another format than the default is the caller's choice: left alone."""
    if not enabled or not all(parameter.is_contiguous() for parameter in module.parameters()):
        yield
        return
    try:
        module.to(memory_format=torch.channels_last)
        yield
    finally:
        module.to(memory_format=torch.contiguous_format)


@contextmanager
def _compiled(part: str, modules: list[torch.nn.Module]) -> Iterator[None]:
    """The modules compiled in place: no wrapper, so that parameters and state_dict keep their names."""
    if not modules:
        yield
        return
    # Slow to import, and needed here only.
    from torch._dynamo import config
    from torch._dynamo.exc import TorchDynamoException

    # A module that its owner has compiled stays as it is.
    ours = [module for module in modules if module._compiled_call_impl is None]
    try:
        for module in ours:
            module.compile(dynamic=False)
        # Every torch since 2.6 knows the limit by this name; only newer ones take it as an argument of `compile`.
        with config.patch(cache_size_limit=RECOMPILE_LIMIT):
            yield
    except TorchDynamoException as error:
        reason = " ".join(str(error).partition("\n\n")[0].split())  # what follows is advice for torch's developers
        raise ModelError(
            f"{part}: it cannot be compiled here ({reason}). Set encode.compile to false, or "
            "install what torch.compile needs, such as a C++ compiler or triton.",
            part=part,
        ) from error
    finally:
        for module in ours:
            module._compiled_call_impl = None
