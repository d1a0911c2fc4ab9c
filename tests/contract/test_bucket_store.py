"""The contract of stores, of a bucket: on a real S3 server, and in a directory as obstore sees one; with a tier too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.swift_server import SwiftServer
from obstore.store import LocalStore
from test_remote_store import RemoteStoreContract

from latentcache.remote.bucket import Bucket
from latentcache.remote.bucket_store import BucketStore

pytestmark = pytest.mark.remote


@pytest.fixture
def s3(swift: SwiftServer) -> Bucket:
    return emptied(Bucket(swift.store("tests", "contract"), "s3://tests/contract"))


def emptied(bucket: Bucket) -> Bucket:
    bucket.remove(bucket.names(""))
    return bucket


class TestBucketStore(RemoteStoreContract):
    @pytest.fixture
    def store(self, s3: Bucket) -> Iterator[BucketStore]:
        with BucketStore(s3, create=True) as store:
            yield store


class TestBucketStoreWithLocalTier(RemoteStoreContract):
    @pytest.fixture
    def store(self, s3: Bucket, tmp_path: Path) -> Iterator[BucketStore]:
        with BucketStore(s3, create=True, local=tmp_path / "local") as store:
            yield store


class TestBucketStoreOfFiles(RemoteStoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[BucketStore]:
        bucket = Bucket(LocalStore(tmp_path / "bucket", mkdir=True), "file://bucket")
        with BucketStore(bucket, create=True, local=tmp_path / "local", local_max_bytes=0) as store:
            yield store
