"""One sample in all detail: its photo and crop, its entries with their records, and why it is a hit or a miss."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from latentcache.config import ImagesConfig
from latentcache.dataset.images import decode
from latentcache.dataset.row_table import Ref, Row
from latentcache.dataset.samples import read_range
from latentcache.errors import EntryDamagedError, EntryMissingError, ImageRefused, RequestRefused, StoreError
from latentcache.identity import digest
from latentcache.loading.status import entry_json
from latentcache.service.page.thumbnails import webp_of
from latentcache.service.page.views import Gallery
from latentcache.store.base import Store
from latentcache.store.cut_captions import num_cut_tokens
from latentcache.types import Geometry

if TYPE_CHECKING:
    from latentcache.config import Config
    from latentcache.families.base import Family
    from latentcache.models.model_loader import ModelLoader
    from latentcache.precache.explanation import Explanation

MAX_PHOTO_BYTES = 1 << 28
"""Max size of a photo's file; a larger one is not shown."""
_OTHER_BYTES = "The file has other bytes than those that were encoded: precache encodes it again"
PHOTO_SIDE = 1024
"""The longer side of a photo that is shown, in pixels, at most."""
_ANY_IMAGE = ImagesConfig(animated="first-frame", max_aspect=1e6, min_side=1)


def sample_details(gallery: Gallery, dataset: str, sample_id: str, *, show_photo: bool) -> dict[str, Any]:
    """All about one sample, as its template names it. With `show_photo` the photo's file is read, if it is here.

    `photo` says in words what became of that file, `has_photo` whether there is a picture of it, and `crop` is in
    pixels of it. RequestRefused for an unknown dataset, SampleError for an unknown sample.
    """
    row, before, after = gallery.sample(dataset, sample_id)
    has_photo, photo = False, "This server shows no photos: start it with --photos"
    if show_photo:
        has_photo, photo = _examined(row)
    [state] = gallery.states([row])
    num_variants = gallery.manifest(dataset).variants
    images = [_details(gallery.store, "image", ref) for ref in row.images]
    texts = [_details(gallery.store, "caption", ref) for ref in row.captions]
    parts = [_details(gallery.store, ref.role, ref) for ref in row.parts]
    # Of variants only those that are lost.
    listed = [
        text for number, text in enumerate(texts) if text["problem"] or (text["record"] and not number % num_variants)
    ]
    return {
        "dataset": dataset,
        "row": row,
        "state": state,
        "is_hit": state is None and row.images and photo != _OTHER_BYTES,
        "images": images,
        "captions": texts[::num_variants],
        "num_variants": num_variants,
        "parts": parts,
        "entries": [*images, *listed, *parts],
        "has_photo": has_photo,
        "photo": photo,
        "crop": crop_box(row.images[0].geometry) if row.images else None,
        "before": before,
        "after": after,
    }


def _details(store: Store, name: str, ref: Ref) -> dict[str, Any]:
    """An entry of a sample, by the names of its template.

    `problem` says why it is a miss; then there is no `record`, nor is there of a text alone. `num_cut` are the tokens
    that the text encoders did not read.
    """
    found: dict[str, Any] = {"name": name, "ref": ref, "record": None, "problem": "", "num_tokens": None, "num_cut": 0}
    if not ref.key:
        return found
    try:
        record, fields = store.record(ref.key), store.describe(ref.key)
    except (EntryMissingError, EntryDamagedError) as error:
        return found | {"problem": error.reason, "json": {"key": ref.key, "problem": error.reason}}
    made = record.provenance
    # A client may have uploaded it, with anything in its provenance.
    num_tokens, created = made.get("num_tokens"), made.get("created")
    return found | {
        "record": record,
        "fields": fields,
        "num_tokens": num_tokens if type(num_tokens) is int else None,
        "num_cut": num_cut_tokens(record.identity.get("encoding"), made),
        "created": created if isinstance(created, str) else "",
        "json": entry_json(record, fields),
    }


def crop_box(geometry: Geometry) -> dict[str, float]:
    """The crop in pixels of the photo (x, y, width, height), and the percent of it that the crop keeps."""
    original, resized, target = geometry.original_size, geometry.resized_size, geometry.target_size
    top, left = geometry.crop_top_left
    down, across = original.height / resized.height, original.width / resized.width
    box = {"x": left * across, "y": top * down, "width": target.width * across, "height": target.height * down}
    kept = 100 * box["width"] * box["height"] / (original.width * original.height)
    return {name: round(value, 1) for name, value in {**box, "kept": min(100.0, kept)}.items()}


# The photo. Only what decodes as an image leaves this module, as WebP: never the bytes of a file.


def _examined(row: Row) -> tuple[bool, str]:
    """Compare the photo's file with the digest in the manifest: whether it can be shown, and what was found."""
    try:
        data = _read(row.path)
    except StoreError as error:
        return False, str(error)
    if row.source is None or digest(data) == row.source:
        return True, "The file has the bytes that were encoded"
    return True, _OTHER_BYTES


def photo_webp(row: Row) -> bytes:
    """The photo upright, in sRGB, at most PHOTO_SIDE pixels high and wide. RequestRefused if it cannot be shown."""
    try:
        return webp_of(decode(_read(row.path), row.path, _ANY_IMAGE), PHOTO_SIDE)
    except ImageRefused as error:
        # Not its detail: that may have bytes of a file that is no photo.
        raise RequestRefused(f"{row.path}: cannot be shown: {error.reason}", status=404) from error
    except StoreError as error:
        raise RequestRefused(str(error), status=404) from error


def _read(path: str) -> bytes:
    """The bytes of a regular file. A pipe or a device has none, and is never waited for."""
    try:
        data = read_range(path, 0, MAX_PHOTO_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise StoreError(f"{path}: cannot be read on this machine: {reason}") from error
    if not 0 < len(data) <= MAX_PHOTO_BYTES:
        raise StoreError(f"{path}: is no regular file of 1 to {MAX_PHOTO_BYTES:,} bytes")
    return data


# What the next precache would do


@dataclass(frozen=True, slots=True)
class CutCaption:
    """A caption as the text encoders read it, and the rest, which they do not."""

    read: str
    cut: str


class Explainer:
    """Asks the planner of precache why a sample is a hit or a miss, with the config's models. It writes nothing.

    Threads may share it; one is answered at a time, since the first request may read the models' files.
    """

    def __init__(self, config: Config):
        self._config = config
        self._lock = threading.Lock()
        self._models: ModelLoader | None = None

    def __call__(self, row: Row, num_variants: int) -> tuple[Explanation, list[CutCaption]]:
        """What the next precache would do with a manifest's row, and where its captions are cut.

        The row has so many variants of each caption, of which the first is the caption itself.
        ConfigError, DatasetError, ModelError, SampleError of `explain`.
        """
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
            captions = row.captions[::num_variants]
            return explanation, [cut_caption(family, tokenizers, recipe, caption.text) for caption in captions]


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
