"""One sample in all detail: its entries with their records, its crop, and why it is a hit or a miss."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from latentcache.dataset.manifest_row import CaptionRef, ImageRef, PartRef, Row
from latentcache.errors import EntryDamagedError, EntryMissingError
from latentcache.families import DEFAULT, FAMILIES, family_named
from latentcache.service.charts import crop_box
from latentcache.service.gallery import Gallery, State
from latentcache.service.photos import Photo, examine_photo
from latentcache.store.base import Store
from latentcache.store.entry import Description
from latentcache.types import Record

if TYPE_CHECKING:
    from latentcache.config import Config
    from latentcache.families.base import Family
    from latentcache.models.model_loader import ModelLoader
    from latentcache.precache.explanation import Explanation


@dataclass(frozen=True, slots=True)
class EntryDetails:
    """An entry of a sample. `problem` says why it is a miss; then there is no record."""

    ref: ImageRef | CaptionRef | PartRef
    record: Record | None
    fields: Description
    problem: str

    @property
    def num_tokens(self) -> int | None:
        """Tokens of the caption, with begin and end; None where nobody counted them."""
        found = None if self.record is None else self.record.provenance.get("num_tokens")
        return found if type(found) is int else None

    @property
    def num_cut(self) -> int:
        """How many of them the text encoders did not read, by the family and the recipe in its identity."""
        encoding = None if self.record is None else self.record.identity.get("encoding")
        recipe = encoding if isinstance(encoding, Mapping) else {}
        family = recipe.get("family", DEFAULT)
        if self.num_tokens is None or family not in FAMILIES:
            return 0
        numbers = {name: value for name, value in recipe.items() if type(value) is int}
        return max(0, self.num_tokens - family_named(family).token_limit({}, numbers))

    @property
    def created(self) -> str:
        """When it was made, as its record says it; empty where it does not."""
        found = None if self.record is None else self.record.provenance.get("created")
        return found if isinstance(found, str) else ""

    def to_json(self) -> dict[str, Any]:
        """The whole record, to be shown."""
        if self.record is None:
            return {"key": self.ref.key, "problem": self.problem}
        return {
            "key": self.ref.key,
            "kind": self.record.kind,
            "fields": {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in self.fields.items()},
            "identity": dict(self.record.identity),
            "provenance": dict(self.record.provenance),
        }


@dataclass(frozen=True, slots=True)
class SampleDetails:
    """What a sample's page shows. `crop` is in pixels of the photo (`charts.crop_box`); None without an image."""

    dataset: str
    row: Row
    state: State | None
    images: tuple[EntryDetails, ...]
    captions: tuple[EntryDetails, ...]
    parts: tuple[tuple[str, EntryDetails], ...]
    """Control images and the mask, each with its name."""
    photo: Photo
    crop: Mapping[str, float] | None
    before: Row | None
    after: Row | None


def sample_details(gallery: Gallery, dataset: str, sample_id: str, *, show_photo: bool) -> SampleDetails:
    """All about one sample. With `show_photo` the photo's file is read, if it is on this machine.

    RequestRefused for an unknown dataset, SampleError for an unknown sample.
    """
    view, row = gallery.sample(dataset, sample_id)
    before, after = gallery.neighbours(view, row)
    photo = Photo("not shown", "this server shows no photos: start it with --photos") if not show_photo else None
    return SampleDetails(
        dataset=dataset,
        row=row,
        state=gallery.state(view, row),
        images=tuple(_details(gallery.store, ref) for ref in row.images),
        captions=tuple(_details(gallery.store, ref) for ref in row.captions),
        parts=tuple((name, _details(gallery.store, ref)) for name, ref in row.named_parts()),
        photo=photo or examine_photo(row),
        crop=crop_box(row.images[0].geometry.to_json()) if row.images else None,
        before=before,
        after=after,
    )


def _details(store: Store, ref: ImageRef | CaptionRef | PartRef) -> EntryDetails:
    try:
        return EntryDetails(ref, store.record(ref.key), store.describe(ref.key), "")
    except (EntryMissingError, EntryDamagedError) as error:
        return EntryDetails(ref, None, {}, error.reason)


@dataclass(frozen=True, slots=True)
class CutCaption:
    """A caption as the text encoders read it, and the rest, which they do not."""

    read: str
    cut: str


@dataclass(frozen=True, slots=True)
class Reasons:
    """What the next precache would do with a sample, and where its captions are cut."""

    explanation: Explanation
    captions: tuple[CutCaption, ...]


class Explainer:
    """Asks the planner of precache why a sample is a hit or a miss, with the config's models. It writes nothing.

    Threads may share it; one is answered at a time, since the first request may read the models' files.
    """

    def __init__(self, config: Config):
        self._config = config
        self._lock = threading.Lock()
        self._models: ModelLoader | None = None

    def __call__(self, row: Row) -> Reasons:
        """The reasons of a manifest's row. ConfigError, DatasetError, ModelError, SampleError of `explain`."""
        from latentcache.precache.encodings import load_models
        from latentcache.precache.explanation import explain

        with self._lock:
            if self._models is None:
                self._models = load_models(self._config.model, {})
            explanation = explain(self._config, row.sample_id, models=self._models)
            encode, family = self._config.encode, self._models.family
            recipe = family.text_recipe(
                clip_skip=encode.clip_skip, max_length=encode.max_length, padding=encode.padding
            )
            tokenizers = self._models.tokenizers()
            cut = tuple(cut_caption(family, tokenizers, recipe, caption.text) for caption in row.captions)
        return Reasons(explanation, cut)


def cut_caption(family: Family, tokenizers: Mapping[str, Any], recipe: Mapping[str, Any], text: str) -> CutCaption:
    """Where a fast tokenizer of the family cuts a caption.

    A family that cleans the text shows it cleaned. Of a template nothing is shown.
    """
    readable = text.encode("utf-8", "replace").decode()  # a lone surrogate is one character, as is its stand-in
    rendered = family.rendered(tokenizers, readable)
    found = tokenizers[family.names("tokenizer")[-1]]
    tokenizer = getattr(found, "tokenizer", found)  # a processor has one
    limit = family.token_limit(tokenizers, recipe)

    def offsets(**options: Any) -> list[tuple[int, int]]:
        """Where the tokens of the text are in it: begin and end, which are not in it, have no length."""
        read = tokenizer(rendered, return_offsets_mapping=True, verbose=False, **options)["offset_mapping"]
        return [(start, end) for start, end in read if end > start]

    whole, num_read = offsets(truncation=False), len(offsets(truncation=True, max_length=limit))
    begin = rendered.find(readable)
    shown, begin = (text, begin) if begin >= 0 else (rendered, 0)
    start = whole[num_read][0] - begin if num_read < len(whole) else len(shown)
    return CutCaption(shown[: max(start, 0)], shown[max(start, 0) :])
