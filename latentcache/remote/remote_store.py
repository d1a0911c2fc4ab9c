"""RemoteStore: the entries of a service, checked here, and kept on this machine's disk if there is a place for them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from typing_extensions import Unpack, override

from latentcache.cache_config import RemoteOptions
from latentcache.errors import PackError, ReadOnlyError, RemoteError
from latentcache.identity import key_of
from latentcache.remote.fetched import FetchedPack
from latentcache.remote.fetching_store import FetchingStore
from latentcache.remote.http import (
    RETRY_S,
    UPLOAD_ANSWER_S,
    UPLOAD_BUSY_S,
    MakeBody,
    ServiceAnswer,
    ServiceConnection,
    strange_answer,
    understood,
)
from latentcache.store.base import Description, EntryArrays, StoreStats, check_key, record_of
from latentcache.store.disk import DiskStore
from latentcache.store.layout import KEY_BYTES, PackRow, description_of
from latentcache.types import Entry, Record

READ_KEYS = 512
"""In one request that reads entries. A batch has a few for each of its samples."""
FIND_KEYS = 4096
"""In one request that needs no entry's bytes."""
LISTED_KEYS = 1 << 16
"""In one page of all keys, of 2 MiB."""
ENCODED_PROMPTS = 32
"""In one request that encodes prompts: as many as a service takes."""
ENCODE_S = 600.0
"""How long a service may take to encode them: it loads its models first."""
_CREATED, _UNAUTHORIZED, _NOT_FOUND, _TOO_LARGE = 201, 401, 404, 413
_SENT_BYTES = 1 << 20

logger = logging.getLogger("latentcache")


