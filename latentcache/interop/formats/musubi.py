"""musubi-tuner's caches: one folder of safetensors files, `<name>_{W:04d}x{H:04d}_<arch>` and `<name>_<arch>_te`.

`<name>` is the image's file name without folder and suffix, W and H its size, `<arch>` the architecture.

Latents are `latents_{F}x{H}x{W}_{dtype}` [C, h, w], or [C, F, h, w] for Qwen-Image, Krea 2 and Wan: scaled, except
Z-Image's. The metadata have `architecture`, `width` and `height`. Latents of control images (`latents_control_...`) are
in the same file. A clip has `_00000-{frames:03d}` after `<name>` and `frame_count` in its metadata. For image to video
its file also has `latents_image_...`, the mask of the first frame followed by the condition, and Wan 2.1's
`clip_{dtype}`. Embeddings are `varlen_<what>_{dtype}`, a row per token without padding; FLUX.1's include the padding.
Their metadata have `architecture` and `caption1`. (Read in musubi-tuner 30c658c.)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from typing_extensions import Unpack

from latentcache.families.base import CONDITION, PICTURE
from latentcache.families.parts import TrainerFiles
from latentcache.interop.exporting import NOTE_FIRST_CAPTION, Export, ExportOptions, ExportSample
from latentcache.interop.readers import layouts_of
from latentcache.interop.reports import ExportReport
from latentcache.loading.cache import LatentCache
from latentcache.store.entry import dtype_name

NOTE_BUCKETS = "musubi-tuner batches by its own buckets: if this cache has different ones, train with batch_size 1"
NOTE_FLIPPED = "musubi-tuner does not support flipped latents: they were not exported"
NOTE_UNKNOWN = "a text was imported without its caption, which musubi-tuner's file must have: it was not exported"

_VERSION = "1.0.1"


def export(
    cache: LatentCache,
    name: str,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    **options: Unpack[ExportOptions],
) -> ExportReport:
    """Write musubi-tuner's files for the manifest `name` to `folder`, a `cache_directory`.

    Latents are written in `dtype`, scaled if musubi-tuner's are; embeddings keep their dtype. Only the first caption
    is written. musubi-tuner trains FLUX.1 with exactly one control image (Kontext), so other samples are skipped and
    listed. Raises what `Export` raises.
    """
    layouts = layouts_of("musubi")
    run = Export("musubi", cache, name, folder, options, families=layouts, takes={"control"})
    layout = layouts[run.family.name]
    run.report.note(NOTE_BUCKETS)
    sample_of: dict[str, str] = {}
    for sample in run.samples():
        controls = sample.parts["control"]
        # The names of texts have no size: samples with the same name would share one caption.
        other = sample_of.setdefault(sample.stem.name, sample.row.sample_id)
        if why := _why_not(sample, layout, other, len(controls)):
            run.skip(sample.row, *why)
            continue
        base = Path(folder, sample.stem.name)
        height, width = sample.geometry.original_size
        stored = [("latents", sample.latents), *(("latents_control", control) for control in controls)]
        if CONDITION in sample.entry.tensors:
            stored.append(("latents_image", sample.entry.tensors[CONDITION].float()))
        tensors = {}
        for kind, latents in stored:
            values = (run.scaling.apply(latents) if layout.is_scaled else latents).to(dtype)
            if kind == "latents_image":  # the denoiser's input without its noised latents, hence no channels of them
                values = run.family.inputs(None, values[None, :0], {CONDITION: values[None]})[0]
            sides = (1, *values.shape[1:]) if values.ndim == 3 else tuple(values.shape[1:])
            tensors[f"{kind}_{'x'.join(map(str, sides))}_{dtype_name(values)}"] = values
        if PICTURE in sample.entry.tensors:
            tensors[f"clip_{dtype_name(dtype)}"] = sample.entry.tensors[PICTURE].to(dtype)
        num_frames = sample.geometry.num_frames
        start = "" if num_frames is None else f"_00000-{num_frames:03d}"
        path = base.with_name(f"{base.name}{start}_{width:04d}x{height:04d}_{layout.architecture}.safetensors")
        metadata = {"width": str(width), "height": str(height)}
        metadata |= {} if num_frames is None else {"frame_count": str(num_frames)}
        data = _file(tensors, layout, metadata)
        run.report.num_images += run.write(path, data, sample)
        run.report.note(None if sample.flipped is None else NOTE_FLIPPED)
        _export_text(sample, base.with_name(f"{base.name}_{layout.architecture}_te.safetensors"), layout, run)
    return run.report


def _why_not(sample: ExportSample, layout: TrainerFiles, other: str, num_controls: int) -> tuple[str, str] | None:
    """Reason and detail if the sample cannot be exported. `other` is the first sample with its file name."""
    if other != sample.row.sample_id:
        return "duplicate", f"{other} has the same name, and the files of all folders are written to one"
    if num_controls != int(layout.needs_control):
        needed = "one control image (Kontext)" if layout.needs_control else "no control image"
        detail = f"musubi-tuner trains {layout.title} with {needed}: this sample has {num_controls}"
        return "unsupported-format", detail
    return None


def _export_text(sample: ExportSample, path: Path, layout: TrainerFiles, run: Export) -> None:
    if not sample.captions:
        return
    caption, entry = sample.captions[0]
    if caption is None:
        run.report.note(NOTE_UNKNOWN)
        return
    fields = {name: entry.tensors[field] for name, field in layout.texts.items()}
    tensors = {f"{name}_{dtype_name(tensor)}": tensor for name, tensor in fields.items()}
    run.report.num_texts += run.write(path, _file(tensors, layout, {"caption1": caption}), sample)
    run.report.note(NOTE_FIRST_CAPTION if len(sample.captions) > 1 else None)


def _file(tensors: Mapping[str, torch.Tensor], layout: TrainerFiles, metadata: Mapping[str, str]) -> bytes:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return save(contiguous, {"architecture": layout.title, "format_version": _VERSION, **metadata})
