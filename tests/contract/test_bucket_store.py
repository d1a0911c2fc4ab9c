"""The contract of stores, of a bucket: on a real S3 server, with room for no pack on this disk."""

from __future__ import annotations

import pytest
from helpers.swift_server import SwiftServer
from test_remote_store import RemoteStoreContract

from latentcache.remote.bucket import BucketTransport
from latentcache.remote.store import RemoteStore

pytestmark = pytest.mark.extended


class TestBucketStore(RemoteStoreContract):
    @pytest.fixture
    def far(self, swift: SwiftServer, tmp_path) -> BucketTransport:
        prefix = f"contract/{tmp_path.name}"  # one for each test
        return BucketTransport(swift.store("tests", prefix), f"s3://tests/{prefix}")

    @pytest.fixture
    def store(self, far, tmp_path):
        with RemoteStore(far, local=tmp_path / "local", local_max_bytes=0) as store:
            yield store
