"""What an entry IS: canonical inputs -> key.

The key is the BLAKE3 digest of canonical JSON. The identities below hold everything that determines an entry's value,
and nothing else: path, mtime, host, device, batch size and library versions are provenance. A new field needs a row in
`tests/precache/test_staleness.py`, which fails otherwise. Existing keys must not change, so `to_json` omits a new field
that has its default.
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
"""Version of the identities below. Raising it, for a change of meaning, invalidates all existing entries."""


def digest(data: bytes | memoryview) -> str:
    """The BLAKE3 digest of the bytes, as 64 hexadecimal digits."""
    return (blake3(data, max_threads=blake3.AUTO) if len(data) > 1 << 20 else blake3(data)).hexdigest()


# json.dumps would create one per call, which takes as long as encoding a small value.
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def canonical_json(value: Any) -> bytes:
    """Encode a value deterministically: sorted keys, no spaces, UTF-8. Raises ValueError for NaN and Infinity."""
    # surrogatepass: a file name or a caption from a broken archive may contain lone surrogates.
    return _ENCODER.encode(value).encode("utf-8", "surrogatepass")


def seed_of(*parts: str | int) -> int:
    """Derive a 64-bit seed from the parts, the first of which should name its purpose.

    Unlike the usual sums and products of seed and epoch, different parts give different seeds.
    """
    return int(digest(canonical_json(parts))[:16], 16)


_is_key = re.compile(r"[0-9a-f]{64}").fullmatch


def is_key(value: object) -> bool:
    """Whether the value is 64 lower-case hexadecimal digits."""
    return isinstance(value, str) and _is_key(value) is not None


def key_names(keys: np.ndarray) -> list[str]:
    """Convert a column of keys, uint8 [n, 32], to text."""
    digits = keys.tobytes().hex()
    return [digits[at : at + 64] for at in range(0, len(digits), 64)]


def sortable(keys: np.ndarray) -> np.ndarray:
    """Keys, uint8 [n, 32], as one sortable numpy value each."""
    return keys.view("S32").reshape(-1)


def key_of(identity: Mapping[str, Any]) -> str:
    """The key of an entry with this identity in its JSON form: 64 hexadecimal digits."""
    return digest(canonical_json(identity))


def short(value: str) -> str:
    """The first six digits of a digest, for display."""
    return value[:6]


def _values(value: Any) -> dict[str, Any]:
    """The fields of a dataclass with slots, not recursively: dataclasses.asdict is slow."""
    return {name: getattr(value, name) for name in value.__slots__}


def _without(values: Mapping[str, Any], *later: str) -> dict[str, Any]:
    """The values without the fields `later`, which were added after the first keys were made."""
    return {name: value for name, value in values.items() if name not in later}


@dataclass(frozen=True, slots=True)
class PartIdentity:
    """One part of a model. For a tokenizer, `weights` is the digest of its vocabulary and merges."""

    class_name: str
    weights: str
    config: str

    @property
    def name(self) -> str:
        """Six digits that stand for the part in messages."""
        return short(digest(f"{self.class_name} {self.weights} {self.config}".encode()))


@dataclass(frozen=True, slots=True)
class Preparation:
    """How image bytes become the pixels that the encoder sees: each policy by name, then the geometry.

    For a clip, `fps` and `start` are those of `config.FramesConfig`.
    """

    exif: str
    colour: str
    alpha: str
    decoder: str
    resample: str
    geometry: Geometry
    fps: float | None = None
    start: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The preparation as JSON, flat."""
        values = _values(self)
        return values | _values(values.pop("geometry"))


@dataclass(frozen=True, slots=True)
class ImageEncoding:
    """The encoder and what is stored of its output. `seed` is 0 unless the output is `sample`.

    `condition` is the rule for a clip entry's conditioning (`Family.clip_condition`); empty for all other entries.
    `picture` names the parts and rules that encode the first frame, if the entry stores that.
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
        """The encoding as JSON, with the items of `picture` at the top level."""
        found = _without(_values(self), "picture", *([] if self.condition else ["condition"]))
        named = {**found, **dict(self.picture)}
        return {name: _values(each) if isinstance(each, PartIdentity) else each for name, each in named.items()}


@dataclass(frozen=True, slots=True)
class TextEncoding:
    """The encoders and tokenizers by name, and what is stored of their outputs.

    `recipe` holds the family's other settings that determine the outputs (`Family.text_recipe`).
    """

    parts: tuple[tuple[str, PartIdentity], ...]
    compute_dtype: str
    store_dtype: str
    recipe: tuple[tuple[str, Any], ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """The recipe as a dict."""
        return dict(self.recipe)

    def to_json(self) -> dict[str, Any]:
        """The encoding as one flat JSON object: part names and recipe settings do not collide."""
        parts = {name: _values(part) for name, part in self.parts}
        return {**parts, "compute_dtype": self.compute_dtype, "store_dtype": self.store_dtype, **self.settings}


@functools.lru_cache(maxsize=64)
def encoding_json(encoding: ImageEncoding | TextEncoding) -> dict[str, Any]:
    """The encoding as JSON, shared by all entries of a run: do not modify it. A plan makes millions of entries."""
    return encoding.to_json()


@dataclass(frozen=True, slots=True)
class Masking:
    """The mask of a masked image: its digest, its preparation, and the masking rule (`config.MaskConfig`)."""

    source: str
    preparation: Preparation
    rule: str


@dataclass(frozen=True, slots=True)
class ImageIdentity:
    """Everything that determines an image entry's value. Only a masked image has `masking`."""

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
        if self.preparation.geometry.num_frames is None:  # only here: masks and texts' control images have null
            preparation = _without(preparation, "num_frames", "fps", "start")
        found = _values(self) | {"preparation": preparation, "encoding": encoding_json(self.encoding)}
        if masking is None:
            return _without(found, "masking")
        return found | {"masking": _values(masking) | {"preparation": masking.preparation.to_json()}}


@dataclass(frozen=True, slots=True)
class MaskIdentity:
    """Everything that determines a mask's value. Each element covers `downscale` x `downscale` pixels."""

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

    `controls` are the digest and preparation of each control image that the encoder reads with the text.
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
    """A fast function from a source digest to the key of an identity that otherwise equals this one.

    A plan makes millions of keys whose identities differ only in the source.
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
