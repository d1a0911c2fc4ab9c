"""The named list of a dataset's samples: their keys, their geometry, their captions.

On disk a manifest is `<name>.jsonl`: a header line, then one line per sample. It is replaced as a whole, and the header
has a digest of everything else: a damaged manifest could give wrong samples silently.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, Protocol, get_args

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from latentcache.config import MAX_REPEATS, PROMPTS_PREFIX
from latentcache.errors import DatasetError, StoreError, UnsafeStoreError
from latentcache.identity import canonical_json, digest, is_key
from latentcache.provenance import now
from latentcache.types import Geometry, Refusal
from latentcache.utils.durable_files import (
    make_folder,
    read_regular,
    regular_file,
    typed_errors,
    unreadable,
    write_sealed,
)
from latentcache.utils.host_memory import collector_paused
from latentcache.utils.json_document import first_fault
from latentcache.utils.locks import locked

FORMAT = 2
UNFINISHED = ".unfinished"
LOCK = ".lock"
"""A file next to the manifests, which is locked while one is replaced."""
MAX_BYTES = 1 << 36
"""Of a manifest's file: one of a hundred million samples has about as many. It is read line by line."""
_MAX_LINE_BYTES = 1 << 24
_MAX_NOTE_BYTES = 100
REMEDY = "`latentcache precache CONFIG`, or the import that made it, writes it again"
Role = Literal["train", "validation", "prompts"]
Trust = Literal["verified", "unverified"]
"""`unverified`: imported, and not shown to equal what encoding gives. Everything else is `verified`."""


@dataclass(frozen=True, slots=True)
class ImageRef:
    """One image entry of a sample."""

    key: str
    geometry: Geometry
    trust: Trust = "verified"


@dataclass(frozen=True, slots=True)
class CaptionRef:
    """One text entry of a sample."""

    text: str
    key: str
    trust: Trust = "verified"


