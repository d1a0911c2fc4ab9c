"""The arrays of a caption in kohya sd-scripts' `.npz` files, for each family.

SDXL: `hidden_state1` [77, 768], `hidden_state2` [77, 1280] and `pool2` [1280]. FLUX.1: `t5_out` [L, 4096], `l_pooled`
[768], `txt_ids` [L, 3] of zeros, `t5_attn_mask` [L] and `apply_t5_attn_mask`, in float32. With `apply_t5_attn_mask` T5
does not attend to padding: that is another recipe than diffusers', whose embeddings have the same shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from latentcache.errors import ForeignFileRefused
from latentcache.families.sdxl import FAMILY as SDXL
from latentcache.interop.exporting import ExportCaption
from latentcache.interop.files import corrupt
from latentcache.interop.reports import ExportReport

Arrays = Mapping[str, np.ndarray]
SUFFIXES = {"sdxl": "_te_outputs.npz", "flux": "_flux_te.npz"}
"""How the names of a family's text files end. kohya keeps no texts of SD 1.5."""
NOTE_MASK_UNKNOWN = "t5_attn_mask is not known and was written as all ones: kohya reads it with apply_t5_attn_mask only"
_FLAG, _MASK = "apply_t5_attn_mask", "t5_attn_mask"


def array_of(arrays: Arrays, name: str, path: Path) -> np.ndarray:
    """An array of a file. Raises ForeignFileRefused."""
    if name not in arrays:
        raise corrupt(path, f"it has no {name}")
    return arrays[name]


def float_tensor(arrays: Arrays, name: str, path: Path, *, ndim: int) -> torch.Tensor:
    """An array of a file as a tensor of float32 or float16. Raises ForeignFileRefused."""
    array = array_of(arrays, name, path)
    if array.dtype not in (np.float32, np.float16) or array.ndim != ndim or array.size == 0:
        raise corrupt(path, f"{name} is {array.dtype} {list(array.shape)}; it must be float with {ndim} dimensions")
    return torch.from_numpy(array)


def read_text(family: str, file: Arrays, path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The caption's prompt_embeds [L, D] and pooled_prompt_embeds [P]. Raises ForeignFileRefused."""
    return _read_flux(file, path) if family == "flux" else _read_sdxl(file, path)


def _read_sdxl(file: Arrays, path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = (float_tensor(file, f"hidden_state{number}", path, ndim=2) for number in (1, 2))
    pooled = float_tensor(file, "pool2", path, ndim=1)
    if first.shape[0] != SDXL.max_length or second.shape[0] != SDXL.max_length:
        detail = f"hidden_state1 is {list(first.shape)}, hidden_state2 {list(second.shape)}: "
        detail += f"{SDXL.max_length} tokens are needed (max_token_length 75)"
        raise ForeignFileRefused(path, "unsupported-format", detail)
    if not first.dtype == second.dtype == pooled.dtype:
        raise corrupt(path, f"its dtypes are {first.dtype}, {second.dtype}, {pooled.dtype}")
    return torch.cat([first, second], dim=-1), pooled


def _read_flux(file: Arrays, path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    flag, mask = array_of(file, _FLAG, path), array_of(file, _MASK, path)
    if flag.shape != () or flag.dtype != np.bool_:
        raise corrupt(path, f"{_FLAG} is {flag.dtype} {list(flag.shape)}; it must be one bool")
    if flag:
        detail = f"it was made with {_FLAG}, and diffusers' FLUX.1 has no such mask: cache texts without it"
        raise ForeignFileRefused(path, "unsupported-format", detail)
    embeds, pooled = float_tensor(file, "t5_out", path, ndim=2), float_tensor(file, "l_pooled", path, ndim=1)
    if embeds.dtype != pooled.dtype or mask.shape != embeds.shape[:1]:
        shapes = f"t5_out {embeds.dtype} {list(embeds.shape)}, l_pooled {pooled.dtype}, {_MASK} {list(mask.shape)}"
        raise corrupt(path, f"its arrays do not fit together: {shapes}")
    return embeds, pooled


def text_arrays(family: str, caption: ExportCaption, report: ExportReport) -> dict[str, np.ndarray] | str:
    """The arrays of a caption, or why it has none."""
    embeds, pooled = caption.prompt_embeds, caption.pooled_prompt_embeds
    assert pooled is not None, "both families have pooled embeddings"
    if embeds.dtype is not torch.float16:
        embeds, pooled = embeds.float(), pooled.float()  # npz has no bfloat16
    if family == "flux":
        return _flux_arrays(embeds, pooled.to(embeds.dtype), caption.num_tokens, report)
    # The second encoder's hidden states are as wide as its pooled output.
    width = embeds.shape[1] - pooled.shape[0]
    if embeds.shape[0] != SDXL.max_length or width < 1:
        return f"embeddings of the shapes {list(embeds.shape)} and {list(pooled.shape)} are not SDXL's"
    return {
        "hidden_state1": embeds[:, :width].contiguous().numpy(),
        "hidden_state2": embeds[:, width:].contiguous().numpy(),
        "pool2": pooled.numpy(),
    }


def _flux_arrays(
    embeds: torch.Tensor, pooled: torch.Tensor, num_tokens: int | None, report: ExportReport
) -> dict[str, np.ndarray]:
    length = len(embeds)
    report.note(NOTE_MASK_UNKNOWN if num_tokens is None else None)
    return {
        "l_pooled": pooled.numpy(),
        "t5_out": embeds.contiguous().numpy(),
        "txt_ids": np.zeros((length, 3), np.float32),
        _MASK: (np.arange(length) < (length if num_tokens is None else num_tokens)).astype(np.int64),
        _FLAG: np.array(False),
    }
