"""The commands about caches elsewhere: copies between directories, services and object stores; and the service."""

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
"""A hundred years: dates have an end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """What every command takes that moves packs."""

    manifest: Annotated[list[str] | None, Parameter(negative="")] = None
    """Move only what this manifest needs. It may be given several times."""
    replace: Switch = False
    """Put each manifest in the place of the one that is there, instead of merging them."""
    dry_run: Switch = False
    """Report how many packs and bytes; move nothing."""
    as_json: AsJson = False


OfTransfer = Annotated[TransferOptions, Parameter(name="*")]
TRANSFER_DEFAULTS = TransferOptions()


def push(cache: str, url: str, /, *, options: OfTransfer = TRANSFER_DEFAULTS) -> int:
    """Send the packs and manifests that another place lacks. What is there is not sent again.

    Args:
        cache: The cache: a directory.
        url: The place: a bucket (s3, gs, az), a service (http, https), or a directory.
    """
    return _moved([(cache, url)], options)


def pull(url: str, cache: str, /, *, options: OfTransfer = TRANSFER_DEFAULTS) -> int:
    """Fetch the packs and manifests that a cache lacks. What is there is not fetched again.

    Args:
        url: The place: a bucket (s3, gs, az), a service (http, https), or a directory.
        cache: The cache: a directory, which is made if it is not there.
    """
    return _moved([(url, cache)], options)


def sync(a: str, b: str, /, *, options: OfTransfer = TRANSFER_DEFAULTS) -> int:
    """Push, then pull: both have what either of them had. Of a sample that both have, that of the first counts.

    Args:
        a: A cache: a directory, or a URL.
        b: Another one.
    """
    if options.replace:
        raise ConfigError("--replace does not go with sync, which merges the manifests of both: use push or pull")
    return _moved([(a, b), (b, a)], options)


def merge(out: str, /, *caches: str, options: OfTransfer = TRANSFER_DEFAULTS) -> int:
    """Bring the packs and manifests of several caches into one, as those that several workers filled.

    Of a sample that several have, that of the last one counts.

    Args:
        out: The cache that gets all: a directory, which is made if it is not there, or a URL.
        caches: Those that it gets them from.
    """
    if not caches:
        raise ConfigError("which caches? Give those to merge after the one that gets all: merge OUT CACHE...")
    return _moved([(cache, out) for cache in caches], options)


def _moved(ways: Iterable[tuple[str, str]], options: TransferOptions) -> int:
    from latentcache.remote.transfer import TransferReport, transfer
    from latentcache.utils.progress import ShownProgress

    reports: list[TransferReport] = []
    for source, target in ways:
        try:
            report = transfer(
                source,
                target,
                manifests=options.manifest or (),
                replace=options.replace,
                dry_run=options.dry_run,
                progress=ShownProgress(),
            )
        except LatentCacheError as error:
            if not reports:
                raise
            # What moved before is reported too.
            reports.append(TransferReport(source, target, options.dry_run, refused={"the whole": str(error)}))
            break
        reports.append(report)
    is_ok = all(report.ok for report in reports)
    documents = [report.to_json() for report in reports]
    document = documents[0] if len(reports) == 1 else {"transfers": documents, "ok": is_ok}
    text = "\n".join(report.to_text() for report in reports)
    return finish(document, options.as_json, has_faults=not is_ok, text=text)


def prune_bucket(url: str, *, unfinished: bool, grace: float, dry_run: bool, as_json: bool) -> int:
    """`prune` of a bucket. `grace`: hours for which what is not needed any more stays."""
    from latentcache.remote.transport import open_transport
    from latentcache.remote.upkeep import prune

    if not 0 <= grace <= MAX_GRACE_H:
        raise ConfigError(f"--grace is {grace}; give a number of hours, 0 or more, at most {MAX_GRACE_H:,}")
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
    """Serve a cache over HTTP: several trainers, on one machine or many, share it. It runs until Ctrl-C or SIGTERM.

    With --json the first line of stdout is {"url": ...}, once the server answers.

    Args:
        host: The address to listen on. Any other than this machine's own needs a token.
        port: The port to listen on; 0 takes a free one.
        token_file: A file with the token of clients that may read. Default: the variable LATENTCACHE_TOKEN.
        write_token_file: A file with the token of clients that may also write. Default: LATENTCACHE_WRITE_TOKEN.
            Without it nobody writes.
        ssl_certfile: A certificate (PEM): the server then speaks TLS.
        ssl_keyfile: The certificate's private key (PEM).
        encode: A config: prompts and images that are not cached are encoded with its models, and stored.
        idle_s: After so many seconds without a miss these models leave the device.
        photos: Show the photos on the page too, where their files are on this machine.
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
        logger.info("%s is served at %s", path, url)

    config = options.named_config(target) if encode is None else load_config(encode)
    if encode is not None and options.config is not None:
        raise ConfigError(f"leave it out: the page shows the config of --encode, {encode}", source="--config")
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
    """Look into a cache in a browser: its samples, models and damage. It runs until Ctrl-C.

    Only this machine reaches the page, by an address with a token that is made for it, and nothing is written. With
    --json the first line of stdout is {"url": ...}.

    Args:
        port: The port to listen on; 0 takes a free one.
        no_open: Open no browser: only say where the page is.
    """
    from latentcache.service.server import Address, access_for
    from latentcache.service.server import serve as run_server
    from latentcache.service.state import ServiceSettings

    # Every account of this machine reaches the port.
    address, path, token = Address(port=port), options.path(target), secrets.token_urlsafe(32)

    def announce(url: str) -> None:
        url = f"{url}/login?token={token}"
        if options.as_json:
            print(json.dumps({"url": url}), flush=True)
        logger.info("Ctrl-C ends it. Look at %s", url)  # nothing after it is copied with the token
        if not no_open:
            # Every account can read a browser's command line. It names a file that only this account can read.
            file = Path(folder, "open.html")
            file.write_text(f'<meta http-equiv="refresh" content="0; url={url}">', encoding="ascii")
            # In a thread: a browser in the terminal would keep the server from answering it.
            threading.Thread(target=webbrowser.open, args=(file.as_uri(),), daemon=True).start()

    access, config = access_for(address, token, None), options.named_config(target)
    settings = ServiceSettings(cache=path, access=access, config=config, show_photos=True)
    with tempfile.TemporaryDirectory(prefix="latentcache-") as folder:
        return 128 + run_server(settings, address, announce)


SERVICE_COMMANDS = (serve, browse)
