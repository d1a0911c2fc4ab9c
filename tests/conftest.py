"""Small datasets and configs for the whole suite."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.photo_files import write_photos
from helpers.tiny_configs import tiny_config
from hypothesis import settings

from latentcache.cli.app import main
from latentcache.config import Config

# On a busy machine an example can take longer, which says nothing about the code.
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # inherited from the shell of a background job
    signal.signal(signal.SIGINT, signal.default_int_handler)


WITH_SERVERS = (
    *("tests/service/", "tests/remote/", "tests/contract/test_remote_store.py", "tests/buckets/", "tests/scaleout/"),
)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests that need a server process in the lane `extended`: a server takes seconds to start."""
    for item in items:
        if item.nodeid.startswith(WITH_SERVERS):
            item.add_marker("extended")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore the developer's own environment variables."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def swift() -> Iterator[Any]:
    """A real S3 server with a bucket named `tests`."""
    from helpers.swift_server import swift_serving  # needs packages that other tests do not

    with swift_serving() as server:
        server.make_bucket("tests")
        yield server


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """The photos of `write_photos`."""
    return write_photos(tmp_path / "photos")


@pytest.fixture
def make_config(tmp_path: Path, photos: Path) -> Callable[..., Config]:
    """Make a config of `photos` with the tiny model and changed settings: make_config(**{"encode.clip_skip": 1})."""
    return partial(tiny_config, tmp_path)


@pytest.fixture
def config(make_config: Callable[..., Config]) -> Config:
    """The config of `make_config`, with its cache filled."""
    from latentcache.precache.run import run_precache  # imports torch, which most tests do not need

    config = make_config()
    run_precache(config)
    return config


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def run_json(run: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, Any]]:
    """Run a command with --json: exit code and document."""

    def run_json(*arguments: object) -> tuple[int, Any]:
        code, out, _ = run(*arguments, "--json")
        return code, json.loads(out)

    return run_json


@pytest.fixture
def run_ok(run_json: Callable[..., tuple[int, Any]]) -> Callable[..., Any]:
    """Run a command with --json that has to succeed, and return its document."""

    def run_ok(*arguments: object) -> Any:
        code, document = run_json(*arguments)
        assert code == 0, document
        return document

    return run_ok


@pytest.fixture(scope="session")
def script() -> Any:
    """scripts/train_lora.py, as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "scripts"))
        import train_lora

    return train_lora