class RemoteStore(FetchingStore):
    """A `base.Store` in a service (`latentcache serve`) at `url`. Processes and threads may share it, also forks.

    The entries of a read come in one request, and each is compared with its digest here. What was damaged on its way is
    fetched once more. The options are those of `cache_config.CacheConfig`: with `local` entries that were read are kept
    in that directory, and read from there the next time, unless `read_only`, which writes nothing at all. `read_only`
    None: as the token allows, which is asked when it matters. RemoteError: the service does not answer within
    `retry_s`, or not as it should.
    """

    def __init__(self, url: str, *, read_only: bool | None = None, **options: Unpack[RemoteOptions]):
        self._read_only = read_only
        self.http = ServiceConnection(url, token=options.get("token"), retry_s=options.get("retry_s", RETRY_S))
        self.url = self.http.url
        super().__init__(read_only=read_only, options=options)

    @override
    def check_open(self) -> None:
        self.http.check_open()

    @property
    @override
    def read_only(self) -> bool:  # type: ignore[override]  # nobody sets it, and the service is asked only if need be
        if self._read_only is None:
            try:
                self.http.request("POST", "entries:remove", document={"keys": []})  # what a reading token may not do
                self._read_only = False
            except ReadOnlyError:
                self._read_only = True
            except RemoteError as error:
                if error.status != _UNAUTHORIZED or self.http.has_token:
                    raise  # a token that the server refuses is a mistake; without one, reading may be allowed
                self._read_only = True
        return self._read_only

    @override
    def check_writable(self) -> None:
        self.http.check_open()
        if self.read_only:
            raise ReadOnlyError(
                self.url,
                "is open for reading only here: give the server's writing token with token=... or LATENTCACHE_TOKEN, "
                "and do not open it with read_only=True",
            )

    # Writing

    @override
    def _send(self, path: Path, row: PackRow) -> int:
        answer = self.put_pack(path.name, lambda: _parts_of(path), row.pack.file_bytes)
        if answer.status != _CREATED:
            return len(row.keys)  # a first attempt arrived, and its answer was lost
        with understood(answer) as document:
            return int(document["num_added"])

    def put_pack(self, pack: str, body: MakeBody, num_bytes: int) -> ServiceAnswer:
        """Upload a pack of so many bytes by its id. The service checks it whole before it seals it."""
        return self.http.request(
            "PUT",
            f"packs/{pack}",
            body=body,
            headers={"Content-Type": "application/octet-stream", "Content-Length": str(num_bytes)},
            answer_s=UPLOAD_ANSWER_S,
            busy_s=UPLOAD_BUSY_S,
        )

    @override
    def remove(self, keys: Iterable[str]) -> int:
        wanted = [check_key(key) for key in dict.fromkeys(keys)]
        self.check_writable()
        num_removed = 0
        for chunk in _chunks(wanted, FIND_KEYS):
            with understood(self.http.request("POST", "entries:remove", document={"keys": chunk})) as document:
                num_removed += int(document["num_removed"])
        if self.tier is not None:
            self.tier.forget(wanted)
        return num_removed

    @override
    def encode_prompts(self, prompts: Sequence[tuple[str, bool]]) -> list[str] | None:
        """The keys of prompts: pairs of a text and whether it is negative. The service encodes those that it lacks.

        None: it encodes nothing (`latentcache serve --encode`). RemoteError, also for a prompt that it refuses.
        """
        keys: list[str] = []
        for start in range(0, len(prompts), ENCODED_PROMPTS):
            asked = [
                {"text": text, "negative": negative} for text, negative in prompts[start : start + ENCODED_PROMPTS]
            ]
            document = {"prompts": asked, "return": "keys"}
            answer = self.http.request(
                "POST", "prompts:encode", document=document, also=[_NOT_FOUND], answer_s=ENCODE_S
            )
            if answer.status == _NOT_FOUND:
                return None
            with understood(answer) as found:
                keys += [check_key(entry["key"]) for entry in found["entries"]]
        if len(keys) != len(prompts):
            raise strange_answer(self.url, f"{len(keys)} keys of {len(prompts)} prompts")
        return keys

    # Looking up

    @override
    def find(self, keys: Iterable[str]) -> set[str]:
        self.http.check_open()
        found: set[str] = set()
        for chunk in _chunks([check_key(key) for key in dict.fromkeys(keys)], FIND_KEYS):
            with understood(self.http.request("POST", "entries:find", document={"keys": chunk})) as document:
                found.update(chunk if len(document["found"]) == len(chunk) else document["found"])
        return found

    @override
    def keys(self) -> Iterator[str]:
        after = ""
        while True:
            answer = self.http.request("GET", f"keys?limit={LISTED_KEYS}" + (f"&after={after}" if after else ""))
            if len(answer.data) % KEY_BYTES:
                raise strange_answer(answer.url, f"{len(answer.data):,} bytes, which are no keys")
            page = [answer.data[at : at + KEY_BYTES].hex() for at in range(0, len(answer.data), KEY_BYTES)]
            yield from page
            if answer.headers.get("Latentcache-More") != "1" or not page:
                return
            after = page[-1]

    def _about(self, key: str) -> ServiceAnswer:
        return self.http.request("GET", f"entries/{check_key(key)}")

    @override
    def describe(self, key: str) -> Description:
        if (here := self._local(key, DiskStore.describe)) is not None:
            return here
        with understood(self._about(key)) as document:
            fields = sorted(document["fields"].items())
            return dict(description_of(*[(name, each["dtype"], tuple(each["shape"])) for name, each in fields]))

    @override
    def record(self, key: str) -> Record:
        if (here := self._local(key, DiskStore.record)) is not None:
            return here
        with understood(self._about(key)) as found:
            if key_of(found["identity"]) != key:
                raise ValueError(f"its identity does not give the key {key}")
            return Record(key, found["kind"], found["identity"], found["provenance"])

    # Reading

    @override
    def get(self, key: str) -> Entry:
        if (here := self._local(key, DiskStore.get)) is not None:
            return here
        (entry,) = self.fetch([check_key(key)]).owned()
        return Entry(record_of(key, entry.kind, entry.record), entry.tensors, entry.ragged)

    @override
    def _fetch_rows(self, keys: Sequence[str]) -> Mapping[str, EntryArrays]:
        found: dict[str, EntryArrays] = {}
        for chunk in _chunks(keys, READ_KEYS):
            found |= self._fetch_chunk(chunk)
        return found

    def _fetch_chunk(self, keys: Sequence[str]) -> Mapping[str, EntryArrays]:
        """The arrays of these entries, by one request, or by more where the service finds one too large."""
        try:
            return self.fetch(keys).rows
        except RemoteError as error:
            if error.status != _TOO_LARGE or len(keys) < 2:
                raise
        half = len(keys) // 2
        return {**self._fetch_chunk(keys[:half]), **self._fetch_chunk(keys[half:])}

    def fetch(self, keys: Sequence[str]) -> FetchedPack:
        """The entries of one request. EntryMissingError, EntryDamagedError, RemoteError."""
        problem: PackError | None = None
        for _ in range(2):
            answer = self.http.request("POST", "entries:read", document={"keys": list(keys), "fields": None})
            try:
                pack = FetchedPack.read(answer.data, keys, self.url)
            except PackError as error:
                logger.warning("%s. It was damaged on its way, or before.", error)
                problem = error
                continue
            if self.tier is not None:
                self.tier.add(pack)
            return pack
        raise RemoteError(
            self.url,
            f"sent entries twice that are not what was stored: {problem}",
            "Run `latentcache verify` on the server's machine; if all is well there, the network is the cause.",
        )

    # The whole

    @override
    def damaged(self) -> dict[str, str]:
        with understood(self.http.request("GET", "damaged")) as document:
            return dict(document["damaged"])

    @override
    def stats(self) -> StoreStats:
        with understood(self.http.request("GET", "stats")) as document:
            return StoreStats(**document)

    def close(self) -> None:
        """Close the connections. What the local tier has in memory goes to its disk."""
        self.http.close()
        super().close()


def _parts_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(_SENT_BYTES):
            yield part


def _chunks(items: Sequence[str], size: int) -> list[list[str]]:
    return [list(items[start : start + size]) for start in range(0, len(items), size)]
