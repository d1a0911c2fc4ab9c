"""Errors as other processes get them: of a DataLoader's worker, of a cluster."""

from __future__ import annotations

import pickle

from latentcache import errors
from latentcache.errors import LatentCacheError


def test_an_error_travels_whole() -> None:
    for error in (
        errors.StorageFullError("cache", 1 << 30),
        errors.RemoteError("http://host", "does not answer", "Start it.", status=503),
        errors.DeviceMismatchError("no", module="unet", argument="x", found="cpu", expected="cuda:0"),
    ):
        error.add_note("of a worker")
        there = pickle.loads(pickle.dumps(error))
        assert type(there) is type(error) and str(there) == str(error) and vars(there) == vars(error)


def test_every_error_can_travel() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, LatentCacheError)]
    assert len(kinds) > 20
    for kind in kinds:
        error = kind.__new__(kind, "a message")
        assert type(pickle.loads(pickle.dumps(error))) is kind
