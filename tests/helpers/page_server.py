"""The app of a service in a thread of this process, for tests that look at its page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers.page_caches import write_cache
from helpers.photo_files import write_photo
from helpers.serving import running_here

from latentcache.dataset.manifest import Manifest
from latentcache.service.auth import Access
from latentcache.service.server import Address
from latentcache.service.state import ServiceSettings
from latentcache.types import Refusal

REFUSED = Refusal("broken.jpg", "/nowhere/broken.jpg", "truncated", "the JPEG data ends after 12,345 bytes")
LONG_CAPTION = " ".join(f"word{number}" for number in range(90))


@contextmanager
def page_of(cache: Path, *, access: Access | None = None, **page: Any) -> Iterator[str]:
    """Serve a cache for the block. Returns the URL. `page` are fields of ServiceSettings."""
    settings = ServiceSettings(cache=cache, access=access or Access(), **page)
    with running_here(settings, Address(port=0)) as url:
        yield url


def photo_cache(folder: Path, num_photos: int = 40) -> Manifest:
    """`folder/cache` of photos in two buckets, one refused file and one caption that is too long; a validation set."""
    names = [f"{number:03d}.png" for number in range(num_photos)]
    sizes = [(192, 128), (128, 192), (130, 192)]
    photos = {
        name: write_photo(folder / "photos" / name, number, sizes[number % 3]) for number, name in enumerate(names)
    }
    captions = {name: [f"a red house, number {int(name[:3])}"] for name in photos}
    captions["001.png"] = [LONG_CAPTION, "a street at night"]
    manifest = write_cache(folder / "cache", "photos", photos, captions, refused=[REFUSED])
    held_out = {name: photos[name] for name in names[:2]}
    write_cache(folder / "cache", "held-out", held_out, captions, role="validation")
    return manifest
