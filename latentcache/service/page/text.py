"""The page's templates, and how they word numbers, sizes, times and addresses."""

from __future__ import annotations

from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined

import latentcache
from latentcache.errors import ConfigError
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
