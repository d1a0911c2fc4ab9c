"""Manifests in a bucket: several writers at once lose nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from latentcache.dataset.manifest import Manifest, manifest_parts
from latentcache.dataset.manifest_folder import update_manifest
from latentcache.dataset.row_table import ImageRef, Row
from latentcache.errors import DatasetError, ReadOnlyError, StoreBusyError
from latentcache.remote.bucket import BucketTransport
from latentcache.remote.manifests import RemoteManifests
from latentcache.remote.transport import ANY_VERSION
from latentcache.types import Crop, Geometry, Size

COMMON = {"schema": 1, "salt": "", "text_encoding": {"name": "a"}}
IMAGES = (ImageRef("b" * 64, Geometry(Size(64, 64), Size(64, 64), Crop(0, 0), Size(64, 64))),)


def make(*numbers: int, path: str = "", common: dict[str, object] | None = None, name: str = "photos") -> Manifest:
    rows = {f"{number}.png": Row(f"{number}.png", f"{path}{number}.png", None, IMAGES, ()) for number in numbers}
    return Manifest(name, "train", 1, common or COMMON, rows)


def ids(manifest: Manifest | None) -> set[int]:
    assert manifest is not None
    return {int(sample_id.removesuffix(".png")) for sample_id in manifest.rows}


def test_what_was_written_is_read_and_replaced_as_a_whole(bucket: BucketTransport) -> None:
    manifests = RemoteManifests(bucket)
    assert manifests.names() == [] and manifests.read("photos") is None and manifests.unfinished() == []
    manifests.begin("photos")
    assert manifests.unfinished() == ["photos"] and manifests.names() == []
    manifests.write(make(1, 2))
    manifests.write(make(7, name="my.photos"))
    assert manifests.unfinished() == []
    assert RemoteManifests(bucket).read("photos") == make(1, 2) and RemoteManifests(bucket).names() == [
        "my.photos",
        "photos",
    ]
    manifests.write(make(2, 3))
    assert manifests.read("photos") == make(2, 3), "1 is gone: this writer knew of it"
    RemoteManifests(bucket).write(make(4))
    assert manifests.read("photos") == make(4)
    assert len(bucket.list("manifests")) == 2, "what was replaced is removed"


def test_two_writers_that_read_the_same_lose_nothing(bucket: BucketTransport) -> None:
    RemoteManifests(bucket).write(make(1))
    first, second = RemoteManifests(bucket), RemoteManifests(bucket)
    for writer in (first, second):
        read = writer.read("photos")
        assert read is not None and ids(read) == {1}
    first.write(make(1, 2))
    with pytest.raises(StoreBusyError, match="another client replaced the manifest photos"):
        second.write(make(1, 3, path="newer/"))
    assert ids(second.read("photos")) == {1, 2}
    second.write(replace(make(1, 3, path="newer/"), rows={**make(2).rows, **make(1, 3, path="newer/").rows}))
    found = RemoteManifests(bucket).read("photos")
    assert ids(found) == {1, 2, 3}
    assert found is not None and found.rows["1.png"].path == "newer/1.png"
    third = RemoteManifests(bucket)
    third.update(
        lambda: replace(read, rows={"9.png": make(9).rows["9.png"]}) if (read := third.read("photos")) else None
    )
    assert ids(RemoteManifests(bucket).read("photos")) == {9} and len(bucket.list("manifests")) == 1


def test_many_writers_at_once_lose_nothing(bucket: BucketTransport) -> None:
    """Each adds its samples one by one, as machines do that push to one place."""
    errors: list[BaseException] = []

    def add(first: int) -> None:
        manifests = RemoteManifests(bucket)

        def with_one(number: int) -> Callable[[], Manifest]:
            def made() -> Manifest:
                there = manifests.read("photos")
                return make(*({number} if there is None else ids(there) | {number}))

            return made

        try:
            for number in range(first, first + 4):
                update_manifest(manifests, with_one(number))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=add, args=(10 * number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert ids(RemoteManifests(bucket).read("photos")) == {10 * a + b for a in range(3) for b in range(4)}


def test_a_damaged_manifest_is_named_and_replaced(bucket: BucketTransport) -> None:
    data = b"".join(manifest_parts(make(1)))
    bucket.write("manifests/photos.safetensors", data.replace(b"1.png", b"2.png"), version=ANY_VERSION)
    manifests = RemoteManifests(bucket)
    with pytest.raises(DatasetError, match=r"/manifests/photos\.safetensors.*its digest differs"):
        manifests.read("photos")
    manifests.write(make(3))
    assert manifests.read("photos") == make(3)


def test_an_old_manifest_is_named_and_replaced(bucket: BucketTransport) -> None:
    """It counts: `prune` must not remove what it lists as if nothing needed it."""
    bucket.write("manifests/photos.jsonl", b'{"format": 2, "name": "photos"}\n', version=ANY_VERSION)
    manifests = RemoteManifests(bucket)
    assert manifests.names() == ["photos"]
    with pytest.raises(DatasetError, match=r"manifests/photos\.jsonl.*older version.*latentcache precache CONFIG"):
        manifests.read("photos")
    manifests.write(make(3))
    assert manifests.names() == ["photos"] and manifests.read("photos") == make(3)
    assert not [name for name in bucket.list("manifests") if name.endswith(".jsonl")]


def test_a_reader_writes_nothing(bucket: BucketTransport) -> None:
    manifests = RemoteManifests(bucket, read_only=True)
    for call in (lambda: manifests.write(make(1)), lambda: manifests.begin("photos")):
        with pytest.raises(ReadOnlyError):
            call()
    assert bucket.list("") == {}
