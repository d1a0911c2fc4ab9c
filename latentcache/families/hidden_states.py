"""Hidden states of a text encoder, captured at modules that the family names.

diffusers' pipelines read them by index, whose meaning depends on transformers: since 5.0 the last one is normalised.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from latentcache.errors import ModelError


class _AllRead(Exception):
    """Raised to skip the rest of the encoder once every state is captured."""


class HiddenStates:
    """Stand-in for a pipeline's text encoder: `hidden_states[k]` is the output of the module named for k.

    `modules` maps k to the end of a module's name, so an encoder inside a larger model works too. ModelError if not
    exactly one name ends like this. The encoder runs only up to the last of these modules, without a KV cache and
    uncompiled. Only these states are kept in memory, not one per layer.
    """

    def __init__(self, encoder: Any, modules: Mapping[int, str]):
        self._encoder = encoder
        named = [(f".{name}", module) for name, module in encoder.named_modules()]
        self._modules: dict[int, Any] = {}
        for index, end in modules.items():
            found = [module for name, module in named if name.endswith(f".{end}")]
            if len(found) != 1:
                raise ModelError(
                    f"text_encoder: {len(found)} modules of {type(encoder).__name__} have names that end in {end!r}, "
                    "but exactly one is needed. Pass an encoder of the class that the family names.",
                    part="text_encoder",
                )
            self._modules[index] = found[0]

    def __call__(self, **options: Any) -> Any:
        """Run the encoder's `forward` with these arguments, and return an output with `hidden_states` only."""
        states: dict[int, torch.Tensor] = {}

        def keep(index: int) -> Any:
            def hook(module: Any, given: Any, output: Any) -> None:
                states[index] = output[0] if isinstance(output, tuple) else output
                if len(states) == len(self._modules):
                    raise _AllRead

            return hook

        hooks = [module.register_forward_hook(keep(index)) for index, module in self._modules.items()]
        try:
            # Not __call__, which may be compiled: a compiled graph would ignore these hooks.
            self._encoder.forward(**{**options, "output_hidden_states": False, "use_cache": False})
        except _AllRead:
            return SimpleNamespace(hidden_states=states)
        finally:
            for each in hooks:
                each.remove()
        raise ModelError(
            f"text_encoder: {type(self._encoder).__name__} did not run {len(self._modules) - len(states)} of the "
            "modules whose outputs are read. Pass it as it was loaded, without compiled or replaced layers.",
            part="text_encoder",
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)
