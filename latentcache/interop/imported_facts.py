"""What the manifest of an import, and the identities of its entries, say of the foreign cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from latentcache.dataset.manifest_row import Row
from latentcache.families import DEFAULT, family_named
from latentcache.families.scaling import Scaling
from latentcache.identity import SCHEMA
from latentcache.interop.foreign_family import published_scaling
from latentcache.interop.readers import ForeignCache
from latentcache.provenance import now
from latentcache.types import Record


def common_of(foreign: ForeignCache, rows: Mapping[str, Row]) -> dict[str, Any]:
    """The `common` of an imported manifest. Of the encoding, only the scale of the latents is known, or declared."""
    scaling = scaling_of(foreign)
    masks = {"name": "mask", "downscale": family_named(foreign.family).latent.downscale}
    return {
        "schema": SCHEMA,
        "salt": "",
        "imported": {"format": foreign.format, "time": now(), **declared_by(foreign)},
        "policy": {},
        "image_encoding": {"scaling_factor": scaling.scaling_factor, "shift_factor": scaling.shift_factor},
        "text_encoding": recipe_of(foreign),
        **({} if foreign.family == DEFAULT else {"family": foreign.family}),
        **({"scaling": scaling.to_json()} if scaling.mean else {}),
        **({"parts": [masks]} if any(row.parts for row in rows.values()) else {}),
    }


def scaling_of(foreign: ForeignCache) -> Scaling:
    """The scaling of the VAE: as it is declared, else that of the family's published one."""
    return published_scaling(foreign.family) if foreign.declaration is None else foreign.declaration.scaling


def recipe_of(foreign: ForeignCache) -> dict[str, Any]:
    """How texts are padded in a batch, which is all that is known; nothing of the first family, as it was before."""
    if foreign.family == DEFAULT:
        return {}
    declared = None if foreign.declaration is None else foreign.declaration.max_length
    max_length = declared or family_named(foreign.family).max_length
    return {"family": foreign.family, "max_length": max_length, "keeps_padding": foreign.keeps_padding}


def declared_by(foreign: ForeignCache) -> dict[str, Any]:
    """What an identity and a manifest say of a declaration: nothing without one."""
    return {} if foreign.declaration is None else {"declared": foreign.declaration.statement()}


def knows_caption(record: Record) -> bool:
    """Whether a text's caption is known: an import that did not find it has no source, and others may not have one."""
    return record.identity.get("source", "") is not None
