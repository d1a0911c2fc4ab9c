"""The named list of a dataset's samples: their keys, their geometry, their captions.

On disk a manifest is `<name>.safetensors`: the columns of its rows (`row_table`), and in the metadata a header and one
digest of all that the file holds, for a damaged manifest could give wrong samples silently. It is replaced as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from latentcache.config import MAX_REPEATS, MAX_VARIANTS, PROMPTS_PREFIX, Share
from latentcache.dataset.row_table import Row, RowTable
from latentcache.errors import DatasetError
from latentcache.families import DEFAULT, Rule, family_named
from latentcache.identity import canonical_json, digest
from latentcache.utils.json_document import first_fault

if TYPE_CHECKING:
    from latentcache.families.base import Family  # imports torch

FORMAT = "5"
MARK = "latentcache_manifest"
"""The name of the format in the metadata of a manifest's file."""
REMEDY = "`latentcache precache CONFIG`, or the import that made it, writes it again"
MAX_HEADER_BYTES = 1 << 24
"""Longest accepted head of a manifest's file, which does not grow with the samples."""
_DTYPES: Mapping[str, np.dtype[Any]] = {"U8": np.dtype("B"), "I32": np.dtype("i"), "I64": np.dtype("q")}
Role = Literal["train", "validation", "prompts"]


@dataclass(slots=True)
class Manifest:
    """All samples of one dataset, by sample_id, and what their keys have in common.

    `common` is the part of the identities that all samples share (salt, schema, policy, image and text encoding), as
    JSON: a later plan finds there why a key changed. `rows` may be any mapping; it becomes a `RowTable`.

    Each caption (line) of a sample has `variants` texts, of which number 0 is the line itself: caption entry
    `line * variants + variant` is variant `variant` of line `line`. `weights` say how often a line is drawn, in the
    order of lines; without any all are equal. `loss_weight` is how much a sample counts in the loss.
    """

    name: str
    role: Role
    repeats: int
    common: Mapping[str, Any]
    rows: RowTable
    variants: int = 1
    weights: Sequence[float] = ()
    loss_weight: float = 1.0

    def __post_init__(self) -> None:
        self.rows, self.weights = RowTable.of(self.rows), tuple(self.weights)

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

    return RowTable.of(chosen())


class _HeaderPart(BaseModel):
    """Values of other types are refused, not converted; what is not listed here may be anything."""

    model_config = ConfigDict(strict=True, extra="allow")


class _Scaling(_HeaderPart):
    rule: Rule = "factor"  # a newer version may have others


class _Common(_HeaderPart):
    identity_schema: int = Field(alias="schema")
    salt: str
    text_encoding: dict[str, Any] | None
    image_encoding: dict[str, Any] | None = None
    scaling: _Scaling | None = None


class ManifestHead(_HeaderPart):
    """What the head of a manifest's file says, not compared with the digest of the columns."""

    name: str
    role: Role
    repeats: Annotated[int, Field(ge=1, le=MAX_REPEATS)]
    num_samples: int
    common: _Common
    variants: Annotated[int, Field(ge=1, le=MAX_VARIANTS)]
    weights: list[Share]
    loss_weight: Share
    digest: str


def manifest_bytes(manifest: Manifest) -> bytes:
    """A manifest's file: safetensors."""
    header = {field.name: getattr(manifest, field.name) for field in fields(manifest) if field.name != "rows"}
    text, columns = json.dumps({**header, "num_samples": len(manifest.rows)}), manifest.rows.columns
    metadata = {MARK: FORMAT, "header": text, "digest": _digest_of(text, columns)}
    document: dict[str, Any] = {"__metadata__": metadata}
    parts, end = [], 0
    # Numbers of eight bytes come first, so that each column is aligned.
    for name in sorted(columns, key=lambda name: (-columns[name].itemsize, name)):
        column, start = columns[name], end
        parts.append(column.tobytes())
        end += len(parts[-1])
        dtype = next(theirs for theirs, ours in _DTYPES.items() if ours == column.dtype)
        document[name] = {"dtype": dtype, "shape": list(column.shape), "data_offsets": [start, end]}
    head = json.dumps(document).encode()
    head += b" " * (-len(head) % 8)
    return b"".join([len(head).to_bytes(8, "little"), head, *parts])


