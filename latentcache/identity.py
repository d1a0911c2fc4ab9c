"""What an entry IS: canonical inputs -> key.

The key is the BLAKE3 digest of canonical JSON. Everything that determines the value is in the identities below, and
nothing else: path, mtime, host, device, batch size and library versions are provenance. A field that is added here
must get a row in `tests/precache/test_staleness.py`, which fails otherwise. Keys that exist stay what they are:
`to_json` leaves a new field out where it has its default.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from blake3 import blake3

from latentcache.types import Geometry, ImageOutput

if TYPE_CHECKING:
    import numpy as np

SCHEMA = 1
"""Version of the identities below. A change of meaning raises it, and so disowns all older entries."""


def digest(data: bytes | memoryview) -> str:
    """BLAKE3 of the bytes, as 64 hexadecimal digits."""
    return (blake3(data, max_threads=blake3.AUTO) if len(data) > 1 << 20 else blake3(data)).hexdigest()


# json.dumps would make one for each call, which takes as long as a small value.
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def canonical_json(value: Any) -> bytes:
    """One byte string for one value: sorted keys, no spaces, UTF-8, and no NaN or Infinity (ValueError)."""
    # surrogatepass: a file name or a caption from a broken archive may hold lone surrogates.
    return _ENCODER.encode(value).encode("utf-8", "surrogatepass")


def seed_of(*parts: str | int) -> int:
    """The first 64 bits of the BLAKE3 digest of the parts as canonical JSON. Any integers will do.

    The first part is what the seed is for. Sums and products of seed and epoch, as are usual, give one seed to several
    pairs of them.
    """
    return int(digest(canonical_json(parts))[:16], 16)


_is_key = re.compile(r"[0-9a-f]{64}").fullmatch


def is_key(value: object) -> bool:
    """Whether the value is 64 lower-case hexadecimal digits."""
    return isinstance(value, str) and _is_key(value) is not None


def key_names(keys: np.ndarray) -> list[str]:
    """The keys of a column, uint8 [n, 32], as text."""
    digits = keys.tobytes().hex()
    return [digits[at : at + 64] for at in range(0, len(digits), 64)]


def key_of(identity: Mapping[str, Any]) -> str:
    """The key of an entry with this identity (the JSON form): 64 hexadecimal digits."""
    return digest(canonical_json(identity))


def short(value: str) -> str:
    """The first six digits of a digest, for people."""
    return value[:6]


def _values(value: Any) -> dict[str, Any]:
    """The fields of a dataclass with slots, not nested ones: dataclasses.asdict is slow."""
    return {name: getattr(value, name) for name in value.__slots__}


def _without(values: Mapping[str, Any], *later: str) -> dict[str, Any]:
    """The values without fields that came later: keys that were made before them do not have them."""
    return {name: value for name, value in values.items() if name not in later}


@dataclass(frozen=True, slots=True)
class PartIdentity:
    """One part of a model. Tokenizers have no weights: `weights` is the digest of their vocabulary and merges."""

    class_name: str
    weights: str
    config: str

    @property
    def name(self) -> str:
        """Six digits that name weights and config in messages."""
        return short(digest(f"{self.class_name} {self.weights} {self.config}".encode()))


@dataclass(frozen=True, slots=True)
class Preparation:
    """From image bytes to the pixels that the encoder sees: each policy by name, then the geometry.

    A clip has the rule of its frames too, as `config.FramesConfig` has it: their rate, and where they start.
    """

    exif: str
    colour: str
    alpha: str
    decoder: str
    resample: str
    geometry: Geometry
    fps: float | None = None
    start: str | None = None

    @classmethod
    def of(cls, policy: Mapping[str, Any], geometry: Geometry) -> Preparation:
        """`policy` gives exif, colour, alpha, decoder and resample (`dataset.images.preparation_policy`).

        That of a clip also gives fps and start.
        """
        return cls(**policy, geometry=geometry)

    def to_json(self) -> dict[str, Any]:
        """The preparation as JSON, flat."""
        values = _values(self)
        return values | _values(values.pop("geometry"))


@dataclass(frozen=True, slots=True)
class ImageEncoding:
    """The encoder and what is stored of its output. `seed` counts for `sample` only, and is 0 otherwise.

    `condition` is the rule of what a clip's entry also has (`Family.clip_condition`); empty for all other entries.
    `picture` is what its rows of the first frame are made by, where it has these: names, and parts or rules.
    """

    vae: PartIdentity
    compute_dtype: str
    output: ImageOutput
    store_dtype: str
    scaling_factor: float
    shift_factor: float | None
    seed: int = 0
    condition: str = ""
    picture: tuple[tuple[str, PartIdentity | str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The encoding as JSON, what `picture` names among the rest."""
        found = _without(_values(self), "picture", *([] if self.condition else ["condition"]))
        named = {**found, **dict(self.picture)}
        return {name: _values(each) if isinstance(each, PartIdentity) else each for name, each in named.items()}


