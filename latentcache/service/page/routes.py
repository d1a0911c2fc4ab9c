"""The routes of the page at `/`. It works without scripts; with them the gallery loads more samples by itself."""

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
from latentcache.service.page.sample import Explainer, photo_webp, sample_details
from latentcache.service.page.thumbnails import DEFAULT_SIDE, SIDES, WAYS, Thumbnails
from latentcache.service.page.views import (
    FILTERS,
    STATES,
    Gallery,
    ReadableManifests,
    environment,
    filters_of,
    query_of,
    rendered,
    url,
)
from latentcache.service.state import ServiceState

PAGES = (("/", "Overview"), ("/gallery", "Gallery"), ("/health", "Health"))
_NUM_ON_OVERVIEW = 8
"""How many samples the overview shows."""
HEADERS = {
    # Scripts, styles and pictures come from this server alone, never inline; no page is shown in a frame.
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
NOT_KEPT = {"Cache-Control": "no-store"}
DECODED_HEADER = "Latentcache-Decoded"

Fields = Mapping[str, str]
Side = Annotated[int, Query(ge=SIDES.start, lt=SIDES.stop, description="Longest side of the picture, in pixels.")]


def page_router(state: ServiceState, pages: Pages) -> APIRouter:
    """The routes of the pages, and of the pictures that they show.

    Each page is made in a thread. An error is shown as a page with its message. If reading needs a token, a form asks
    for it, and a cookie that scripts cannot read remembers it.
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
        """The cached image, decoded, as a WebP picture at most `side` pixels high and wide.

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
        """Show the form, or log in by the token in the address, which `latentcache browse` opens."""
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
            return pages.login_form(403, problem="This is not a token of this server.")
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
    """Attributes of the cookie. `secure` follows X-Forwarded-Proto if a proxy in front of the server sends it."""
    return {"path": "/", "httponly": True, "samesite": "lax", "secure": request.url.scheme == "https"}


def _webp(data: bytes, headers: Mapping[str, str]) -> Response:
    return Response(data, 200, {**HEADERS, "Cache-Control": "private, max-age=3600", **headers}, "image/webp")


class Pages:
    """What each address shows, by the fields of its query. Thread-safe."""

    def __init__(self, state: ServiceState):
        environment()
        self._store, settings = state.store, state.settings
        self._gallery = Gallery(self._store, state.manifests)
        self._has_sessions, self._show_photos = not state.access.is_open, settings.show_photos
        self._explainer, decoder = None, None
        if settings.config is not None:
            # The served cache counts, not the one that the config names.
            cache = settings.config.cache.model_copy(update={"path": self._store.path})
            config = settings.config.model_copy(update={"cache": cache})
            from latentcache.service.page.vae_decoder import decoder_of  # imports diffusers

            self._explainer, decoder = Explainer(config), decoder_of(config)
        self.thumbnails = Thumbnails(self._store, decoder)
        # Part of the addresses of pictures, which browsers cache.
        self._decoded_by = "latents" if decoder is None else "vae"

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

    def wrong_address(self, request: Request) -> Response:
        """The response to an unknown address outside of the API."""
        if request.scope["latentcache.role"] < Role.READ:
            return self.login_form(401)
        return self.problem(RequestRefused("This server has no page at this address", status=404))

    def problem(self, error: LatentCacheError) -> Response:
        """The page that says what is wrong."""
        status = problem_of(error).status_code
        title = {404: "Not found", 422: "This address is not valid"}.get(status, "This page cannot be shown")
        return self._page("problem.html", status=status, title=title, detail=str(error))

    def login_form(self, status: int, problem: str = "") -> Response:
        """The form that asks for a token."""
        return self._page("login.html", status=status, problem=problem)

    def overview(self, query: Fields) -> Response:
        """What the cache holds, and the first samples of its datasets."""
        found, tiles = self._gallery.overview(), list[Any]()
        for dataset in found["datasets"]:
            if dataset["manifest"] is not None and len(tiles) < _NUM_ON_OVERVIEW:
                tiles += self._gallery.page({"dataset": dataset["name"]})["tiles"]
        return self._page(
            "overview.html",
            "/",
            cache_name=self._store.path.name,
            overview=found,
            unfinished=self._gallery.folder.unfinished(),
            gallery={"tiles": tiles[:_NUM_ON_OVERVIEW], "next_start": None},
            filters={},
        )

    def gallery(self, query: Fields) -> Response:
        """Samples that match the filters. ConfigError for an invalid filter or start."""
        start = query.get("start", "0")
        if not start.isdecimal() or len(start) > 12:
            raise ConfigError(f"start is {start!r:.40}; give how many samples to skip")
        filters = filters_of(query)
        answer = self._page(
            "gallery.html",
            "/gallery",
            gallery=self._gallery.page(filters, int(start)),
            filters=filters,
            choices=FILTERS,
            datasets=self._gallery.dataset_names(),
        )
        answer.headers["HX-Replace-Url"] = url("/gallery", **filters)  # without empty fields
        return answer

    def sample(self, query: Fields) -> Response:
        """One sample; with `reasons` in the query, which may read the models' files, also why it is a hit or a miss."""
        details = sample_details(self._gallery, *_named(query), show_photo=self._show_photos)
        explanation, captions = None, list[tuple[str, str]]()
        if self._explainer is not None and "reasons" in query:
            explanation, captions = self._explainer(details["row"], details["num_variants"])
        return self._page(
            "sample.html",
            "/gallery",
            sample=details,
            explains=self._explainer is not None,
            explanation=explanation,
            captions=captions,
            ways=WAYS,
            way=self.thumbnails.way,
        )

    def photo(self, query: Fields) -> Response:
        """The photo of a sample."""
        if not self._show_photos:
            raise RequestRefused("this server does not show photos", status=403, next_step="Start it with --photos")
        manifest, number = self._gallery.sample(*_named(query))
        return _webp(photo_webp(manifest.rows.row(number)), {})

    def health(self, query: Fields) -> Response:
        """What is wrong with the cache, and the commands that fix it."""
        manifests = ReadableManifests(self._gallery.folder.path)
        found = status_of(self._store, manifests, self._store.path)
        return self._page(
            "health.html", "/health", health=found, problems=manifests.problems, unfinished=manifests.unfinished()
        )


def _named(query: Fields) -> tuple[str, str]:
    """Dataset and sample_id. ConfigError if one is missing."""
    if "dataset" not in query or "id" not in query:
        raise ConfigError("the address of a sample needs a dataset and an id")
    return query["dataset"], query["id"]
