"""Why an entry is a miss: the identity of its sample in the last manifest, compared with the one it has now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_row import CaptionRef, ImageRef, PartRef, Row
from latentcache.identity import PartIdentity

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

LABELS = {
    "compute_dtype": "encoder dtype",
    "store_dtype": "stored dtype",
    "target_size": "bucket",
    "crop_top_left": "crop",
    "num_frames": "number of frames",
}
"""Names of fields in reasons, where they are not the field's own."""
GEOMETRY = ("target_size", "original_size", "resized_size", "crop_top_left", "num_frames")
"""A changed bucket changes resized size and crop with it, so the first of these that differs is the cause."""


class History:
    """What the last manifest says of a dataset. Renamed samples are found by the digest of their image."""

    def __init__(self, manifest: Manifest | None, damaged: Mapping[str, str]):
        self._manifest = manifest
        self._damaged = damaged

    @property
    def sources(self) -> set[str]:
        """Digests of all images that the last manifest lists."""
        return set() if self._manifest is None else set(self._manifest.rows.sources())

    def row(self, sample_id: str, source: str | None) -> Row | None:
        """The sample's last row, or that of a sample with the same image; None for a new one."""
        if self._manifest is None:
            return None
        row = self._manifest.rows.get(sample_id)
        if row is None and source is not None:
            row = self._manifest.rows.row_of_source(source)
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
        before = self._manifest.common
        causes = [*_encoding_changes(before, common, "image_encoding")]
        causes += _changes(before.get("policy") or {}, common["policy"], " policy")
        if now.geometry.num_frames is not None:
            causes += _changes(before.get("frames") or {}, common["frames"])
        if row.source != source:
            causes.insert(0, "image changed")
        elif twin is None:
            causes.append("flip added")
        else:
            old, new = ({name: getattr(ref.geometry, name) for name in GEOMETRY} for ref in (twin, now))
            causes += islice(_changes(old, new), 1)
        return ", ".join(causes) or LOST

    def why_part(self, row: Row | None, name: str, now: PartRef, common: Mapping[str, Any]) -> str:
        """Why the entry `now` of the part `name` (see `Row.named_parts`) is a miss."""
        if now.key in self._damaged:
            return DAMAGED
        if row is None or self._manifest is None:
            return NEW
        known = dict(row.named_parts(flip=now.geometry.flip))
        if (twin := known.get(name)) is None:
            has_other = any(other == name for other, _ in row.named_parts())
            return "flip added" if has_other else NEW
        if twin.key == now.key:
            return LOST if row.refusal is None else f"{REFUSED} ({row.refusal.reason})"
        before, encoding = self._manifest.common, "image_encoding" if now.role == "control" else ""
        causes = [*_encoding_changes(_of_parts(before), _of_parts(common), encoding)]
        old, new = _part_of(before, name), _part_of(common, name)
        causes += _changes(old.get("policy") or {}, new["policy"], " policy")
        if old.get("downscale") != new.get("downscale"):
            causes.append("downscale changed")
        if twin.source != now.source:
            causes.insert(0, "image changed")
        else:
            was, now_is = ({each: getattr(ref.geometry, each) for each in GEOMETRY} for ref in (twin, now))
            causes += islice(_changes(was, now_is), 1)
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
        causes = [*_encoding_changes(self._manifest.common, common, encoding)]
        if all(ref.text != now.text for ref in row.captions):
            causes.insert(0, "caption changed")
        return ", ".join(causes) or LOST


def _of_parts(common: Mapping[str, Any]) -> dict[str, Any]:
    """What parts depend on: whatever is kept of images, of control images it is the mean. Masks have no encoding."""
    encoding = common.get("image_encoding") or {}
    kept = {name: value for name, value in encoding.items() if name not in ("output", "seed")}
    return {**common, "image_encoding": kept, "": {}}


def _part_of(common: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """What the samples of a manifest share of this part."""
    return next((part for part in common.get("parts") or () if part["name"] == name), {})


def _why_imported(ref: ImageRef | CaptionRef | None, key: str) -> str:
    """Why the entry `key` is a miss, of a sample that was imported. `ref` is what was imported of it."""
    if ref is None:
        return NEW
    if ref.key == key:
        return LOST
    return IMPORTED if ref.trust == "unverified" else IMPORTED_OTHERWISE


def _encoding_changes(old: Mapping[str, Any], new: Mapping[str, Any], encoding: str) -> Iterator[str]:
    before, after = ({name: repr(common.get(name)) for name in ("schema", "salt")} for common in (old, new))
    yield from _changes(before, after)
    yield from _changes(old.get(encoding) or {}, new[encoding])


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], what: str = "") -> Iterator[str]:
    """A cause for each value of `new` that differs from that of `old`."""
    for name, value in new.items():
        if old.get(name) != value:
            label = LABELS.get(name, name.replace("_", " "))
            yield f"{label}{what} changed ({_shown(old.get(name))} -> {_shown(value)})"


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return PartIdentity(**value).name
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
