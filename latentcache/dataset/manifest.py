"""The named list of a dataset's samples: their keys, their geometry, their captions.

On disk a manifest is `<name>.jsonl`: a header line, then one line per sample. It is replaced as a whole, and the header
has a digest of everything else: a damaged manifest could give wrong samples silently.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args

from blake3 import blake3

from latentcache.config import PROMPTS_PREFIX
from latentcache.errors import DatasetError
from latentcache.identity import canonical_json, digest
from latentcache.provenance import now
from latentcache.types import Geometry, Refusal
from latentcache.utils.durable_files import typed_errors, write_sealed
from latentcache.utils.host_memory import collector_paused

FORMAT = 2
UNFINISHED = ".unfinished"
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
        return cls(
            sample_id=value["sample_id"],
            path=value["path"],
            source=value["source"],
            images=tuple(ImageRef(ref["key"], Geometry.from_json(ref), _trust(ref)) for ref in value["images"]),
            captions=tuple(CaptionRef(ref["text"], ref["key"], _trust(ref)) for ref in value["captions"]),
            refusal=None if value["refusal"] is None else Refusal(**value["refusal"]),
        )


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
    role: Literal["train", "validation", "prompts"]
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
        """The names of all manifests, sorted."""
        return sorted(file.stem for file in self.path.glob("*.jsonl"))

    def read(self, name: str) -> Manifest | None:
        """The manifest, or None if there is none. Raises DatasetError when the file is not a manifest."""
        file = self.path / f"{name}.jsonl"
        try:
            lines = file.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DatasetError(file, f"cannot be read: {error.strerror}") from error
        try:
            header = json.loads(lines[0])
            if header["format"] != FORMAT:
                raise DatasetError(
                    file,
                    f"manifest format {header['format']!r}, but this version reads {FORMAT}; run precache again to "
                    "write it",
                )
            if header.pop("digest") != _digest(header, lines[1:]):
                raise ValueError("its digest differs")
            with collector_paused():
                rows = [Row.from_json(json.loads(line)) for line in lines[1:]]
            return Manifest(
                header["name"], header["role"], header["repeats"], header["common"], {r.sample_id: r for r in rows}
            )
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise DatasetError(file, f"is not a whole manifest ({error}); run precache again to write it") from error

    def write(self, manifest: Manifest) -> None:
        """Replace the manifest's file. ReadOnlyError, StorageFullError or StoreError when that cannot be done."""
        header = {
            "format": FORMAT,
            "name": manifest.name,
            "role": manifest.role,
            "repeats": manifest.repeats,
            "num_samples": len(manifest.rows),
            "common": manifest.common,
        }
        # ASCII, so that captions with odd line ends stay one line each.
        lines = [json.dumps(row.to_json()).encode() + b"\n" for row in manifest.rows.values()]
        first = json.dumps(header | {"digest": _digest(header, lines)}).encode() + b"\n"
        self._write(f"{manifest.name}.jsonl", [first, *lines])
        with typed_errors(self.path, 0):
            (self.path / f"{manifest.name}{UNFINISHED}").unlink(missing_ok=True)

    def begin(self, name: str) -> None:
        """Note that a run began to work on the manifest. `write` ends it."""
        self._write(f"{name}{UNFINISHED}", [now().encode()])

    def unfinished(self) -> dict[str, str]:
        """The names of runs that began and did not finish, with the time of their start."""
        return {file.stem: file.read_text() for file in sorted(self.path.glob(f"*{UNFINISHED}"))}

    def _write(self, name: str, parts: list[bytes]) -> None:
        with typed_errors(self.path, 0):
            self.path.mkdir(parents=True, exist_ok=True)
        write_sealed(self.path / name, b"".join(parts))


Manifests = ManifestMemory | ManifestFolder
"""Where manifests are stored: memory, or a folder."""


def _digest(header: Mapping[str, Any], lines: Iterable[bytes]) -> str:
    """BLAKE3 of the header without its digest, and of the samples' lines."""
    hasher = blake3(canonical_json(header))
    for line in lines:
        hasher.update(line)
    return hasher.hexdigest()
