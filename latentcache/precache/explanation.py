"""Explains one sample: what the next precache run would do with each of its entries, and why."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from latentcache.config import Config
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.row_table import Ref, Row
from latentcache.errors import SampleError
from latentcache.models.model_loader import Models
from latentcache.precache.encodings import choose_encodings, load_models
from latentcache.precache.plan import make_plan
from latentcache.precache.workspace import open_workspace
from latentcache.store.base import Report
from latentcache.types import Json
from latentcache.utils.wording import counted, short, size


@dataclass(frozen=True, slots=True)
class Explanation(Report):
    """A sample as the next precache run would see it, once per dataset that contains it.

    Each of `datasets` has `dataset`, `path`, `source` (the digest of its image), `refusal` and `entries`. An entry has
    `kind`, `key`, `what`, `variant` (of the caption, 0 otherwise), `status` (hit or miss) and the `reason` of a miss. A
    caption that is not encoded has no entry.
    """

    sample_id: str
    datasets: tuple[Json, ...]

    def to_text(self) -> str:
        """The explanation as text, one line per entry."""
        lines = []
        for dataset in self.datasets:
            lines.append(f"{self.sample_id} in {dataset['dataset']}: {dataset['path']}")
            if refusal := dataset["refusal"]:
                lines.append(f"  refused ({refusal['reason']}): {refusal['detail']}")
            variants = Counter[str]()
            for entry in dataset["entries"]:
                verdict = "hit" if entry["reason"] is None else f"miss: {entry['reason']}"
                if entry["variant"]:
                    variants[verdict] += 1
                else:
                    lines.append(f"  {entry['kind']:<5} {entry['key'][:12]}  {verdict}  ({short(entry['what'])})")
            for verdict, number in variants.items():
                num_bytes = size(number * dataset["text_bytes"])
                lines.append(f"  text  {counted(number, 'variant')}  {verdict}  ({num_bytes})")
        return "\n".join(lines)


def explain(config: Config, sample_id: str, *, models: Models | None = None) -> Explanation:
    """Explain what the next run would do with this sample, and why. Writes nothing.

    Raises SampleError, suggesting the nearest sample_id, if no dataset of the config has it.
    """
    with open_workspace(config.cache, read_only=True) as workspace:
        models = models or load_models(config.model, workspace.memo)
        encodings = choose_encodings(config, models, workspace.memo)
        plan = make_plan(config, workspace, encodings, models, only=frozenset([sample_id]))
        found = [manifest for manifest in plan.manifests if sample_id in manifest.rows]
        if not found:
            known = (manifest for name in workspace.manifests.names() if (manifest := workspace.manifests.read(name)))
            ids = [row_id for manifest in known if manifest.role != "prompts" for row_id in manifest.rows]
            near = difflib.get_close_matches(sample_id, ids, n=1)
            names = ", ".join(dataset.name for dataset in config.datasets)
            remedy = f"did you mean {near[0]!r}?" if near else "a sample_id is a path relative to the dataset's folder"
            raise SampleError(sample_id, f"is in none of the datasets {names}", remedy)
        explained = [_explained(each, sample_id, plan.reasons, encodings.text_bytes) for each in found]
        return Explanation(sample_id, tuple(explained))


def _explained(manifest: Manifest, sample_id: str, reasons: Mapping[str, str], text_bytes: int) -> Json:
    row = manifest.rows[sample_id]
    entries = [("image", ref.key, f"{ref.geometry.extent}{_which(row, ref)}", 0) for ref in row.images]
    texts = [(ref, number % manifest.variants) for number, ref in enumerate(row.captions) if ref.key]
    entries += [("text", ref.key, repr(ref.text), variant) for ref, variant in texts]
    for ref in row.parts:
        kind = "mask" if ref.role == "mask" else "image"
        entries.append((kind, ref.key, f"{ref.role}, {ref.geometry.target_size}{_which(row, ref)}", 0))
    return {
        "dataset": manifest.name,
        "path": row.path,
        "source": row.source,
        "text_bytes": text_bytes,
        "refusal": None if row.refusal is None else row.refusal.to_json(),
        "entries": [
            {"kind": kind, "key": key, "what": what, "variant": variant}
            | {"reason": reasons.get(key), "status": "miss" if key in reasons else "hit"}
            for kind, key, what, variant in entries
        ],
    }


def _which(row: Row, ref: Ref) -> str:
    """What tells the entry apart from others of the same image: the crop, if there are several, and the flip."""
    crop = " at {},{}".format(*ref.geometry.crop_top_left) if any(image.crop for image in row.images) else ""
    return crop + (" flipped" if ref.geometry.flip else "")
