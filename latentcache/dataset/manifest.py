"""The named list of a dataset's samples: their keys, their geometry, their captions.

On disk a manifest is `<name>.jsonl`: a header line, then one line per sample. It is replaced as a whole, and the header
has a digest of everything else: a damaged manifest could give wrong samples silently.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, Protocol, TypeVar

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from latentcache.config import MAX_REPEATS, PROMPTS_PREFIX
from latentcache.dataset.manifest_row import Row, RowLine, parse_line, parse_lines
from latentcache.dataset.row_checker import RowChecker
from latentcache.dataset.row_table import RowTable, RowTableBuilder
from latentcache.errors import DatasetError, StoreError
from latentcache.families import DEFAULT, family_named
from latentcache.families.base import Family
from latentcache.families.scaling import Rule
from latentcache.identity import canonical_json, digest
from latentcache.utils.garbage import collector_paused
from latentcache.utils.json_document import first_fault

FORMAT, FORMAT_OF_MORE = 2, 3
"""FORMAT_OF_MORE has a family, further parts or clips: a program that knows FORMAT alone would leave them out, and
remove their entries."""
_MORE = frozenset({"family", "scaling", "parts", "frames"})
"""What `common` has of a manifest with these."""
_MAX_LINE_BYTES = 1 << 24
_BLOCK_BYTES = 1 << 20
"""Of lines that are read together."""
REMEDY = "`latentcache precache CONFIG`, or the import that made it, writes it again"
Role = Literal["train", "validation", "prompts"]


@dataclass(frozen=True, slots=True)
class Manifest:
    """All samples of one dataset, by sample_id, and what their keys have in common.

    `common` is the part of the identities that all samples share (salt, schema, policy, image and text encoding), as
    JSON: a later plan finds there why a key changed.
    """

    name: str
    role: Role
    repeats: int
    common: Mapping[str, Any]
    rows: Mapping[str, Row] = field(default_factory=dict)

    def keys(self) -> set[str]:
        """The keys of all its samples."""
        if isinstance(self.rows, RowTable):
            return set(self.rows.entry_keys())
        return {key for row in self.rows.values() for key in row.keys()}

    @property
    def family(self) -> Family:
        """The family of the model that it was encoded with. ModelError for one that this version does not know."""
        return family_named(self.common.get("family", DEFAULT))

    @property
    def imported_from(self) -> str | None:
        """The format of the foreign cache that it was imported from; None for a manifest of precache."""
        imported = self.common.get("imported")
        return None if imported is None else imported["format"]


class _HeaderPart(BaseModel):
    """Values of other types are refused, not converted; what is not listed here may be anything."""

    model_config = ConfigDict(strict=True, extra="allow")


_MAX_FACTOR = 1e9


_Factor = Annotated[float, Field(gt=0, le=_MAX_FACTOR)]
_Shift = Annotated[float, Field(ge=-_MAX_FACTOR, le=_MAX_FACTOR)]


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
    text_encoding: dict[str, Any]
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


def prompts_name(common: Mapping[str, Any]) -> str:
    """The name of the manifest of prompts for datasets with this `common`.

    There is one for each text encoding: a prompt of another model's encoders must never be returned.
    """
    parts = {name: common[name] for name in ("schema", "salt", "text_encoding")}
    return f"{PROMPTS_PREFIX}-{digest(canonical_json(parts))[:12]}"


def merged_rows(theirs: Mapping[str, Row], ours: Mapping[str, Row]) -> Mapping[str, Row]:
    """The samples of both; of a sample in both ours, unless we refused what they encoded from the same image."""

    def chosen() -> Iterator[Row]:
        for sample_id, before in theirs.items():
            row = ours.get(sample_id)
            if row is None or (row.refusal and not before.refusal and row.source == before.source):
                row = before
            yield row
        yield from (row for sample_id, row in ours.items() if sample_id not in theirs)

    return RowTable.from_rows(chosen())


def manifest_lines(manifest: Manifest) -> list[bytes]:
    """The lines of a manifest's file. StoreError for a sample whose line would be too long to be read again."""
    hasher, lines = blake3(canonical_json(_header(manifest))), list(_lines_of(manifest))
    for line in lines:
        hasher.update(line)
    return [_header_line(manifest, hasher.hexdigest()), *lines]


def write_manifest(manifest: Manifest, file: BinaryIO) -> None:
    """Write what `manifest_lines` returns to an empty file, line by line: those of a million samples are large."""
    hasher = blake3(canonical_json(_header(manifest)))
    file.write(_header_line(manifest, hasher.hexdigest()))  # the digest is known at the end: this keeps its place
    for line in _lines_of(manifest):
        hasher.update(line)
        file.write(line)
    file.seek(0)
    file.write(_header_line(manifest, hasher.hexdigest()))


def _header(manifest: Manifest) -> dict[str, Any]:
    return {
        "format": FORMAT_OF_MORE if isinstance(manifest.common, Mapping) and _MORE & manifest.common.keys() else FORMAT,
        "name": manifest.name,
        "role": manifest.role,
        "repeats": manifest.repeats,
        "num_samples": len(manifest.rows),
        "common": manifest.common,
    }


