"""The page of one sample: its photo and crop, its entries with their records, and why it is a hit or a miss."""

from __future__ import annotations

import threading
from collections.abc import Mapping
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
"""Largest file of a photo that is shown."""
PHOTO_SIDE = 1024
"""Longest side of a shown photo, in pixels."""
_CHANGED = "The file has changed since it was encoded: precache encodes it again"
_ANY_IMAGE = ImagesConfig(animated="first-frame", max_aspect=1e6, min_side=1)


def sample_details(gallery: Gallery, dataset: str, sample_id: str, *, show_photo: bool) -> dict[str, Any]:
    """Everything about one sample, by the names that its template uses. With `show_photo` the photo's file is read.

    `photo` says in words how that file compares with what was encoded, `has_photo` whether it can be shown; `crop` is
    in its pixels. RequestRefused for an unknown dataset, SampleError for an unknown sample.
    """
    manifest, number = gallery.sample(dataset, sample_id)
    rows, num_variants = manifest.rows, manifest.variants
    row = rows.row(number)
    has_photo, photo = False, "This server does not show photos; start it with --photos"
    if show_photo:
        has_photo, photo = _examined(row)
    [state] = gallery.states([row])
    images = [_details(gallery.store, "image", ref) for ref in row.images]
    texts = [_details(gallery.store, "caption", ref) for ref in row.captions]
    parts = [_details(gallery.store, ref.role, ref) for ref in row.parts]
    # Variants are listed only if they are lost.
    listed = [text for at, text in enumerate(texts) if text["problem"] or (text["record"] and not at % num_variants)]
    return {
        "dataset": dataset,
        "row": row,
        "state": state,
        "is_hit": state is None and row.images and photo != _CHANGED,
        "images": images,
        "captions": texts[::num_variants],
        "num_variants": num_variants,
        "parts": parts,
        "entries": [*images, *listed, *parts],
        "has_photo": has_photo,
        "photo": photo,
        "crop": crop_box(row.images[0].geometry) if row.images else None,
        "before": rows.row(number - 1) if number else None,
        "after": rows.row(number + 1) if number + 1 < len(rows) else None,
    }


def _details(store: Store, name: str, ref: Ref) -> dict[str, Any]:
    """An entry of a sample, by the names that the template uses.

    `problem` says why it is a miss. `record` is None for a miss, and for a text that was not encoded. `num_cut` counts
    the tokens that the text encoders did not read.
    """
    found: dict[str, Any] = {"name": name, "ref": ref, "record": None, "problem": "", "num_tokens": None, "num_cut": 0}
    if not ref.key:
        return found
    try:
        record, fields = store.record(ref.key), store.describe(ref.key)
    except (EntryMissingError, EntryDamagedError) as error:
        return found | {"problem": error.reason, "json": {"key": ref.key, "problem": error.reason}}
    made = record.provenance
    # A client may have uploaded the record, with values of any type in its provenance.
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
    """The crop in pixels of the photo (x, y, width, height), and the percentage of the photo that it keeps (`kept`)."""
    original, resized, target = geometry.original_size, geometry.resized_size, geometry.target_size
    top, left = geometry.crop_top_left
    down, across = original.height / resized.height, original.width / resized.width
    box = {"x": left * across, "y": top * down, "width": target.width * across, "height": target.height * down}
    kept = 100 * box["width"] * box["height"] / (original.width * original.height)
    return {name: round(value, 1) for name, value in {**box, "kept": min(100.0, kept)}.items()}


# The photo: only decoded images leave this module, as WebP, never the bytes of a file.


def _examined(row: Row) -> tuple[bool, str]:
    """Whether the photo can be shown, and how its file compares with the digest in the manifest, in words."""
    try:
        data = _read(row.path)
    except StoreError as error:
        return False, str(error)
    if row.source is None:
        return True, "Whether the file has changed since it was encoded is not known"
    return True, "The file has not changed since it was encoded" if digest(data) == row.source else _CHANGED


def photo_webp(row: Row) -> bytes:
    """The photo, upright and in sRGB, at most PHOTO_SIDE pixels high and wide. RequestRefused if it cannot be shown."""
    try:
        return webp_of(decode(_read(row.path), row.path, _ANY_IMAGE), PHOTO_SIDE)
    except ImageRefused as error:
        # Without its detail, which may quote bytes of a file that is not a photo.
        raise RequestRefused(f"{row.path}: cannot be shown: {error.reason}", status=404) from error
    except StoreError as error:
        raise RequestRefused(str(error), status=404) from error


def _read(path: str) -> bytes:
    """The bytes of a regular file. StoreError for anything else: a pipe or a device is never waited for."""
    try:
        data = read_range(path, 0, MAX_PHOTO_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise StoreError(f"{path}: cannot be read on this machine: {reason}") from error
    if not 0 < len(data) <= MAX_PHOTO_BYTES:
        raise StoreError(f"{path}: is not a regular file of 1 to {MAX_PHOTO_BYTES:,} bytes")
    return data


# What the next precache would do


class Explainer:
    """Asks the planner of precache why a sample is a hit or a miss, with the config's models. It writes nothing.

    Thread-safe: requests are answered one at a time, since the first one may read the models' files.
    """

    def __init__(self, config: Config):
        self._config = config
        self._lock = threading.Lock()
        self._models: ModelLoader | None = None

    def __call__(self, row: Row, num_variants: int) -> tuple[Explanation, list[tuple[str, str]]]:
        """What the next precache would do with a manifest's row, and each caption divided by `read_and_cut`.

        Each caption has `num_variants` variants in the row, the first of which is the caption itself.
        ConfigError, DatasetError, ModelError and SampleError as `explain` raises them.
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
            return explanation, [read_and_cut(family, tokenizers, recipe, caption.text) for caption in captions]


def read_and_cut(
    family: Family, tokenizers: Mapping[str, Any], recipe: Mapping[str, Any], text: str
) -> tuple[str, str]:
    """The part of a caption that the text encoders read, and the rest, which the tokenizer cuts off.

    If the family cleans texts, these are parts of the cleaned text. A template around the text is left out.
    """
    readable = text.encode("utf-8", "replace").decode()  # a lone surrogate and its replacement are one character each
    rendered = family.rendered(tokenizers, readable)
    found = tokenizers[family.names("tokenizer")[-1]]
    tokenizer = getattr(found, "tokenizer", found)  # of a processor
    limit = family.token_limit(tokenizers, recipe)

    def offsets(**options: Any) -> list[tuple[int, int]]:
        """Where each token begins and ends in the text, without special tokens, which have no length there."""
        read = tokenizer(rendered, return_offsets_mapping=True, verbose=False, **options)["offset_mapping"]
        return [(start, end) for start, end in read if end > start]

    whole, num_read = offsets(truncation=False), len(offsets(truncation=True, max_length=limit))
    begin = rendered.find(readable)
    shown, begin = (text, begin) if begin >= 0 else (rendered, 0)
    start = whole[num_read][0] - begin if num_read < len(whole) else len(shown)
    return shown[: max(start, 0)], shown[max(start, 0) :]
