"""The commands that copy caches between directories, services and buckets, and those that serve one."""

from __future__ import annotations

import json
import logging
import secrets
import tempfile
import threading
import webbrowser
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from latentcache.cli.options import CACHE_DEFAULTS, AsJson, LocalTarget, OfCache, Switch
from latentcache.cli.output import bucket_pruned_text, finish
from latentcache.config import TOKEN_VARIABLE, WRITE_TOKEN_VARIABLE
from latentcache.config_file import load_config
from latentcache.errors import ConfigError, LatentCacheError

if TYPE_CHECKING:
    from latentcache.remote.transfer import TransferReport

logger = logging.getLogger("latentcache")

MAX_GRACE_H = 24 * 36525
"""A hundred years. Later dates would overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """Options of every command that copies packs."""

    manifest: Annotated[list[str] | None, Parameter(negative="")] = None
    """Copy only what this manifest needs. Can be repeated."""
    replace: Switch = False
    """Replace existing manifests instead of merging them."""
    dry_run: Switch = False
    """Report how many packs and bytes, but copy nothing."""
    as_json: AsJson = False


OfTransfer = Annotated[TransferOptions, Parameter(name="*")]
TRANSFER_DEFAULTS = TransferOptions()


def push(cache: str, url: str, /, *, options: OfTransfer = TRANSFER_DEFAULTS) -> int:
    """Upload the packs and manifests that the target lacks.

    Args:
        cache: Directory of the cache.
        url: Target: a bucket (s3, gs, az), a service (http, https), or a directory.
    """
    return _moved([(cache, url)], options)


def pull(url: str, cache: str, /, *, options: OfTransfer = TRANSFER_DEFAULTS) -> int:
    """Download the packs and manifests that a cache lacks.

    Args:
        url: Source: a bucket (s3, gs, az), a service (http, https), or a directory.
        cache: Directory of the cache. Created if it does not exist.
    """
    return _moved([(url, cache)], options)


def sync(a: str, b: str, /, *, options: OfTransfer = TRANSFER_DEFAULTS) -> int:
    """Push, then pull, so that both caches have everything. For samples that differ, the first cache wins.

    Args:
        a: Directory or URL of a cache.
        b: Directory or URL of another cache.
    """
    if options.replace:
        raise ConfigError("--replace cannot be used with sync, which merges both sides: use push or pull")
    return _moved([(a, b), (b, a)], options)


def merge(out: str, /, *caches: str, options: OfTransfer = TRANSFER_DEFAULTS) -> int:
    """Copy the packs and manifests of several caches into one, for example those that several workers filled.

    For samples that differ, the last cache wins.

    Args:
        out: Target: a directory, created if it does not exist, or a URL.
        caches: The caches to copy from.
    """
    if not caches:
        raise ConfigError("which caches? Give them after the target: latentcache merge OUT CACHE...")
    return _moved([(cache, out) for cache in caches], options)


def _moved(ways: Iterable[tuple[str, str]], options: TransferOptions) -> int:
    from latentcache.remote.transfer import TransferReport, transfer
    from latentcache.utils.progress import Progress

    reports: list[TransferReport] = []
    for source, target in ways:
        try:
            report = transfer(
                source,
                target,
                manifests=options.manifest or (),
                replace=options.replace,
                dry_run=options.dry_run,
                progress=Progress(shown=True),
            )
        except LatentCacheError as error:
            if not reports:
                raise
            # Still report what was copied before.
            reports.append(TransferReport(source, target, options.dry_run, refused={"the whole": str(error)}))
            break
        reports.append(report)
    is_ok = all(report.ok for report in reports)
    documents = [report.to_json() for report in reports]
    document = documents[0] if len(reports) == 1 else {"transfers": documents, "ok": is_ok}
    text = "\n".join(report.to_text() for report in reports)
    return finish(document, options.as_json, has_faults=not is_ok, text=text)


def prune_bucket(url: str, *, unfinished: bool, grace: float, dry_run: bool, as_json: bool) -> int:
    """Prune a bucket. Packs that are no longer needed stay for `grace` hours."""
    from latentcache.remote.transport import open_transport
    from latentcache.remote.upkeep import prune

    if not 0 <= grace <= MAX_GRACE_H:
        raise ConfigError(f"--grace is {grace}; give a number of hours from 0 to {MAX_GRACE_H:,}")
    with open_transport(url) as transport:
        report = prune(transport, grace_h=grace, unfinished=unfinished, dry_run=dry_run)
    return finish(report, as_json, has_faults=bool(report.unreadable), text=bucket_pruned_text(report))


REMOTE_COMMANDS = (push, pull, sync, merge)


def serve(  # noqa: PLR0913 - each is a flag
    target: LocalTarget = None,
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 8765,
    token_file: Path | None = None,
    write_token_file: Path | None = None,
    ssl_certfile: Path | None = None,
    ssl_keyfile: Path | None = None,
    encode: Path | None = None,
    idle_s: float = 300.0,
    photos: Switch = False,
    options: OfCache = CACHE_DEFAULTS,
) -> int:
    """Serve a cache over HTTP, so that trainers on one or many machines can share it. Runs until Ctrl-C or SIGTERM.

    With --json the first line of stdout is {"url": ...}, printed once the server is up.

    Args:
        host: Address to listen on. Anything but 127.0.0.1 or localhost needs a token.
        port: Port to listen on. 0 picks a free one.
        token_file: File with the token for reading. Default: the environment variable LATENTCACHE_TOKEN.
        write_token_file: File with the token for reading and writing. Default: LATENTCACHE_WRITE_TOKEN. Without one
            the cache is read-only.
        ssl_certfile: Certificate (PEM). Enables TLS.
        ssl_keyfile: Private key of the certificate (PEM).
        encode: A config. Prompts and images that are not cached are encoded with its model, and stored.
        idle_s: Move that model off the device after this many seconds without a miss.
        photos: Show the photos on the page, if their files are on this machine.
    """
    from latentcache.service.auth import token_from
    from latentcache.service.server import Address, access_for
    from latentcache.service.server import serve as run_server
    from latentcache.service.state import ServiceSettings

    address = Address(host=host, port=port, certfile=ssl_certfile, keyfile=ssl_keyfile)
    reading = token_from(token_file, TOKEN_VARIABLE)
    writing = token_from(write_token_file, WRITE_TOKEN_VARIABLE)
    access, path = access_for(address, reading, writing), options.path(target)

    def announce(url: str) -> None:
        if options.as_json:
            print(json.dumps({"url": url}), flush=True)
        logger.info("serving %s at %s", path, url)

    config = options.named_config(target) if encode is None else load_config(encode)
    if encode is not None and options.config is not None:
        raise ConfigError(f"remove it: the page shows the config of --encode, {encode}", source="--config")
    settings = ServiceSettings(
        cache=path,
        access=access,
        writes=writing is not None or encode is not None,
        encode=None if encode is None else config,
        idle_s=idle_s,
        config=config,
        show_photos=photos,
    )
    return 128 + run_server(settings, address, announce)


def browse(
    target: LocalTarget = None,
    /,
    *,
    port: int = 0,
    no_open: Switch = False,
    options: OfCache = CACHE_DEFAULTS,
) -> int:
    """Look at a cache in the browser: its samples, models and damage. Runs until Ctrl-C.

    The page is read-only, and reachable from this machine only, through a URL with a random token. With --json the
    first line of stdout is {"url": ...}.

    Args:
        port: Port to listen on. 0 picks a free one.
        no_open: Do not open a browser, only print the URL.
    """
    from latentcache.service.server import Address, access_for
    from latentcache.service.server import serve as run_server
    from latentcache.service.state import ServiceSettings

    # All users of this machine can reach the port.
    address, path, token = Address(port=port), options.path(target), secrets.token_urlsafe(32)

    def announce(url: str) -> None:
        url = f"{url}/login?token={token}"
        if options.as_json:
            print(json.dumps({"url": url}), flush=True)
        logger.info("Press Ctrl-C to stop. Open %s", url)  # nothing follows that could be copied with the token
        if not no_open:
            # All users can read a browser's command line, so it gets a file that only this user can read.
            file = Path(folder, "open.html")
            file.write_text(f'<meta http-equiv="refresh" content="0; url={url}">', encoding="ascii")
            # In a thread: a terminal browser would block the server that it waits for.
            threading.Thread(target=webbrowser.open, args=(file.as_uri(),), daemon=True).start()

    access, config = access_for(address, token, None), options.named_config(target)
    settings = ServiceSettings(cache=path, access=access, config=config, show_photos=True)
    with tempfile.TemporaryDirectory(prefix="latentcache-") as folder:
        return 128 + run_server(settings, address, announce)


SERVICE_COMMANDS = (serve, browse)
