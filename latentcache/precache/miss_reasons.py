"""Why an entry is a miss: the identity of its sample in the last manifest, compared with the one it has now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from latentcache.dataset.manifest import CaptionRef, ImageRef, Manifest, Row
from latentcache.identity import PartIdentity
from latentcache.types import Geometry

NEW = "new"
DAMAGED = "damaged"
LOST = "entry lost"
"""The manifest has the key but the store does not: it was removed, or its pack was deleted."""
REFUSED = "refused before"
"""The last run refused the sample; this one tries again."""
IMPORTED = "imported, unverified"
"""Not shown to equal what encoding gives, so it is encoded."""
IMPORTED_OTHERWISE = "imported, verified for other settings"
"""Equal to what another config encodes."""

PARTS = {
    "vae": "vae",
    "text_encoder": "text encoder",
    "text_encoder_2": "text encoder 2",
    "tokenizer": "tokenizer",
    "tokenizer_2": "tokenizer 2",
}
SETTINGS = {
    "compute_dtype": "encoder dtype",
    "output": "output",
    "store_dtype": "stored dtype",
    "scaling_factor": "scaling factor",
    "shift_factor": "shift factor",
    "seed": "seed",
    "clip_skip": "clip skip",
}
GEOMETRY = {
    "target_size": "bucket",
    "original_size": "original size",
    "resized_size": "resized size",
    "crop_top_left": "crop",
}


class History:
    """What the last manifest says of a dataset. Renamed samples are found by the digest of their image."""

    def __init__(self, manifest: Manifest | None, damaged: Mapping[str, str]):
        self._manifest = manifest
        self._damaged = damaged
        self._by_source: dict[str, Row] | None = None

    @property
    def sources(self) -> set[str]:
        """Digests of all images that the last manifest lists."""
        rows = () if self._manifest is None else self._manifest.rows.values()
        return {row.source for row in rows if row.source is not None}

    def row(self, sample_id: str, source: str | None) -> Row | None:
        """The sample's last row, or that of a sample with the same image; None for a new one."""
        if self._manifest is None:
            return None
        row = self._manifest.rows.get(sample_id)
        if row is None and source is not None:
            if self._by_source is None:
                rows = self._manifest.rows.values()
                self._by_source = {row.source: row for row in rows if row.source is not None}
            row = self._by_source.get(source)
        return row

    def why_image(self, row: Row | None, source: str, now: ImageRef, common: Mapping[str, Any]) -> str:
        """Why the image entry `now`, of an image with digest `source`, is a miss."""
        if now.key in self._damaged:
            return DAMAGED
        if row is None or self._manifest is None:
            return NEW
        twin = next((ref for ref in row.images if ref.geometry.flip == now.geometry.flip), None)
        if self._manifest.imported_from is not None:
            return "image changed" if row.source not in (source, None) else _why_imported(twin, now.key)
        if row.source is None or not row.images:
            return NEW
        if any(ref.key == now.key for ref in row.images):
            return LOST if row.refusal is None else f"{REFUSED} ({row.refusal.reason})"
        causes = list(_common_causes(self._manifest.common, common, "image_encoding"))
        causes += _policy_causes(self._manifest.common, common)
        if row.source != source:
            causes.insert(0, "image changed")
        elif twin is None:
            causes.append("flip added")
        else:
            causes += _geometry_causes(twin.geometry, now.geometry)
        return ", ".join(causes) or LOST

    def why_text(self, row: Row | None, now: CaptionRef, common: Mapping[str, Any], encoding: str) -> str:
        """Why the text entry `now` is a miss. `encoding` names the part of `common` that it is made with."""
        if now.key in self._damaged:
            return DAMAGED
        if row is None or self._manifest is None:
            return NEW
        if self._manifest.imported_from is not None:
            # An unknown caption was imported as the empty one.
            return _why_imported(next((ref for ref in row.captions if ref.text in (now.text, "")), None), now.key)
        if any(ref.key == now.key for ref in row.captions):
            return LOST if row.refusal is None else f"{REFUSED} ({row.refusal.reason})"
        causes = list(_common_causes(self._manifest.common, common, encoding))
        if all(ref.text != now.text for ref in row.captions):
            causes.insert(0, "caption changed")
        return ", ".join(causes) or LOST


def _why_imported(ref: ImageRef | CaptionRef | None, key: str) -> str:
    """Why the entry `key` is a miss, of a sample that was imported. `ref` is what was imported of it."""
    if ref is None:
        return NEW
    if ref.key == key:
        return LOST
    return IMPORTED if ref.trust == "unverified" else IMPORTED_OTHERWISE


def _common_causes(old: Mapping[str, Any], new: Mapping[str, Any], encoding: str) -> Iterator[str]:
    for name in ("schema", "salt"):
        if old.get(name) != new[name]:
            yield f"{name} changed ({old.get(name)!r} -> {new[name]!r})"
    before, after = old.get(encoding) or {}, new[encoding]
    for name, label in PARTS.items():
        if name in after and name in before and before[name] != after[name]:
            yield f"{label} changed ({_part_name(before[name])} -> {_part_name(after[name])})"
    for name, label in SETTINGS.items():
        if name in after and before.get(name) != after[name]:
            yield f"{label} changed ({before.get(name)} -> {after[name]})"


def _part_name(part: Mapping[str, str]) -> str:
    return PartIdentity(**part).name


def _policy_causes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    before, after = old.get("policy") or {}, new["policy"]
    for name in after:
        if before.get(name) != after[name]:
            yield f"{name} policy changed ({before.get(name)} -> {after[name]})"


def _geometry_causes(old: Geometry, new: Geometry) -> Iterator[str]:
    # A changed bucket changes resized size and crop with it: one cause is enough.
    for name, label in GEOMETRY.items():
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            yield f"{label} changed ({_pair(before)} -> {_pair(after)})"
            return


def _pair(value: tuple[int, int]) -> str:
    return f"{value[0]}x{value[1]}"
