"""ServicePlace: a service that packs and manifests move to, and from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from typing_extensions import override

from latentcache.dataset.manifest import Manifests
from latentcache.remote.http import ServiceAnswer, understood
from latentcache.remote.places import Place
from latentcache.remote.remote_manifests import RemoteManifests
from latentcache.remote.remote_store import RemoteStore
from latentcache.store.base import is_pack_id
from latentcache.store.pack import PackRecords, row_in
from latentcache.store.tensor_file import RangedBytes

_PART, _MISSING = 206, 404
_SENT_BYTES = 1 << 20


class ServicePlace(Place):
    """The service at `url`. Its own disk has the packs; the client's has nothing of it."""

    def __init__(self, url: str):
        self.store = RemoteStore(url)
        self.name = self.store.url
        self.manifests: Manifests = RemoteManifests(self.store.http)
        self._sizes: dict[str, int] = {}

    def check_writable(self) -> None:
        """ReadOnlyError if the token does not allow writing."""
        self.store.check_writable()

    @override
    def packs(self) -> dict[str, int]:
        with understood(self.store.http.request("GET", "packs")) as document:
            self._sizes = {each["id"]: int(each["num_bytes"]) for each in document["packs"] if is_pack_id(each["id"])}
        return dict(self._sizes)

    @override
    def keys_of(self, pack: str) -> list[str]:
        source = RangedBytes(f"{self.name}, pack {pack}", self._sizes[pack], partial(self._range, pack))
        names = row_in(pack, source)[0].names()
        found = self.store.find(names)
        return [key for key in names if key in found]

    def _range(self, pack: str, offset: int, num_bytes: int) -> bytes:
        answer = self._get(pack, {"Range": f"bytes={offset}-{offset + num_bytes - 1}"})
        return answer.data if answer.status == _PART else answer.data[offset : offset + num_bytes]

    @override
    def find(self, keys: Iterable[str]) -> set[str]:
        return self.store.find(keys)

    @override
    def read(self, pack: str) -> bytes:
        return self._get(pack, {}).data

    def _get(self, pack: str, headers: dict[str, str]) -> ServiceAnswer:
        answer = self.store.http.request("GET", f"packs/{pack}", headers=headers, also=[_MISSING])
        if answer.status == _MISSING:
            raise FileNotFoundError(pack)
        return answer

    @override
    def take(self, records: PackRecords, data: bytes | memoryview) -> None:
        self.store.put_pack(records.row.pack.id, lambda: _parts_of(data), len(data))

    def close(self) -> None:
        """Close the connections."""
        self.store.close()


def _parts_of(data: bytes | memoryview) -> Iterator[memoryview]:
    view = memoryview(data)
    return (view[start : start + _SENT_BYTES] for start in range(0, len(view), _SENT_BYTES))
