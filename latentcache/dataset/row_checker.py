"""RowChecker: whether the rows of a manifest can be read, without keeping them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from latentcache.dataset.manifest_row import RowLine
from latentcache.identity import is_key

_DIGEST_BYTES = 16


class RowChecker:
    """Refuses the rows that `RowTableBuilder` refuses, and keeps 16 bytes of each, whatever is in it."""

    def __init__(self) -> None:
        self._digests = bytearray()
        self.without_image: int | None = None
        """The number of the first row that has neither an image nor a refusal, as only prompts may."""

    def __len__(self) -> int:
        return len(self._digests) // _DIGEST_BYTES

    def add_lines(self, lines: Sequence[RowLine]) -> None:
        """Check these lines. ValueError, adding none, for a key or a source that is no digest."""
        _check("key", [ref.key for line in lines for ref in line.images])
        _check("key", [ref.key for line in lines for ref in line.captions])
        _check("key", [ref.key for line in lines for ref in line.parts])
        _check("source", [ref.source for line in lines for ref in line.parts])
        _check("source", [line.source for line in lines if line.source is not None])
        for line in lines:
            if self.without_image is None and not line.images and line.refusal is None:
                self.without_image = len(self)
            self._digests += xxhash.xxh3_128_digest(line.sample_id.encode("utf-8", "surrogatepass"))

    def finish(self) -> RowChecker:
        """The same: it has what `RowTable` has and a check needs."""
        return self

    def repeated(self) -> int | None:
        """The number of a row whose sample_id is that of a row before; None if no two are equal."""
        high, low = np.frombuffer(self._digests, np.uint64).reshape(-1, 2).T
        order = np.lexsort((low, high))  # equal ones keep their order
        high, low = high[order], low[order]
        again = order[1:][(high[1:] == high[:-1]) & (low[1:] == low[:-1])]
        return int(again.min()) if len(again) else None


def _check(what: str, values: list[str]) -> None:
    for value in values:
        if not is_key(value):
            raise ValueError(f"{what} is {value!r:.80}, where 64 hexadecimal digits are needed")