@dataclass(frozen=True, slots=True)
class TextEncoding:
    """The encoders and tokenizers by name, and what is stored of their outputs.

    `recipe` is what else determines them, by name: that of the family (`Family.text_recipe`).
    """

    parts: tuple[tuple[str, PartIdentity], ...]
    compute_dtype: str
    store_dtype: str
    recipe: tuple[tuple[str, Any], ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """The recipe by name."""
        return dict(self.recipe)

    def to_json(self) -> dict[str, Any]:
        """All in one object: names of parts and of the recipe's settings do not meet."""
        parts = {name: _values(part) for name, part in self.parts}
        return {**parts, "compute_dtype": self.compute_dtype, "store_dtype": self.store_dtype, **self.settings}


@functools.lru_cache(maxsize=64)
def encoding_json(encoding: ImageEncoding | TextEncoding) -> dict[str, Any]:
    """The encoding as JSON. One object for all entries of a run (a plan makes millions): do not change it."""
    return encoding.to_json()


@dataclass(frozen=True, slots=True)
class Masking:
    """What covers a masked image: the digest of a mask, its preparation, and by which rule (`config.MaskConfig`)."""

    source: str
    preparation: Preparation
    rule: str


@dataclass(frozen=True, slots=True)
class ImageIdentity:
    """Everything that determines an image entry's value. `masking` is that of an image that a mask covers."""

    source: str
    preparation: Preparation
    encoding: ImageEncoding
    salt: str = ""
    kind: Literal["image"] = "image"
    schema: int = SCHEMA
    masking: Masking | None = None

    def to_json(self) -> dict[str, Any]:
        """The identity in the form that `key_of` takes."""
        preparation, masking = self.preparation.to_json(), self.masking
        if self.preparation.geometry.num_frames is None:  # only here: masks and control images of texts say null
            preparation = _without(preparation, "num_frames", "fps", "start")
        found = _values(self) | {"preparation": preparation, "encoding": encoding_json(self.encoding)}
        if masking is None:
            return _without(found, "masking")
        return found | {"masking": _values(masking) | {"preparation": masking.preparation.to_json()}}


@dataclass(frozen=True, slots=True)
class MaskIdentity:
    """Everything that determines a mask's value. Each of its numbers stands for `downscale` x `downscale` pixels."""

    source: str
    preparation: Preparation
    downscale: int
    salt: str = ""
    kind: Literal["mask"] = "mask"
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        """The identity in the form that `key_of` takes."""
        return _values(self) | {"preparation": self.preparation.to_json()}


@dataclass(frozen=True, slots=True)
class TextIdentity:
    """Everything that determines a text entry's value. `source` is the digest of the processed caption in UTF-8.

    `controls` are the images that are read together with it: the digest of each and its preparation.
    """

    source: str
    encoding: TextEncoding
    salt: str = ""
    kind: Literal["text"] = "text"
    schema: int = SCHEMA
    controls: tuple[tuple[str, Preparation], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The identity in the form that `key_of` takes."""
        controls = [{"source": source, "preparation": made.to_json()} for source, made in self.controls]
        found = _values(self) | {"encoding": encoding_json(self.encoding), "controls": controls}
        return found if controls else _without(found, "controls")


Identity = ImageIdentity | MaskIdentity | TextIdentity


def keys_like(identity: Identity) -> Callable[[str], str]:
    """Gives the key of an identity that differs from this one in its source alone, which is a digest.

    A plan makes millions of keys, and the rest of their identities is the same text.
    """
    values = identity.to_json()
    before = canonical_json({name: value for name, value in values.items() if name < "source"})
    after = canonical_json({name: value for name, value in values.items() if name > "source"})
    start, end = blake3(before[:-1] + b',"source":"'), b'"%b}' % (b"," + after[1:-1] if len(after) > 2 else b"")

    def key(source: str) -> str:
        hasher = start.copy()
        hasher.update(source.encode("ascii") + end)
        return hasher.hexdigest()

    return key


def caption_digest(caption: str) -> str:
    """The source digest of a processed caption."""
    return digest(caption.encode("utf-8", "surrogatepass"))
