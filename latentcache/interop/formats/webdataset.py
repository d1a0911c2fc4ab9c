"""WebDataset: tar files whose members belong to one sample if their names are equal up to the first dot.

An export has `shard-000000.tar` and so on with `<number>.json`, `<number>.latents.npy`, `<number>.prompt_embeds.npy`
and `<number>.pooled_prompt_embeds.npy`; further captions have `prompt_embeds_1.npy`, flipped latents
`latents_flipped.npy`. `latentcache.json` says what the numbers are. It comes last: what lacks it is not whole.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typing_extensions import Unpack

import latentcache
from latentcache.errors import ConfigError, StoreError
from latentcache.families.scaling import Scaling
from latentcache.interop.exporting import Export, ExportOptions, ExportSample
from latentcache.interop.files import flaw_of
from latentcache.interop.reports import ExportReport
from latentcache.loading.cache import LatentCache
from latentcache.store.entry import dtype_name
from latentcache.utils.durable_files import typed_errors, write_all
from latentcache.utils.json_document import to_bytes

DESCRIPTION = "latentcache.json"
NOTE_WIDER = "{0} was written as float32, which has all of its values: numpy has no {0}"
NOTE_ROUNDED = "what was computed of latents was rounded to float16, in which they are stored: --dtype float32 keeps it"
_DTYPES = (torch.float16, torch.float32)
_SHARD_BYTES = (1 << 12, 1 << 31)


def export(
    cache: LatentCache,
    name: str,
    folder: str | Path,
    *,
    scaled: bool = False,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 256 << 20,
    **options: Unpack[ExportOptions],
) -> ExportReport:
    """Write the manifest `name` as WebDataset shards of about `shard_bytes` to `folder`, which must be new or empty.

    Tensors keep their stored dtype, but bfloat16 becomes float32; with `dtype` (float16 or float32) all get that.
    Latents are unscaled, unless `scaled`; a note says where scaling, or a draw, was rounded to float16. Memory holds
    one sample. Raises what `Export` does, ConfigError, and StoreError if the folder is not empty.
    """
    if dtype not in (None, *_DTYPES):
        raise ConfigError(f"dtype is {dtype}; webdataset has float16 and float32: numpy has no others", key="dtype")
    if not _SHARD_BYTES[0] <= shard_bytes <= _SHARD_BYTES[1]:
        allowed = f"{_SHARD_BYTES[0]:,} to {_SHARD_BYTES[1]:,} are allowed"
        raise ConfigError(f"a shard of {shard_bytes:,} bytes; {allowed}", key="shard_bytes")
    run = Export("webdataset", cache, name, folder, options)
    folder = Path(folder)
    with typed_errors(folder, 0):
        if folder.exists() and not folder.is_dir():
            raise StoreError(f"{folder}: is no folder. Shards are written to a new one: name another")
        if folder.exists() and any(folder.iterdir()):
            raise StoreError(f"{folder}: is not empty. Shards are written to a new folder: name another, or empty it")
    outputs: set[str] = set()
    members = _members(run, scaled, dtype, outputs)
    num_samples = 0
    for shard, first in enumerate(members):
        with (
            run.sealed(folder / f"shard-{shard:06}.tar", shard_bytes) as fd,
            open(fd, "wb", closefd=False) as file,
            tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar,
        ):
            sample: dict[str, bytes] | None = first
            while sample is not None:
                _add(tar, f"{num_samples:09}", sample)
                num_samples += 1
                sample = next(members, None) if tar.offset < shard_bytes else None
    if num_samples:
        description = to_bytes(_description(run, scaled, num_samples, outputs))
        with run.sealed(folder / DESCRIPTION, len(description)) as fd:
            write_all(fd, description)
    return run.report


def _add(tar: tarfile.TarFile, key: str, members: Mapping[str, bytes]) -> None:
    for part, data in members.items():
        member = tarfile.TarInfo(f"{key}.{part}")
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))
    tar.members = []  # type: ignore[attr-defined]  # tarfile would keep them all, a kilobyte each


def _members(run: Export, scaled: bool, dtype: torch.dtype | None, outputs: set[str]) -> Iterator[dict[str, bytes]]:
    """The members of each sample, by the name's second part; `outputs` collects what latents are of the posterior."""
    for sample in run.samples():
        if others := ", ".join(dict.fromkeys(name for caption in sample.captions for name in caption.others)):
            detail = f"its texts have {others}, for which shards have no place: precache with encode.padding drop"
            run.skip(sample, "unsupported-format", detail)
            continue
        arrays = _arrays(sample, run, scaled, dtype)
        if arrays is None:
            continue
        outputs.add(sample.output)
        run.report.num_images += 1 if sample.flipped is None else 2
        run.report.num_texts += len(sample.captions)
        members = {"json": json.dumps(_facts(sample, run.scaling, scaled)).encode()}
        for field, array in arrays.items():
            file = io.BytesIO()
            np.save(file, array, allow_pickle=False)
            members[f"{field}.npy"] = file.getvalue()
        yield members


