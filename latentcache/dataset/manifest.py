"""The named list of a dataset's samples: their keys, geometries and captions.

On disk a manifest is `<name>.safetensors`: the columns of its rows (`row_table`), with a header in the metadata, and a
digest of both, because a damaged manifest could silently give wrong samples. It is always replaced as a whole.
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
from latentcache.identity import canonical_json, digest, key_names
from latentcache.utils.json_document import first_fault

if TYPE_CHECKING:
    from latentcache.families.base import Family  # imports torch

FORMAT = "5"
MARK = "latentcache_manifest"
"""The metadata key of a manifest file's format version."""
REMEDY = "run `latentcache precache CONFIG`, or the import that made it, to write it again"
MAX_HEADER_BYTES = 1 << 24
"""Largest accepted head of a manifest's file. Its size does not depend on the number of samples."""
_DTYPES: Mapping[str, np.dtype[Any]] = {"U8": np.dtype("B"), "I32": np.dtype("i"), "I64": np.dtype("q")}
Role = Literal["train", "validation", "prompts"]


@dataclass(slots=True)
class Manifest:
    """All samples of one dataset, by sample_id, and what their keys have in common.

    `common` is the part of the identities that all samples share (salt, schema, policy, image and text encoding), as
    JSON. A later plan compares it to explain why a key changed. `rows` may be any mapping; it becomes a `RowTable`.

    Each caption (line) of a sample has `variants` texts, the first of which is the line itself: caption entry
    `line * variants + variant` is variant `variant` of line `line`. `weights` are the relative frequencies of the
    lines, in order; empty means equal. `loss_weight` scales the loss of each sample.
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
        """A copy of this manifest with other samples."""
        return replace(self, rows=RowTable.of(rows))

    def keys(self) -> set[str]:
        """The keys of all samples."""
        return set(key_names(self.rows.entry_keys()))

    @property
    def family(self) -> Family:
        """The family of the model that encoded it. Raises ModelError for a family unknown to this version."""
        return family_named(self.common.get("family", DEFAULT))

    @property
    def has_texts(self) -> bool:
        """Whether captions were encoded: not with `encode.text: none`."""
        return self.common["text_encoding"] is not None

    @property
    def imported_from(self) -> str | None:
        """The format of the trainer's cache that it was imported from; None if precache wrote it."""
        imported = self.common.get("imported")
        return None if imported is None else imported["format"]


def prompts_name(common: Mapping[str, Any]) -> str:
    """The name of the prompts manifest for datasets with this `common`, which must have texts.

    There is one per text encoding, so that a prompt from another model's encoders is never returned.
    """
    parts = {name: common[name] for name in ("schema", "salt", "text_encoding")}
    return f"{PROMPTS_PREFIX}-{digest(canonical_json(parts))[:12]}"


def merged_rows(theirs: Mapping[str, Row], ours: Mapping[str, Row]) -> RowTable:
    """The union of both. Ours wins for a sample in both, unless we refused what they encoded from the same image."""

    def chosen() -> Iterator[Row]:
        for before in theirs.values():
            row = ours.get(before.sample_id)
            if row is None or (row.refusal and not before.refusal and row.source == before.source):
                row = before
            yield row
        yield from (row for row in ours.values() if row.sample_id not in theirs)

    return RowTable.of(chosen())


