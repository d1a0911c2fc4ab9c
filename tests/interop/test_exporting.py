"""What no format can write is listed, and the other samples are exported."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from foreign_samples import Foreign, image, pairs, text

from latentcache.interop.formats import ai_toolkit, kohya
from latentcache.interop.importing import import_cache
from latentcache.loading.cache import LatentCache
from latentcache.precache.workspace import Workspace


@pytest.mark.parametrize(
    ("module", "sample_id", "detail"),
    [
        (kohya, "x" * 250 + ".png", "its name is too long for a file here"),
        (ai_toolkit, "x" * 250 + ".png", "its name is too long for a file here"),
        (ai_toolkit, "caf\udce9.png", "its name is not UTF-8"),
    ],
    ids=["kohya-long", "ai-toolkit-long", "ai-toolkit-latin-1"],
)
def test_names_that_the_format_cannot_have_are_listed(
    tmp_path: Path, module: ModuleType, sample_id: str, detail: str
) -> None:
    workspace = Workspace()
    format_name = "kohya" if module is kohya else "ai-toolkit"
    items = [image(sample_id), text(sample_id, caption="a cat"), *pairs("b.png")]
    import_cache(Foreign(items, format_name), workspace, name="foreign")
    cache = LatentCache(store=workspace.store, manifests=workspace.manifests, unverified=True)
    report = module.export(cache, "foreign", tmp_path)
    assert {(refusal.sample_id, refusal.reason) for refusal in report.skipped} == {(sample_id, "unreadable")}
    assert detail in report.skipped[0].detail
    assert (report.num_images, report.num_texts) == (1, 1)
