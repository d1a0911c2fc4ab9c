"""Finds samples and prompts in the manifests of a cache, and says what the samples of one have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from latentcache.config import PROMPTS_PREFIX
from latentcache.dataset.manifest import Manifest, prompts_name
from latentcache.dataset.manifest_folder import Manifests
from latentcache.dataset.manifest_row import Row
from latentcache.errors import ModelError, SampleError, StoreError
from latentcache.families import DEFAULT, family_named
from latentcache.families.base import Family
from latentcache.families.scaling import Scaling
from latentcache.types import Padding, prompt_id

PRECACHE: Final = "run `latentcache precache CONFIG` again"
"""The remedy of most errors about a sample."""


@dataclass(frozen=True, slots=True)
class SampleFacts:
    """What the samples of a manifest have in common: those of equal facts may be in one batch.

    `scaling` is None for a manifest of prompts. `padding` names the fields that its texts store without padding.
    """

    family: Family = field(default_factory=lambda: family_named(DEFAULT))
    scaling: Scaling | None = None
    padding: tuple[tuple[str, Padding], ...] = ()

    @classmethod
    def of(cls, manifest: Manifest) -> SampleFacts:
        """The facts of a manifest. StoreError for one of a family that this version does not know."""
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


class Known:
    """What was read of manifests, which all views of one cache share: by name, and samples that were requested."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew. What another thread still adds to the old ones is not found any more."""
        self.manifests: dict[str, Manifest] = {}
        self.refs: dict[Any, Any] = {}


class SampleIndex:
    """Finds samples in manifests, which are read once. `only` names the one manifest whose samples are seen.

    Imported samples that are not verified are a SampleError unless `unverified`. Errors name the `path` of the cache.
    """

    def __init__(self, manifests: Manifests, *, only: str | None, unverified: bool, path: Path | str | None):
        self.manifests, self.only, self.unverified, self.path = manifests, only, unverified, path
        self.known = Known()
        if only is not None:
            self.manifest(only)

    def manifest(self, name: str) -> Manifest:
        """The manifest of this name. StoreError naming those that there are."""
        loaded = self.known.manifests
        if name not in loaded:
            manifest = self.manifests.read(name)
            if manifest is None:
                known = ", ".join(self.manifests.names()) or "none yet: run `latentcache precache CONFIG` first"
                raise StoreError(f"{self.path or 'cpu store'}: no manifest {name!r}; there are: {known}")
            loaded[name] = manifest
        return loaded[name]

    def dataset_names(self) -> list[str]:
        """Names of the manifests that hold samples, not prompts."""
        if self.only is not None:
            return [self.only]
        return [name for name in self.manifests.names() if not name.startswith(PROMPTS_PREFIX)]

    def datasets(self) -> list[Manifest]:
        """The manifests that hold samples."""
        return [self.manifest(name) for name in self.dataset_names()]

    def sample_ids(self) -> list[str]:
        """All samples that may be requested: those that were not refused, in the order of the manifests."""
        tables = [manifest.rows for manifest in self.datasets()]
        return [table.sample_ids[number] for table in tables for number in table.usable().tolist()]

    def row(self, sample_id: str, datasets: Sequence[Manifest] | None = None) -> tuple[Manifest, Row]:
        """The sample's manifest, one of `datasets` (default: all), and row.

        SampleError when it is unknown, ambiguous, refused, or may not be read.
        """
        datasets = self.datasets() if datasets is None else datasets
        found = []
        for manifest in datasets:
            row = manifest.rows.get(sample_id)
            if row is not None:
                found.append((manifest, row))
        if len(found) != 1:
            names = ", ".join(manifest.name for manifest in [each for each, _ in found] or datasets)
            if not found:
                raise SampleError(sample_id, f"is in no manifest ({names})", PRECACHE)
            raise SampleError(sample_id, f"is in several manifests: {names}", "LatentCache(path, manifest=NAME)")
        [(manifest, row)] = found
        if row.refusal is not None:
            reason = f"was refused ({row.refusal.reason}): {row.refusal.detail}"
            raise SampleError(sample_id, reason, f"replace {row.refusal.path}, then {PRECACHE}")
        self.check_trust(manifest, row)
        return manifest, row

    def check_trust(self, manifest: Manifest, row: Row) -> None:
        """SampleError if the sample was imported and is not verified, and such samples may not be read."""
        if not self.unverified and not row.is_verified:
            raise unverified_error(row.sample_id, manifest.imported_from)

    def facts(self, manifest: Manifest) -> SampleFacts:
        """What is said of all samples of this manifest. StoreError for a manifest of prompts."""
        facts = SampleFacts.of(manifest)
        if facts.scaling is None:
            raise StoreError(f"manifest {manifest.name} holds prompts, not images: use LatentCache.prompt")
        return facts

    def scaling(self, manifest: Manifest) -> Scaling:
        """The scaling of the VAE that encoded this manifest's latents. StoreError for a manifest of prompts."""
        scaling = self.facts(manifest).scaling
        assert scaling is not None
        return scaling

    def prompt_row(self, text: str, *, negative: bool) -> tuple[Manifest, Row]:
        """A cached prompt of these datasets' text encoders. SampleError naming a prompt that is not cached.

        StoreError if no dataset is cached, or if their text encoders differ.
        """
        datasets = self.datasets()
        names = {prompts_name(manifest.common) for manifest in datasets if manifest.imported_from is None}
        if datasets and not names:  # imported datasets name no encoders: all prompts may be theirs
            names = {name for name in self.manifests.names() if name.startswith(PROMPTS_PREFIX)}
        if len(names) > 1:
            known = ", ".join(manifest.name for manifest in datasets)
            raise StoreError(
                f"the datasets {known} have different text encoders: say whose with LatentCache(path, manifest=NAME)"
            )
        if not datasets:
            raise StoreError(f"{self.path or 'cpu store'}: no dataset is cached yet; {PRECACHE}")
        sample_id = prompt_id(text, negative=negative)
        # A manifest of prompts may be absent: no prompt was cached yet, or it was lost.
        there = [name for name in names if name in self.known.manifests or name in self.manifests.names()]
        prompts = self.manifest(there[0]) if there else None
        row = None if prompts is None else prompts.rows.get(sample_id)
        if prompts is None or row is None:
            remedy = f"add it to validation.{'negative_prompt' if negative else 'prompts'} and {PRECACHE}"
            raise SampleError(sample_id, "is not cached", remedy)
        return prompts, row


def unverified_error(sample_id: str, imported_from: str | None) -> SampleError:
    """The error about a sample that was imported and is not verified, with its remedies."""
    reason = f"was imported from {imported_from} and is unverified: nobody knows what its entries are of"
    remedy = (
        f"{PRECACHE}, which encodes it; or import it with --verify, which proves it; or take it as it is, with "
        "`cache.unverified: true` in the config (`unverified=True` here)"
    )
    return SampleError(sample_id, reason, remedy)
