"""The commands that move packs and manifests between caches: directories, services and object stores."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from latentcache.cli.options import AsJson, Switch
from latentcache.cli.output import bucket_pruned_text, finish
from latentcache.errors import ConfigError, LatentCacheError

if TYPE_CHECKING:
    from latentcache.remote.transfer import TransferReport

MAX_GRACE_H = 24 * 36525
"""A hundred years: dates have an end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """What every command takes that moves packs."""

    manifest: Annotated[list[str] | None, Parameter(negative="")] = None
    """Move only what this manifest needs. It may be given several times."""
    replace: Switch = False
    """Put each manifest in the place of the one that is there, instead of merging them."""
    dry_run: Switch = False
    """Report how many packs and bytes; move nothing."""
    as_json: AsJson = False


OfTransfer = Annotated[TransferOptions, Parameter(name="*")]
TRANSFER_DEFAULTS = TransferOptions()


def push(cache: str, url: str, /, *, options: OfTransfer = TRANSFER_DEFAULTS) -> int:
    """Send the packs and manifests that another place lacks. What is there is not sent again.

    Args:
        cache: The cache: a directory.
        url: The place: a bucket (s3, gs, az), a service (http, https), or a directory.
    """
    return _moved([(cache, url)], options)


def pull(url: str, cache: str, /, *, options: OfTransfer = TRANSFER_DEFAULTS) -> int:
    """Fetch the packs and manifests that a cache lacks. What is there is not fetched again.

    Args:
        url: The place: a bucket (s3, gs, az), a service (http, https), or a directory.
        cache: The cache: a directory, which is made if it is not there.
    """
    return _moved([(url, cache)], options)


def sync(a: str, b: str, /, *, options: OfTransfer = TRANSFER_DEFAULTS) -> int:
    """Push, then pull: both have what either of them had. Of a sample that both have, that of the first counts.

    Args:
        a: A cache: a directory, or a URL.
        b: Another one.
    """
    if options.replace:
        raise ConfigError("--replace does not go with sync, which merges the manifests of both: use push or pull")
    return _moved([(a, b), (b, a)], options)


def merge(out: str, /, *caches: str, options: OfTransfer = TRANSFER_DEFAULTS) -> int:
    """Bring the packs and manifests of several caches into one, as those that several workers filled.

    Of a sample that several have, that of the last one counts.

    Args:
        out: The cache that gets all: a directory, which is made if it is not there, or a URL.
        caches: Those that it gets them from.
    """
    if not caches:
        raise ConfigError("which caches? Give those to merge after the one that gets all: merge OUT CACHE...")
    return _moved([(cache, out) for cache in caches], options)


def _moved(ways: Iterable[tuple[str, str]], options: TransferOptions) -> int:
    from latentcache.remote.transfer import TransferReport, transfer
    from latentcache.utils.progress import ShownProgress

    reports: list[TransferReport] = []
    for source, target in ways:
        try:
            report = transfer(
                source,
                target,
                manifests=options.manifest or (),
                replace=options.replace,
                dry_run=options.dry_run,
                progress=ShownProgress(),
            )
        except LatentCacheError as error:
            if not reports:
                raise
            # What moved before is reported too.
            reports.append(TransferReport(source, target, options.dry_run, refused={"the whole": str(error)}))
            break
        reports.append(report)
    is_ok = all(report.ok for report in reports)
    documents = [report.to_json() for report in reports]
    document = documents[0] if len(reports) == 1 else {"transfers": documents, "ok": is_ok}
    text = "\n".join(report.to_text() for report in reports)
    return finish(document, options.as_json, has_faults=not is_ok, text=text)


def prune_bucket(url: str, *, unfinished: bool, grace: float, dry_run: bool, as_json: bool) -> int:
    """`prune` of a bucket. `grace`: hours for which what is not needed any more stays."""
    from latentcache.remote.transport import open_transport
    from latentcache.remote.upkeep import prune

    if not 0 <= grace <= MAX_GRACE_H:
        raise ConfigError(f"--grace is {grace}; give a number of hours, 0 or more, at most {MAX_GRACE_H:,}")
    with open_transport(url) as transport:
        report = prune(transport, grace_h=grace, unfinished=unfinished, dry_run=dry_run)
    return finish(report, as_json, has_faults=bool(report.unreadable), text=bucket_pruned_text(report))


REMOTE_COMMANDS = (push, pull, sync, merge)
