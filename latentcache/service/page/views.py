"""What the overview and the gallery show (counts, samples that match, what is wrong), and how the page words it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from itertools import compress, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qsl, quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from typing_extensions import override

import latentcache
from latentcache.config import PROMPTS_PREFIX
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import NAME_PATTERN, ManifestFolder
from latentcache.dataset.row_table import Row
from latentcache.errors import ConfigError, LatentCacheError, RequestRefused, SampleError
from latentcache.service.manifests import served_names
from latentcache.store.cut_captions import CutCaptions
from latentcache.store.disk import DiskStore
from latentcache.utils.json_document import to_bytes
from latentcache.utils.wording import counted, size

STATIC = Path(__file__).parent / "static"
TEMPLATES = Path(__file__).parent / "templates"
MAX_FIELDS = 20
"""Of a query."""


def url(path: str, **query: object) -> str:
    """A path of this service with a query. Texts may hold lone surrogates, as file names do: `query_of` reads them."""
    fields = urlencode(query, quote_via=quote, encoding="utf-8", errors="surrogatepass")
    return f"{path}?{fields}" if fields else path


def query_of(data: bytes) -> dict[str, str]:
    """The fields of a query that `url`, or a browser's form, wrote. ConfigError for one that is not UTF-8."""
    try:
        text = data.decode("ascii")
        pairs = parse_qsl(text, keep_blank_values=True, errors="surrogatepass", max_num_fields=MAX_FIELDS)
    except ValueError as error:
        raise ConfigError(f"the address has a query that is not UTF-8, or too long: {error}") from error
    return dict(pairs)


def count(number: int) -> str:
    """`1,234`."""
    return f"{number:,}"


def time(text: str) -> str:
    """A time in ISO 8601 as `2026-11-05 14:03 UTC`; any other text as it is."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    return moment.astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M UTC") if moment.tzinfo else text


def static(name: str) -> str:
    """The address of a static file: another one with each version, so that browsers may keep it."""
    return f"/static/{name}?v={latentcache.__version__}"


@cache
def environment() -> Environment:
    """The templates. Everything that they print is escaped, and a name that is not given is an error."""
    found = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        auto_reload=False,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "count": count,
        "counted": counted,
        "bytes": size,
        "time": time,
        "json": lambda value: to_bytes(value).decode(),
    }
    found.globals |= {"url": url, "static": static}
    for name in found.list_templates():
        found.get_template(name)  # compiled now, and not for the first view
    return found


def rendered(template: str, **values: Any) -> bytes:
    """The template as UTF-8. A lone surrogate, which has none, is shown as its escape."""
    return environment().get_template(template).render(values).encode("utf-8", "backslashreplace")


PAGE_SIZE = 24
"""Samples that are loaded together while scrolling."""
MAX_SEARCH_CHARS = 500
_CHUNK = 1024

State = Literal["refused", "damaged", "missing", "unverified"]
STATES: Mapping[str, str] = {
    "refused": "cannot be used, for a stated reason",
    "damaged": "an entry's bytes are not those that were stored",
    "missing": "an entry is not there",
    "unverified": "imported, and not shown to be what encoding gives",
}
"""What may be wrong with a sample, the worst first, in words."""
NO_CAPTION, CUT_CAPTION = "no caption", "caption cut off"
FILTERS: Mapping[str, str] = {
    **STATES,
    NO_CAPTION: "without a caption, or with an empty one",
    CUT_CAPTION: "a caption is longer than the text encoders read",
}
"""What samples can be filtered by."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Which samples are shown; an empty text lets all pass.

    Each word of `search` must occur in the sample_id or a caption, in upper or lower case.
    """

    search: str = ""
    dataset: str = ""
    state: str = ""

    def __post_init__(self) -> None:
        if len(self.search) > MAX_SEARCH_CHARS:
            raise ConfigError(f"a search of {len(self.search):,} characters; at most {MAX_SEARCH_CHARS} are allowed")
        if self.state and self.state not in FILTERS:
            raise ConfigError(f"state {self.state!r:.40}: one of {', '.join(FILTERS)} is needed")

    @property
    def is_empty(self) -> bool:
        """Whether all samples of the dataset, or of all datasets, are shown."""
        return not (self.search.split() or self.state)

    def to_query(self) -> dict[str, str]:
        """The filters that are set, by name."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name))}


class Tile(NamedTuple):
    """A sample in the gallery, and what is wrong with it."""

    dataset: str
    row: Row
    state: State | None


@dataclass(frozen=True, slots=True)
class GalleryPage:
    """Tiles, and the number with which the next page starts; None at the end.

    `num_found` counts all samples that match; None on later pages of a search.
    """

    tiles: tuple[Tile, ...]
    next_start: int | None
    num_found: int | None


