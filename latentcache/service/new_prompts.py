"""Prompts that a service has encoded, on their way into the manifest of prompts."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable

from latentcache.dataset.manifest import Manifest, prompts_name
from latentcache.dataset.manifest_row import Row
from latentcache.errors import LatentCacheError
from latentcache.precache.encodings import TextEncodings
from latentcache.precache.plan import TextTask
from latentcache.precache.prompts import add_prompts, prompt_row, prompts_common
from latentcache.precache.workspace import Workspace

WAIT_S = 2.0
"""Prompts wait so long for others before they are written, and ten times as long as the last writing took."""
RETRY_S = 60.0

logger = logging.getLogger("latentcache")


class NewPrompts:
    """Collects prompts, because the manifest is replaced as a whole. One thread uses it.

    A process that is killed loses those of the last seconds: their entries are there all the same, and a later request
    finds them, but `prune` does not know them.
    """

    def __init__(self, workspace: Workspace, encodings: TextEncodings, salt: str):
        self._workspace, self._common = workspace, prompts_common(encodings, salt)
        self._rows: dict[str, Row] = {}
        self._wait_s = WAIT_S
        self.due_at = math.inf
        """When `write` should be called, by the monotonic clock."""

    def add(self, tasks: Iterable[TextTask]) -> None:
        """Add prompts whose entries are stored."""
        for task in tasks:
            if not self._rows:
                self.due_at = time.monotonic() + self._wait_s
            self._rows[task.sample_id] = prompt_row(task)

    def write(self) -> None:
        """Add them to the manifest. Where that fails it is logged, and they wait for the next call."""
        if not self._rows:
            return
        manifest = Manifest(prompts_name(self._common), "prompts", 1, self._common, self._rows)
        started = time.monotonic()
        try:
            add_prompts(self._workspace, manifest, always=False)
        except LatentCacheError as error:
            self.due_at = time.monotonic() + RETRY_S
            message = "%d prompts that were encoded are not in the manifest of prompts yet: %s"
            logger.error(message, len(self._rows), error)
            return
        self._rows, self.due_at = {}, math.inf
        self._wait_s = max(WAIT_S, 10 * (time.monotonic() - started))
