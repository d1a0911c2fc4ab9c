"""Objects and packs in a bucket: obstore's stores in memory and on disk, and a real S3 server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from latentcache.errors import PackError, RemoteError, SchemaError, StoreError, UnsafeStoreError
from latentcache.identity import key_of
from latentcache.remote.bucket import Bucket
from latentcache.store.base import own_entry
from latentcache.store.directory import pack_name
from latentcache.store.layout import PackRow
from latentcache.store.pack import HEAD_BYTES, new_pack_id, read_row, write_pack
from latentcache.types import Entry, Record


def make_pack(folder: Path, num: int = 3, *, values: int = 50, seed: int = 0) -> tuple[Path, PackRow]:
    """A pack's file, whose name is its id."""
    generator = torch.Generator().manual_seed(seed)
    entries = []
    for number in range(num):
        identity = {"number": number, "seed": seed}
        tensors = {"moments": torch.randn(values, generator=generator)}
        entries.append(own_entry(Entry(Record(key_of(identity), "image", identity, {}), tensors)))
    path = folder / new_pack_id()
    return path, write_pack(path, entries)


def test_a_pack_is_sent_once_listed_read_in_ranges_and_removed(bucket: Bucket, tmp_path: Path) -> None:
    assert bucket.packs() == {}
    path, row = make_pack(tmp_path)
    assert bucket.send(path.name, path) and not bucket.send(path.name, path)
    bucket.put("packs/aa/other.safetensors", b"x")  # what is no pack's name counts for nothing
    bucket.put("packs/README", b"x")
    assert bucket.packs() == {path.name: row.pack.file_bytes}
    data = path.read_bytes()
    assert b"".join(bucket.chunks(path.name)) == data
    assert [bytes(part) for part in bucket.ranges(path.name, [(0, 10), (len(data) - 5, 5)])] == [data[:10], data[-5:]]
    found = bucket.row(path.name, len(data))
    assert found.pack == read_row(path).pack and found.names() == row.names()
    assert bucket.records(path.name, len(data)).record(1).identity == {"number": 1, "seed": 0}
    bucket.remove_packs([path.name, "0" * 32])
    assert bucket.packs() == {}
    for call in (lambda: list(bucket.chunks(path.name)), lambda: bucket.row(path.name, 100)):
        with pytest.raises(FileNotFoundError):
            call()


