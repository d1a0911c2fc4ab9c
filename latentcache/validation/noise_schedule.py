"""The noise schedule that a model was trained with: x_t = signal x_0 + noise, at every timestep of the training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler

from latentcache.errors import ConfigError
from latentcache.families.base import TimestepSampling
from latentcache.identity import canonical_json, digest

FLOW = "flow_prediction"
PREDICTION_TYPES = ("epsilon", "v_prediction", "sample", FLOW)
OFFSET_BITS = 64
Share: TypeAlias = tuple[float, float]
"""Start and end of a range of timesteps, as fractions of their number; 0 is the cleanest."""
WHOLE: Share = (0.0, 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class NoiseSchedule:
    """Noise levels, timesteps and targets of a training, by index: 0 is the cleanest level, the last the noisiest.

    `signal` and `noise_scale` are float32 [num_train_timesteps] on the CPU. `timesteps` [num_train_timesteps] are the
    denoiser's inputs (int64, or float32 for flow matching). `digest` identifies the schedule. `used` is the range of
    indices that the denoiser is trained for: all of them, unless a second denoiser has the rest. An `index` argument is
    int64 [B] on the CPU; after `to(device)` it may be on that device, which saves a copy.
    """

    prediction_type: str
    signal: torch.Tensor
    noise_scale: torch.Tensor
    timesteps: torch.Tensor
    digest: str
    used: range

    @classmethod
    def of(cls, scheduler: Any, within: Share = WHOLE) -> NoiseSchedule:
        """The training schedule of a model, from its diffusers scheduler or the content of scheduler_config.json.

        A NoiseSchedule is returned unchanged. Only the config is read. A sampler such as EulerDiscreteScheduler has the
        betas of the DDPM training. Flow matching is recognised by class (FlowMatch...) or prediction type. `within` is
        the range of timesteps that the denoiser is trained for. Raises ConfigError for an unknown prediction type, and
        for a scheduler with neither betas nor flow matching.
        """
        if isinstance(scheduler, NoiseSchedule):
            return scheduler
        class_names, config = _config_of(scheduler)
        try:
            if is_flow(scheduler):
                schedule = cls._of_flow(config)
            else:
                schedule = cls._of_betas(class_names[0], config)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise ConfigError(f"scheduler {class_names[0]}: its config cannot be used: {error}") from error
        if not (schedule.signal.isfinite().all() and schedule.noise_scale.isfinite().all()):
            raise ConfigError(
                f"scheduler {class_names[0]}: noise levels are not finite; betas must lie in [0, 1], a shift above 0"
            )
        return schedule if within == WHOLE else schedule._restricted(*within)

    @classmethod
    def _of_betas(cls, name: str, config: Mapping[str, Any]) -> NoiseSchedule:
        # Configs of older models lack it. This is diffusers' default.
        prediction_type = config.get("prediction_type", "epsilon")
        if prediction_type not in PREDICTION_TYPES:
            allowed = ", ".join(PREDICTION_TYPES)
            raise ConfigError(f"scheduler {name}: prediction_type is {prediction_type!r}; it must be one of {allowed}")
        has_own_betas = config.get("trained_betas") is not None
        needed: dict[str, Callable[[Any], Any]] = {"beta_schedule": str, "beta_start": float, "beta_end": float}
        if has_own_betas:
            needed = {"trained_betas": lambda betas: [float(beta) for beta in betas]}
        missing = [key for key in needed if key not in config]
        if missing:
            raise ConfigError(
                f"scheduler {name}: its config has no {', '.join(missing)}. A training schedule needs betas or a "
                "FlowMatch... class: give the scheduler itself, or the whole scheduler_config.json with its _class_name"
            )
        settings = {key: convert(config[key]) for key, convert in needed.items()} | {
            "num_train_timesteps": int(config.get("num_train_timesteps", 1000)),
            "prediction_type": prediction_type,
            "rescale_betas_zero_snr": bool(config.get("rescale_betas_zero_snr", False)),
        }
        if has_own_betas:
            settings["num_train_timesteps"] = len(settings["trained_betas"])
        alphas_cumprod = DDPMScheduler.from_config(settings).alphas_cumprod
        return cls(
            prediction_type=prediction_type,
            signal=alphas_cumprod**0.5,
            noise_scale=(1 - alphas_cumprod) ** 0.5,
            timesteps=torch.arange(settings["num_train_timesteps"]),
            digest=digest(canonical_json({"kind": "betas", **settings})),
            used=range(settings["num_train_timesteps"]),
        )

    @classmethod
    def _of_flow(cls, config: Mapping[str, Any]) -> NoiseSchedule:
        """x_t = (1 - sigma) x_0 + sigma noise, as in diffusers' examples/dreambooth/train_dreambooth_lora_sd3.py.

        With `use_dynamic_shifting` training uses unshifted sigmas; only sampling shifts them.
        """
        if config.get("invert_sigmas"):
            raise ConfigError("scheduler: invert_sigmas is true; only flow from data (0) to noise (1) is supported")
        # Solvers that sample flow models (UniPC, DPM-Solver) name it `flow_shift`.
        shift = config.get("shift", config.get("flow_shift", 1.0))
        settings = {
            "num_train_timesteps": int(config.get("num_train_timesteps", 1000)),
            "shift": 1.0 if config.get("use_dynamic_shifting") else float(shift),
        }
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(settings)
        sigmas = scheduler.sigmas.flip(0)
        return cls(
            prediction_type=FLOW,
            signal=1 - sigmas,
            noise_scale=sigmas,
            timesteps=scheduler.timesteps.flip(0),
            digest=digest(canonical_json({"kind": "flow", **settings})),
            used=range(len(sigmas)),
        )

    def _restricted(self, low: float, high: float) -> NoiseSchedule:
        """The schedule of a denoiser for timesteps from `low` to below `high`, as fractions of all."""
        number = self.num_train_timesteps
        first, end = (int(torch.searchsorted(self.timesteps.float(), at * number)) for at in (low, high))
        used = range(first, number if high >= 1 else end)
        if not used:
            raise ConfigError(f"the schedule of {number} has no timestep from {low} to {high}: correct boundary_ratio")
        return replace(self, used=used, digest=digest(canonical_json([self.digest, used.start, used.stop])))

    def to(self, device: torch.device) -> NoiseSchedule:
        """Move the tensors to a device, to call `noised` and `target` there."""
        signal, noise_scale, timesteps = (each.to(device) for each in (self.signal, self.noise_scale, self.timesteps))
        return replace(self, signal=signal, noise_scale=noise_scale, timesteps=timesteps)

    def draw(self, sampling: TimestepSampling, num: int, generator: torch.Generator) -> torch.Tensor:
        """Draw `num` indices to train at with a CPU generator: int64 [num] on the CPU.

        `uniform` draws every position in the schedule equally often. `logit_normal` draws the sigmoid of a normal
        number of mean 0, as diffusers' compute_density_for_timestep_sampling does. With a `shift` the number drawn is
        the noise level before shifting, by the formula of arXiv 2403.03206, 5.3.2: `shift * t / (1 + (shift - 1) * t)`.
        It replaces the schedule's own shift. A denoiser for part of the schedule gets the whole distribution scaled
        into that part, like musubi-tuner's `min_timestep` and `max_timestep`.
        """
        first, last = self.used[0], self.used[-1]
        if sampling == TimestepSampling():
            return torch.randint(first, last + 1, (num,), generator=generator)
        if sampling.density == "logit_normal":
            drawn = (sampling.deviation * torch.randn(num, generator=generator)).sigmoid()
        else:
            drawn = torch.rand(num, generator=generator)
        if sampling.shift is None:
            index = first + (drawn * len(self.used)).long()
        else:
            noise = sampling.shift * drawn / (1 + (sampling.shift - 1) * drawn)
            if len(self.used) < self.num_train_timesteps:
                noise = torch.lerp(self.noise_scale[first], self.noise_scale[last], noise)
            index = torch.searchsorted(self.noise_scale, noise)
        return index.clamp(first, last)

    @property
    def num_train_timesteps(self) -> int:
        """Number of timesteps in training."""
        return len(self.timesteps)

    def noised(self, latents: torch.Tensor, noise: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """x_t of scaled latents [B, C, h, w] in float32, bit-identical to diffusers' `add_noise` in float32."""
        signal, noise_scale = self._factors(latents, index)
        return signal * latents.float() + noise_scale * noise.float()

    def target(self, latents: torch.Tensor, noise: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """The prediction that the denoiser is trained for, in float32. v is diffusers' `get_velocity`."""
        latents, noise = latents.float(), noise.float()
        if self.prediction_type == "epsilon":
            return noise
        if self.prediction_type == "sample":
            return latents
        if self.prediction_type == FLOW:
            return noise - latents
        signal, noise_scale = self._factors(latents, index)
        return signal * noise - noise_scale * latents

    def snr(self, index: torch.Tensor) -> torch.Tensor:
        """The signal-to-noise ratio, float64 [B] on the CPU. Raises ConfigError for flow matching."""
        if self.prediction_type == FLOW:
            raise ConfigError(
                "min-SNR weighting needs a schedule with betas, but this scheduler is flow matching: "
                "set validation.snr_gamma to null",
                key="validation.snr_gamma",
            )
        return (self.signal[index].double() / self.noise_scale[index].double()) ** 2

    def min_snr_weight(self, index: torch.Tensor, gamma: float) -> torch.Tensor:
        """The min-SNR weight of the loss (arXiv 2303.09556), float64 [B] on the CPU. Raises ConfigError for flow.

        min(snr, gamma), divided by snr for epsilon and by snr + 1 for v, as in diffusers' training scripts. The limits
        are right too: 1 for epsilon at snr 0, and 0 for epsilon and v without noise.
        """
        snr = self.snr(index)
        clipped = snr.clamp(max=gamma)
        if self.prediction_type == "epsilon":
            return gamma / snr.clamp(min=gamma)
        return clipped if self.prediction_type == "sample" else clipped / (snr + 1)

    def _factors(self, latents: torch.Tensor, index: torch.Tensor) -> list[torch.Tensor]:
        shape = (-1, *[1] * (latents.ndim - 1))
        return [factor[index].reshape(shape).to(latents.device) for factor in (self.signal, self.noise_scale)]


def is_flow(scheduler: Any) -> bool:
    """Whether a diffusers scheduler, or its config, is for flow matching. Raises ConfigError if it is neither."""
    class_names, config = _config_of(scheduler)
    return any(name.startswith("FlowMatch") for name in class_names) or config.get("prediction_type") == FLOW


def strata(num_train_timesteps: int, num_timesteps: int) -> tuple[range, ...]:
    """Split range(num_train_timesteps) into `num_timesteps` parts whose lengths differ by at most one.

    Raises ConfigError if there are more parts than timesteps.
    """
    if not 1 <= num_timesteps <= num_train_timesteps:
        raise ConfigError(
            f"num_timesteps is {num_timesteps}; the schedule has {num_train_timesteps} timesteps, so it must be from "
            f"1 to {num_train_timesteps}",
            key="validation.num_timesteps",
        )
    ends = [number * num_train_timesteps // num_timesteps for number in range(num_timesteps + 1)]
    return tuple(range(first, end) for first, end in pairwise(ends))


def index_in(stratum: range, offset: int) -> int:
    """The index at `offset` in the stratum. The offset is a fraction, in units of 2**-OFFSET_BITS."""
    return stratum[offset * len(stratum) >> OFFSET_BITS]


def _config_of(scheduler: Any) -> tuple[list[str], Mapping[str, Any]]:
    """The names of the scheduler's class and its bases, and the config."""
    if isinstance(scheduler, Mapping):
        return [str(scheduler.get("_class_name", "config"))], scheduler
    config = getattr(scheduler, "config", None)
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"scheduler is a {type(scheduler).__name__}; it must be a diffusers scheduler, or the content of its "
            "scheduler_config.json"
        )
    return [base.__name__ for base in type(scheduler).__mro__], config