def _arrays(sample: ExportSample, run: Export, scaled: bool, dtype: torch.dtype | None) -> dict[str, np.ndarray] | None:
    """The sample's tensors by field. None, and reported, if a number is too large for the dtype."""
    found: dict[str, torch.Tensor] = {}
    for field, latents in (("latents", sample.latents), ("latents_flipped", sample.flipped)):
        if latents is not None:
            found[field] = _cast(run.scaling.apply(latents) if scaled else latents, dtype, sample.dtype, run.report)
    for number, caption in enumerate(sample.captions):
        for field in run.family.fields:
            tensor = getattr(caption, field)
            found[f"{field}_{number}" if number else field] = tensor if dtype is None else tensor.to(dtype)
    for field, tensor in found.items():
        if tensor.dtype not in _DTYPES:
            run.report.note(NOTE_WIDER.format(dtype_name(tensor)))
            found[field] = tensor.float()
        if problem := flaw_of(found[field]):
            detail = f"its {field} hold {problem} in {tensor.dtype}: give --dtype float32"
            run.skip(sample, "bad-output", detail)
            return None
    return {field: tensor.contiguous().numpy() for field, tensor in found.items()}


def _cast(latents: torch.Tensor, dtype: torch.dtype | None, stored: torch.dtype, report: ExportReport) -> torch.Tensor:
    """Latents in float32 as they are written. bfloat16 stays float32: to round it first would lose what is new."""
    if dtype is not None:
        return latents.to(dtype)
    if stored is torch.bfloat16:
        report.note(NOTE_WIDER.format("bfloat16"))
        return latents
    written = latents.to(stored)
    report.note(None if torch.equal(written.float(), latents) else NOTE_ROUNDED)
    return written


def _facts(sample: ExportSample, scaling: Scaling, scaled: bool) -> dict[str, Any]:
    """The json of a sample."""
    flipped, images = sample.flipped_geometry, {ref.geometry.flip: ref.key for ref in sample.row.images_of(0)}
    keys = {"latents": images[False], "captions": [ref.key for ref in sample.row.captions if ref.key]}
    # Captions that were not encoded are texts all the same.
    texts = [caption.text for caption in sample.captions] or [ref.text for ref in sample.row.captions]
    return {
        "sample_id": sample.sample_id,
        "caption": texts[0] if texts else "",
        "captions": texts,
        "geometry": sample.geometry.to_json(),
        **({} if flipped is None else {"geometry_flipped": flipped.to_json()}),
        "keys": keys if flipped is None else keys | {"latents_flipped": images[True]},
        "scaled": scaled,
        "scaling_factor": scaling.scaling_factor,
        "shift_factor": scaling.shift_factor,
        "output": sample.output,
    }


def _description(run: Export, scaled: bool, num_samples: int, outputs: set[str]) -> dict[str, Any]:
    """What the numbers are: the VAE, the scaling, the preparation, the text encoders."""
    formula = _formula(run.scaling)
    unscaled = f"unscaled, as the VAE gave them: the denoiser expects {formula}"
    return {
        "format": "webdataset",
        "written_by": f"latentcache {latentcache.__version__}",
        "manifest": run.manifest.name,
        "role": run.manifest.role,
        "num_samples": num_samples,
        "family": run.family.name,
        "latents": f"scaled: {formula} is done, as the denoiser expects it" if scaled else unscaled,
        "scaled": scaled,
        "scaling": run.scaling.to_json(),
        "output": "sample" if "sample" in outputs else "mean",
        "common": run.manifest.common,
    }


def _formula(scaling: Scaling) -> str:
    if not scaling.mean:
        return "(latents - shift_factor) * scaling_factor"
    patches = "patches of 2x2 as channels, then " if scaling.rule == "batch_norm" else ""
    return f"{patches}(latents - mean) / std{'' if scaling.rule != 'factor' else ' * scaling_factor'}"
