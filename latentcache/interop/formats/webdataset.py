"""WebDataset: tar files in which the members with the same name up to the first dot make up one sample.

An export has `shard-000000.tar` and so on with `<number>.json`, `<number>.latents.npy`, `<number>.prompt_embeds.npy`
and `<number>.pooled_prompt_embeds.npy`. A second caption is `prompt_embeds_1.npy` and so on, and flipped latents are
`latents_flipped.npy`. `latentcache.json` describes the tensors. It is written last: without it an export is incomplete.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typing_extensions import Unpack

import latentcache
from latentcache.errors import ConfigError, StoreError
from latentcache.families import FAMILIES, family_named
from latentcache.interop.exporting import Export, ExportOptions, ExportSample
from latentcache.interop.readers import flaw_of
from latentcache.interop.reports import ExportReport
from latentcache.loading.cache import LatentCache
from latentcache.store.entry import dtype_name
from latentcache.utils.durable_files import typed_errors, write_all
from latentcache.utils.json_document import to_bytes

DESCRIPTION = "latentcache.json"
NOTE_WIDER = "{0} was written as float32, without loss: numpy has no {0}"
NOTE_ROUNDED = "scaled latents were rounded to float16, the stored dtype: --dtype float32 avoids that"
_DTYPES = (torch.float16, torch.float32)


def held_families() -> list[str]:
    """The families that shards support: those without conditions and without token ids."""
    return [each.name for each in map(family_named, FAMILIES) if not (each.clip_condition or each.whole)]


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

    Tensors keep their stored dtype, except that bfloat16 becomes float32; `dtype` (float16 or float32) converts all.
    Latents are unscaled unless `scaled`, and the mean of stored moments. One sample is in memory at a time. Raises
    what `Export` raises, ConfigError for another dtype, and StoreError if the folder is not empty.
    """
    if dtype not in (None, *_DTYPES):
        raise ConfigError(f"dtype is {dtype}; webdataset supports float16 and float32", key="dtype")
    run = Export("webdataset", cache, name, folder, options, families=held_families(), takes=())
    folder = Path(folder)
    with typed_errors(folder, 0):
        if folder.exists() and not folder.is_dir():
            raise StoreError(f"{folder}: is not a folder. Shards are written to a new one: give another path")
        if folder.exists() and any(folder.iterdir()):
            raise StoreError(f"{folder}: is not empty. Shards are written to a new folder: give another, or empty it")
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
                for part, data in sample.items():
                    member = tarfile.TarInfo(f"{num_samples:09}.{part}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
                tar.members = []  # type: ignore[attr-defined]  # otherwise tarfile keeps all, a kilobyte each
                num_samples += 1
                sample = next(members, None) if tar.offset < shard_bytes else None
    if num_samples:
        description = to_bytes(_description(run, scaled, num_samples, outputs))
        with run.sealed(folder / DESCRIPTION, len(description)) as fd:
            write_all(fd, description)
    return run.report


def _members(run: Export, scaled: bool, dtype: torch.dtype | None, outputs: set[str]) -> Iterator[dict[str, bytes]]:
    """Yield the members of each sample, by name after the first dot. `outputs` collects `mean` or `sample`."""
    for sample in run.samples():
        if others := {name for _, text in sample.captions for name in text.tensors} - run.family.fields.keys():
            named = ", ".join(sorted(others))
            detail = f"its texts have {named}, which shards cannot hold: precache with `encode.padding: drop`"
            run.skip(sample.row, "unsupported-format", detail)
            continue
        arrays = _arrays(sample, run, scaled, dtype)
        if arrays is None:
            continue
        identity = sample.entry.record.identity
        is_draw = identity.get("encoding", identity.get("imported"))["output"] == "sample"
        outputs.add(output := "sample" if is_draw else "mean")
        run.report.num_images += 1 if sample.flipped is None else 2
        run.report.num_texts += len(sample.captions)
        members = {"json": json.dumps(_facts(sample, run, scaled, output)).encode()}
        for field, array in arrays.items():
            file = io.BytesIO()
            np.save(file, array, allow_pickle=False)
            members[f"{field}.npy"] = file.getvalue()
        yield members


def _arrays(sample: ExportSample, run: Export, scaled: bool, dtype: torch.dtype | None) -> dict[str, np.ndarray] | None:
    """The sample's tensors by field. None, and reported, if a value overflows the dtype."""
    [stored] = {tensor.dtype for tensor in sample.entry.tensors.values()}
    found: dict[str, tuple[torch.Tensor, torch.dtype]] = {}
    for field, latents in (("latents", sample.latents), ("latents_flipped", sample.flipped)):
        if latents is not None:
            found[field] = (run.scaling.apply(latents) if scaled else latents), stored
    for number, (_, text) in enumerate(sample.captions):
        for field, tensor in text.tensors.items():
            found[f"{field}_{number}" if number else field] = tensor, tensor.dtype
    arrays = {}
    for field, (tensor, stored) in found.items():
        values = tensor.to(dtype or (stored if stored in _DTYPES else torch.float32))
        if problem := flaw_of(values):
            run.skip(sample.row, "bad-output", f"its {field} hold {problem} in {values.dtype}: give --dtype float32")
            return None
        if dtype is None:
            run.report.note(None if stored in _DTYPES else NOTE_WIDER.format(dtype_name(stored)))
            run.report.note(None if torch.equal(values.float(), tensor.float()) else NOTE_ROUNDED)
        arrays[field] = values.contiguous().numpy()
    return arrays


def _facts(sample: ExportSample, run: Export, scaled: bool, output: str) -> dict[str, Any]:
    """The JSON member of a sample."""
    images = {f"latents{'_flipped' * ref.geometry.flip}": ref for ref in sample.row.images if ref.crop == 0}
    keys, flipped = {name: ref.key for name, ref in images.items()}, images.get("latents_flipped")
    # Captions that were not encoded are written as text.
    texts = [caption for caption, _ in sample.captions] or [ref.text for ref in sample.row.captions]
    return {
        "sample_id": sample.row.sample_id,
        "caption": texts[0] if texts else "",
        "captions": texts,
        "geometry": sample.geometry.to_json(),
        **({} if flipped is None else {"geometry_flipped": flipped.geometry.to_json()}),
        "keys": keys | {"captions": [ref.key for ref in sample.row.captions if ref.key]},
        "scaled": scaled,
        "scaling_factor": run.scaling.scaling_factor,
        "shift_factor": run.scaling.shift_factor,
        "output": output,
    }


def _description(run: Export, scaled: bool, num_samples: int, outputs: set[str]) -> dict[str, Any]:
    """What the tensors are: the VAE, the scaling, the preparation, the text encoders."""
    return {
        "format": "webdataset",
        "written_by": f"latentcache {latentcache.__version__}",
        "manifest": run.manifest.name,
        "role": run.manifest.role,
        "num_samples": num_samples,
        "family": run.family.name,
        "scaled": scaled,
        "scaling": run.scaling.to_json(),
        "output": "sample" if "sample" in outputs else "mean",
        "common": run.manifest.common,
    }
