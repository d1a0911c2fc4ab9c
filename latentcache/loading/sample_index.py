"""Finds samples and prompts in the manifests of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from latentcache.config import PROMPTS_PREFIX
from latentcache.dataset.manifest import Manifest, prompts_name
from latentcache.dataset.manifest_folder import Manifests
from latentcache.dataset.manifest_row import Row
from latentcache.errors import SampleError, StoreError
from latentcache.families.scaling import Scaling
from latentcache.loading.sample import PRECACHE, SampleRef
from latentcache.loading.sample_facts import SampleFacts
from latentcache.types import prompt_id


class SampleIndex:
    """Finds samples in manifests, which are read once. `only` names the one manifest whose samples are seen.

    Imported samples that are not verified are a SampleError unless `unverified`. Errors name the `path` of the cache.
    """

    def __init__(self, manifests: Manifests, *, only: str | None, unverified: bool, path: Path | str | None):
        self.manifests, self.only, self.unverified, self.path = manifests, only, unverified, path
        self._loaded: dict[str, Manifest] = {}
        if only is not None:
            self.manifest(only)

    def manifest(self, name: str) -> Manifest:
        """The manifest of this name. StoreError naming those that there are."""
        if name not in self._loaded:
            manifest = self.manifests.read(name)
            if manifest is None:
                known = ", ".join(self.manifests.names()) or "none yet: run `latentcache precache CONFIG` first"
                raise StoreError(f"{self.path or 'cpu store'}: no manifest {name!r}; there are: {known}")
            self._loaded[name] = manifest
        return self._loaded[name]

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
        return [row.sample_id for manifest in self.datasets() for row in manifest.rows.values() if row.refusal is None]

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

    def prompt_ref(self, text: str, *, negative: bool) -> SampleRef:
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
        there = [name for name in names if name in self._loaded or name in self.manifests.names()]
        prompts = self.manifest(there[0]) if there else None
        row = None if prompts is None else prompts.rows.get(sample_id)
        if prompts is None or row is None:
            remedy = f"add it to validation.{'negative_prompt' if negative else 'prompts'} and {PRECACHE}"
            raise SampleError(sample_id, "is not cached", remedy)
        return SampleRef(sample_id, (row.captions[0].key,), facts=SampleFacts.of(prompts))


def unverified_error(sample_id: str, imported_from: str | None) -> SampleError:
    """The error about a sample that was imported and is not verified, with its remedies."""
    reason = f"was imported from {imported_from} and is unverified: nobody knows what its entries are of"
    remedy = (
        f"{PRECACHE}, which encodes it; or import it with --verify, which proves it; or take it as it is, with "
        "`cache.unverified: true` in the config (`unverified=True` here)"
    )
    return SampleError(sample_id, reason, remedy)
