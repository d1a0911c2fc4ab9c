"""A cache as a whole: what it holds, and which manifests can be read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.errors import LatentCacheError
from latentcache.service.page.views import Gallery
from latentcache.store.base import StoreStats


@dataclass(frozen=True, slots=True)
class DatasetSummary:
    """One dataset: its manifest, or the `problem` for which it cannot be read."""

    name: str
    manifest: Manifest | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Overview:
    """The figures of the first view. `num_cut` counts samples with a caption that the text encoders cut off."""

    stats: StoreStats
    datasets: tuple[DatasetSummary, ...]
    num_samples: int
    num_refused: int
    num_uncaptioned: int
    num_cut: int


def overview(gallery: Gallery) -> Overview:
    """Count what the index, the manifests and the records say. A damaged manifest does not hide the others."""
    store, manifests = gallery.store, gallery.manifests
    datasets = []
    for name in manifests.dataset_names():
        try:
            datasets.append(DatasetSummary(name, manifests.get(name)))
        except LatentCacheError as error:
            datasets.append(DatasetSummary(name, None, str(error)))
    tables = [found.manifest.rows for found in datasets if found.manifest is not None]
    cut = gallery.cut_captions.flags_of
    return Overview(
        store.stats(),
        tuple(datasets),
        num_samples=sum(map(len, tables)),
        num_refused=sum(len(table.refusals) for table in tables),
        num_uncaptioned=sum(len(table.without_caption()) for table in tables),
        num_cut=sum(len(table.usable_with("caption", cut(table.columns["caption/keys"]))) for table in tables),
    )


class ReadableManifests(ManifestFolder):
    """The manifests of a folder that can be read. `problems` says why others cannot."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.problems: list[str] = []

    @override
    def read(self, name: str) -> Manifest | None:
        try:
            return super().read(name)
        except LatentCacheError as error:
            self.problems.append(str(error))
            return None
