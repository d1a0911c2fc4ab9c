"""The page: what a person sees at `/`. It works without scripts too; with them, parts of it load as they are needed."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

import latentcache
from latentcache.dataset.manifest import ManifestFolder
from latentcache.errors import ConfigError, EntryMissingError, LatentCacheError, SampleError, StoreError
from latentcache.service import page_text
from latentcache.service.cache_health import health, running
from latentcache.service.charts import aspect_bars, bucket_bars, curve_of
from latentcache.service.gallery import STATES, Filters, Gallery, GalleryPage
from latentcache.service.manifest_views import ManifestViews
from latentcache.service.overview import GrowthReader, model_origins, overview
from latentcache.service.page_text import query_of, rendered, url
from latentcache.service.photos import photo_webp
from latentcache.service.sample_details import explained, sample_details
from latentcache.service.thumbnails import DEFAULT_SIDE, Decoder, Thumbnails
from latentcache.service.validation_runs import validation_picture, validation_steps

if TYPE_CHECKING:
    from pathlib import Path

    from latentcache.config import Config
    from latentcache.store.disk import DiskStore

PAGES = (
    ("/", "Overview"),
    ("/gallery", "Gallery"),
    ("/buckets", "Buckets"),
    ("/validation", "Validation"),
    ("/health", "Health"),
)
STRIP = 8
"""Samples on the overview."""
HEADERS = {
    # Everything comes from here, and nothing is written into the pages: no script, no style, no frame.
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
FOR_EVER = "public, max-age=31536000, immutable"
FOR_AN_HOUR = "private, max-age=3600"
NOT_KEPT = "no-store"


@dataclass(frozen=True)
class PageSource:
    """What the page is about. Threads share it.

    `config` gives the reasons of hits and misses, and the places of validations; `validation` is that folder if there
    is no config. `show_photos` reads the photos' files on this machine. `decoder` decodes thumbnails; None: the linear
    approximation.
    """

    store: DiskStore
    manifests: ManifestFolder
    config: Config | None = None
    validation: Path | None = None
    show_photos: bool = False
    decoder: Decoder | None = None

    @cached_property
    def views(self) -> ManifestViews:
        """The manifests."""
        return ManifestViews(self.manifests)

    @cached_property
    def gallery(self) -> Gallery:
        """The samples."""
        return Gallery(self.store, self.views)

    @cached_property
    def thumbnails(self) -> Thumbnails:
        """Their pictures."""
        return Thumbnails(self.store, self.decoder)

    @cached_property
    def growth(self) -> GrowthReader:
        """When packs were made."""
        return GrowthReader(self.store)

    @property
    def validation_folder(self) -> Path | None:
        """Where the results of validations are, if that is known."""
        if self.validation is not None:
            return self.validation
        return None if self.config is None else self.config.validation.path


Query = Mapping[str, str]
View = Callable[[PageSource, Query], Response]


def page_router(source: PageSource) -> APIRouter:
    """The pages and their parts. Each is made in a thread; errors are a page too, with the error's own words."""
    router = APIRouter(include_in_schema=False)

    def add(path: str, view: View) -> None:
        async def answer(request: Request) -> Response:
            try:
                query = query_of(request.scope["query_string"]) | request.path_params
                return await run_in_threadpool(view, source, query)
            except LatentCacheError as error:
                return await run_in_threadpool(_problem, source, error)

        router.add_api_route(path, answer, methods=["GET", "HEAD"])

    for path, view in VIEWS.items():
        add(path, view)
    return router


def static_router() -> APIRouter:
    """The page's style, script and icon: anyone may have them."""
    router = APIRouter(include_in_schema=False)

    async def static(name: str) -> Response:
        data = page_text.static_files().get(name)
        if data is None:
            return Response(status_code=404)
        media_type = page_text.MEDIA_TYPES[f".{name.rpartition('.')[2]}"]
        return Response(data, media_type=media_type, headers={**HEADERS, "Cache-Control": FOR_EVER})

    router.add_api_route("/static/{name}", static, methods=["GET", "HEAD"])
    return router


def thumbnail_router(source: PageSource) -> APIRouter:
    """Pictures of cached images. Errors are raised: they are those of the service's other routes."""
    router = APIRouter(tags=["entries"])

    @router.get("/v1/thumbnails/{key}.webp", response_class=Response, responses={200: {"content": {"image/webp": {}}}})
    async def thumbnail(key: str, side: int = DEFAULT_SIDE) -> Response:
        """The cached image, decoded, as WebP of at most `side` pixels."""
        return _webp(await run_in_threadpool(source.thumbnails.webp, key, side))

    return router


def _page(source: PageSource, template: str, page: str = "", status: int = 200, **values: Any) -> Response:
    def thumbnail(key: str, side: int = DEFAULT_SIDE) -> str:
        return url(f"/v1/thumbnails/{key}.webp", side=side, by=source.thumbnails.name)

    html = rendered(
        template,
        page=page,
        pages=PAGES,
        version=latentcache.__version__,
        cache_path=str(source.store.path),
        shell_path=shlex.quote(str(source.store.path)),
        states=STATES,
        thumbnail=thumbnail,
        decoder=source.thumbnails.name,
        **values,
    )
    return Response(html, status, {**HEADERS, "Cache-Control": NOT_KEPT}, "text/html; charset=utf-8")


def _problem(source: PageSource, error: LatentCacheError) -> Response:
    status, title = 500, "This cannot be shown"
    if isinstance(error, ConfigError):
        status, title = 400, "This address makes no sense"
    elif isinstance(error, SampleError | EntryMissingError) or type(error) is StoreError:
        status, title = 404, "Not found"
    return _page(source, "problem.html", status=status, title=title, detail=str(error))


