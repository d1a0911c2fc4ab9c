"""ServicePlace: a service that packs and manifests move to, and from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from typing_extensions import override

from latentcache.dataset.manifest_folder import Manifests
from latentcache.errors import EntryDamagedError, EntryMissingError, RemoteError
from latentcache.remote.http import ServiceAnswer, understood
from latentcache.remote.places import FarPlace
from latentcache.remote.remote_manifests import RemoteManifests
from latentcache.remote.remote_store import RemoteStore
from latentcache.store.base import is_pack_id
from latentcache.store.layout import PackRow
from latentcache.store.pack import PackRecords, RangedBytes, row_in

_PART, _MISSING = 206, 404
_SENT_BYTES = 1 << 20
_SUSPECTS = 1024  # in one request: the service reads each before it answers
_CHECK_S = 300.0


class ServicePlace(FarPlace):
    """The service at `url`. Its own disk has the packs; the client's has nothing of it."""

    def __init__(self, url: str, *, retry_s: float | None = None):
        self.store = RemoteStore(url) if retry_s is None else RemoteStore(url, retry_s=retry_s)
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
    def row(self, pack: str) -> PackRow:
        source = RangedBytes(f"{self.name}, pack {pack}", self._sizes[pack], partial(self._range, pack))
        row = row_in(pack, source)[0]
        names = row.names()
        found = self.store.find(names)
        row.live[:] = [key in found for key in names]
        return row

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

    # Verifying

    @override
    def damaged(self) -> dict[str, str]:
        return self.store.damaged()

    @override
    def live(self) -> set[str]:
        return set(self.store.keys())

    @override
    def confirmed(self, suspects: Mapping[str, str], unreadable: Iterable[str]) -> dict[str, str]:
        """Those of the suspects that are damaged: an entry may lie in another pack too, be removed, or have moved.

        With a writing token the service reads them from its own disk, and marks what is damaged.
        """
        damaged: dict[str, str] = {}
        keys = sorted(suspects)
        for chunk in (keys[start : start + _SUSPECTS] for start in range(0, len(keys), _SUSPECTS)):
            if self.store.read_only:
                damaged |= {key: suspects[key] for key in chunk if not self._is_readable(key)}
                continue
            answer = self.store.http.request("POST", "verify", document={"keys": chunk}, answer_s=_CHECK_S)
            with understood(answer) as document:
                damaged |= {str(key): str(reason) for key, reason in document["damaged"].items()}
        return damaged

    def _is_readable(self, key: str) -> bool:
        """Whether an entry that is there can be read. One that was removed meanwhile is not damaged."""
        try:
            self.store.fetch([key])
        except EntryMissingError:
            return True
        except (EntryDamagedError, RemoteError):
            return False
        return True

    def close(self) -> None:
        """Close the connections."""
        self.store.close()


def _parts_of(data: bytes | memoryview) -> Iterator[memoryview]:
    view = memoryview(data)
    return (view[start : start + _SENT_BYTES] for start in range(0, len(view), _SENT_BYTES))
