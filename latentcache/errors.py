"""Every error that latentcache raises. A message names the thing, the value found, what is allowed, the next step."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

NUM_LISTED = 20
"""How many offenders a message lists. The rest are counted."""

logger = logging.getLogger("latentcache")


def listed(lines: Iterable[str]) -> str:
    """Format one indented line per offender. Beyond NUM_LISTED, a last line says how many more there are."""
    lines = list(lines)
    shown = [f"\n  {line}" for line in lines[:NUM_LISTED]]
    if len(lines) > NUM_LISTED:
        shown.append(f"\n  ... and {len(lines) - NUM_LISTED} more")
    return "".join(shown)


def add_note(error: BaseException, note: str) -> None:
    """Call `error.add_note(note)`, or log the note on Python 3.10, which lacks it and shows no notes in tracebacks."""
    if hasattr(error, "add_note"):
        error.add_note(note)
        return
    vars(error)["__notes__"] = [*getattr(error, "__notes__", []), note]
    logger.error("%s: %s", type(error).__name__, note)


class LatentCacheError(Exception):
    """Base of all errors that latentcache raises on purpose. All of them can be pickled."""

    def __reduce__(self) -> tuple[object, ...]:
        # By default unpickling would call the class with the arguments of Exception, which are others.
        return _restored, (type(self), self.args, vars(self))


def _restored(kind: type[LatentCacheError], arguments: tuple[object, ...], fields: dict[str, object]) -> Exception:
    error = kind.__new__(kind, *arguments)
    vars(error).update(fields)
    return error


class ConfigError(LatentCacheError):
    """A setting is wrong. `source` is the file, flag or environment variable; `key` the dotted name of the setting."""

    def __init__(self, message: str, *, source: str | None = None, key: str | None = None):
        self.source, self.key = source, key
        super().__init__(f"{source}: {message}" if source else message)


class DatasetError(LatentCacheError):
    """A dataset, or the file `path` in it, cannot be read."""

    def __init__(self, path: str | Path, detail: str):
        self.path, self.detail = str(path), detail
        super().__init__(f"{path}: {detail}")


class ImageRefused(DatasetError):
    """An image cannot be used. `reason` is one of `types.RefusalReason`; `detail` says what was found and allowed."""

    def __init__(self, path: str | Path, reason: str, detail: str):
        self.reason = reason
        super().__init__(path, detail)
        self.args = (f"{path}: refused ({reason}): {detail}",)


class ForeignFileRefused(ImageRefused):
    """A file of another trainer's cache cannot be used. `reason` is one of `types.RefusalReason`."""


class MetricsError(LatentCacheError):
    """The metrics.json at `path` cannot be read or is invalid. `field` is the first invalid field."""

    def __init__(self, path: str | Path, detail: str, *, field: str | None = None, value: object = None):
        self.path, self.detail, self.field, self.value = str(path), detail, field, value
        super().__init__(
            f"{path}: not a valid metrics.json: {detail}. Give one from validation.path/<step>/, or run that "
            "validation again"
        )


class CheckpointError(LatentCacheError):
    """The checkpoint at `path` cannot be written or read, or does not fit. `offenders` lists what does not fit."""

    def __init__(self, path: str | Path, detail: str, *, offenders: tuple[str, ...] = ()):
        self.path, self.detail, self.offenders = str(path), detail, offenders
        super().__init__(f"{path}: {detail}{listed(offenders)}")


class DeviceError(LatentCacheError):
    """It is ambiguous which device tensors should go to, or they cannot go there."""


class DeviceMismatchError(DeviceError):
    """Tensors that are used together are on different devices.

    `module` is the dotted path of the module or part that uses them. `argument` names the first tensor on the wrong
    device, `found` is that device and `expected` the right one.
    """

    def __init__(self, message: str, *, module: str, argument: str, found: str, expected: str):
        self.module, self.argument, self.found, self.expected = module, argument, found, expected
        super().__init__(message)


class PhaseError(LatentCacheError):
    """A phase cannot be entered, or the training state could not be restored. `offenders` lists the causes."""

    def __init__(self, message: str, *, phase: str, offenders: tuple[str, ...] = ()):
        self.phase, self.offenders = phase, offenders
        super().__init__(f"phase {phase}: {message}{listed(offenders)}")


class PipelineError(LatentCacheError):
    """A trainer's data pipeline cannot be cached or patched. `module` is the pipeline module at fault."""

    def __init__(self, message: str, *, module: str | None = None):
        self.module = module
        super().__init__(f"{module}: {message}" if module else message)


class ItemsError(PipelineError):
    """Some items cannot be cached. The others were stored; `failures` lists each with its reason."""

    def __init__(self, failures: tuple[str, ...], num_items: int, detail: str = ""):
        self.failures, self.num_items = failures, num_items
        super().__init__(
            f"{len(failures)} of {num_items} items cannot be cached{detail}. The others are stored: fix or remove "
            f"these, and the next start encodes only what is missing:{listed(failures)}"
        )


class PipelineStopped(PipelineError):
    """Caching was stopped on request. `num_encoded` of `num_missing` items were stored."""

    def __init__(self, num_encoded: int, num_missing: int):
        self.num_encoded, self.num_missing = num_encoded, num_missing
        super().__init__(
            f"caching was stopped: {num_encoded} of {num_missing} missing items are stored; the next start continues"
        )


class ModelError(LatentCacheError):
    """A model, or its part `part`, cannot be loaded or used."""

    def __init__(self, message: str, *, part: str | None = None):
        self.part = part
        super().__init__(message)


