"""What the overview and the gallery show, and the templates that show it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timezone
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl, quote, urlencode

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from typing_extensions import override

import latentcache
from latentcache.config import PROMPTS_PREFIX
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import NAME_PATTERN, ManifestFolder
from latentcache.dataset.row_table import Row, RowTable
from latentcache.errors import ConfigError, LatentCacheError, RequestRefused, SampleError
from latentcache.service.manifests import served_names
from latentcache.store.cut_captions import CutCaptions
from latentcache.store.disk import DiskStore
from latentcache.utils.json_document import to_bytes
from latentcache.utils.wording import counted, size

STATIC = Path(__file__).parent / "static"
TEMPLATES = Path(__file__).parent / "templates"
_MAX_FIELDS = 20
"""Most fields that a query may have."""


def url(path: str, **query: object) -> str:
    """A path with a query. Values may hold lone surrogates, as file names do; `query_of` decodes them."""
    fields = urlencode(query, quote_via=quote, encoding="utf-8", errors="surrogatepass")
    return f"{path}?{fields}" if fields else path


def query_of(data: bytes) -> dict[str, str]:
    """The fields of a query that `url`, or a browser's form, wrote. ConfigError if it is not UTF-8, or too long."""
    try:
        text = data.decode("ascii")
        pairs = parse_qsl(text, keep_blank_values=True, errors="surrogatepass", max_num_fields=_MAX_FIELDS)
    except ValueError as error:
        raise ConfigError(f"the query in the address is too long, or not UTF-8: {error}") from error
    return dict(pairs)


def time(text: str) -> str:
    """An ISO 8601 time as `2026-11-05 14:03 UTC`; any other text unchanged."""
    try:
        moment = datetime.fromisoformat(text)
        return moment.astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M UTC") if moment.tzinfo else text
    except (ValueError, OverflowError):
        return text


def document(value: object) -> str:
    """A value as indented JSON."""
    try:
        return to_bytes(value).decode()
    except RecursionError:  # in a record that a client has uploaded
        return "nested too deeply to be shown"


def static(name: str) -> str:
    """The address of a static file. It differs between versions, so that browsers may cache the file."""
    return f"/static/{name}?v={latentcache.__version__}"


@cache
def environment() -> Environment:
    """The templates. They escape all that they print, and an undefined name is an error."""
    found = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        auto_reload=False,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "count": "{:,}".format,
        "counted": counted,
        "bytes": size,
        "time": time,
        "json": document,
    }
    found.globals |= {"url": url, "static": static}
    for name in found.list_templates():
        found.get_template(name)  # compile now, not on the first view
    return found


def rendered(template: str, **values: Any) -> bytes:
    """The template as UTF-8. Lone surrogates, which UTF-8 cannot encode, are shown as escapes."""
    return environment().get_template(template).render(values).encode("utf-8", "backslashreplace")


PAGE_SIZE = 24
"""Samples on a page of the gallery. Scrolling loads one page after the other."""
_MAX_SEARCH_CHARS = 500

State = Literal["refused", "damaged", "missing", "unverified"]
STATES: Mapping[str, str] = {
    "refused": "cannot be used for training",
    "damaged": "an entry's bytes have changed on disk",
    "missing": "an entry is not in the cache",
    "unverified": "imported; which model encoded it is not known",
}
"""What may be wrong with a sample, worst first, and how the page explains it."""
NO_CAPTION, CUT_CAPTION = "no caption", "caption cut off"
FILTERS: Mapping[str, str] = {
    **STATES,
    NO_CAPTION: "no caption, or an empty one",
    CUT_CAPTION: "a caption is longer than the text encoders can read",
}
"""The states that the gallery can be filtered by."""


def filters_of(query: Mapping[str, str]) -> dict[str, str]:
    """The filters that a query sets: `search`, `dataset` and `state`. ConfigError for a value that is not allowed.

    Each word of `search` must occur in the sample_id or in a caption, in upper or lower case.
    """
    filters = {name: query[name] for name in ("search", "dataset", "state") if query.get(name)}
    if (num_chars := len(filters.get("search", ""))) > _MAX_SEARCH_CHARS:
        raise ConfigError(f"the search has {num_chars:,} characters; at most {_MAX_SEARCH_CHARS} are allowed")
    if "state" in filters and filters["state"] not in FILTERS:
        raise ConfigError(f"there is no state {filters['state']!r:.40}; use one of {', '.join(FILTERS)}")
    return filters


