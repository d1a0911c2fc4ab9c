"""Why an entry is a miss: compares its inputs with those in the last manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from latentcache.dataset.manifest import Manifest
from latentcache.dataset.row_table import Ref, Row, RowTable
from latentcache.identity import PartIdentity
from latentcache.types import Geometry

NEW = "new"
DAMAGED = "damaged"
LOST = "entry lost"
"""The manifest has the key, but the store does not: the entry was removed, or its pack was deleted."""
REFUSED = "refused before"
"""The last run refused the sample; this run retries it."""
IMPORTED = "imported, unverified"
"""Not shown to equal what encoding gives, so it is encoded."""

LABELS = {
    "compute_dtype": "encoder dtype",
    "store_dtype": "stored dtype",
    "target_size": "bucket",
    "crop_top_left": "crop",
    "num_frames": "number of frames",
}
"""Display names of facts, if they differ from the fact's own."""
GEOMETRY = ("variation", "flip", "target_size", "original_size", "resized_size", "crop_top_left", "num_frames")
"""Facts of the geometry. The first that differs is the cause: a changed bucket also changes resized size and crop.
`variation` is the index of the crop."""
_SHORT = {
    "image": "image changed",
    "mask": "mask changed",
    "caption": "caption changed",
    "variant": "new variant of the caption",
    "controls": "control changed",
    "control policies": "control changed",
    "flip": "flip added",
    "variation": "variation added",
}
"""Causes whose values would not help a reader."""

Facts = Mapping[str, Any]
"""An entry's inputs by name, in the order in which causes are listed."""


def image_facts(source: str | None, geometry: Geometry, crop: int, masked: str | None = None) -> Facts:
    """The inputs of the entry of an image, control image or mask with the digest `source`, in the crop `crop`.

    For a masked image, `masked` is the digest of the image and `source` that of its mask.
    """
    sources = {"image": source} if masked is None else {"image": masked, "mask": source}
    return {**sources, "variation": crop, **{name: getattr(geometry, name) for name in GEOMETRY[1:]}}


def text_facts(caption: str, variant: str, controls: Sequence[tuple[str, Geometry]] | None = None) -> Facts:
    """The inputs of the entry of a caption's variant, which may be the caption itself.

    `controls` are the digests and geometries of the images that are read with it.
    """
    facts = {"caption": caption, "variant": variant}
    return facts if controls is None else {**facts, "controls": list(controls)}


class History:
    """A dataset's last manifest, for comparison.

    `common` is what the samples have in common now. `damaged` has the store's damaged entries.
    """

    def __init__(self, last: Manifest | None, common: Mapping[str, Any], damaged: Mapping[str, str]):
        self._last, self._common, self._damaged = last, common, damaged

    def num_lost(self, rows: RowTable) -> int:
        """How many images the last manifest lists, if these rows have images but share none with it; else 0."""
        if self._last is None:
            return 0
        # Arrays of 8-byte prefixes: for a million images, sets of digests would take 200 MB.
        columns = (table.columns["source"] for table in (self._last.rows, rows))
        before, now = (np.unique(each[each.any(1)][:, :8].copy().view(np.uint64)) for each in columns)
        return len(before) if len(now) and not np.isin(before, now).any() else 0

    def why(self, sample_id: str, name: str, key: str, facts: Facts) -> str:
        """Why the entry `key` of this sample is a miss.

        `name` is `image` or a companion's role; for a text it is the name of its encoding in `common`. `facts` come
        from `image_facts` or `text_facts`.
        """
        reason = self._why(sample_id, name, key, facts)
        return reason if name in ("image", "text_encoding", "negative_encoding") else f"{name}: {reason}"

    def _why(self, sample_id: str, name: str, key: str, facts: Facts) -> str:
        if key in self._damaged:
            return DAMAGED
        row = None if self._last is None else self._last.rows.get(sample_id)
        known = [] if row is None or self._last is None else _known(row, name, self._last.variants)
        if self._last is None or row is None or not known:
            return NEW
        if any(ref.key == key for ref, _ in known):
            return LOST if row.refusal is None else f"{REFUSED} ({row.refusal.reason})"
        if self._last.imported_from is not None:
            return IMPORTED
        # Compare with the entry that differs least: the same caption, or the same crop and flip.
        nearest = min((was for _, was in known), key=lambda was: sum(was[fact] != facts[fact] for fact in facts))
        before = {**_common_facts(self._last.common, name, facts), **{fact: nearest[fact] for fact in facts}}
        now = {**_common_facts(self._common, name, facts), **facts}
        return ", ".join(dict.fromkeys(cause for _, cause in _causes(before, now))) or LOST


