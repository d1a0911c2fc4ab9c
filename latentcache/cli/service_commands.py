"""The command that serves a cache to other processes and machines."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from latentcache.cli.options import CACHE_DEFAULTS, OfCache, Target
from latentcache.config import load_config

logger = logging.getLogger("latentcache")


def serve(  # noqa: PLR0913 - each is a flag
    target: Target = None,
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
    """
    from latentcache.service.access import token_from
    from latentcache.service.context import ServiceSettings
    from latentcache.service.server import Address, access_for
    from latentcache.service.server import serve as run_server

    address = Address(host=host, port=port, certfile=ssl_certfile, keyfile=ssl_keyfile)
    reading, writing = (
        token_from(token_file, "LATENTCACHE_TOKEN"),
        token_from(write_token_file, "LATENTCACHE_WRITE_TOKEN"),
    )
    access = access_for(address, reading, writing)
    path = options.path(target)

    def announce(url: str) -> None:
        if options.as_json:
            print(json.dumps({"url": url}), flush=True)
        logger.info("%s is served at %s", path, url)

    settings = ServiceSettings(
        cache=path,
        access=access,
        writes=writing is not None or encode is not None,
        encode=None if encode is None else load_config(encode),
        idle_s=idle_s,
    )
    return 128 + run_server(settings, address, announce)


SERVICE_COMMANDS = (serve,)
