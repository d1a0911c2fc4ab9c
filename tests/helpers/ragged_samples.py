"""Small hand-written caches of families whose texts are stored without padding. They need no model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from latentcache.dataset.manifest import Manifest, prompts_name
from latentcache.dataset.manifest_folder import ManifestFolder, Manifests
from latentcache.dataset.row_table import Ref, Row, RowTable
from latentcache.families import DEFAULT, FamilyName, family_named
from latentcache.families.scaling import Scaling
from latentcache.identity import caption_digest, key_of
from latentcache.store import DiskStore
from latentcache.store.base import Store
from latentcache.types import Crop, Entry, Geometry, Padding, Record, Size, prompt_id

WIDTH, CHANNELS = 6, 4
MAX_LENGTH = 24
SIZES = (Size(64, 64), Size(64, 96))
"""The buckets. Every third sample is in the second."""
VIDEO = Scaling(rule="mean_std", mean=(0.1, -0.2, 0.3, 0.4), std=(1.1, 0.9, 1.3, 0.7))
IMAGE = Scaling(0.3611, 0.1159)
NEGATIVE_ROWS = 3


def bucket_of(number: int) -> Size:
    return SIZES[number % 3 == 2]


def common_of(family: FamilyName, **settings: Any) -> dict[str, Any]:
    """The `common` of a manifest of this family, with these settings of its recipe."""
    scaling = VIDEO if family_named(family).latent.is_video else IMAGE
    settings = settings or ({"max_length": MAX_LENGTH} if family == "chroma" else {})
    common: dict[str, Any] = {
        "schema": 1,
        "salt": "",
        "text_encoding": {
            "compute_dtype": "float32",
            "store_dtype": "bfloat16",
            **family_named(family).text_recipe(**settings),
        },
        "image_encoding": {"scaling_factor": scaling.scaling_factor, "shift_factor": scaling.shift_factor},
    }
    if family != DEFAULT:
        common["family"] = family
    if scaling.rule != "factor":
        common["scaling"] = scaling.to_json()
    return common


def rule_of(common: dict[str, Any]) -> Padding | None:
    return family_named(common.get("family", DEFAULT)).padding("prompt_embeds", common["text_encoding"])


def moments_of(family: FamilyName, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    frames = [1] if family_named(family).latent.is_video else []
    sides = [side // 8 for side in bucket_of(number)]
    return torch.randn([2 * CHANNELS, *frames, *sides], generator=generator)


def text_of(number: int, length: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 + number)
    return torch.randn([length, WIDTH], generator=generator).to(dtype)


def fill(
    store: Store,
    manifests: Manifests,
    family: FamilyName,
    lengths: Sequence[int],
    *,
    name: str = "ragged",
    dtype: torch.dtype = torch.bfloat16,
    first: int = 0,
    **settings: Any,
) -> Manifest:
    """Add a prompt, and samples `str(first)`, `str(first + 1)`, ... whose captions have these numbers of rows."""
    common = common_of(family, **settings)
    is_ragged = rule_of(common) is not None

    def text_entry(number: int, length: int, identity: dict[str, Any]) -> Entry:
        ragged = frozenset({"prompt_embeds"}) if is_ragged else frozenset()
        tensors = {"prompt_embeds": text_of(number, length, dtype)}
        if "pooled_prompt_embeds" in family_named(family).fields:
            tensors["pooled_prompt_embeds"] = text_of(number, 1, dtype)[0]
        return Entry(Record(key_of(identity), "text", identity, {}), tensors, ragged)

    rows, entries = {}, []
    for number, length in enumerate(lengths, first):
        identity = {"kind": "image", "number": number, "family": family}
        image = Entry(Record(key_of(identity), "image", identity, {}), {"moments": moments_of(family, number)})
        text = text_entry(number, length, {"kind": "text", "of": number, "length": length, "common": common})
        size = bucket_of(number)
        geometry = Geometry(size, size, Crop(0, 0), size)
        images, captions = (Ref(image.record.key, geometry),), (Ref.of_text(f"photo {number}", text.record.key),)
        rows[str(number)] = Row(str(number), str(number), None, images, captions)
        entries += [image, text]
    prompts = {}
    for negative in (False, True):
        # This family renders no texts, and encodes negative prompts like others.
        source = caption_digest("not a cat" if negative else "a cat")
        identity = {"source": source, "encoding": common["text_encoding"], "salt": "", "schema": 1, "kind": "text"}
        entry = text_entry(900 + negative, NEGATIVE_ROWS if negative else 5, identity)
        sample_id = prompt_id("a cat", negative=negative)
        prompts[sample_id] = Row(sample_id, sample_id, None, (), (Ref.of_text("a cat", entry.record.key),))
        entries.append(entry)
    store.add(entries)
    manifest = Manifest(name, "train", 1, common, RowTable.of(rows))
    manifests.write(manifest)
    without_images = {key: value for key, value in common.items() if key not in ("image_encoding", "scaling")}
    manifests.write(Manifest(prompts_name(common), "prompts", 1, without_images, RowTable.of(prompts)))
    return manifest


def on_disk(path: Path, family: FamilyName, lengths: Sequence[int], **options: Any) -> Path:
    with DiskStore(path) as store:
        fill(store, ManifestFolder(path / "manifests"), family, lengths, **options)
    return path


def padded(numbers: Sequence[int], lengths: Sequence[int], length: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The expected embeddings of a batch, padded with zeros, and the mask."""
    longest = length or max(lengths)
    embeds = torch.zeros(len(numbers), longest, WIDTH, dtype=torch.bfloat16)
    mask = torch.zeros(len(numbers), longest, dtype=torch.bool)
    for place, (number, rows) in enumerate(zip(numbers, lengths, strict=True)):
        embeds[place, :rows] = text_of(number, rows)
        mask[place, :rows] = True
    return embeds, mask
