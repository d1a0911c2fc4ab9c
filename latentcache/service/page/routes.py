"""The page: what a person sees at `/`. It works without scripts too; with them the gallery loads more by itself."""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

import latentcache
from latentcache.errors import ConfigError, LatentCacheError, RequestRefused
from latentcache.loading.status import status_of
from latentcache.service.auth import SESSION_S, Role, cookie_of
from latentcache.service.errors import problem_of
from latentcache.service.packs import KeyInPath
from latentcache.service.page.sample import CutCaption, Explainer, photo_webp, sample_details
from latentcache.service.page.thumbnails import DEFAULT_SIDE, SIDES, WAYS, Thumbnails
from latentcache.service.page.views import (
    FILTERS,
    STATES,
    Filters,
    Gallery,
    GalleryPage,
    ReadableManifests,
    environment,
    query_of,
    rendered,
    url,
)
from latentcache.service.state import ServiceState

PAGES = (("/", "Overview"), ("/gallery", "Gallery"), ("/health", "Health"))
STRIP = 8
"""Samples on the overview."""
HEADERS = {
    # Everything comes from here, and nothing is written into the pages: no script, no style, no frame.
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
NOT_KEPT = {"Cache-Control": "no-store"}
DECODED_HEADER = "Latentcache-Decoded"

Fields = Mapping[str, str]
Side = Annotated[int, Query(ge=SIDES.start, lt=SIDES.stop, description="Of the longer side, in pixels, at most.")]


def page_router(state: ServiceState, pages: Pages) -> APIRouter:
    """The pages, and the pictures that they show.

    Each is made in a thread. Errors are a page too, with the error's own words. Where reading needs a token, a form
    takes it, and a cookie that no script can read remembers it.
    """
    router = APIRouter()
    views = {
        "/": pages.overview,
        "/gallery": pages.gallery,
        "/sample": pages.sample,
        "/photo": pages.photo,
        "/health": pages.health,
    }
    for path, view in views.items():
        router.add_api_route(path, _answering(state, pages, view), methods=["GET", "HEAD"], include_in_schema=False)
    router.include_router(_login_router(state, pages), include_in_schema=False)

    webp = {"content": {"image/webp": {}}, "description": "A picture."}

    @router.get("/v1/thumbnails/{key}.webp", tags=["packs"], response_class=Response, responses={200: webp})
    async def thumbnail(key: KeyInPath, side: Side = DEFAULT_SIDE) -> Response:
        """The cached image, decoded, as WebP of at most `side` pixels.

        The header `Latentcache-Decoded` says how: `vae`, `linear`, or `channels`, whose colours are not the photo's.
        """
        data, way = await state.view(pages.thumbnails.webp, key, side)
        return _webp(data, {DECODED_HEADER: way})

    return router


def _answering(
    state: ServiceState, pages: Pages, view: Callable[[Fields], Response]
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        if request.scope["latentcache.role"] < Role.READ:
            return pages.login_form(401)
        try:
            return await state.view(view, query_of(request.scope["query_string"]))
        except LatentCacheError as error:
            return pages.problem(error)

    return answer


def _login_router(state: ServiceState, pages: Pages) -> APIRouter:
    router = APIRouter()

    @router.get("/login")
    async def form(request: Request) -> Response:
        """The form. An address with the token, as `browse` opens it, logs in by itself."""
        given = request.scope["query_string"]
        return logged_in(request, given) if given else pages.login_form(200)

    @router.post("/login")
    async def login(request: Request) -> Response:
        return logged_in(request, await request.body())

    def logged_in(request: Request, form: bytes) -> Response:
        try:
            token = query_of(form).get("token", "").strip()
        except ConfigError:
            token = ""
        session = state.access.session_of(token)
        if session is None:
            return pages.login_form(403, problem="This is not the token of this server.")
        answer = Response(status_code=303, headers={"Location": "/", **NOT_KEPT})
        answer.set_cookie(cookie_of(request.scope), session, SESSION_S, **_cookie_options(request))
        return answer

    @router.post("/logout")
    async def logout(request: Request) -> Response:
        answer = Response(status_code=303, headers={"Location": "/login", **NOT_KEPT})
        answer.delete_cookie(cookie_of(request.scope), **_cookie_options(request))
        return answer

    return router


def _cookie_options(request: Request) -> dict[str, Any]:
    """How the cookie is set. A proxy before the server says by X-Forwarded-Proto that its side is encrypted."""
    return {"path": "/", "httponly": True, "samesite": "lax", "secure": request.url.scheme == "https"}


def _webp(data: bytes, headers: Mapping[str, str]) -> Response:
    return Response(data, 200, {**HEADERS, "Cache-Control": "private, max-age=3600", **headers}, "image/webp")


class Pages:
    """What each address shows, from the fields of its query. Threads share it."""

    def __init__(self, state: ServiceState):
        environment()
        self._store, settings = state.store, state.settings
        self._gallery = Gallery(self._store, state.manifests)
        self._has_sessions, self._show_photos = not state.access.is_open, settings.show_photos
        self._explainer, decoder = None, None
        if settings.config is not None:
            # Whatever the config says, this is the cache that is served.
            cache = settings.config.cache.model_copy(update={"path": self._store.path})
            config = settings.config.model_copy(update={"cache": cache})
            from latentcache.service.page.vae_decoder import decoder_of  # imports diffusers

            self._explainer, decoder = Explainer(config), decoder_of(config)
        self.thumbnails = Thumbnails(self._store, decoder)
        self._decoded_by = "latents" if decoder is None else "vae"  # in the addresses of pictures, which browsers keep

    def _page(self, template: str, page: str = "", status: int = 200, **values: Any) -> Response:
        def thumbnail(key: str, side: int = DEFAULT_SIDE) -> str:
            return url(f"/v1/thumbnails/{key}.webp", side=side, by=self._decoded_by)

        html = rendered(
            template,
            page=page,
            pages=PAGES,
            version=latentcache.__version__,
            cache_path=str(self._store.path),
            shell_path=shlex.quote(str(self._store.path)),
            states=STATES,
            thumbnail=thumbnail,
            can_log_out=self._has_sessions,
            **values,
        )
        return Response(html, status, {**HEADERS, **NOT_KEPT}, "text/html; charset=utf-8")

    def wrong_address(self, request: Request, error: LatentCacheError) -> Response:
        """The answer to an address outside of the API that there is not."""
        return self.login_form(401) if request.scope["latentcache.role"] < Role.READ else self.problem(error)

    def problem(self, error: LatentCacheError) -> Response:
        """The page that says what is wrong."""
        status = problem_of(error).status_code
        title = {404: "Not found", 422: "This address makes no sense"}.get(status, "This cannot be shown")
        return self._page("problem.html", status=status, title=title, detail=str(error))

    def login_form(self, status: int, problem: str = "") -> Response:
        """The form that takes a token."""
        return self._page("login.html", status=status, problem=problem)

    def overview(self, query: Fields) -> Response:
        """What the cache holds, and the first samples of its datasets."""
        found = self._gallery.overview()
        strip: tuple[Any, ...] = ()
        for dataset in found["datasets"]:
            if dataset["manifest"] is not None and len(strip) < STRIP:
                strip += self._gallery.page(Filters(dataset=dataset["name"])).tiles[: STRIP - len(strip)]
        return self._page(
            "overview.html",
            "/",
            cache_name=self._store.path.name,
            overview=found,
            unfinished=self._gallery.folder.unfinished(),
            gallery=GalleryPage(strip, None, None),
            filters=Filters(),
        )

    def gallery(self, query: Fields) -> Response:
        """Samples that match the filters. ConfigError for an address that has none of these."""
        start = query.get("start", "0")
        if not start.isdecimal() or len(start) > 12:
            raise ConfigError(f"start {start!r:.40}: it is the number of a sample")
        filters = Filters(**{name: query.get(name, "") for name in Filters.__slots__})
        answer = self._page(
            "gallery.html",
            "/gallery",
            gallery=self._gallery.page(filters, int(start)),
            filters=filters,
            choices=FILTERS,
            datasets=self._gallery.dataset_names(),
        )
        answer.headers["HX-Replace-Url"] = url("/gallery", **filters.to_query())  # without the fields that are empty
        return answer

    def sample(self, query: Fields) -> Response:
        """One sample in all detail; with `reasons`, which may read the models' files, why it is a hit or a miss."""
        details = sample_details(self._gallery, *_named(query), show_photo=self._show_photos)
        explanation, captions = None, list[CutCaption]()
        if self._explainer is not None and "reasons" in query:
            explanation, captions = self._explainer(details["row"], details["num_variants"])
        return self._page(
            "sample.html",
            "/gallery",
            sample=details,
            explains=self._explainer is not None,
            explanation=explanation,
            cut_captions=captions,
            ways=WAYS,
            way=self.thumbnails.way,
        )

    def photo(self, query: Fields) -> Response:
        """The photo of a sample."""
        if not self._show_photos:
            raise RequestRefused("this server shows no photos", status=403, next_step="Start it with --photos")
        row, _, _ = self._gallery.sample(*_named(query))
        return _webp(photo_webp(row), {})

    def health(self, query: Fields) -> Response:
        """What is wrong, with the command that fixes it."""
        manifests = ReadableManifests(self._gallery.folder.path)
        found = status_of(self._store, manifests, self._store.path)
        return self._page(
            "health.html", "/health", health=found, problems=manifests.problems, unfinished=manifests.unfinished()
        )


def _named(query: Fields) -> tuple[str, str]:
    """Dataset and sample_id. ConfigError if one is not given."""
    if "dataset" not in query or "id" not in query:
        raise ConfigError("the address of a sample has a dataset and an id")
    return query["dataset"], query["id"]