def _header_line(manifest: Manifest, digest_of_rest: str) -> bytes:
    return json.dumps(_header(manifest) | {"digest": digest_of_rest}).encode() + b"\n"


def _lines_of(manifest: Manifest) -> Iterator[bytes]:
    return (_line(manifest.name, row) for row in manifest.rows.values())


def _line(name: str, row: Row) -> bytes:
    # ASCII, so that captions with odd line ends stay one line each.
    line = json.dumps(row.to_json()).encode() + b"\n"
    if len(line) > _MAX_LINE_BYTES:
        raise StoreError(
            f"manifest {name}: sample {row.sample_id!r:.80} takes {len(line):,} bytes, where {_MAX_LINE_BYTES:,} are "
            "allowed: shorten its captions or its name"
        )
    return line


def read_manifest(opened: BinaryIO, name: str, source: str | Path) -> Manifest:
    """The manifest `name` in what `manifest_lines` returned. DatasetError names the `source` and the wrong line."""
    header, rows = _read(opened, name, source, RowTableBuilder())
    return Manifest(name, header["role"], header["repeats"], header["common"], rows)


def check_manifest(opened: BinaryIO, name: str, source: str | Path) -> None:
    """The errors of `read_manifest`, in little memory; and of a sample that has neither an image nor a refusal."""
    header, rows = _read(opened, name, source, RowChecker())
    if header["role"] != "prompts" and rows.without_image is not None:
        what = "the sample has no image, and no refusal that says why"
        raise DatasetError(source, f"is no manifest: line {rows.without_image + 2}: {what}; {REMEDY}")


class _Rows(Protocol):
    def __len__(self) -> int: ...

    def repeated(self) -> int | None: ...


_Found = TypeVar("_Found", bound=_Rows, covariant=True)


class _Builder(Protocol[_Found]):
    def __len__(self) -> int: ...

    def add_lines(self, lines: Sequence[RowLine]) -> None: ...

    def finish(self) -> _Found: ...


def _read(opened: BinaryIO, name: str, source: str | Path, builder: _Builder[_Found]) -> tuple[dict[str, Any], _Found]:
    """The header, and what `builder` makes of the rows. DatasetError."""
    number = 1
    try:
        with collector_paused():
            header = json.loads(_whole(opened.readline(_MAX_LINE_BYTES)))
            stored = header.pop("digest", None)
            if header["format"] not in (FORMAT, FORMAT_OF_MORE):
                known = f"{FORMAT} and {FORMAT_OF_MORE}"
                raise ValueError(f"manifest format {header['format']!r:.80}, but this version reads {known}")
            checked = _Header.model_validate(header)
            hasher = blake3(canonical_json(header))
            number = 0  # of the line: it follows from the rows until now
            for block in _blocks_in(opened):
                hasher.update(block)
                _add_block(builder, block)
        rows, number = builder.finish(), 1
        if stored != hasher.hexdigest():
            raise ValueError(f"its digest differs: {stored!r:.80}. It is damaged, or was edited")
        if checked.name != name or checked.num_samples != len(rows):
            facts = f"{checked.num_samples:,} samples of {checked.name!r:.80}"
            raise ValueError(f"it says that there are {facts}, but here are {len(rows):,} of {name!r}")
        if (repeated := rows.repeated()) is not None:
            number = repeated + 2
            opened.seek(0)
            [line] = islice(opened, number - 1, number)
            raise ValueError(f"sample {parse_line(line).sample_id!r:.80} was listed before")
        return header, rows
    except ValidationError as error:
        raise DatasetError(source, f"is no manifest: line 1: {first_fault(error)[2]}; {REMEDY}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        at = number or len(builder) + 2
        raise DatasetError(source, f"is no manifest: line {at}: {what}; {REMEDY}") from error


def _blocks_in(opened: BinaryIO) -> Iterator[bytes]:
    """Whole lines, about as many bytes as a block has. ValueError for one without an end, or with too many bytes."""
    rest = b""
    while data := opened.read(_BLOCK_BYTES):
        end = data.find(b"\n")
        if len(rest) + (len(data) if end < 0 else end) >= _MAX_LINE_BYTES:
            break
        lines, newline, data = data.rpartition(b"\n")
        if newline:
            yield rest + lines + newline
            rest = b""
        rest += data
    _whole(rest or b"\n")


def _add_block(builder: _Builder[Any], block: bytes) -> None:
    """Add the rows of whole lines. ValueError: then the rows before the wrong line were added."""
    try:
        lines = parse_lines(block)
        if len(lines) == block.count(b"\n"):
            builder.add_lines(lines)
            return
    except (ValueError, RecursionError):
        pass  # some line is wrong, or unusual: see below which
    for line in block.split(b"\n")[:-1]:
        builder.add_lines([parse_line(line)])


def _whole(line: bytes) -> bytes:
    if not line.endswith(b"\n"):
        raise ValueError(f"it has no end, or more than {_MAX_LINE_BYTES:,} bytes")
    return line
