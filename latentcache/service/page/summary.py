"""A cache as a whole: what it holds, and which manifests can be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typing_extensions import override

from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.errors import LatentCacheError
from latentcache.service.page.views import Gallery


def overview(gallery: Gallery) -> dict[str, Any]:
    """Count what the index, the manifests and the records say, by the names of the template.

    A damaged manifest does not hide the others: of each dataset there is the `manifest`, or the `problem` with it.
    `num_cut` counts samples with a caption that the text encoders cut off.
    """
    datasets = list[dict[str, Any]]()
    for name in gallery.dataset_names():
        try:
            datasets.append({"name": name, "manifest": gallery.manifest(name)})
        except LatentCacheError as error:
            datasets.append({"name": name, "manifest": None, "problem": str(error)})
    tables = [found["manifest"].rows for found in datasets if found["manifest"] is not None]
    cut = gallery.cut_captions.flags_of
    return {
        "stats": gallery.store.stats(),
        "datasets": datasets,
        "num_samples": sum(map(len, tables)),
        "num_refused": sum(len(table.refusals) for table in tables),
        "num_uncaptioned": sum(len(table.without_caption()) for table in tables),
        "num_cut": sum(len(table.usable_with("caption", cut(table.columns["caption/keys"]))) for table in tables),
    }


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