def test_the_rows_of_many_packs_come_and_those_that_are_gone_or_damaged_do_not(
    bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = [make_pack(tmp_path, seed=seed) for seed in range(5)]
    made.append(make_pack(tmp_path, 1500, values=1, seed=9))
    for path, _ in made:
        bucket.send(path.name, path)
    assert HEAD_BYTES < 1500 * 48  # its keys and digests need a second read
    packs = bucket.packs()
    damaged = new_pack_id()
    bucket.put(pack_name(damaged), b"\0" * 100)
    rows = list(bucket.rows({**packs, damaged: 100, "0" * 32: 100}))
    assert [row.pack.id for row in rows] == list(packs)
    expected = {row.pack.id: row.names() for _, row in made}
    assert {row.pack.id: row.names() for row in rows} == expected
    assert damaged in caplog.text and "Its entries are missing" in caplog.text


def test_a_pack_that_is_shorter_than_it_says_is_found(bucket: Bucket, tmp_path: Path) -> None:
    path, row = make_pack(tmp_path)
    data = path.read_bytes()
    bucket.put(pack_name(path.name), data[:-10])
    with pytest.raises(PackError, match="ends after"):
        bucket.ranges(path.name, [(len(data) - 20, 20)])
    with pytest.raises(PackError):
        bucket.row(path.name, len(data) - 10)
    with pytest.raises(RemoteError, match=f"{len(data) - 10:,} bytes there, and {row.pack.file_bytes:,} here.*Remove"):
        bucket.send(path.name, path)


def test_conditional_writes(bucket: Bucket) -> None:
    assert bucket.read("a/x") is None
    assert bucket.create("a/x", b"1") and bucket.create("a/x", b"1") and not bucket.create("a/x", b"2")
    first = bucket.read("a/x")
    assert first is not None and bytes(first.data) == b"1"
    is_able = "memory" in bucket.url
    assert bucket.can_replace is is_able and bucket.names("") == {"a/x": 1}
    if is_able:
        assert bucket.replace("a/x", b"2", first.version) and not bucket.replace("a/x", b"3", first.version)
        assert not bucket.replace("a/x", b"3", None) and bucket.replace("a/y", b"3", None)
        bucket.remove(["a/y", "a/none"])
        assert not bucket.replace("a/y", b"4", first.version)
    bucket.put("a/x", b"5")
    assert bucket.names("a") == {"a/x": 1} and bucket.names("b") == {}


def test_a_bucket_says_whether_it_is_a_cache(bucket: Bucket) -> None:
    with pytest.raises(StoreError, match=r"no cache here.*latentcache push"):
        bucket.check()
    bucket.check(create=True)
    bucket.check()
    bucket.put("CACHE.json", b'{"format": "latentcache", "schema": 99}')
    with pytest.raises(SchemaError):
        bucket.check()
    bucket.put("CACHE.json", b"{}")
    with pytest.raises(UnsafeStoreError, match="damaged"):
        bucket.check(create=True)


def test_large_packs_go_in_parts(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("latentcache.remote.bucket.PART_BYTES", 5 << 20)
    path, _ = make_pack(tmp_path, 3, values=1 << 20)
    assert path.stat().st_size > 12 << 20
    assert bucket.send(path.name, path) and not bucket.send(path.name, path)
    assert b"".join(bucket.chunks(path.name)) == path.read_bytes()
    bucket.remove_packs([path.name])
    assert bucket.send(path.name, memoryview(path.read_bytes())) and not bucket.send(path.name, path)
    assert b"".join(bucket.chunks(path.name)) == path.read_bytes()


def test_errors_say_what_to_do(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RemoteError, match="tools make a bucket") as caught:
        Bucket.open("s3://no-such-bucket/cache").packs()
    assert caught.value.status == 404 and caught.value.url == "s3://no-such-bucket/cache"
    with pytest.raises(RemoteError, match="does not exist"):
        Bucket.open("s3://no-such-bucket/cache").put("x", b"")
    with pytest.raises(RemoteError, match="tools make a bucket"):
        Bucket.open("s3://no-such-bucket/cache").remove(["x"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    for call in (Bucket.packs, lambda bucket: bucket.put("x", b""), lambda bucket: bucket.read("x")):
        with pytest.raises(RemoteError, match=r"signature.*AWS_ACCESS_KEY_ID") as caught:
            call(Bucket.open(s3_url))
        assert caught.value.status == 403 and "Debug source" not in str(caught.value)
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(RemoteError, match="AWS_ALLOW_HTTP"):
        Bucket.open(s3_url).packs()
    with pytest.raises(RemoteError, match="AZURE_STORAGE_ACCOUNT_NAME"):
        Bucket.open("az://container/cache")


def test_credentials_that_lack_a_half_are_asked_for(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(RemoteError, match=r"SecretAccessKey.*Give credentials"):
        Bucket.open(s3_url)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/none.json")
    with pytest.raises(RemoteError, match=r"service account file.*Give credentials"):
        Bucket.open("gs://bucket/cache")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("AWS_ENDPOINT_URL", "127.0.0.1:9000"),
        ("AWS_ENDPOINT_URL", ""),
        ("AWS_ENDPOINT_URL", "http://host:port"),
        ("AWS_ACCESS_KEY_ID", "test:tester\n"),
    ],
)
def test_a_variable_on_which_obstore_panics_is_an_error(
    s3_url: str, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(RemoteError, match=rf"cannot use.*{variable}"):
        Bucket.open(s3_url).packs()


def test_without_obstore_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(RemoteError, match=r"pip install 'latentcache\[remote\]'"):
        Bucket.open("s3://tests/cache")


def test_a_fork_of_a_process_that_used_a_bucket_is_refused(s3_url: str) -> None:
    """The client would wait for ever there."""
    bucket = Bucket.open(s3_url)
    bucket.packs()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            bucket.packs()
        except RemoteError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    assert b"forkserver" in os.read(read, 10_000)
    os.close(read)


def test_importing_the_package_imports_no_obstore() -> None:
    code = "import sys, latentcache, latentcache.cli.app, latentcache.remote.bucket; print('obstore' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed.strip() == "False"