class Gallery:
    """Finds samples. Threads may share it. Numbers of samples count through all datasets that are shown."""

    def __init__(self, store: DiskStore, folder: ManifestFolder):
        self.store, self.folder = store, folder
        self.cut_captions = CutCaptions(store)

    def dataset_names(self) -> list[str]:
        """Names of the manifests that hold samples, not prompts."""
        return [name for name in served_names(self.folder) if not name.startswith(PROMPTS_PREFIX)]

    def manifest(self, name: str) -> Manifest:
        """The whole manifest: a fraction of a second for a million samples.

        RequestRefused if there is none of this name; DatasetError, StoreError.
        """
        # The name comes from a request: only what cannot lead out of the folder may become a path.
        manifest = self.folder.read(name) if re.fullmatch(NAME_PATTERN, name) else None
        if manifest is None:
            there = ", ".join(self.dataset_names()) or "none yet: run latentcache precache"
            raise RequestRefused(f"no dataset {name!r:.100}; there are: {there}", status=404)
        return manifest

    def overview(self) -> dict[str, Any]:
        """What the index, the manifests and the records count, by the names of the overview's template.

        A damaged manifest does not hide the others: of each dataset there is the `manifest`, or the `problem` with it.
        `num_cut` counts samples with a caption that the text encoders cut off.
        """
        datasets = list[dict[str, Any]]()
        for name in self.dataset_names():
            try:
                datasets.append({"name": name, "manifest": self.manifest(name)})
            except LatentCacheError as error:
                datasets.append({"name": name, "manifest": None, "problem": str(error)})
        tables = [found["manifest"].rows for found in datasets if found["manifest"] is not None]
        cut = self.cut_captions.flags_of
        return {
            "stats": self.store.stats(),
            "datasets": datasets,
            "num_samples": sum(map(len, tables)),
            "num_refused": sum(len(table.refusals) for table in tables),
            "num_uncaptioned": sum(len(table.without_caption()) for table in tables),
            "num_cut": sum(len(table.usable_with("caption", cut(table.columns["caption/keys"]))) for table in tables),
        }

    def page(self, filters: Filters, start: int = 0) -> GalleryPage:
        """PAGE_SIZE samples that match, from number `start` on. ConfigError, DatasetError, StoreError."""
        names = [filters.dataset] if filters.dataset else self.dataset_names()
        manifests = [self.manifest(name) for name in names]
        found = self._found(manifests, filters, start)
        shown = list(islice(found, PAGE_SIZE + 1))
        num_found = None
        if filters.is_empty:
            num_found = sum(len(manifest.rows) for manifest in manifests)
        elif not start:  # later pages need not look at the rest
            num_found = len(shown) + sum(1 for _ in found)
        next_start = shown.pop()[0] if len(shown) > PAGE_SIZE else None
        states = self.states([row for _, _, row in shown])
        tiles = [Tile(name, row, state) for (_, name, row), state in zip(shown, states, strict=True)]
        return GalleryPage(tuple(tiles), next_start, num_found)

    def _found(self, manifests: Sequence[Manifest], filters: Filters, start: int) -> Iterator[tuple[int, str, Row]]:
        """Number, dataset and row of each sample that matches, from number `start` on."""
        words, first = filters.search.casefold().split(), 0
        size = 1 if filters.is_empty else _CHUNK  # no row is parsed that is not shown
        for manifest in manifests:
            for begin in range(max(0, start - first), len(manifest.rows), size):
                rows = map(manifest.rows.row, range(begin, min(begin + size, len(manifest.rows))))
                chunk = [
                    (number, manifest.name, row)
                    for number, row in enumerate(rows, first + begin)
                    if _matches(row, filters.state, words)
                ]
                if filters.state in ("damaged", "missing"):
                    lacking = self._lacking([row for _, _, row in chunk])
                    chunk = [found for found, state in zip(chunk, lacking, strict=True) if state == filters.state]
                if filters.state == CUT_CAPTION:
                    keys = [text.key for _, _, row in chunk for text in row.captions if text.key]
                    cut = set(compress(keys, self.cut_captions.flags(keys)))
                    chunk = [found for found in chunk if any(text.key in cut for text in found[2].captions)]
                yield from chunk
            first += len(manifest.rows)

    def states(self, rows: Sequence[Row]) -> list[State | None]:
        """What is wrong with each sample, the worst first; None if nothing is."""
        return [
            "refused" if row.refusal is not None else lacking or (None if row.is_verified else "unverified")
            for row, lacking in zip(rows, self._lacking(rows), strict=True)
        ]

    def _lacking(self, rows: Sequence[Row]) -> list[State | None]:
        """For each row `damaged` or `missing` if it was not refused and lacks an entry, else None."""
        usable = [row for row in rows if row.refusal is None]
        present = self.store.find(dict.fromkeys(key for row in usable for key in row.keys()))
        whole = [row.refusal is not None or present.issuperset(row.keys()) for row in rows]
        if all(whole):
            return [None] * len(rows)
        damaged = self.store.damaged().keys()
        return [
            None if is_whole else "missing" if damaged.isdisjoint(row.keys()) else "damaged"
            for row, is_whole in zip(rows, whole, strict=True)
        ]

    def sample(self, dataset: str, sample_id: str) -> tuple[Row, Row | None, Row | None]:
        """One sample, and those before and after it. RequestRefused for an unknown dataset, SampleError."""
        rows = self.manifest(dataset).rows
        number = rows.number(sample_id)
        if number < 0:
            raise SampleError(sample_id, f"is not in dataset {dataset}", "look for it in the gallery")
        before = rows.row(number - 1) if number else None
        return rows.row(number), before, rows.row(number + 1) if number + 1 < len(rows) else None


class ReadableManifests(ManifestFolder):
    """The manifests of a folder that can be read. `problems` says why others cannot."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.problems: list[str] = []

    @override
    def read(self, name: str) -> Manifest | None:
        try:
            return super().read(name)
        except LatentCacheError as error:
            self.problems.append(str(error))
            return None


def _matches(row: Row, state: str, words: Sequence[str]) -> bool:
    """Whether a row has all words, and is in the state as far as the manifest says it."""
    if state and (row.refusal is not None) != (state == "refused"):
        return False
    if state == "unverified" and row.is_verified:
        return False
    if state == NO_CAPTION and any(caption.text for caption in row.captions):
        return False
    if not words:
        return True
    text = "\n".join([row.sample_id, *(caption.text for caption in row.captions)]).casefold()
    return all(word in text for word in words)