class TrainableEncoderError(ModelError):
    """An encoder is being trained. Its outputs go stale with every step, so they must not be cached."""

    def __init__(self, part: str, parameter: str):
        self.parameter = parameter
        super().__init__(
            f"{part}.{parameter} requires grad: outputs of an encoder that is being trained must not be cached. Call "
            f"{part}.requires_grad_(False) if it is frozen, or do not cache its outputs.",
            part=part,
        )


class EncodeError(ModelError):
    """An encoder's output cannot be stored. `problem` is for example `nan`, `inf`, `all-zero` or `out-of-memory`."""

    def __init__(self, message: str, *, part: str, problem: str):
        self.problem = problem
        super().__init__(message, part=part)


class ExtraMissingError(LatentCacheError, ModuleNotFoundError):
    """The package that provides `module` is not installed. The extra `extra` of latentcache includes it."""

    def __init__(self, module: str, extra: str):
        self.module, self.extra = module, extra
        super().__init__(
            f"the package for {module} is not installed. Run: pip install 'latentcache[{extra}]'", name=module
        )


class EncoderBusyError(LatentCacheError):
    """A missing entry cannot be encoded right now. Retry after `retry_after_s` seconds."""

    def __init__(self, detail: str, *, retry_after_s: int):
        self.retry_after_s = retry_after_s
        super().__init__(f"{detail}; retry after {retry_after_s} s")


class ClusterError(LatentCacheError):
    """The cluster at `address` cannot do the work of a run. `next_step` says what to do."""

    def __init__(self, address: str, detail: str, next_step: str):
        self.address, self.detail, self.next_step = address, detail, next_step
        super().__init__(f"Ray ({address}): {detail}. {next_step}")


class RequestRefused(LatentCacheError):
    """A service refuses a request. `status` is the HTTP status of the response.

    `met` is the value found, `allowed` what is allowed, `next_step` what to do. The client may retry after
    `retry_after_s` seconds. Each may be absent.
    """

    def __init__(
        self,
        detail: str,
        *,
        status: int,
        met: object = None,
        allowed: object = None,
        next_step: str = "",
        retry_after_s: int | None = None,
    ):
        self.status, self.retry_after_s = status, retry_after_s
        self.met, self.allowed, self.next_step = met, allowed, next_step
        super().__init__(f"{detail}. {next_step}" if next_step else detail)


class StoreError(LatentCacheError):
    """The cache cannot do what was requested."""


class CachePathError(StoreError):
    """The file or folder `path` of the cache cannot be used."""

    def __init__(self, path: str | Path, detail: str):
        self.path, self.detail = str(path), detail
        super().__init__(f"{path}: {detail}")


class ReadOnlyError(CachePathError):
    """The cache at `path` cannot be written."""

    def __init__(self, path: str | Path, detail: str = "the cache was opened for reading only"):
        super().__init__(path, detail)


class StoreBusyError(CachePathError):
    """Another process holds the lock that this operation needs."""


class StorageFullError(StoreError):
    """The file system of `path` is full. Entries that were sealed before stay readable."""

    def __init__(self, path: str | Path, needed_bytes: int):
        self.path, self.needed_bytes = str(path), needed_bytes
        super().__init__(
            f"{path}: no space left to write {needed_bytes:,} bytes. All sealed entries are safe: "
            "free some space (`latentcache prune` helps) and run the same command again to continue."
        )


class SchemaError(StoreError):
    """The cache at `path` has format `found`, but this version reads `supported`."""

    def __init__(self, path: str | Path, found: object, supported: int):
        self.path, self.found, self.supported = str(path), found, supported
        super().__init__(
            f"{path}: cache format {found!r}, but this latentcache reads format {supported}. "
            "Use the version that wrote it, or set cache.path to a new directory."
        )


class UnsafeStoreError(CachePathError):
    """`path` was not written by latentcache, and is left untouched."""


class PackError(CachePathError):
    """The pack at `path` cannot be read."""


class IndexDamagedError(CachePathError):
    """The index at `path` is missing, damaged, or has rows that latentcache did not write."""

    def __init__(self, path: str | Path, detail: str):
        super().__init__(path, f"the index cannot be used: {detail}. `latentcache rebuild` restores it from the packs.")


class RemoteError(StoreError):
    """The cache at `url` does not respond, or not as expected.

    `status` is the HTTP status of the response, `kind` the error class that it names, `next_step` what to do.
    """

    def __init__(self, url: str, detail: str, next_step: str, *, status: int | None = None, kind: str | None = None):
        self.url, self.detail, self.next_step, self.status, self.kind = url, detail, next_step, status, kind
        super().__init__(f"{url}: {detail}. {next_step}")


class EntryMissingError(StoreError, KeyError):
    """There is no entry `key`. `reason` says why, as far as known."""

    def __init__(self, key: str, reason: str = "no such entry"):
        self.key, self.reason = key, reason
        super().__init__(f"entry {key}: {reason}; `latentcache precache CONFIG` encodes what a dataset needs")

    __str__ = Exception.__str__


class EntryDamagedError(StoreError):
    """The bytes of entry `key` do not match its digest. If `is_marked`, `precache` will encode it again."""

    def __init__(self, key: str, reason: str, *, is_marked: bool = True):
        self.key, self.reason, self.is_marked = key, reason, is_marked
        first = "" if is_marked else "run `latentcache verify`, then "
        super().__init__(f"entry {key} is damaged: {reason}; {first}`latentcache precache CONFIG` encodes it again")


class SampleError(StoreError):
    """Sample `sample_id` cannot be returned. No other sample is returned instead."""

    def __init__(self, sample_id: str, reason: str, remedy: str):
        self.sample_id, self.reason, self.remedy = sample_id, reason, remedy
        super().__init__(f"sample {sample_id!r}: {reason}. To fix it: {remedy}")