def _filters(query: Query) -> tuple[Filters, int]:
    """The filters and the first sample's number. ConfigError."""
    start = query.get("start", "0")
    if not start.isdecimal() or len(start) > 12:
        raise ConfigError(f"start {start!r:.40}: it is the number of a sample")
    return Filters(**{name: query.get(name, "") for name in Filters.__slots__}), int(start)


def _overview(source: PageSource, query: Query) -> Response:
    found = overview(source.store, source.views)
    readable = [dataset.name for dataset in found.datasets if dataset.head is not None]
    strip: tuple[Any, ...] = ()
    for name in readable:
        strip += source.gallery.page(Filters(dataset=name)).tiles[: STRIP - len(strip)]
    return _page(
        source,
        "overview.html",
        "/",
        cache_name=source.store.path.name,
        overview=found,
        running=running(source.store, source.manifests),
        gallery=GalleryPage(strip, None, None),
        filters=Filters(),
    )


def _running(source: PageSource, query: Query) -> Response:
    return _page(source, "running.html", running=running(source.store, source.manifests))


def _growth(source: PageSource, query: Query) -> Response:
    return _page(source, "growth.html", growth=source.growth.growth())


def _models(source: PageSource, query: Query) -> Response:
    datasets = overview(source.store, source.views).datasets
    origins = model_origins(source.store, datasets)
    names: dict[str, set[str]] = {}
    for dataset in datasets:
        for part, name in dataset.parts.items():
            names.setdefault(part, set()).add(name)
    models = [(part, sorted(names[part]), sorted(origins.get(part, ()))) for part in names]
    return _page(source, "models.html", models=models)


def _gallery(source: PageSource, query: Query) -> Response:
    filters, start = _filters(query)
    page, names = source.gallery.page(filters, start), source.views.dataset_names()
    return _page(source, "gallery.html", "/gallery", gallery=page, filters=filters, datasets=names)


def _results(source: PageSource, query: Query) -> Response:
    filters, start = _filters(query)
    response = _page(source, "results.html", gallery=source.gallery.page(filters, start), filters=filters)
    response.headers["HX-Replace-Url"] = url("/gallery", **filters.to_query())
    return response


def _tiles(source: PageSource, query: Query) -> Response:
    filters, start = _filters(query)
    return _page(source, "tiles.html", gallery=source.gallery.page(filters, start), filters=filters)


def _bucket_options(source: PageSource, query: Query) -> Response:
    filters, _ = _filters(query)
    counts = sorted(source.gallery.buckets(filters.dataset).items())
    return _page(source, "bucket_options.html", buckets=counts, filters=filters)


def _sample(source: PageSource, query: Query) -> Response:
    dataset, sample_id = _named(query)
    details = sample_details(source.gallery, dataset, sample_id, show_photo=source.show_photos)
    return _page(source, "sample.html", "/gallery", sample=details, explains=source.config is not None)


def _reasons(source: PageSource, query: Query) -> Response:
    _, row = source.gallery.sample(*_named(query))
    if source.config is None:
        raise ConfigError("why a sample is a hit or a miss is known with a config: start the service with --encode")
    return _page(source, "reasons.html", reasons=explained(source.config, row))


def _photo(source: PageSource, query: Query) -> Response:
    if not source.show_photos:
        raise StoreError("this service does not show photos: start it with --photos")
    _, row = source.gallery.sample(*_named(query))
    return _webp(photo_webp(row))


def _named(query: Query) -> tuple[str, str]:
    """Dataset and sample_id. ConfigError if one is not given."""
    if "dataset" not in query or "id" not in query:
        raise ConfigError("the address of a sample has a dataset and an id")
    return query["dataset"], query["id"]


def _webp(data: bytes) -> Response:
    return Response(data, 200, {**HEADERS, "Cache-Control": FOR_AN_HOUR}, "image/webp")


def _buckets(source: PageSource, query: Query) -> Response:
    views = [source.views.view(name) for name in source.views.dataset_names()]
    charts = [
        (view.name, bucket_bars(view.buckets), aspect_bars(view.original_sizes), view.buckets.total()) for view in views
    ]
    return _page(source, "buckets.html", "/buckets", charts=charts)


def _validation(source: PageSource, query: Query) -> Response:
    folder = source.validation_folder
    steps = [] if folder is None else validation_steps(folder)
    measured = [(step.step, step.metrics.loss) for step in steps if step.metrics and step.metrics.measurement_settings]
    curve = curve_of([step for step, _ in measured], [loss for _, loss in measured], from_zero=False)
    shown = None if folder is None else str(folder)
    return _page(source, "validation.html", "/validation", folder=shown, steps=steps, curve=curve)


def _validation_picture(source: PageSource, query: Query) -> Response:
    folder, step = source.validation_folder, query["step"]
    if folder is None or not step.isdecimal() or len(step) > 18:
        raise StoreError("there is no such validation")
    data = validation_picture(folder, int(step), query["name"])
    return Response(data, 200, {**HEADERS, "Cache-Control": NOT_KEPT}, "image/png")


def _health(source: PageSource, query: Query) -> Response:
    found = health(source.store, source.views)
    return _page(source, "health.html", "/health", health=found, running=running(source.store, source.manifests))


VIEWS: Mapping[str, View] = {
    "/": _overview,
    "/running": _running,
    "/growth": _growth,
    "/models": _models,
    "/gallery": _gallery,
    "/gallery/results": _results,
    "/gallery/tiles": _tiles,
    "/gallery/buckets": _bucket_options,
    "/sample": _sample,
    "/sample/reasons": _reasons,
    "/photo": _photo,
    "/buckets": _buckets,
    "/validation": _validation,
    "/validation/{step}/{name}": _validation_picture,
    "/health": _health,
}
"""Address -> what answers it."""