class Gallery:
    """Finds the samples that the page shows. Thread-safe."""

    def __init__(self, store: DiskStore, folder: ManifestFolder):
        self.store, self.folder = store, folder
        self._cut_captions = CutCaptions(store)

    def dataset_names(self) -> list[str]:
        """Names of the manifests that hold samples, not prompts."""
        return [name for name in served_names(self.folder) if not name.startswith(PROMPTS_PREFIX)]

    def manifest(self, name: str) -> Manifest:
        """Read a manifest, which takes a fraction of a second for a million samples.

        RequestRefused if there is none of this name; DatasetError, StoreError.
        """
        # The name comes from a request: it becomes a path only if it cannot lead out of the folder.
        manifest = self.folder.read(name) if re.fullmatch(NAME_PATTERN, name) else None
        if manifest is None:
            known = ", ".join(self.dataset_names()) or "none yet: run latentcache precache"
            raise RequestRefused(f"there is no dataset {name!r:.100}; the datasets are {known}", status=404)
        return manifest

    def sample(self, dataset: str, sample_id: str) -> tuple[Manifest, int]:
        """A dataset's manifest, and the number of a sample's row in it. SampleError for an unknown sample."""
        manifest = self.manifest(dataset)
        number = int(manifest.rows.numbers([sample_id])[0])
        if number < 0:
            raise SampleError(sample_id, f"is not in dataset {dataset}", "look for it in the gallery")
        return manifest, number

    def overview(self) -> dict[str, Any]:
        """Counts from the index, the manifests and the records, by the names that the overview's template uses.

        Each dataset has its `manifest`, or the `problem` with it: one that is damaged does not hide the others.
        `num_cut` counts samples with a caption that is longer than the text encoders can read.
        """
        datasets = list[dict[str, Any]]()
        for name in self.dataset_names():
            try:
                datasets.append({"name": name, "manifest": self.manifest(name)})
            except LatentCacheError as error:
                datasets.append({"name": name, "manifest": None, "problem": str(error)})
        tables = [found["manifest"].rows for found in datasets if found["manifest"] is not None]
        return {
            "stats": self.store.stats(),
            "datasets": datasets,
            "num_samples": sum(map(len, tables)),
            "num_refused": sum(len(table.refusals) for table in tables),
            "num_uncaptioned": sum(len(table.without_caption()) for table in tables),
            "num_cut": sum(len(self._in_state(table, CUT_CAPTION)) for table in tables),
        }

    def page(self, filters: Mapping[str, str], start: int = 0) -> dict[str, Any]:
        """One page of the samples that match `filters_of`, after the first `start` of them.

        `tiles` has the dataset, row and state of each; `num_found` counts all that match; `next_start` is None on the
        last page. No other row is parsed. DatasetError, StoreError; RequestRefused for an unknown dataset.
        """
        shown, num_found = list[tuple[str, Row]](), 0
        for name in [filters["dataset"]] if "dataset" in filters else self.dataset_names():
            table = self.manifest(name).rows
            numbers, first = self._matching(table, filters), max(0, start - num_found)
            shown += [(name, table.row(number)) for number in numbers[first : first + PAGE_SIZE - len(shown)]]
            num_found += len(numbers)
        states, end = self.states([row for _, row in shown]), start + PAGE_SIZE
        tiles = [(name, row, state) for (name, row), state in zip(shown, states, strict=True)]
        return {"tiles": tiles, "num_found": num_found, "next_start": end if end < num_found else None}

    def _matching(self, table: RowTable, filters: Mapping[str, str]) -> Sequence[int]:
        """The numbers of the rows that match, ascending."""
        numbers: Sequence[int] = range(len(table))
        if "state" in filters:
            numbers = sorted(map(int, self._in_state(table, filters["state"])))
        if words := filters.get("search", "").casefold().split():
            captions, counts = iter(table.caption_texts), np.diff(table.columns["caption/offsets"]).tolist()
            rows = zip(table.sample_ids, counts, strict=True)
            texts = ["\n".join([sample_id, *islice(captions, count)]).casefold() for sample_id, count in rows]
            numbers = [number for number in numbers if all(word in texts[number] for word in words)]
        return numbers

    def _in_state(self, table: RowTable, state: str) -> Collection[int]:
        """The numbers of the rows in a state, one of FILTERS. Refused rows are in no other state."""
        if state == "refused":
            return table.refusals
        if state == "unverified":
            return table.unverified()
        if state == NO_CAPTION:
            return table.without_caption()
        if state == CUT_CAPTION:
            return table.usable_with("caption", self._cut_captions.flags(table.columns["caption/keys"]))
        lacking, damaged = set(table.lacking(self.store.has).tolist()), table.rows_with(self.store.damaged())
        return lacking.intersection(damaged) if state == "damaged" else lacking.difference(damaged)

    def states(self, rows: Sequence[Row]) -> list[State | None]:
        """The worst thing that is wrong with each sample; None if nothing is."""
        keys = {key for row in rows if row.refusal is None for key in row.keys()}
        present = self.store.find(keys)
        damaged = self.store.damaged() if len(present) < len(keys) else {}

        def state(row: Row) -> State | None:
            if row.refusal is not None:
                return "refused"
            if absent := set(row.keys()) - present:
                return "missing" if absent.isdisjoint(damaged) else "damaged"
            return None if row.is_verified else "unverified"

        return [state(row) for row in rows]


class ReadableManifests(ManifestFolder):
    """A folder's manifests without those that cannot be read; `problems` says why they cannot."""

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