class _HeaderPart(BaseModel):
    """Values of other types are refused, not converted. Fields not declared here are allowed."""

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
    """The head of a manifest's file. Reading it does not verify the digest."""

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
    """Serialize a manifest as safetensors."""
    header = {field.name: getattr(manifest, field.name) for field in fields(manifest) if field.name != "rows"}
    text, columns = json.dumps({**header, "num_samples": len(manifest.rows)}), manifest.rows.columns
    metadata = {MARK: FORMAT, "header": text, "digest": _digest_of(text, columns)}
    document: dict[str, Any] = {"__metadata__": metadata}
    parts, end = [], 0
    # Columns of eight-byte numbers come first, so that all are aligned.
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
    """The digest of a manifest's header and columns."""
    hasher = blake3(header.encode())
    for name, column in sorted(columns.items()):
        hasher.update(f"{name} {column.dtype} {column.shape}".encode())
        hasher.update(np.ascontiguousarray(column).reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()


def _document(data: bytes | memoryview) -> tuple[dict[str, Any], dict[str, Any], int]:
    """The columns listed in the head of a manifest's file, its metadata, and the columns' offset. Raises ValueError."""
    num_bytes = int.from_bytes(data[:8], "little")
    if not 0 < num_bytes <= min(MAX_HEADER_BYTES, len(data) - 8):
        raise ValueError(f"its head of {num_bytes:,} bytes is not within the file, or exceeds {MAX_HEADER_BYTES:,}")
    document = json.loads(bytes(data[8 : 8 + num_bytes]))
    metadata = document.pop("__metadata__")
    if metadata[MARK] != FORMAT:
        raise ValueError(f"its format is {metadata[MARK]!r:.80}, but this version reads {FORMAT}")
    return document, metadata, 8 + num_bytes


def _head(metadata: Mapping[str, Any], name: str) -> ManifestHead:
    head = ManifestHead.model_validate({**json.loads(metadata["header"]), "digest": metadata["digest"]})
    if head.name != name:
        raise ValueError(f"its header names the manifest {head.name!r:.80}, not {name!r}")
    return head


def read_head(data: bytes | memoryview, name: str, source: str | Path) -> ManifestHead:
    """Read the head of a manifest's file, of which `data` is the first 8 + MAX_HEADER_BYTES. Raises DatasetError."""
    with _refused(source):
        return _head(_document(data)[1], name)


def read_manifest(
    data: bytes | memoryview | mmap, name: str, source: str | Path, *, whole_check: bool = False
) -> Manifest:
    """Read the manifest `name` from the bytes of its file and verify the digest. Columns are views of `data`.

    `whole_check` is for untrusted files: it also refuses columns and values that no writer here makes, a duplicate
    sample, and a sample with neither an image nor a refusal. Raises DatasetError, naming `source`.
    """
    with _refused(source):
        document, metadata, start = _document(memory := memoryview(data))
        head = _head(metadata, name)
        columns: dict[str, np.ndarray] = {}
        for column, facts in document.items():
            first, end = facts["data_offsets"]
            columns[column] = np.frombuffer(memory[start + first : start + end], _DTYPES[facts["dtype"]])
            columns[column] = columns[column].reshape(facts["shape"])
        if (end := start + sum([column.nbytes for column in columns.values()])) != len(memory):
            raise ValueError(f"it has {len(memory):,} bytes; expected {end:,}")
        if _digest_of(metadata["header"], columns) != head.digest:
            raise ValueError(f"its digest differs from {head.digest!r:.80}: it is damaged, or was edited")
        rows, header = RowTable(columns), json.loads(metadata["header"])
        if whole_check:
            _check(head, rows)
        options = {option: header[option] for option in ("variants", "weights", "loss_weight")}
        return Manifest(name, head.role, head.repeats, header["common"], rows, **options)


def _check(head: ManifestHead, rows: RowTable) -> None:
    """Raise ValueError for a manifest that matches its digest but that no writer here makes."""
    rows.check()
    if head.num_samples != len(rows):
        raise ValueError(f"its header says {head.num_samples:,} samples, but it has {len(rows):,}")
    if head.common.text_encoding is not None and not rows.columns["caption/keys"].any(1).all():
        raise ValueError("a caption has no key, but its header has a text encoding")
    if len(odd := np.flatnonzero(np.diff(rows.columns["caption/offsets"]) % head.variants)):
        sample_id = rows.sample_ids[int(odd[0])]
        raise ValueError(f"the number of captions of sample {sample_id!r:.80} is not a multiple of {head.variants}")
    lacking = np.setdiff1d(rows.usable(), rows.usable_with("image", rows.columns["image/role"] == 0))
    if head.role != "prompts" and len(lacking):
        sample_id = rows.sample_ids[int(lacking[0])]
        raise ValueError(f"sample {sample_id!r:.80} has no image, and no refusal")


@contextmanager
def _refused(source: str | Path) -> Iterator[None]:
    """Turn errors of an invalid manifest into a DatasetError that names the source and the next step."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        if isinstance(error, ValidationError):
            what = first_fault(error)[2]
        raise DatasetError(source, f"is not a valid manifest: {what}; {REMEDY}") from error
