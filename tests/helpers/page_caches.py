"""Caches for the page, made without a model: latents that the linear approximation of the decoder turns into photos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from latentcache.config import BucketsConfig, ImagesConfig
from latentcache.dataset.bucket_rules import BucketRule
from latentcache.dataset.images import preparation_policy, prepare, with_filter
from latentcache.dataset.manifest import Manifest, Role
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.dataset.row_table import Ref, Row
from latentcache.families import sdxl
from latentcache.identity import (
    SCHEMA,
    ImageEncoding,
    ImageIdentity,
    PartIdentity,
    Preparation,
    TextEncoding,
    TextIdentity,
    caption_digest,
    digest,
    encoding_json,
    key_of,
)
from latentcache.provenance import provenance_json
from latentcache.store import DiskStore
from latentcache.types import Entry, Geometry, Record, Refusal, Size

IMAGE = ImageEncoding(
    vae=PartIdentity("AutoencoderKL", "0" * 64, "1" * 64),
    compute_dtype="float32",
    output="moments",
    store_dtype="float16",
    scaling_factor=sdxl.SCALING_FACTOR,
    shift_factor=None,
)
TEXT = TextEncoding(
    parts=(
        ("text_encoder", PartIdentity("CLIPTextModel", "2" * 64, "3" * 64)),
        ("text_encoder_2", PartIdentity("CLIPTextModelWithProjection", "4" * 64, "5" * 64)),
        ("tokenizer", PartIdentity("CLIPTokenizer", "6" * 64, "7" * 64)),
        ("tokenizer_2", PartIdentity("CLIPTokenizer", "8" * 64, "9" * 64)),
    ),
    compute_dtype="float16",
    store_dtype="float16",
    recipe=(("clip_skip", 0),),
)
BUCKETS = BucketsConfig(area=256 * 256, step=64)
COMMON = {
    "schema": SCHEMA,
    "salt": "",
    "image_encoding": encoding_json(IMAGE),
    "text_encoding": encoding_json(TEXT),
}
assert sdxl.FAMILY.latent.preview is not None
_WEIGHTS, _BIASES = (
    torch.tensor(values, dtype=torch.float32)
    for values in (sdxl.FAMILY.latent.preview.weights, sdxl.FAMILY.latent.preview.biases)
)


def image_entry(sample_id: str, path: Path, pixels: np.ndarray, source: str, geometry: Geometry) -> Entry:
    """An entry whose thumbnail is the prepared photo: float16 moments [8, h, w]."""
    prepared = Image.fromarray(prepare(pixels, geometry))
    factor = sdxl.FAMILY.latent.downscale
    small = np.asarray(prepared.resize((prepared.width // factor, prepared.height // factor), Image.Resampling.BOX))
    colours = torch.from_numpy(small.astype(np.float32)) - _BIASES
    latents = torch.einsum("hwr,cr->chw", colours, torch.linalg.pinv(_WEIGHTS)) / sdxl.SCALING_FACTOR
    moments = torch.cat([latents, torch.full_like(latents, -8.0)]).half()
    policy = with_filter(preparation_policy(ImagesConfig()), "lanczos")
    identity = ImageIdentity(source, Preparation.of(policy, geometry), IMAGE).to_json()
    models = {"vae": "stabilityai/stable-diffusion-xl-base-1.0"}
    provenance = provenance_json(
        sample_id=sample_id, source_path=str(path), models=models, device="cuda:0", computed_dtype="float32"
    )
    return Entry(Record(key_of(identity), "image", identity, provenance), {"moments": moments})


def text_entry(sample_id: str, caption: str, num_tokens: int) -> Entry:
    """A tiny entry of a caption."""
    identity = TextIdentity(caption_digest(caption), TEXT).to_json()
    models = dict.fromkeys(("text_encoder", "text_encoder_2"), "stabilityai/stable-diffusion-xl-base-1.0")
    provenance = provenance_json(
        sample_id=sample_id, models=models, device="cuda:0", computed_dtype="float16", num_tokens=num_tokens
    )
    tensors = {"prompt_embeds": torch.ones(2, 4).half(), "pooled_prompt_embeds": torch.ones(4).half()}
    return Entry(Record(key_of(identity), "text", identity, provenance), tensors)


def write_cache(
    cache: Path,
    name: str,
    photos: Mapping[str, Path],
    captions: Mapping[str, Sequence[str]],
    *,
    role: Role = "train",
    refused: Sequence[Refusal] = (),
    buckets: BucketsConfig = BUCKETS,
) -> Manifest:
    """A cache of these photos (sample_id -> file), and its manifest `name`. Refused samples come last."""
    rule, rows, entries = BucketRule(buckets), dict[str, Row](), list[Entry]()
    for sample_id, path in photos.items():
        pixels = np.asarray(Image.open(path).convert("RGB"))
        geometry = rule.geometry(Size(*pixels.shape[:2]))
        assert geometry is not None
        source = digest(path.read_bytes())
        image = image_entry(sample_id, path, pixels, source, geometry)
        texts = {caption: text_entry(sample_id, caption, len(caption.split()) + 2) for caption in captions[sample_id]}
        entries += [image, *texts.values()]
        refs = tuple(Ref.of_text(caption, text.record.key) for caption, text in texts.items())
        rows[sample_id] = Row(sample_id, str(path), source, (Ref(image.record.key, geometry),), refs)
    with DiskStore(cache) as store:
        for kind in ("image", "text"):
            store.add([entry for entry in entries if entry.record.kind == kind])
    for refusal in refused:
        rows[refusal.sample_id] = Row(refusal.sample_id, refusal.path, None, (), (), refusal)
    manifest = Manifest(name, role, 1, COMMON, rows)
    ManifestFolder(cache / "manifests").write(manifest)
    return manifest