def _known(row: Row, name: str, variants: int) -> list[tuple[Ref, Facts]]:
    """The entries of this name in a row, each with its inputs."""
    if name == "image":
        return [(ref, image_facts(row.source, ref.geometry, ref.crop)) for ref in row.images]
    if name in ("text_encoding", "negative_encoding"):
        controls = [(ref.source, ref.geometry) for ref in row.parts_of() if ref.part == "control"]
        captions = [row.captions[at - at % variants].text for at in range(len(row.captions))]
        texts = zip(row.captions, captions, strict=True)
        return [(ref, text_facts(caption, ref.text, controls)) for ref, caption in texts if ref.key]
    masked = row.source if name == "masked image" else None
    parts = (ref for ref in row.parts if ref.role == name)
    return [(ref, image_facts(ref.source, ref.geometry, ref.crop, masked)) for ref in parts]


def _common_facts(common: Mapping[str, Any], name: str, facts: Facts) -> dict[str, Any]:
    """The inputs that all entries of this name share, as far as they matter for an entry with these facts."""
    found = {"schema": common.get("schema"), "salt": repr(common.get("salt"))}
    parts = {part["name"]: part for part in common.get("parts") or ()}
    if name in ("text_encoding", "negative_encoding"):
        if "controls" in facts:  # their preparation is part of the text's key
            found["control policies"] = [
                part["policy"] for part in parts.values() if part["name"].startswith("control")
            ]
        return found | (common.get(name) or {})
    own = common if name == "image" else parts.get(name, {})
    if name == "mask":
        found["downscale"] = own.get("downscale")
    else:  # companions store the mean, whatever is stored of images
        found |= (common.get("image_encoding") or {}) | ({} if name == "image" else {"output": "mean", "seed": 0})
    if name == "masked image":
        found["inpaint"] = own.get("inpaint")
        policy = parts.get("mask", {}).get("policy") or {}
        found |= {f"mask {part} policy": value for part, value in policy.items()}
    found |= {f"{part} policy": value for part, value in (own.get("policy") or {}).items()}
    is_clip = facts.get("num_frames") is not None
    return found | (common.get("frames") or {} if is_clip else {})


def text_causes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What differs in the text encoding of two manifests' `common`: names and causes."""
    return list(_causes(*(_common_facts(common, "text_encoding", {}) for common in (before, now))))


def _causes(before: Facts, now: Facts) -> Iterator[tuple[str, str]]:
    """Name and cause of each fact that differs, was added or was removed; those of the source first."""
    changed = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    geometry = [name for name in GEOMETRY if name in changed]
    # A changed caption changes its variants with it.
    hidden = [*(geometry if "image" in changed else geometry[1:]), *(["variant"] if "caption" in changed else [])]
    for name in sorted(changed, key=lambda name: name not in ("image", "mask", "controls", "caption", "variant")):
        if name not in hidden:
            values = f"({_shown(before.get(name))} -> {_shown(now.get(name))})"
            yield name, _SHORT.get(name) or f"{LABELS.get(name, name.replace('_', ' '))} changed {values}"


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return PartIdentity(**value).name
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
