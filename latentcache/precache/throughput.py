"""How fast the last run encoded, for the estimate of the next one."""

from __future__ import annotations

from collections.abc import MutableMapping

from latentcache.precache.encodings import Encodings, dtype_name
from latentcache.precache.plan import Plan


def remember_rate(memo: MutableMapping[str, str], encodings: Encodings, kind: str, seconds: float, amount: int) -> None:
    """Note that `amount` took so long: captions of kind `text`, pixels of kind `image`."""
    if amount and seconds > 0:
        memo[_name(encodings, kind)] = repr(seconds / amount)


def estimate_seconds(memo: MutableMapping[str, str], encodings: Encodings, plan: Plan) -> float | None:
    """Seconds for this shard's misses, at the rate of the last run with these models on this device."""
    total = 0.0
    for kind, amount in (("text", plan.num_captions_to_encode), ("image", plan.num_pixels_to_encode)):
        rate = memo.get(_name(encodings, kind))
        if amount and rate is None:
            return None
        total += amount * float(rate or 0.0)
    return round(total, 1)


def _name(encodings: Encodings, kind: str) -> str:
    placement = encodings.vae if kind == "image" else encodings.text_encoders
    part = encodings.image.vae if kind == "image" else encodings.text.text_encoder_2
    return f"rate {kind} {placement.device} {dtype_name(placement.dtype)} {part.name}"
