"""Hidden states of a text encoder, taken at modules that the family names.

A pipeline of diffusers reads them by their index, whose meaning is transformers' own: since 5.0 the last one is normed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from latentcache.errors import ModelError


class _AllRead(Exception):
    """What follows in the encoder is not read."""


class HiddenStates:
    """Stands in for a text encoder in a pipeline: `hidden_states[k]` is the output of the module that is named for k.

    `modules`: k -> the end of the module's name, so that a model with a head around the encoder serves as well.
    ModelError if none or several end so. The encoder runs up to the last of these modules, without keys and values
    for further tokens, and uncompiled. It keeps these states alone: a deep encoder would hold as many as it has layers.
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
                    "but one is needed. Give an encoder of the class that the family names.",
                    part="text_encoder",
                )
            self._modules[index] = found[0]

    def __call__(self, **options: Any) -> Any:
        """Run the encoder with the arguments of its `forward`, and return its output: `hidden_states` alone."""
        states: dict[int, torch.Tensor] = {}

        def keep(index: int) -> Any:
            def hook(module: Any, given: Any, output: Any) -> None:
                states[index] = output[0] if isinstance(output, tuple) else output
                if len(states) == len(self._modules):
                    raise _AllRead

            return hook

        hooks = [module.register_forward_hook(keep(index)) for index, module in self._modules.items()]
        try:
            # Not the call, which may be compiled: a graph would go on with the hooks that it was made with.
            self._encoder.forward(**{**options, "output_hidden_states": False, "use_cache": False})
        except _AllRead:
            return SimpleNamespace(hidden_states=states)
        finally:
            for each in hooks:
                each.remove()
        raise ModelError(
            f"text_encoder: {type(self._encoder).__name__} ran without {len(self._modules) - len(states)} of the "
            "modules whose outputs are read. Give it as it was loaded, with none of its layers compiled or replaced.",
            part="text_encoder",
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)
