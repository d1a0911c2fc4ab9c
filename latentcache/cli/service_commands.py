"""The commands that serve a cache: to other processes and machines, and to a browser on this one."""

from __future__ import annotations

import json
import logging
import secrets
import tempfile
import threading
import webbrowser
from pathlib import Path

from latentcache.cli.options import CACHE_DEFAULTS, LocalTarget, OfCache, Switch
from latentcache.config import TOKEN_VARIABLE, WRITE_TOKEN_VARIABLE
from latentcache.config_file import load_config
from latentcache.errors import ConfigError

logger = logging.getLogger("latentcache")


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
