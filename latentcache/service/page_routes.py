"""The page: what a person sees at `/`. It works without scripts too; with them, parts of it load as they are needed."""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

import latentcache
from latentcache.errors import ConfigError, EntryDamagedError, EntryMissingError, LatentCacheError, RequestRefused
from latentcache.service import page_text
from latentcache.service.access import SESSION_S, Role, cookie_of
from latentcache.service.cache_health import health, running
from latentcache.service.charts import aspect_bars, bucket_bars
from latentcache.service.context import ServiceContext
from latentcache.service.entry_routes import KeyInPath
from latentcache.service.gallery import Filters, Gallery, GalleryPage
from latentcache.service.overview import GrowthReader, model_origins, overview
from latentcache.service.page_settings import PageSettings
from latentcache.service.page_text import query_of, rendered, url
from latentcache.service.photos import photo_webp
from latentcache.service.problems import problem_of, problems
from latentcache.service.sample_details import Explainer, sample_details
from latentcache.service.thumbnails import DEFAULT_SIDE, SIDES, WAYS, Thumbnails, Way
from latentcache.service.validation_runs import loss_curve, validation_picture, validation_steps

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
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
FOR_EVER = "public, max-age=31536000, immutable"
FOR_AN_HOUR = "private, max-age=3600"
DECODED_HEADER = "Latentcache-Decoded"
WITHOUT_PICTURE = ("refused", "damaged", "missing")
"""States of samples whose picture is not shown."""
NOT_KEPT = "no-store"


class PageSource:
    """What the page is about. Threads share it."""

    def __init__(self, context: ServiceContext, settings: PageSettings, thumbnails: Thumbnails):
        store = self.store = context.store
        self.manifests, self.settings, self.thumbnails = context.manifests, settings, thumbnails
        self.has_sessions = not context.access.is_open
        self.views = context.views
        self.gallery = Gallery(store, self.views, sees_photos=settings.show_photos)
        self.growth = GrowthReader(store)
        self.explainer = None if settings.config is None else Explainer(settings.config)


Fields = Mapping[str, str]
Side = Annotated[int, Query(ge=SIDES.start, lt=SIDES.stop, description="Of the longer side, in pixels, at most.")]
View = Callable[[PageSource, Fields], Response]


def page_router(context: ServiceContext) -> APIRouter:
    """The pages, their parts, and the thumbnails that they show.

    Each is made in a thread. Errors are a page too, with the error's own words. Where reading needs a token, a form
    takes it, and a cookie that no script can read remembers it.
    """
    settings, decoder = context.settings.page, None
    if settings.config is not None:
        # Whatever the config says, this is the cache that is served.
        cache = settings.config.cache.model_copy(update={"path": context.store.path})
        config = settings.config.model_copy(update={"cache": cache})
        settings = replace(settings, config=config)
        from latentcache.service.vae_decoder import decoder_of  # imports diffusers

        decoder = decoder_of(config)
    source = PageSource(context, settings, Thumbnails(context.store, decoder))
    page_text.environment()
    router = APIRouter()
    for path, view in VIEWS.items():
        router.add_api_route(path, _answering(context, source, view), methods=["GET", "HEAD"], include_in_schema=False)
    router.include_router(_login_router(context, source))

    @router.get(
        "/v1/thumbnails/{key}.webp",
        tags=["entries"],
        response_class=Response,
        responses={200: {"content": {"image/webp": {}}, "description": "A picture."}, **problems(404, 409)},
    )
    async def thumbnail(key: KeyInPath, side: Side = DEFAULT_SIDE) -> Response:
        """The cached image, decoded, as WebP of at most `side` pixels.

        The header `Latentcache-Decoded` says how: `vae`, `linear`, or `components`, whose colours are not the photo's.
        """
        data, way = await context.view(source.thumbnails.webp, key, side)
        return _webp(data, {DECODED_HEADER: way})

    return router


def _answering(context: ServiceContext, source: PageSource, view: View) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        if request.scope["latentcache.role"] < Role.READ:
            return _login_form(source, 401)
        try:
            query = query_of(request.scope["query_string"]) | request.path_params
            return await context.view(view, source, query)
        except LatentCacheError as error:
            return _problem(source, error)

    return answer


