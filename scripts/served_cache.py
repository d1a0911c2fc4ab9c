"""A server process on a cache directory, for benchmarks and soaks of the service."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STOP_S = 30.0


@contextmanager
def served(cache: Path, *arguments: str, log: Path | None = None) -> Iterator[tuple[str, int]]:
    """The URL of `latentcache serve` for the block, and its process id. `arguments` are those of the command."""
    command = [sys.executable, "-m", "latentcache", "serve", str(cache), "--port", "0", "--json", *arguments]
    with open(log or "/dev/null", "wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server ended with {process.wait()}; its log is {log or 'not kept'}")
        yield json.loads(line)["url"], process.pid
    finally:
        process.terminate()
        process.wait(STOP_S)
