"""A store in a bucket behind a network that fails: nothing is lost, nothing is wrong, an error has a next step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.relay import Relay, relaying
from helpers.remote_samples import entries_of
from helpers.swift_server import SwiftServer
from test_bucket_store_reads import ENTRIES, KEYS, assert_right

from latentcache.errors import RemoteError
from latentcache.remote.bucket import BucketTransport
from latentcache.remote.store import RemoteStore, open_remote
from latentcache.remote.transport import ANY_VERSION

RETRY_S = 2.0
NEW = entries_of(50)


def opened(url: str, **options: Any) -> RemoteStore:
    return open_remote(url, create=True, **options)[0]


@pytest.fixture
def relay(swift: SwiftServer, swift_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    """A relay before the server, to which `swift_url` leads from here on. The bucket has the entries."""
    with opened(swift_url) as store:
        store.add(ENTRIES)
    with relaying(swift.address) as relay:
        monkeypatch.setenv("AWS_ENDPOINT_URL", relay.url)
        yield relay


def drops(relay: Relay, num: int) -> None:
    """The first `num` answers do not come."""
    left = iter(range(num))
    relay.change = lambda path, status, data: data if next(left, None) is None else None


def truncates(relay: Relay, num: int) -> None:
    left = iter(range(num))
    relay.change = lambda path, status, data: data if next(left, None) is None else data[: len(data) // 2]


def is_busy(relay: Relay, num: int) -> None:
    left = iter(range(num))
    relay.answer = lambda method, path: None if next(left, None) is None else 503


@pytest.mark.parametrize("begin", [drops, truncates, is_busy])
def test_a_fault_that_passes_is_not_seen_and_one_that_lasts_is_an_error(
    swift_url: str, relay: Relay, begin: Callable[[Relay, int], None], tmp_path: Path
) -> None:
    new_keys = {entry.record.key for entry in NEW}
    with (
        opened(swift_url, retry_s=RETRY_S, local=tmp_path / "one") as store,
        opened(swift_url, retry_s=RETRY_S, local=tmp_path / "two") as other,
    ):
        for call in (
            lambda: store.find(KEYS) == set(KEYS),
            lambda: assert_right(store, KEYS[:2]) is None,
            lambda: store.add(NEW[:1]) == 1,
        ):
            begin(relay, 1)
            assert call()
        store.tier.remove(store.tier.packs())
        begin(relay, 1 << 30)
        adding = [] if begin is truncates else [lambda: store.add(NEW)]  # that answer has nothing to cut
        for call in (lambda: store.rows(KEYS[:2]), lambda: other.find(KEYS[:1]), *adding):
            began = time.monotonic()
            with pytest.raises(RemoteError, match="run the same again: nothing that was stored is lost") as caught:
                call()
            assert caught.value.url == swift_url and time.monotonic() - began < 10 * RETRY_S
        relay.change = relay.answer = None
        assert_right(store, KEYS)
        assert store.damaged() == {} and store.add(NEW) in (0, len(NEW) - 1), "it may have arrived"
        assert_right(store, KEYS)
        assert store.find(new_keys) == new_keys
        assert store.get(NEW[0].record.key).tensors["moments"].equal(NEW[0].tensors["moments"])


def test_what_cannot_be_removed_in_passing_is_tried_again(swift_url: str, relay: Relay) -> None:
    """Each object has a request: where one removes many, what failed stands in an answer that nobody tries again."""
    bucket = BucketTransport.open(swift_url, retry_s=RETRY_S)
    bucket.write("photos", b"1", version=ANY_VERSION)
    relay.requests.clear()
    is_busy(relay, 1)
    bucket.remove(["photos"])
    assert [method for method, _ in relay.requests] == ["DELETE", "DELETE"] and not bucket.list("photos")
    relay.answer = lambda method, path: 403
    with pytest.raises(RemoteError, match=r"photos cannot be removed: .* credentials"):
        bucket.remove(["photos"])
