"""The section `frames` of a dataset: what becomes of animated files where a model takes clips."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from latentcache.bucket_config import SECTION


class FramesConfig(BaseModel):
    """Which frames of an animated file become a clip. Files with one frame stay images."""

    model_config = SECTION

    count: int = Field(81, ge=1, le=100_000)
    """Frames of a clip, at most. What the VAE would drop is left out before: it takes 1, 5, 9, ... where one latent
    frame is made of four. A shorter file gives the most that it has."""
    fps: float | None = Field(16.0, gt=0, le=1000, allow_inf_nan=False)
    """Frames a second, as the model was trained with: frames of the file are repeated or left out. null: each frame of
    the file, whatever its time."""
    start: Literal["first", "middle"] = "first"
    """Where a clip lies in a longer file: at its beginning, or in its middle."""