def _login_router(context: ServiceContext, source: PageSource) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/login")
    async def form(request: Request) -> Response:
        """The form. An address with the token, as `browse` opens it, logs in by itself."""
        given = request.scope["query_string"]
        return logged_in(request, given) if given else _login_form(source, 200)

    @router.post("/login")
    async def login(request: Request) -> Response:
        return logged_in(request, await request.body())

    def logged_in(request: Request, form: bytes) -> Response:
        try:
            token = query_of(form).get("token", "").strip()
        except ConfigError:
            token = ""
        session = context.access.session_of(token)
        if session is None:
            return _login_form(source, 403, problem="This is not the token of this server.")
        answer = Response(status_code=303, headers={"Location": "/", "Cache-Control": NOT_KEPT})
        answer.set_cookie(cookie_of(request.scope), session, SESSION_S, **_cookie_options(request))
        return answer

    @router.post("/logout")
    async def logout(request: Request) -> Response:
        answer = Response(status_code=303, headers={"Location": "/login", "Cache-Control": NOT_KEPT})
        answer.delete_cookie(cookie_of(request.scope), **_cookie_options(request))
        return answer

    return router


def _cookie_options(request: Request) -> dict[str, Any]:
    """How the cookie is set. A proxy before the server says by X-Forwarded-Proto that its side is encrypted."""
    return {"path": "/", "httponly": True, "samesite": "lax", "secure": request.url.scheme == "https"}


def _login_form(source: PageSource, status: int, problem: str = "") -> Response:
    return _page(source, "login.html", status=status, problem=problem)


def static_router(context: ServiceContext) -> APIRouter:
    """The page's style, script and icon: anyone may have them."""
    router = APIRouter(include_in_schema=False)

    @router.get("/static/{name}")
    async def static(name: str, request: Request) -> Response:
        data = page_text.static_files().get(name)
        if data is None:
            return Response(status_code=404)
        headers = {**HEADERS, "Cache-Control": FOR_EVER, "Vary": "Accept-Encoding"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            data, headers["Content-Encoding"] = page_text.compressed(name), "gzip"
        return Response(data, 200, headers, page_text.MEDIA_TYPES[f".{name.rpartition('.')[2]}"])

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
        states=source.gallery.states,
        thumbnail=thumbnail,
        ways=WAYS,
        way=source.thumbnails.way,
        can_log_out=source.has_sessions,
        **values,
    )
    return Response(html, status, {**HEADERS, "Cache-Control": NOT_KEPT}, "text/html; charset=utf-8")


def _problem(source: PageSource, error: LatentCacheError) -> Response:
    status = problem_of(error).status_code
    title = {404: "Not found", 422: "This address makes no sense"}.get(status, "This cannot be shown")
    return _page(source, "problem.html", status=status, title=title, detail=str(error))


def _filters(query: Fields) -> tuple[Filters, int]:
    """The filters and the first sample's number. ConfigError."""
    start = query.get("start", "0")
    if not start.isdecimal() or len(start) > 12:
        raise ConfigError(f"start {start!r:.40}: it is the number of a sample")
    return Filters(**{name: query.get(name, "") for name in Filters.__slots__}), int(start)


def _overview(source: PageSource, query: Fields) -> Response:
    found = overview(source.store, source.views)
    readable = [dataset.name for dataset in found.datasets if dataset.view is not None]
    strip: tuple[Any, ...] = ()
    for name in readable:
        if len(strip) == STRIP:
            break
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


def _running(source: PageSource, query: Fields) -> Response:
    return _page(source, "running.html", running=running(source.store, source.manifests))


def _growth(source: PageSource, query: Fields) -> Response:
    return _page(source, "growth.html", growth=source.growth.growth())


def _models(source: PageSource, query: Fields) -> Response:
    datasets = overview(source.store, source.views).datasets
    origins = model_origins(source.store, datasets)
    names: dict[str, set[str]] = {}
    for dataset in datasets:
        for part, name in dataset.parts.items():
            names.setdefault(part, set()).add(name)
    models = [(part, sorted(names[part]), sorted(origins.get(part, ()))) for part in names]
    return _page(source, "models.html", models=models)


