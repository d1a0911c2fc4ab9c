"""The samples of a cache's manifests: which there are, which may be read, and where the cached prompts are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from latentcache.config import PROMPTS_PREFIX
from latentcache.dataset.manifest import Manifest, Manifests, Row, prompts_name
from latentcache.errors import SampleError, StoreError
from latentcache.loading.batch import Scaling
from latentcache.loading.sample import PRECACHE, SampleRef
from latentcache.types import prompt_id


class SampleIndex:
    """Finds samples in manifests, which are read once. `only` names the one manifest whose samples are seen.

    Imported samples that are not verified are a SampleError unless `unverified`. Errors name the `path` of the cache.
    """

    def __init__(
        self, manifests: Manifests, *, only: str | None = None, unverified: bool = False, path: Path | None = None
    ):
        self.manifests, self.only, self.unverified = manifests, only, unverified
        self._cache_name = path or "cpu store"
        self._loaded: dict[str, Manifest] = {}
        if only is not None:
            self.manifest(only)

    def refresh(self) -> None:
        """Forget the manifests that were read."""
        self._loaded.clear()

    def manifest(self, name: str) -> Manifest:
        """The manifest of this name. StoreError naming those that there are."""
        if name not in self._loaded:
            manifest = self.manifests.read(name)
            if manifest is None:
                known = ", ".join(self.manifests.names()) or "none yet: run latentcache precache first"
                raise StoreError(f"{self._cache_name}: no manifest {name!r}; there are: {known}")
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

    def row(self, sample_id: str) -> tuple[Manifest, Row]:
        """The sample's manifest and row. SampleError when it is unknown, ambiguous, refused, or may not be read."""
        return self._row(sample_id, self.datasets())

    def find(self, sample_ids: Iterable[str], *, caption: int, flip: bool) -> dict[str, SampleRef]:
        """The samples with this caption and flip, by sample_id. SampleError as for `row` and `SampleRef.of`."""
        datasets, found = self.datasets(), {}
        scalings: dict[str, Scaling] = {}
        for sample_id in sample_ids:
            manifest, row = self._row(sample_id, datasets)
            found[sample_id] = ref = SampleRef.of(row, caption=caption, flip=flip)
            if manifest.name not in scalings:
                scalings[manifest.name] = self.scaling(manifest)
            ref.scaling = scalings[manifest.name]
        return found

    def _row(self, sample_id: str, datasets: Sequence[Manifest]) -> tuple[Manifest, Row]:
        found = []
        for manifest in datasets:
            if sample_id in manifest.rows:
                found.append(manifest)
        if not found:
            raise SampleError(sample_id, f"is in no manifest ({', '.join(m.name for m in datasets)})", PRECACHE)
        if len(found) > 1:
            names = ", ".join(manifest.name for manifest in found)
            raise SampleError(sample_id, f"is in several manifests: {names}", "LatentCache(path, manifest=NAME)")
        row = found[0].rows[sample_id]
        if row.refusal is not None:
            reason = f"was refused ({row.refusal.reason}): {row.refusal.detail}"
            raise SampleError(sample_id, reason, f"replace {row.refusal.path}, then {PRECACHE}")
        if not self.unverified and not row.is_verified:
            raise unverified_error(row.sample_id, found[0].imported_from)
        return found[0], row

    def check_trust(self, manifest: Manifest, row: Row) -> None:
        """SampleError if the sample was imported and is not verified, and such samples may not be read."""
        if not self.unverified and not row.is_verified:
            raise unverified_error(row.sample_id, manifest.imported_from)

    def scaling(self, manifest: Manifest) -> Scaling:
        """The scaling of the VAE that encoded this manifest's latents. StoreError for a manifest of prompts."""
        encoding = manifest.common.get("image_encoding")
        if encoding is None:
            raise StoreError(f"manifest {manifest.name} holds prompts, not images: use LatentCache.prompt")
        return Scaling(encoding["scaling_factor"], encoding["shift_factor"])

    def prompt_key(self, text: str, *, negative: bool) -> str:
        """The key of a cached prompt of these datasets' text encoders. SampleError naming a prompt that is not cached.

        StoreError if no dataset is cached, or if their text encoders differ.
        """
        names = self._prompts_names()
        if len(names) > 1:
            datasets = ", ".join(self.dataset_names())
            raise StoreError(
                f"the datasets {datasets} have different text encoders: say whose with LatentCache(path, manifest=NAME)"
            )
        if not self.dataset_names():
            raise StoreError(f"{self._cache_name}: no dataset is cached yet; {PRECACHE}")
        sample_id = prompt_id(text, negative=negative)
        manifest = self.manifest(next(iter(names))) if names else None
        if manifest is None or sample_id not in manifest.rows:
            remedy = f"add it to validation.{'negative_prompt' if negative else 'prompts'} and {PRECACHE}"
            raise SampleError(sample_id, "is not cached", remedy)
        return manifest.rows[sample_id].captions[0].key

    def _prompts_names(self) -> set[str]:
        """The manifests of prompts of these datasets; of an imported one's, which names no encoders, all."""
        datasets = self.datasets()
        known = {prompts_name(manifest.common) for manifest in datasets if manifest.imported_from is None}
        if known or not datasets:
            return known
        return {name for name in self.manifests.names() if name.startswith(PROMPTS_PREFIX)}


def unverified_error(sample_id: str, imported_from: str | None) -> SampleError:
    """The error about a sample that was imported from this format and is not verified."""
    reason = f"was imported from {imported_from} and is unverified: nobody knows what its entries are of"
    remedy = (
        f"{PRECACHE}, which encodes it; or import it with --verify, which proves it; or take it as it is, with "
        "`cache.unverified: true` in the config (`unverified=True` here)"
    )
    return SampleError(sample_id, reason, remedy)
