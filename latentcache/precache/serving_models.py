"""The encoders of a service or a cluster: they stay on the device from the first entry until they are unloaded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from contextlib import ExitStack

from latentcache.config import Config
from latentcache.identity import TextIdentity
from latentcache.models.model_loader import Models
from latentcache.models.running import free_cached_memory
from latentcache.precache.encodings import choose_encodings, for_images
from latentcache.precache.report import Failure, Report
from latentcache.precache.stages import ImageStage, RunContext, TextStage
from latentcache.precache.tasks import Task
from latentcache.types import Entry, Kind
from latentcache.utils.progress import Progress


class ServingModels:
    """A config's models, for encoding a few entries at a time exactly as precache does.

    Only the encoders of one kind of entry are on the device; a request for another kind replaces them. Models are
    identified on construction, which fixes `encodings` and thereby the keys, and are loaded only if the memo lacks
    facts. Not thread-safe. Raises ConfigError, DeviceError, ModelError.
    """

    def __init__(self, config: Config, models: Models, memo: MutableMapping[str, str]):
        self._encode, self._models = config.encode, models
        self.loaded: Kind | None = None
        """The kind of entry whose encoders are on the device."""
        self._on_device = ExitStack()
        self.encodings = choose_encodings(config, models, memo)
        models.release()

    def encode(
        self,
        tasks: Sequence[Task],
        store: Callable[[Entry], None],
        fail: Callable[[str, Failure], None],
        *,
        group_of: Callable[[Task], Hashable] | None = None,
        stop: threading.Event | None = None,
    ) -> Report:
        """Encode entries of one kind. Returns the stage's counts.

        `store` receives each finished entry, and `fail` the key of each that cannot be made. Entries with equal results
        of `group_of`, by default those of one size, may share a batch. Setting `stop` leaves the rest undone.
        Raises DeviceError if the encoders do not fit on the device, and ModelError if they cannot be loaded or their
        files changed since the keys were computed. A caller's own models are not compared again.
        """
        kind, encode, report = tasks[0].kind, self._encode, Report()
        if self.loaded != kind:
            self._leave_device()
        encodings = for_images(self.encodings, encode, [tasks]) if kind == "image" else self.encodings
        stop = stop or threading.Event()
        context = RunContext(encode, encodings, self._models, store, fail, report, Progress(), stop)
        stage = TextStage(context) if kind == "text" else ImageStage(context)
        if self.loaded != kind:
            with ExitStack() as stack:
                stage.place(stack)
                self._on_device, self.loaded = stack.pop_all(), kind
        groups: dict[Hashable, list[Task]] = {}
        for task in tasks:
            groups.setdefault((group_of or _group_of)(task), []).append(task)
        stage.run(list(groups.values()))
        return report

    def unload(self) -> None:
        """Unload all models and free their memory. The next `encode` loads them again."""
        self.close()
        free_cached_memory(self.encodings.vae.device)

    def close(self) -> None:
        """Unload all models. A caller's own models return to where they were."""
        self._leave_device()
        self._models.release()

    def _leave_device(self) -> None:
        try:
            self._on_device.close()
        finally:
            self.loaded = None


def _group_of(task: Task) -> Hashable:
    """What the members of a batch must share."""
    if isinstance(task.identity, TextIdentity):
        return task.identity.encoding.recipe
    geometry = task.identity.preparation.geometry
    return geometry.extent if geometry.num_frames is None else task.key  # a clip alone, as in a plan
