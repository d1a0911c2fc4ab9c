"""Exports to shards: files of many samples, which are written once, in order, and a description that comes last."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

import latentcache
from latentcache.errors import ConfigError, StoreError
from latentcache.families.scaling import Scaling
from latentcache.interop.declaration import DESCRIPTION
from latentcache.interop.exporting import Export, ExportSample
from latentcache.loading.cache import LatentCache
from latentcache.models.vae import problems
from latentcache.store.entry import dtype_name
from latentcache.utils.durable_files import make_folder, sealed_file, typed_errors
from latentcache.utils.json_document import to_bytes
from latentcache.utils.progress import Progress

NOTE_WIDER = "{0} was written as float32, which has all of its values: numpy has no {0}"
NOTE_ROUNDED = "what was computed of latents was rounded to float16, in which they are stored: --dtype float32 keeps it"
SCALED = "scaled: {scaling} is done, as the denoiser expects it"
UNSCALED = "unscaled, as the VAE gave them: the denoiser expects {scaling}"
_DTYPES = (torch.float16, torch.float32)
_SHARD_BYTES = (1 << 12, 1 << 31)


@dataclass(frozen=True, slots=True)
class ShardRow:
    """One sample of a shard: `tensors` by field, in order, and the rest as JSON."""

    number: int
    tensors: dict[str, np.ndarray]
    values: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(array.nbytes for array in self.tensors.values())


def _formula(scaling: Scaling) -> str:
    if not scaling.mean:
        return "(latents - shift_factor) * scaling_factor"
    patches = "patches of 2x2 as channels, then " if scaling.rule == "batch_norm" else ""
    return f"{patches}(latents - mean) / std{'' if scaling.rule != 'factor' else ' * scaling_factor'}"


class ShardExport(Export):
    """An export of the manifest `name` to shards of about `shard_bytes` in `folder`, which must be new or empty.

    Tensors keep their stored dtype, but bfloat16 becomes float32; with `dtype` (float16 or float32) all get that.
    Latents are unscaled, unless `scaled`; a note says where scaling, or a draw, was rounded to float16. Memory holds
    one sample, and what a format keeps of a shard. Index and description come last: what lacks them is not whole.
    Raises ConfigError, and StoreError if the folder is not empty.
    """

    takes_clips = True

    def __init__(  # noqa: PLR0913 - what an export has, by keyword
        self,
        format_name: str,
        cache: LatentCache,
        name: str,
        folder: str | Path,
        *,
        scaled: bool,
        dtype: torch.dtype | None,
        shard_bytes: int,
        seed: int | None,
        progress: Progress | None,
    ):
        super().__init__(format_name, cache, name, folder, seed=seed, families=None, progress=progress)
        if dtype not in (None, *_DTYPES):
            raise ConfigError(
                f"dtype is {dtype}; {format_name} has float16 and float32: numpy has no others", key="dtype"
            )
        if not _SHARD_BYTES[0] <= shard_bytes <= _SHARD_BYTES[1]:
            allowed = f"{_SHARD_BYTES[0]:,} to {_SHARD_BYTES[1]:,} are allowed"
            raise ConfigError(f"a shard of {shard_bytes:,} bytes; {allowed}", key="shard_bytes")
        self.folder = Path(folder)
        with typed_errors(self.folder, 0):
            if self.folder.exists() and not self.folder.is_dir():
                raise StoreError(f"{folder}: is no folder. Shards are written to a new one: name another")
            if self.folder.exists() and any(self.folder.iterdir()):
                raise StoreError(
                    f"{folder}: is not empty. Shards are written to a new folder: name another, or empty it"
                )
        self.num_samples = 0
        self._scaled, self._dtype, self._shard_bytes = scaled, dtype, shard_bytes
        self._dtypes: dict[str, set[str]] = {}
        self._outputs: set[str] = set()

    def fields(self) -> list[str]:
        """The tensors that samples of the manifest have, for formats whose columns are the same for all samples."""
        num_images = num_captions = 0
        for row in self.manifest.rows.values():
            if row.refusal is None:
                num_images, num_captions = max(num_images, len(row.images)), max(num_captions, len(row.captions))
        fields = ["latents", "latents_flipped"][: max(num_images, 1)]
        for number in range(num_captions):
            fields += self._text_fields(number)
        return fields

    def _text_fields(self, number: int) -> list[str]:
        """The fields of a caption's embeddings."""
        return [f"{field}_{number}" if number else field for field in self.family.fields]

    def shards(self) -> Iterator[Iterator[ShardRow]]:
        """The samples, a run for each shard. Read each run before the next. Raises what `Export.samples` does."""
        rows = self._rows()
        for first in rows:
            yield self._run(first, rows)

    def _run(self, first: ShardRow, rows: Iterator[ShardRow]) -> Iterator[ShardRow]:
        num_bytes = first.num_bytes
        yield first
        while num_bytes < self._shard_bytes and (row := next(rows, None)) is not None:
            num_bytes += row.num_bytes
            yield row

    def _rows(self) -> Iterator[ShardRow]:
        for sample in self.samples():
            if any("\ud800" <= char <= "\udfff" for char in sample.sample_id):
                self.skip(sample.sample_id, sample.path, "unreadable", "its name is not UTF-8")
                continue
            if others := ", ".join(dict.fromkeys(name for caption in sample.captions for name in caption.others)):
                detail = f"its texts have {others}, for which shards have no place: precache with encode.padding drop"
                self.skip(sample.sample_id, sample.path, "unsupported-format", detail)
                continue
            if (tensors := self._tensors(sample)) is None:
                continue
            for field, array in tensors.items():
                self._dtypes.setdefault(field, set()).add(array.dtype.name)
            self._outputs.add(sample.output)
            self.report.num_images += 1 if sample.flipped is None else 2
            self.report.num_texts += len(sample.captions)
            yield ShardRow(self.num_samples, tensors, self._values(sample))
            self.num_samples += 1

    def _tensors(self, sample: ExportSample) -> dict[str, np.ndarray] | None:
        """None, and reported, if a number is too large for the dtype."""
        found: dict[str, torch.Tensor] = {}
        for field, latents in (("latents", sample.latents), ("latents_flipped", sample.flipped)):
            if latents is not None:
                found[field] = self._cast(self.scaling.apply(latents) if self._scaled else latents, sample.dtype)
        for number, caption in enumerate(sample.captions):
            embeds = [each for each in (caption.prompt_embeds, caption.pooled_prompt_embeds) if each is not None]
            for field, tensor in zip(self._text_fields(number), embeds, strict=True):
                found[field] = tensor.to(self._dtype or tensor.dtype)
        for field, tensor in found.items():
            if tensor.dtype not in _DTYPES:
                self.report.note(NOTE_WIDER.format(dtype_name(tensor)))
                found[field] = tensor.float()
            if problem := problems(found[field][None])[0]:
                detail = f"its {field} hold {problem} in {tensor.dtype}: give --dtype float32"
                self.skip(sample.sample_id, sample.path, "bad-output", detail)
                return None
        return {field: tensor.contiguous().numpy() for field, tensor in found.items()}

    def _cast(self, latents: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
        """Latents in float32 as they are written. bfloat16 stays float32: to round it first would lose what is new."""
        if self._dtype is not None:
            return latents.to(self._dtype)
        if stored is torch.bfloat16:
            self.report.note(NOTE_WIDER.format("bfloat16"))
            return latents
        written = latents.to(stored)
        if not torch.equal(written.float(), latents):
            self.report.note(NOTE_ROUNDED)
        return written

    def _values(self, sample: ExportSample) -> dict[str, Any]:
        row, flipped = sample.row, sample.flipped_geometry
        images = {ref.geometry.flip: ref.key for ref in row.images}
        keys = {"latents": images[False], "captions": [ref.key for ref in row.captions]}
        return {
            "sample_id": sample.sample_id,
            "caption": sample.captions[0].text if sample.captions else "",
            "captions": [caption.text for caption in sample.captions],
            "geometry": sample.geometry.to_json(),
            **({} if flipped is None else {"geometry_flipped": flipped.to_json()}),
            "keys": keys if flipped is None else keys | {"latents_flipped": images[True]},
            "scaled": self._scaled,
            "scaling_factor": self.scaling.scaling_factor,
            "shift_factor": self.scaling.shift_factor,
            "output": sample.output,
        }

    @contextmanager
    def sealed(self, name: str) -> Iterator[BinaryIO]:
        """A new file of the export, by its path in the folder: it is there when the block is done, or never."""
        path = self.folder / name
        with typed_errors(path.parent, 0):
            make_folder(path.parent)
        with sealed_file(path, self._shard_bytes) as fd:
            with open(fd, "wb", closefd=False) as file:
                yield file
            self.report.bytes_written += os.fstat(fd).st_size
        self.report.num_files += 1

    def write_small(self, name: str, data: bytes) -> None:
        """A small file of the export, as `sealed`."""
        with self.sealed(name) as file:
            file.write(data)

    def _description(self, fields: dict[str, str]) -> dict[str, Any]:
        common = self.manifest.common
        encoding, imported = common.get("image_encoding") or {}, common.get("imported") or {}
        declared = imported.get("declared") or {}
        unknown = f"not known: imported from {self.manifest.imported_from}"
        recipe = common.get("text_encoding") or {}
        length = recipe.get("max_length", self.family.max_length)
        return {
            "format": self.report.format,
            "written_by": f"latentcache {latentcache.__version__}",
            "manifest": self.manifest.name,
            "role": self.manifest.role,
            "num_samples": self.num_samples,
            "latents": (SCALED if self._scaled else UNSCALED).format(scaling=_formula(self.scaling)),
            "dtypes": {field: sorted(names) for field, names in self._dtypes.items()},
            "declaration": {
                "vae": encoding.get("vae") or declared.get("vae") or unknown,
                "family": self.family.name,
                "scaled": self._scaled,
                "scaling_factor": self.scaling.scaling_factor,
                "shift_factor": self.scaling.shift_factor,
                "rule": self.scaling.rule,
                "mean": list(self.scaling.mean),
                "std": list(self.scaling.std),
                "output": "sample" if "sample" in self._outputs else "mean",
                "preparation": common.get("policy") or declared.get("preparation") or unknown,
                "text_encoders": recipe or declared.get("text_encoders") or unknown,
                "keeps_padding": bool(recipe.get("keeps_padding", True)),
                **({} if length == self.family.max_length else {"max_length": length}),
                "fields": {name: place for name, place in fields.items() if name not in self._lacking()},
            },
            "common": common,
        }

    def _lacking(self) -> set[str]:
        """The fields of texts that other families have."""
        return {"prompt_embeds", "pooled_prompt_embeds"} - set(self.family.fields)

    def finish(self, fields: dict[str, str]) -> dict[str, Any]:
        """Write the description of an export that has samples, and return it: what the shards hold, and where from.

        `fields` is the declaration's `fields` for an import.
        """
        description = self._description(fields)
        self.write_small(DESCRIPTION, to_bytes(description))
        return description
