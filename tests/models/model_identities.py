"""Identities of all parts of a model."""

from __future__ import annotations

import torch

from latentcache.identity import PartIdentity

F16, F32 = torch.float16, torch.float32
PIXELS = torch.arange(2 * 32 * 32 * 3).remainder(251).to(torch.uint8).reshape(2, 32, 32, 3)


def identities(models, dtype: torch.dtype = F32) -> dict[str, PartIdentity]:
    return {part: models.identity(part, dtype) for part in models.family.parts}
