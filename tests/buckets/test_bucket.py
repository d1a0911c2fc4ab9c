"""Objects in a bucket: obstore's store in memory, two over HTTP that compare, and a real S3 server that cannot."""

from __future__ import annotations

import itertools
import os
import time

import pytest
from helpers.comparing_server import ComparingServer
from helpers.relay import relaying
from helpers.remote_samples import make_manifest
from helpers.swift_server import SwiftServer
from obstore.store import MemoryStore

from latentcache.errors import RemoteError, SchemaError, StoreError, UnsafeStoreError
from latentcache.remote.bucket import BucketTransport
from latentcache.remote.manifests import RemoteManifests
from latentcache.remote.transport import ANY_VERSION

_numbers = itertools.count()


@pytest.fixture(params=["memory", "s3", "gs"])
def bucket(
    request: pytest.FixtureRequest, object_server: ComparingServer, monkeypatch: pytest.MonkeyPatch
) -> BucketTransport:
    """An empty bucket. S3 compares by ETags, Google's store by generations."""
    if request.param == "memory":
        return BucketTransport(MemoryStore(), "memory://bucket")
    for name, value in object_server.environment(request.param).items():
        monkeypatch.setenv(name, value)
    return BucketTransport.open(f"{request.param}://team/cache")


@pytest.fixture
def swift_url(swift: SwiftServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty place on a real S3 server, which cannot compare. The environment leads to it."""
    for name, value in swift.environment().items():
        monkeypatch.setenv(name, value)
    return f"s3://tests/{next(_numbers)}/cache"


def test_files_are_written_listed_read_and_removed(bucket: BucketTransport) -> None:
    assert bucket.list("packs") == {}
    assert bucket.write("packs/a", b"0123456789", version=ANY_VERSION)
    assert bucket.write("packs/b", memoryview(b"x"), version=ANY_VERSION)
    listed = bucket.list("packs")
    assert {name: each.num_bytes for name, each in listed.items()} == {"packs/a": 10, "packs/b": 1}
    assert all(abs(each.modified - time.time()) < 60 for each in listed.values()) and bucket.list("other") == {}
    assert bytes(bucket.read("packs/a")[0]) == b"0123456789"
    assert bytes(bucket.read("packs/a", 2, 3)[0]) == b"234" and bytes(bucket.read("packs/a", 8)[0]) == b"89"
    bucket.remove(["packs/a", "packs/b", "packs/none"])
    assert bucket.list("packs") == {}
    with pytest.raises(FileNotFoundError):
        bucket.read("packs/a")


def test_a_file_is_replaced_only_if_it_is_the_one_that_was_read(bucket: BucketTransport) -> None:
    assert bucket.write("a/x", b"1", version=None) and not bucket.write("a/x", b"2", version=None)
    first = bucket.read("a/x")[1]
    assert bucket.write("a/x", b"2", version=first) and not bucket.write("a/x", b"3", version=first)
    second = bucket.read("a/x")[1]
    assert first != second and bytes(bucket.read("a/x")[0]) == b"2"
    bucket.remove(["a/x"])
    assert not bucket.write("a/x", b"4", version=second), "it is gone"
    assert bucket.write("a/x", b"5", version=None) and bucket.write("a/x", b"6", version=ANY_VERSION)
    bucket.check_compares()
    assert bucket.list("").keys() == {"a/x"}, "what was tried out is gone"


def test_a_bucket_says_whether_it_is_a_cache(bucket: BucketTransport) -> None:
    with pytest.raises(StoreError, match=r"no cache here.*latentcache push"):
        bucket.check()
    bucket.check(create=True)
    bucket.check()
    bucket.write("CACHE.json", b'{"format": "latentcache", "schema": 99}', version=ANY_VERSION)
    with pytest.raises(SchemaError):
        bucket.check()
    bucket.write("CACHE.json", b"{}", version=ANY_VERSION)
    with pytest.raises(UnsafeStoreError, match="damaged"):
        bucket.check(create=True)


def test_a_store_that_cannot_compare_is_refused(swift_url: str) -> None:
    """It would lose the work of one of two machines. What needs no comparing works."""
    bucket = BucketTransport.open(swift_url, retry_s=1)
    assert bucket.write("x", b"1", version=ANY_VERSION) and bytes(bucket.read("x")[0]) == b"1"
    manifests = RemoteManifests(bucket)
    for call in (lambda: manifests.begin("photos"), lambda: manifests.write(make_manifest())):
        with pytest.raises(RemoteError, match="does not support conditional writes") as caught:
            call()
        assert "latentcache serve" in caught.value.next_step
    assert bucket.list("probes") == bucket.list("manifests") == {}


def test_large_packs_go_in_parts(swift_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("latentcache.remote.bucket.PART_BYTES", 5 << 20)
    bucket, data = BucketTransport.open(swift_url), os.urandom(11 << 20)
    assert bucket.write("packs/large", memoryview(data), version=ANY_VERSION)
    assert bytes(bucket.read("packs/large")[0]) == data


def test_what_cannot_be_removed_in_passing_is_tried_again(
    swift: SwiftServer, swift_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each object has a request: where one removes many, what failed stands in an answer that nobody tries again."""
    answers = [503]
    with relaying(swift.address) as relay:
        monkeypatch.setenv("AWS_ENDPOINT_URL", relay.url)
        bucket = BucketTransport.open(swift_url, retry_s=3.0)
        bucket.write("photos", b"1", version=ANY_VERSION)
        relay.requests.clear()
        relay.answer = lambda method, path: answers.pop() if answers else None
        bucket.remove(["photos"])
        assert [method for method, _ in relay.requests] == ["DELETE", "DELETE"] and not bucket.list("photos")
        relay.answer = lambda method, path: 403
        with pytest.raises(RemoteError, match=r"photos cannot be removed: .* credentials"):
            bucket.remove(["photos"])


def test_errors_say_what_to_do(swift_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = BucketTransport.open("s3://no-such-bucket/cache")
    for call in (lambda: absent.list(""), lambda: absent.write("x", b"", version=ANY_VERSION)):
        with pytest.raises(RemoteError, match=r"does not exist.*Check the URL") as caught:
            call()
        assert caught.value.status == 404 and caught.value.url == absent.url
    for name, value, message in (
        ("AWS_SECRET_ACCESS_KEY", "wrong", r"signature.*AWS_ACCESS_KEY_ID"),
        ("AWS_ENDPOINT_URL", "127.0.0.1:9000", "AWS_ENDPOINT_URL"),  # obstore panics
    ):
        with monkeypatch.context() as patch, pytest.raises(RemoteError, match=message):
            patch.setenv(name, value)
            BucketTransport.open(swift_url).list("packs")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/none.json")
    with pytest.raises(RemoteError, match=r"service account file.*GOOGLE_APP"):
        BucketTransport.open("gs://a/b")


def test_a_fork_of_a_process_that_used_a_bucket_is_refused(swift_url: str) -> None:
    """The client would wait for ever there."""
    bucket = BucketTransport.open(swift_url)
    bucket.list("packs")
    if (child := os.fork()) == 0:
        try:
            with pytest.raises(RemoteError, match="forkserver"):
                bucket.list("packs")
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
