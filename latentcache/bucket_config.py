"""The settings of buckets: whose rule, and what that rule needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

SECTION = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
"""What every section of a config has: unknown settings are errors, nothing changes later, docstrings describe."""

RuleName = Literal["latentcache", "kohya", "simpletuner", "ai-toolkit", "onetrainer", "diffusers"]
RULES = get_args(RuleName)
_SETTINGS_OF_RULE: dict[str, frozenset[str]] = {
    "latentcache": frozenset({"area", "step", "max_aspect"}),
    "kohya": frozenset({"resolution", "step", "square", "min_side", "max_side", "upscale"}),
    "simpletuner": frozenset({"resolution", "step", "square", "resolution_type"}),
    "ai-toolkit": frozenset({"resolution", "step", "square"}),
    "onetrainer": frozenset({"resolution", "step", "square"}),
    "diffusers": frozenset({"resolution", "sizes", "resample"}),
}
_MAX_SIDE = 16384

Side = Annotated[int, Field(ge=8, le=_MAX_SIDE)]


def settings_of(rule: str) -> frozenset[str]:
    """The names of the settings that a rule has."""
    return _SETTINGS_OF_RULE[rule]


class BucketsConfig(BaseModel):
    """The sizes that images are resized and cropped to. Each rule has some of these settings."""

    model_config = SECTION

    rule: RuleName = "latentcache"
    """Whose buckets. A trainer can use exported latents only if they have the buckets that it would make itself."""
    area: int = Field(1024 * 1024, ge=64, le=_MAX_SIDE**2)
    """`latentcache`: largest number of pixels of a bucket; 1048576 for models of 1024x1024."""
    max_aspect: float = Field(2.0, ge=1.0, le=64.0)
    """`latentcache`: longest side of a bucket divided by its shortest, at most."""
    resolution: int = Field(1024, ge=64, le=_MAX_SIDE)
    """All other rules: the trainer's resolution, the side of its square in pixels. An area of 1.0 in SimpleTuner is
    1000."""
    step: int = Field(64, ge=8, le=1024, multiple_of=8)
    """Height and width of a bucket are multiples of this many pixels. `ai-toolkit`: 16 by default, as it is there.
    `diffusers` has none."""
    square: bool = False
    """`kohya` (no enable_bucket), `simpletuner` (crop_aspect square), `ai-toolkit` (square_crop), `onetrainer` (no
    aspect_ratio_bucketing): every image is cropped to one square."""
    min_side: Side = 256
    """`kohya`: min_bucket_reso."""
    max_side: Side = 1024
    """`kohya`: max_bucket_reso. Trainings at 1024 often have 2048."""
    upscale: bool = True
    """`kohya`: false is bucket_no_upscale: small images are cropped and never enlarged."""
    resolution_type: Literal["pixel_area", "pixel"] = "pixel_area"
    """`simpletuner`: whether the resolution is that of a square of the bucket's area, or the shorter side."""
    sizes: tuple[tuple[Side, Side], ...] = ()
    """`diffusers`: aspect_ratio_buckets, each [height, width]; images are resized to them, also out of proportion.
    Without any, every image is cropped to one square."""
    resample: Literal["lanczos", "bilinear"] | None = None
    """`diffusers`: image_interpolation_mode. null: lanczos, and bilinear for `sizes`, as the scripts have it."""

    @model_validator(mode="before")
    @classmethod
    def _step_of_ai_toolkit(cls, settings: Any) -> Any:
        if isinstance(settings, Mapping) and settings.get("rule") == "ai-toolkit":
            return {"step": 16, **settings}
        return settings

    @model_validator(mode="after")
    def _fit_the_rule(self) -> BucketsConfig:
        known = settings_of(self.rule)
        for name, field in type(self).model_fields.items():
            if name != "rule" and name not in known and getattr(self, name) != field.default:
                raise ValueError(f"{name} is no setting of rule {self.rule}; it has {', '.join(sorted(known))}")
        if self.rule == "latentcache" and self.area < self.step**2:
            raise ValueError(f"area is {self.area}; one bucket of {self.step}x{self.step} needs {self.step**2}")
        if self.rule in ("kohya", "onetrainer") and not self.square and self.resolution < self.step:
            raise ValueError(f"resolution is {self.resolution}; it must be at least step, {self.step}")
        if self.rule == "kohya" and self.upscale and not self.square:
            self._check_kohya_sides()
        by_rule = {"simpletuner": self.resolution_type == "pixel", "diffusers": not self.sizes, "latentcache": False}
        if by_rule.get(self.rule, self.square) and self.resolution % 8:
            raise ValueError(f"resolution is {self.resolution}; the side of the square must be a multiple of 8")
        if uneven := [size for size in self.sizes if size[0] % 8 or size[1] % 8]:
            raise ValueError(f"sizes has {list(uneven[0])}; heights and widths must be multiples of 8")
        return self

    def _check_kohya_sides(self) -> None:
        step, least = self.step, self.min_side // self.step * self.step
        most = -(-self.max_side // step) * step
        if least < step:
            raise ValueError(f"min_side is {self.min_side}; it must be at least step, {step}")
        if not least <= self.resolution <= most:
            raise ValueError(
                f"resolution is {self.resolution}; kohya needs one from min_side {self.min_side} to max_side "
                f"{self.max_side}"
            )
