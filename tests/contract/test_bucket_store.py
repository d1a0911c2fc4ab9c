"""The contract of stores, of a bucket: on a real S3 server, with room for no pack on this disk."""

from __future__ import annotations

import itertools

import pytest
from helpers.swift_server import SwiftServer
from test_remote_store import RemoteStoreContract

from latentcache.remote.bucket import BucketTransport
from latentcache.remote.store import RemoteStore

pytestmark = pytest.mark.remote
_numbers = itertools.count()


class TestBucketStore(RemoteStoreContract):
    @pytest.fixture
    def far(self, swift: SwiftServer) -> BucketTransport:
        number = next(_numbers)
        return BucketTransport(swift.store("tests", f"contract/{number}"), f"s3://tests/contract/{number}")

    @pytest.fixture
    def store(self, far, tmp_path):
        with RemoteStore(far, local=tmp_path / "local", local_max_bytes=0) as store:
            yield store
