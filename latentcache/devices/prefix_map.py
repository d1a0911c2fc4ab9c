"""What a caller declares of parts and of what lies below them: the longest dotted prefix wins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from latentcache.errors import DeviceError

T = TypeVar("T")


class Declared(Generic[T]):
    """Values by dotted prefix: `unet` speaks for all of the part, `unet.mid_block` for that block.

    `name` is the caller's argument, for messages. Raises DeviceError for a key that is below none of `parts`.
    """

    def __init__(self, name: str, values: Mapping[str, T] | None, parts: Iterable[str]):
        self._name, self._values = name, dict(values or {})
        self._unmet = {key for key in self._values if key not in parts}
        for key in self._unmet:
            if not any(key.startswith(f"{part}.") for part in parts):
                raise DeviceError(f"{name}[{key!r}]: there is no such part; the parts are {', '.join(parts)}")

    def of(self, path: str) -> T | None:
        """The value of the longest key that is `path` or lies above it, or None."""
        keys = [key for key in self._values if path == key or path.startswith(f"{key}.")]
        self._unmet.difference_update(keys)
        return self._values[max(keys, key=len)] if keys else None

    def check_met(self) -> None:
        """DeviceError for keys below which nothing was asked for: a name that is misspelt declares nothing."""
        if self._unmet:
            raise DeviceError(f"{self._name}: nothing in the parts is called {', '.join(sorted(self._unmet))}")
