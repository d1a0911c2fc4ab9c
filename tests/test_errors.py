"""Errors as other processes get them: of a DataLoader's worker, of a cluster."""

from __future__ import annotations

import pickle

import pytest

from latentcache import errors
from latentcache.errors import ClusterError, EntryMissingError, LatentCacheError, RemoteError, StorageFullError


@pytest.mark.parametrize(
    "error",
    [
        StorageFullError("cache", 1 << 30),
        EntryMissingError("ab" * 32),
        RemoteError("http://host", "does not answer", "Start it.", status=503),
        ClusterError("auto", "has no GPU", "Add one."),
        errors.EncodeError("nan", part="vae", problem="nan"),
        errors.DeviceMismatchError("no", module="unet", argument="x", found="cpu", expected="cuda:0"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_travels_whole(error: LatentCacheError) -> None:
    error.add_note("of a worker")
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is type(error) and str(there) == str(error) and vars(there) == vars(error)


def test_every_error_can_travel() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, LatentCacheError)]
    assert len(kinds) > 20
    for kind in kinds:
        error = kind.__new__(kind, "a message")
        assert type(pickle.loads(pickle.dumps(error))) is kind