def _gallery(source: PageSource, query: Fields) -> Response:
    filters, start = _filters(query)
    page, names = source.gallery.page(filters, start), source.views.dataset_names()
    found = {_way_of(source, tile.key) for tile in page.tiles if tile.key and tile.state not in WITHOUT_PICTURE}
    decoded = [words for way, words in WAYS.items() if way in found]
    return _page(source, "gallery.html", "/gallery", gallery=page, filters=filters, datasets=names, decoded=decoded)


def _way_of(source: PageSource, key: str) -> Way | None:
    try:
        return source.thumbnails.way(source.store.record(key).identity, source.store.describe(key))
    except (EntryMissingError, EntryDamagedError):  # since the page was put together
        return None


def _results(source: PageSource, query: Fields) -> Response:
    filters, start = _filters(query)
    response = _page(source, "results.html", gallery=source.gallery.page(filters, start), filters=filters)
    response.headers["HX-Replace-Url"] = url("/gallery", **filters.to_query())
    return response


def _tiles(source: PageSource, query: Fields) -> Response:
    filters, start = _filters(query)
    return _page(source, "tiles.html", gallery=source.gallery.page(filters, start), filters=filters)


def _bucket_options(source: PageSource, query: Fields) -> Response:
    filters, _ = _filters(query)
    counts = sorted(source.gallery.buckets(filters.dataset).items())
    return _page(source, "bucket_options.html", buckets=counts, filters=filters)


def _sample(source: PageSource, query: Fields) -> Response:
    dataset, sample_id = _named(query)
    details = sample_details(source.gallery, dataset, sample_id, show_photo=source.settings.show_photos)
    return _page(source, "sample.html", "/gallery", sample=details, explains=source.settings.config is not None)


def _reasons(source: PageSource, query: Fields) -> Response:
    _, row = source.gallery.sample(*_named(query))
    if source.explainer is None:
        raise ConfigError("why a sample is a hit or a miss is known with a config: start the service with --encode")
    return _page(source, "reasons.html", reasons=source.explainer(row))


def _photo(source: PageSource, query: Fields) -> Response:
    if not source.settings.show_photos:
        raise RequestRefused("this server shows no photos", status=403, next_step="Start it with --photos")
    _, row = source.gallery.sample(*_named(query))
    return _webp(photo_webp(row))


def _named(query: Fields) -> tuple[str, str]:
    """Dataset and sample_id. ConfigError if one is not given."""
    if "dataset" not in query or "id" not in query:
        raise ConfigError("the address of a sample has a dataset and an id")
    return query["dataset"], query["id"]


def _webp(data: bytes, headers: Mapping[str, str] | None = None) -> Response:
    return Response(data, 200, {**HEADERS, "Cache-Control": FOR_AN_HOUR, **(headers or {})}, "image/webp")


def _buckets(source: PageSource, query: Fields) -> Response:
    views = [source.views.view(name) for name in source.views.dataset_names()]
    charts = [
        (view.name, bucket_bars(view.buckets), aspect_bars(view.original_sizes), view.buckets.total()) for view in views
    ]
    return _page(source, "buckets.html", "/buckets", charts=charts)


def _validation(source: PageSource, query: Fields) -> Response:
    folder = source.settings.validation_folder
    steps = [] if folder is None else validation_steps(folder)
    shown = None if folder is None else str(folder)
    return _page(source, "validation.html", "/validation", folder=shown, steps=steps, loss=loss_curve(steps))


def _validation_picture(source: PageSource, query: Fields) -> Response:
    folder, step = source.settings.validation_folder, query["step"]
    if folder is None or not step.isdecimal() or len(step) > 18:
        raise RequestRefused(f"no validation of step {step:.40}", status=404)
    data = validation_picture(folder, int(step), query["name"])
    return Response(data, 200, {**HEADERS, "Cache-Control": NOT_KEPT}, "image/png")


def _health(source: PageSource, query: Fields) -> Response:
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
