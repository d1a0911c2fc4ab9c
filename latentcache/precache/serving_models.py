"""The encoders of a service or a cluster: on their device from the first entry on, until they are unloaded."""

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
    """A config's models, for entries that are encoded a few at a time, as precache encodes them.

    The encoders of one kind of entries are on the device; those of another kind take their place when it is asked for.
    The keys follow from `encodings`, which are those of the time when this was made. The models are identified then,
    and loaded only for what is not known of them. Afterwards one thread may use it.
    Raises ConfigError, DeviceError, ModelError.
    """

    def __init__(self, config: Config, models: Models, memo: MutableMapping[str, str]):
        self._encode, self._models = config.encode, models
        self.loaded: Kind | None = None
        """The kind of entries whose encoders are on the device."""
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
        """Encode entries of one kind. `store` gets each that was made, `fail` the key of each that cannot be made.

        `group_of` says which entries may share a batch, by default those of one size. `stop` leaves the rest undone.
        Returns what the stage counted.
        Raises DeviceError if the encoders do not fit onto the device, and ModelError if they cannot be loaded, or their
        files changed since the keys were made of them. A caller's own models are not compared again.
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
        """Free the memory of all that was loaded. The next `encode` loads it again."""
        self.close()
        free_cached_memory(self.encodings.vae.device)

    def close(self) -> None:
        """Forget all that was loaded. A caller's own models return to where they were."""
        self._leave_device()
        self._models.release()

    def _leave_device(self) -> None:
        try:
            self._on_device.close()
        finally:
            self.loaded = None


def _group_of(task: Task) -> Hashable:
    """What the members of a batch share."""
    if isinstance(task.identity, TextIdentity):
        return task.identity.encoding.recipe
    geometry = task.identity.preparation.geometry
    return geometry.extent if geometry.num_frames is None else task.key  # a clip alone, as in a plan