@dataclass(frozen=True, slots=True)
class Row:
    """One sample. A refused sample has a refusal, and keeps what was known before it was refused.

    `images` is the image and, if the dataset flips, its mirrored twin. `source` is the digest of the image's bytes.
    """

    sample_id: str
    path: str
    source: str | None
    images: tuple[ImageRef, ...]
    captions: tuple[CaptionRef, ...]
    refusal: Refusal | None = None

    def keys(self) -> Iterator[str]:
        """The keys of its images, then of its captions."""
        yield from (ref.key for ref in self.images)
        yield from (ref.key for ref in self.captions)

    @property
    def is_verified(self) -> bool:
        """Whether none of its entries was imported and left unverified."""
        # No Python function runs for a reference: each sample of a batch is asked.
        return "unverified" not in map(attrgetter("trust"), (*self.images, *self.captions))

    def to_json(self) -> dict[str, Any]:
        """The row as a line of the manifest."""
        return {
            "sample_id": self.sample_id,
            "path": self.path,
            "source": self.source,
            "images": [{"key": ref.key, **ref.geometry.to_json(), **_trust_json(ref)} for ref in self.images],
            "captions": [{"key": ref.key, "text": ref.text, **_trust_json(ref)} for ref in self.captions],
            "refusal": None if self.refusal is None else self.refusal.to_json(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Row:
        """The row of a line. Raises KeyError, TypeError or ValueError for what is no row."""
        refusal = value["refusal"]
        return cls(
            sample_id=_text(value, "sample_id"),
            path=_text(value, "path"),
            source=None if value["source"] is None else _text(value, "source"),
            images=tuple([ImageRef(_key(ref), Geometry.from_json(ref), _trust(ref)) for ref in value["images"]]),
            captions=tuple([CaptionRef(_text(ref, "text"), _key(ref), _trust(ref)) for ref in value["captions"]]),
            refusal=None if refusal is None else Refusal(**{name: _text(refusal, name) for name in refusal}),
        )


def _text(value: Mapping[str, Any], name: str) -> str:
    text = value[name]
    if type(text) is not str:
        raise TypeError(f"{name} is {text!r:.80}, where a text is needed")
    return text


def _key(ref: Mapping[str, Any]) -> str:
    key = ref["key"]
    if not is_key(key):
        raise ValueError(f"key is {key!r:.80}, where 64 hexadecimal digits are needed")
    return str(key)


def _trust_json(ref: ImageRef | CaptionRef) -> dict[str, str]:
    """Nothing for a verified entry, so that manifests stay small."""
    return {} if ref.trust == "verified" else {"trust": ref.trust}


def _trust(ref: Mapping[str, Any]) -> Trust:
    trust: Trust = ref.get("trust", "verified")
    if trust not in get_args(Trust):
        raise ValueError(f"trust is {trust!r}, but one of {', '.join(get_args(Trust))} is needed")
    return trust


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
        return {key for row in self.rows.values() for key in row.keys()}

    @property
    def imported_from(self) -> str | None:
        """The format of the foreign cache that it was imported from; None for a manifest of precache."""
        imported = self.common.get("imported")
        return None if imported is None else imported["format"]


class _HeaderPart(BaseModel):
    """Values of other types are refused, not converted; what is not listed here may be anything."""

    model_config = ConfigDict(strict=True, extra="allow")


_MAX_FACTOR = 1e9


class _ImageEncoding(_HeaderPart):
    scaling_factor: Annotated[float, Field(gt=0, le=_MAX_FACTOR)]
    shift_factor: Annotated[float, Field(ge=-_MAX_FACTOR, le=_MAX_FACTOR)] | None


class _Imported(_HeaderPart):
    format: str


class _Common(_HeaderPart):
    identity_schema: int = Field(alias="schema")
    salt: str
    text_encoding: dict[str, Any]
    image_encoding: _ImageEncoding | None = None
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


class ManifestMemory:
    """Manifests of this process, for the CPU store."""

    def __init__(self) -> None:
        self._manifests: dict[str, Manifest] = {}

    def names(self) -> list[str]:
        """The names of all manifests, sorted."""
        return sorted(self._manifests)

    def read(self, name: str) -> Manifest | None:
        """The manifest, or None if there is none."""
        return self._manifests.get(name)

    def write(self, manifest: Manifest) -> None:
        """Replace the manifest as a whole."""
        self._manifests[manifest.name] = manifest

    def update(self, make: Callable[[], Manifest | None]) -> None:
        """Write the manifest that `make` returns, if any."""
        if (manifest := make()) is not None:
            self.write(manifest)

    def begin(self, name: str) -> None:
        """Note nothing: no unfinished run outlives this process."""

    def unfinished(self) -> dict[str, str]:
        """Nothing: see `begin`."""
        return {}


class ManifestFolder:
    """Manifests as `<name>.jsonl` files in a folder."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def names(self) -> list[str]:
        """The names of all manifests, sorted. UnsafeStoreError if something else than a folder lies there."""
        return self._names(".jsonl")

    def _names(self, suffix: str) -> list[str]:
        try:
            if self.path.is_symlink():
                raise NotADirectoryError(errno.ENOTDIR, "it is a link")
            return sorted(name.removesuffix(suffix) for name in os.listdir(self.path) if name.endswith(suffix))
        except FileNotFoundError:
            return []
        except NotADirectoryError as error:
            raise UnsafeStoreError(self.path, f"is no folder; remove it, then {REMEDY}") from error
        except OSError as error:
            raise unreadable(self.path, error) from error

    def read(self, name: str, each: Callable[[Row], None] | None = None) -> Manifest | None:
        """The manifest, or None if there is none; `each` as in `read_manifest`. DatasetError names file and line.

        StoreError: it cannot be read now.
        """
        file = self.path / f"{name}.jsonl"
        try:
            with regular_file(file, MAX_BYTES, REMEDY) as opened:
                return read_manifest(opened, name, file, each)
        except FileNotFoundError:
            return None
        except UnsafeStoreError as error:
            raise DatasetError(file, error.detail) from error

    def write(self, manifest: Manifest) -> None:
        """Replace the manifest's file. ReadOnlyError, StorageFullError or StoreError when that cannot be done."""
        self.update(lambda: manifest)

    def update(self, make: Callable[[], Manifest | None]) -> None:
        """Write the manifest that `make` returns, if any. What it reads is not replaced meanwhile. As `write`."""
        with self.lock():
            if (manifest := make()) is None:
                return
            self._write(f"{manifest.name}.jsonl", manifest_lines(manifest))
            with typed_errors(self.path, 0):
                (self.path / f"{manifest.name}{UNFINISHED}").unlink(missing_ok=True)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold what each process and thread waits for before it compares and replaces a manifest of this folder."""
        self._make()
        with locked(self.path / LOCK, "replacing a manifest", shared=False, wait=True):
            yield

    def begin(self, name: str) -> None:
        """Note that a run began to work on the manifest. `write` ends it."""
        self._write(f"{name}{UNFINISHED}", [now().encode()])

    def unfinished(self) -> dict[str, str]:
        """The names of runs that began and did not finish, with the time of their start.

        DatasetError for a note that is none.
        """
        return {name: self._begun(self.path / f"{name}{UNFINISHED}") for name in self._names(UNFINISHED)}

    def _begun(self, file: Path) -> str:
        remedy = "run precache again to finish, or `latentcache prune --unfinished`"
        try:
            text = read_regular(file, _MAX_NOTE_BYTES, remedy).decode("ascii")
            datetime.fromisoformat(text)
            return text
        except FileNotFoundError:
            return "and finished meanwhile"
        except UnsafeStoreError as error:
            raise DatasetError(file, error.detail) from error
        except ValueError as error:
            raise DatasetError(file, f"does not say when a run began ({error}); {remedy}") from error

    def _write(self, name: str, parts: list[bytes]) -> None:
        self._make()
        write_sealed(self.path / name, b"".join(parts))

    def _make(self) -> None:
        with typed_errors(self.path, 0):
            make_folder(self.path)
            if self.path.is_symlink():
                raise UnsafeStoreError(self.path, f"is a link; remove it, then {REMEDY}")


class Manifests(Protocol):
    """Where manifests are stored: memory, a folder, or a service."""

    def names(self) -> list[str]:
        """The names of all manifests, sorted."""

    def read(self, name: str) -> Manifest | None:
        """The manifest, or None if there is none. DatasetError for one that is damaged."""

    def write(self, manifest: Manifest) -> None:
        """Replace the manifest as a whole, and end what `begin` noted."""

    def update(self, make: Callable[[], Manifest | None]) -> None:
        """Write the manifest that `make` returns, if any. Others do not undo it, nor it theirs."""

    def begin(self, name: str) -> None:
        """Note that a run began to work on the manifest."""


def manifest_lines(manifest: Manifest) -> list[bytes]:
    """The lines of a manifest's file. StoreError for a sample whose line would be too long to be read again."""
    header = {
        "format": FORMAT,
        "name": manifest.name,
        "role": manifest.role,
        "repeats": manifest.repeats,
        "num_samples": len(manifest.rows),
        "common": manifest.common,
    }
    # ASCII, so that captions with odd line ends stay one line each.
    lines = [_line(manifest.name, row) for row in manifest.rows.values()]
    hasher = blake3(canonical_json(header))
    for line in lines:
        hasher.update(line)
    return [json.dumps(header | {"digest": hasher.hexdigest()}).encode() + b"\n", *lines]


def _line(name: str, row: Row) -> bytes:
    line = json.dumps(row.to_json()).encode() + b"\n"
    if len(line) > _MAX_LINE_BYTES:
        raise StoreError(
            f"manifest {name}: sample {row.sample_id!r:.80} takes {len(line):,} bytes, where {_MAX_LINE_BYTES:,} are "
            "allowed: shorten its captions or its name"
        )
    return line


def read_manifest(
    opened: BinaryIO, name: str, source: str | Path, each: Callable[[Row], None] | None = None
) -> Manifest:
    """The manifest `name` in what `manifest_lines` wrote. DatasetError names the `source` and the wrong line.

    With `each` the rows go there, one by one before the digest is compared, and the manifest has none: a million rows
    take more than a gigabyte.
    """
    number = 1
    try:
        with collector_paused():
            rows: dict[str, Row] = {}
            seen: set[int] = set()
            readline = partial(opened.readline, _MAX_LINE_BYTES)
            header = json.loads(_whole(readline()))
            stored = header.pop("digest", None)
            if header["format"] != FORMAT:
                raise ValueError(f"manifest format {header['format']!r:.80}, but this version reads {FORMAT}")
            checked = _Header.model_validate(header)
            hasher = blake3(canonical_json(header))
            for number, line in enumerate(iter(readline, b""), 2):  # noqa: B007 - the errors below name it
                hasher.update(line)
                row = Row.from_json(json.loads(_whole(line)))
                if each is None:
                    rows[row.sample_id] = row
                else:
                    each(row)
                    seen.add(hash(row.sample_id))
        num_distinct = len(rows) if each is None else len(seen)
        num_rows, number = number - 1, 1
        if stored != hasher.hexdigest():
            raise ValueError(f"its digest differs: {stored!r:.80}. It is damaged, or was edited")
        if checked.name != name or not checked.num_samples == num_distinct == num_rows:
            facts = f"{checked.num_samples:,} samples of {checked.name!r:.80}"
            raise ValueError(f"it says that there are {facts}, but here are {num_distinct:,} of {name!r}")
        return Manifest(name, checked.role, checked.repeats, header["common"], rows)
    except ValidationError as error:
        raise DatasetError(source, f"is no manifest: line 1: {first_fault(error)[2]}; {REMEDY}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise DatasetError(source, f"is no manifest: line {number}: {what}; {REMEDY}") from error


def keys_in_use(manifests: ManifestFolder, *, unfinished: bool = False) -> set[str]:
    """The keys of all manifests: what `prune` must keep. StoreError where it cannot be known what is in use.

    That is so without any manifest, and while a run is not finished, unless `unfinished` gives up what it encoded.
    """
    path, names = manifests.path.parent, manifests.names()
    if not names:
        # An unfinished first run has entries but no manifest yet: everything would go.
        raise StoreError(
            f"{path}: has no manifest, so prune would remove every entry; run `latentcache precache CONFIG` first"
        )
    if not unfinished and (runs := manifests.unfinished()):
        begun = ", ".join(f"{name} (begun {time})" for name, time in runs.items())
        raise StoreError(
            f"{path}: not finished: {begun}. What was encoded for them is in no manifest yet, and would be removed: "
            "run precache again to finish, or give --unfinished to remove it"
        )
    return {key for name in names if (manifest := manifests.read(name)) for key in manifest.keys()}


def _whole(line: bytes) -> bytes:
    if not line.endswith(b"\n"):
        raise ValueError(f"it has no end, or more than {_MAX_LINE_BYTES:,} bytes")
    return line
