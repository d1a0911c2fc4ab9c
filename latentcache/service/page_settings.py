"""What the page shows beyond the cache itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from latentcache.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSettings:
    """Settings of the page.

    `config` gives the reasons of hits and misses, its VAE decodes pictures where that is quick, and it names the folder
    of validations. `validation` names that folder without a config. `show_photos` shows the photos that the manifests
    name, by their paths on this machine: a client that may write manifests chooses them.
    """

    config: Config | None = None
    validation: Path | None = None
    show_photos: bool = False

    @property
    def validation_folder(self) -> Path | None:
        """Where the results of validations are, if that is known."""
        if self.validation is not None or self.config is None:
            return self.validation
        return self.config.validation.path
