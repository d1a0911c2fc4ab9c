"""What a manifest says of all its samples, for who reads them: family, scaling of latents, padding of texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from latentcache.dataset.manifest import Manifest
from latentcache.errors import ModelError, StoreError
from latentcache.families import DEFAULT, family_named
from latentcache.families.base import Family
from latentcache.families.scaling import Scaling
from latentcache.types import Padding


@dataclass(frozen=True, slots=True)
class SampleFacts:
    """Of two manifests: samples of equal facts may be in one batch.

    `scaling` is None for a manifest of prompts. `padding` names the fields that its texts store without padding.
    """

    family: Family = field(default_factory=lambda: family_named(DEFAULT))
    scaling: Scaling | None = None
    padding: tuple[tuple[str, Padding], ...] = ()

    @classmethod
    def of(cls, manifest: Manifest) -> SampleFacts:
        """Those of a manifest. StoreError for one of a family that this version does not know."""
        common = manifest.common
        try:
            family = manifest.family
        except ModelError as error:
            raise StoreError(f"manifest {manifest.name}: {error}. Update latentcache, or precache again.") from error
        padding = []
        for name in family.fields:
            try:
                rule = family.padding(name, common["text_encoding"])
            except (LookupError, TypeError, ValueError) as error:
                message = f"its text_encoding is no recipe of {family.name}: {error!r}. Precache again."
                raise StoreError(f"manifest {manifest.name}: {message}") from error
            if rule is not None:
                padding.append((name, rule))
        return cls(family, _scaling_of(common), tuple(padding))


def _scaling_of(common: Mapping[str, Any]) -> Scaling | None:
    encoding = common.get("image_encoding")
    if encoding is None:
        return None
    if "scaling" in common:
        return Scaling.from_json(common["scaling"])
    return Scaling(encoding["scaling_factor"], encoding["shift_factor"])


def prompt_identity(common: Mapping[str, Any], *, negative: bool) -> dict[str, Any]:
    """The identity, but for its source, of a prompt that is encoded as the captions of datasets with this `common`."""
    encoding = common["text_encoding"]
    if negative:
        keeps = "keep" if encoding.get("keeps_padding") else "auto"
        settings = {"clip_skip": encoding.get("clip_skip", 0), "max_length": encoding.get("max_length")}
        family = family_named(common.get("family", DEFAULT))
        encoding = {**encoding, **family.text_recipe(negative=True, **settings, padding=keeps)}
    return {"encoding": encoding, "salt": common["salt"], "schema": common["schema"], "kind": "text"}
