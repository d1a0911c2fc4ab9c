"""The section `ray` of a config: what a run on a Ray cluster requests of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, field_validator

from latentcache.bucket_config import SECTION

Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RayConfig(BaseModel):
    """What a run on a Ray cluster requests of it (`latentcache precache CONFIG --ray auto`)."""

    model_config = SECTION

    num_gpus: Literal["auto"] | Share = "auto"
    """GPUs of each encoder; of a fraction several encoders share one. `auto`: none where `encode.device` is `cpu`, else
    one."""
    accelerator_type: str | None = None
    """Only GPUs of this type, as Ray names them: `A100`, `H100`, `L4`, ..."""
    num_cpus: Share = 0.5
    """CPUs of each encoder. One that encodes on the CPU uses as many threads."""
    decode_cpus: Share = Field(0.5, gt=0)
    """CPUs of each task that decodes an image."""
    min_encoders: int = Field(1, ge=1)
    """The run fails where so many encoders do not start within `wait_s`."""
    max_encoders: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Encoders at once. More than the cluster has room for now make it grow, where it can. `auto`: as many as there is
    room for now; of those without a GPU one for each node."""
    wait_s: float = Field(180.0, gt=0, allow_inf_nan=False)
    """For so many seconds the run waits where the cluster has no room for any encoder, or for decoding."""

    @field_validator("num_gpus")
    @classmethod
    def _fraction_or_whole(cls, value: float | str) -> float | str:
        if isinstance(value, float) and value > 1 and value != int(value):
            raise ValueError(f"is {value:g}; Ray gives a fraction of one GPU, or whole GPUs")
        return value