def _digest_of(header: str, columns: Mapping[str, np.ndarray]) -> str:
    """The digest of all that a manifest's file holds, but for itself."""
    hasher = blake3(header.encode())
    for name, column in sorted(columns.items()):
        hasher.update(f"{name} {column.dtype} {column.shape}".encode())
        hasher.update(np.ascontiguousarray(column).reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()


def _document(data: bytes | memoryview) -> tuple[dict[str, Any], dict[str, Any], int]:
    """The columns that the head of a manifest's file lists, its metadata, and where the columns begin. ValueError."""
    num_bytes = int.from_bytes(data[:8], "little")
    if not 0 < num_bytes <= min(MAX_HEADER_BYTES, len(data) - 8):
        raise ValueError(f"its head has {num_bytes:,} bytes; it needs 1 to {MAX_HEADER_BYTES:,}, all in the file")
    document = json.loads(bytes(data[8 : 8 + num_bytes]))
    metadata = document.pop("__metadata__")
    if metadata[MARK] != FORMAT:
        raise ValueError(f"manifest format {metadata[MARK]!r:.80}, but this version reads {FORMAT}")
    return document, metadata, 8 + num_bytes


def _head(metadata: Mapping[str, Any], name: str) -> ManifestHead:
    head = ManifestHead.model_validate({**json.loads(metadata["header"]), "digest": metadata["digest"]})
    if head.name != name:
        raise ValueError(f"it says that it is the manifest {head.name!r:.80}, but here it is {name!r}")
    return head


def read_head(data: bytes | memoryview, name: str, source: str | Path) -> ManifestHead:
    """The head of a manifest's file. `data` has at least 8 + MAX_HEADER_BYTES of it, or all. DatasetError."""
    with _refused(source):
        return _head(_document(data)[1], name)


def read_manifest(
    data: bytes | memoryview | mmap, name: str, source: str | Path, *, whole_check: bool = False
) -> Manifest:
    """The manifest `name` in the bytes of its file, of which the columns are views. DatasetError names the `source`.

    They are compared with their digest. `whole_check` is for what comes from elsewhere: it also refuses columns and
    values that no writer here makes, a sample that is listed twice, and one that has neither an image nor a refusal.
    """
    with _refused(source):
        document, metadata, start = _document(memory := memoryview(data))
        head = _head(metadata, name)
        columns: dict[str, np.ndarray] = {}
        for column, facts in document.items():
            first, end = facts["data_offsets"]
            columns[column] = np.frombuffer(memory[start + first : start + end], _DTYPES[facts["dtype"]])
            columns[column] = columns[column].reshape(facts["shape"])
        if (end := start + sum(column.nbytes for column in columns.values())) != len(memory):
            raise ValueError(f"it has {len(memory):,} bytes, where {end:,} are needed")
        if _digest_of(metadata["header"], columns) != head.digest:
            raise ValueError(f"its digest differs: {head.digest!r:.80}. It is damaged, or was edited")
        rows, header = RowTable(columns), json.loads(metadata["header"])
        if whole_check:
            _check(head, rows)
        options = {option: header[option] for option in ("variants", "weights", "loss_weight")}
        return Manifest(name, head.role, head.repeats, header["common"], rows, **options)


def _check(head: ManifestHead, rows: RowTable) -> None:
    """ValueError for a manifest that no writer here makes, though its digest fits."""
    rows.check()
    if head.num_samples != len(rows):
        raise ValueError(f"it says that there are {head.num_samples:,} samples, but here are {len(rows):,}")
    if head.common.text_encoding is not None and not rows.columns["caption/keys"].any(1).all():
        raise ValueError("a caption has no key, but it says how texts were encoded")
    if len(odd := np.flatnonzero(np.diff(rows.columns["caption/offsets"]) % head.variants)):
        sample_id = rows.sample_ids[int(odd[0])]
        raise ValueError(f"the captions of sample {sample_id!r:.80} are no multiple of its {head.variants} variants")
    lacking = np.setdiff1d(rows.usable(), rows.usable_with("image", rows.columns["image/role"] == 0))
    if head.role != "prompts" and len(lacking):
        sample_id = rows.sample_ids[int(lacking[0])]
        raise ValueError(f"sample {sample_id!r:.80} has no image, and no refusal that says why")


@contextmanager
def _refused(source: str | Path) -> Iterator[None]:
    """What is found wrong with a manifest becomes a DatasetError that names the source and the next step."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        if isinstance(error, ValidationError):
            what = first_fault(error)[2]
        raise DatasetError(source, f"is no manifest: {what}; {REMEDY}") from error
