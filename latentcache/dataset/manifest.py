"""The named list of a dataset's samples: their keys, their geometry, their captions.

On disk a manifest is `<name>.safetensors`: the columns of its rows (`row_table`), and in the metadata a header and one
digest of all that the file holds, for a damaged manifest could give wrong samples silently. It is replaced as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from latentcache.config import MAX_REPEATS, MAX_VARIANTS, PROMPTS_PREFIX, Share
from latentcache.dataset.row_table import Row, RowTable, has_key
from latentcache.errors import DatasetError
from latentcache.families import DEFAULT, Rule, family_named
from latentcache.identity import canonical_json, digest, is_key
from latentcache.utils.json_document import first_fault

if TYPE_CHECKING:
    from latentcache.families.base import Family  # imports torch

FORMAT = "4"
MARK = "latentcache_manifest"
"""The name of the format in the metadata of a manifest's file."""
REMEDY = "`latentcache precache CONFIG`, or the import that made it, writes it again"
MAX_HEADER_BYTES = 1 << 24
"""Longest accepted head of a manifest's file, which does not grow with the samples."""
_DTYPES: Mapping[str, np.dtype[Any]] = {
    "U8": np.dtype("B"),
    "U32": np.dtype("I"),
    "I32": np.dtype("i"),
    "I64": np.dtype("q"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGNMENT = 8
Role = Literal["train", "validation", "prompts"]
_OPTIONAL: Mapping[str, Any] = {"variants": 1, "weights": (), "loss_weight": 1.0}
"""What a header has only where it differs from this."""


@dataclass(init=False, slots=True)
class Manifest:
    """All samples of one dataset, by sample_id, and what their keys have in common.

    `common` is the part of the identities that all samples share (salt, schema, policy, image and text encoding), as
    JSON: a later plan finds there why a key changed.

    Each caption (line) of a sample has `variants` texts, of which number 0 is the line itself: caption entry
    `line * variants + variant` is variant `variant` of line `line`. `weights` say how often a line is drawn, in the
    order of lines; without any all are equal. `loss_weight` is how much a sample counts in the loss.
    """

    name: str
    role: Role
    repeats: int
    common: Mapping[str, Any]
    rows: RowTable
    variants: int
    weights: tuple[float, ...]
    loss_weight: float

    def __init__(
        self,
        name: str,
        role: Role,
        repeats: int,
        common: Mapping[str, Any],
        rows: Mapping[str, Row] | None = None,
        *,
        variants: int = 1,
        weights: Sequence[float] = (),
        loss_weight: float = 1.0,
    ):
        self.name, self.role, self.repeats, self.common = name, role, repeats, common
        self.rows = RowTable.of(rows or {})
        self.variants, self.weights, self.loss_weight = variants, tuple(weights), loss_weight

    def with_rows(self, rows: Mapping[str, Row]) -> Manifest:
        """This manifest with other samples."""
        return replace(self, rows=RowTable.of(rows))

    def keys(self) -> set[str]:
        """The keys of all its samples."""
        return set(self.rows.entry_keys())

    @property
    def family(self) -> Family:
        """The family of the model that it was encoded with. ModelError for one that this version does not know."""
        return family_named(self.common.get("family", DEFAULT))

    @property
    def has_texts(self) -> bool:
        """Whether its captions were encoded; else it is of `encode.text: none`."""
        return self.common["text_encoding"] is not None

    @property
    def imported_from(self) -> str | None:
        """The format of the foreign cache that it was imported from; None for a manifest of precache."""
        imported = self.common.get("imported")
        return None if imported is None else imported["format"]


def prompts_name(common: Mapping[str, Any]) -> str:
    """The name of the manifest of prompts for datasets with this `common`, which have texts.

    There is one for each text encoding: a prompt of another model's encoders must never be returned.
    """
    parts = {name: common[name] for name in ("schema", "salt", "text_encoding")}
    return f"{PROMPTS_PREFIX}-{digest(canonical_json(parts))[:12]}"


def merged_rows(theirs: Mapping[str, Row], ours: Mapping[str, Row]) -> RowTable:
    """The samples of both; of a sample in both ours, unless we refused what they encoded from the same image."""

    def chosen() -> Iterator[Row]:
        for before in theirs.values():
            row = ours.get(before.sample_id)
            if row is None or (row.refusal and not before.refusal and row.source == before.source):
                row = before
            yield row
        yield from (row for row in ours.values() if row.sample_id not in theirs)

    return RowTable.from_rows(chosen())


class _HeaderPart(BaseModel):
    """Values of other types are refused, not converted; what is not listed here may be anything."""

    model_config = ConfigDict(strict=True, extra="allow")


_Factor = Annotated[float, Field(gt=0, le=1e9)]
_Shift = Annotated[float, Field(ge=-1e9, le=1e9)]


class _ImageEncoding(_HeaderPart):
    scaling_factor: _Factor
    shift_factor: _Shift | None


class _Scaling(_HeaderPart):
    """What `Scaling.from_json` reads, and nothing else."""

    model_config = ConfigDict(extra="forbid")

    scaling_factor: _Factor = 1.0
    shift_factor: _Shift | None = None
    rule: Rule = "factor"
    mean: list[_Shift] = []
    std: list[_Factor] = []


class _Imported(_HeaderPart):
    format: str


class _Common(_HeaderPart):
    identity_schema: int = Field(alias="schema")
    salt: str
    text_encoding: dict[str, Any] | None
    image_encoding: _ImageEncoding | None = None
    family: str | None = None
    scaling: _Scaling | None = None
    imported: _Imported | None = None


class _Header(_HeaderPart):
    """What the header of a manifest has to say."""

    name: str
    role: Role
    repeats: Annotated[int, Field(ge=1, le=MAX_REPEATS)]
    num_samples: int
    common: _Common
    variants: Annotated[int, Field(ge=1, le=MAX_VARIANTS)] = 1
    weights: list[Share] = []
    loss_weight: Share = 1.0


def manifest_parts(manifest: Manifest) -> list[bytes | memoryview]:
    """The bytes of a manifest's file: its head, then each column."""
    header = {
        "name": manifest.name,
        "role": manifest.role,
        "repeats": manifest.repeats,
        "num_samples": len(manifest.rows),
        "common": manifest.common,
    }
    header |= {name: value for name in _OPTIONAL if (value := getattr(manifest, name)) != _OPTIONAL[name]}
    document: dict[str, Any] = {"__metadata__": {MARK: FORMAT, "header": json.dumps(header)}}
    data, end = [], 0
    # Numbers of eight bytes come first, so that each column is aligned.
    for name, column in sorted(manifest.rows.columns.items(), key=lambda item: (-item[1].itemsize, item[0])):
        start, end = end, end + column.nbytes
        document[name] = {"dtype": _NAMES[column.dtype], "shape": list(column.shape), "data_offsets": [start, end]}
        data.append(np.ascontiguousarray(column).reshape(-1).view(np.uint8).data)
    document["__metadata__"]["digest"] = _digest_of(document, data)
    head = json.dumps(document).encode()
    head += b" " * (-len(head) % _ALIGNMENT)
    return [len(head).to_bytes(8, "little") + head, *data]


def _digest_of(document: Mapping[str, Any], data: Sequence[memoryview]) -> str:
    """The digest of all that the file holds, but for itself."""
    hasher = blake3(canonical_json(document))
    for part in data:
        hasher.update(part)
    return hasher.hexdigest()


@dataclass(frozen=True, slots=True)
class ManifestHead:
    """What the head of a manifest's file says, not compared with the digest. `data_start` is where its columns are."""

    role: str
    num_samples: int
    digest: str
    document: dict[str, Any]
    header: dict[str, Any]
    data_start: int


def read_head(data: bytes | memoryview, name: str, source: str | Path) -> ManifestHead:
    """The head of a manifest's file. `data` has at least 8 + MAX_HEADER_BYTES of it, or all. DatasetError."""
    if data[:1] == b"{":  # no length of a head ends so
        raise DatasetError(
            source,
            "is a manifest of an older version, JSON lines, which this version does not read: run `latentcache "
            "precache CONFIG` (keys do not change: all hits), or the import that made it, or remove the file",
        )
    try:
        num_bytes = int.from_bytes(data[:8], "little")
        if not 0 < num_bytes <= min(MAX_HEADER_BYTES, len(data) - 8):
            raise ValueError(f"its head has {num_bytes:,} bytes; it needs 1 to {MAX_HEADER_BYTES:,}, all in the file")
        document = json.loads(bytes(data[8 : 8 + num_bytes]))
        metadata = document["__metadata__"]
        if metadata[MARK] != FORMAT:
            raise ValueError(f"manifest format {metadata[MARK]!r:.80}, but this version reads {FORMAT}")
        stored, header = metadata.pop("digest"), json.loads(metadata["header"])
        checked = _Header.model_validate(header)
        if checked.name != name:
            raise ValueError(f"it says that it is the manifest {checked.name!r:.80}, but here it is {name!r}")
        if not is_key(stored):
            raise ValueError(f"its digest is {stored!r:.80}, where 64 hexadecimal digits are needed")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _no_manifest(source, error) from error
    return ManifestHead(checked.role, checked.num_samples, stored, document, header, 8 + num_bytes)


def read_manifest(
    data: bytes | memoryview | mmap, name: str, source: str | Path, *, whole_check: bool = False
) -> Manifest:
    """The manifest `name` in the bytes of its file, of which the columns are views. DatasetError names the `source`.

    They are compared with their digest. `whole_check` is for what comes from elsewhere: it also refuses columns and
    values that no writer here makes, a sample that is listed twice, and one that has neither an image nor a refusal.
    """
    memory = memoryview(data)
    head = read_head(memory, name, source)
    try:
        columns_of_file = memory[head.data_start :]
        if _digest_of(head.document, [columns_of_file]) != head.digest:
            raise ValueError(f"its digest differs: {head.digest!r:.80}. It is damaged, or was edited")
        rows = RowTable(_columns(head.document, columns_of_file))
        if whole_check:
            rows.check()
            if head.num_samples != len(rows):
                raise ValueError(f"it says that there are {head.num_samples:,} samples, but here are {len(rows):,}")
            keys = rows.columns["caption/keys"]
            if head.header["common"]["text_encoding"] is not None and not has_key(keys).all():
                raise ValueError("a caption has no key, but it says how texts were encoded")
            variants = head.header.get("variants", 1)
            if len(odd := np.flatnonzero(np.diff(rows.columns["caption/offsets"]) % variants)):
                sample_id = rows.sample_ids[int(odd[0])]
                raise ValueError(f"the captions of sample {sample_id!r:.80} are no multiple of its {variants} variants")
            lacking = np.flatnonzero(rows.first_sizes("target_size")[:, 0] == 0)
            if head.role != "prompts" and len(lacking := np.setdiff1d(lacking, rows.columns["refusal/rows"])):
                sample_id = rows.sample_ids[int(lacking[0])]
                raise ValueError(f"sample {sample_id!r:.80} has no image, and no refusal that says why")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _no_manifest(source, error) from error
    header = head.header
    optional = {name: header[name] for name in _OPTIONAL if name in header}
    return Manifest(name, header["role"], header["repeats"], header["common"], rows, **optional)


def _columns(document: Mapping[str, Any], data: memoryview) -> dict[str, np.ndarray]:
    columns, end = {}, 0
    for name, column in document.items():
        if name == "__metadata__":
            continue
        dtype, shape = _DTYPES[column["dtype"]], column["shape"]
        start, end = end, end + prod(shape) * dtype.itemsize
        if column["data_offsets"] != [start, end]:
            raise ValueError(f"{name} is at {column['data_offsets']}, where {[start, end]} is needed")
        columns[name] = np.frombuffer(data[start:end], dtype).reshape(shape)
    if end != len(data):
        raise ValueError(f"it has {len(data):,} bytes after its head, where {end:,} are needed")
    return columns


def _no_manifest(source: str | Path, error: Exception) -> DatasetError:
    what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
    if isinstance(error, ValidationError):
        what = first_fault(error)[2]
    return DatasetError(source, f"is no manifest: {what}; {REMEDY}")
