"""Pipelines of diffusers' modular blocks, called as the pipelines of other families are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def modular_sampler(blocks: Any, guidance_name: str, **parts: Any) -> Callable[..., tuple[torch.Tensor]]:
    """The pipeline of these blocks and parts. It returns latents, and takes its guidance as `guidance_name`."""
    made = blocks.init_pipeline()
    made.update_components(**parts)
    made._blocks.sub_blocks["denoise"].set_progress_bar_config(disable=True)

    def run(*, output_type: str, return_dict: bool, **options: Any) -> tuple[torch.Tensor]:
        # A component, and no argument. Below 1 it would be on again, and lead to the negative prompt.
        made.guider.guidance_scale = max(options.pop(guidance_name), 1.0)
        return (made(**options).get("latents"),)

    return run
