"""The encoders of a service or a cluster: on their device from the first entry on, until they are unloaded."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from contextlib import ExitStack

from latentcache.config import Config
from latentcache.devices.placement import placed
from latentcache.errors import ModelError
from latentcache.identity import TextIdentity
from latentcache.models.model_loader import Models
from latentcache.models.running import encoders_placed, free_cached_memory
from latentcache.precache.encoding_stage import RunContext
from latentcache.precache.encodings import Encodings, choose_encodings, for_images
from latentcache.precache.image_stage import ImageStage
from latentcache.precache.report import Failure, Report
from latentcache.precache.tasks import Task
from latentcache.precache.text_stage import TextStage
from latentcache.types import Entry, Kind
from latentcache.utils.progress import Progress

logger = logging.getLogger("latentcache")


class ServingModels:
    """A config's models, for entries that are encoded a few at a time, as precache encodes them.

    The encoders of one kind of entries are on the device; those of another kind take their place when it is asked for.
    The keys follow from `encodings`, which are those of the time when this was made. The models are identified then,
    and loaded only for what is not known of them. Afterwards one thread may use it.
    Raises ConfigError, DeviceError, ModelError.
    """

    def __init__(self, config: Config, models: Models, memo: MutableMapping[str, str]):
        self._config, self._models, self._memo = config, models, memo
        self._placed: tuple[Kind, Encodings] | None = None
        self._on_device = ExitStack()
        self.encodings = choose_encodings(self._config, models, memo)
        models.release()

    @property
    def loaded(self) -> Kind | None:
        """The kind of entries whose encoders are on the device."""
        return self._placed and self._placed[0]

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
        Raises DeviceError if the encoders do not fit onto the device, and ModelError if they cannot be loaded, or are
        other ones by now than those from which the keys follow.
        """
        kind, encode, report = tasks[0].kind, self._config.encode, Report()
        encodings = self._place(kind)
        if kind == "image":
            encodings = for_images(encodings, encode, [tasks])
        stop = stop or threading.Event()
        context = RunContext(encode, encodings, self._models, store, fail, report, Progress(), stop)
        groups: dict[Hashable, list[Task]] = {}
        for task in tasks:
            groups.setdefault((group_of or _group_of)(task), []).append(task)
        stage = TextStage(context) if kind == "text" else ImageStage(context)
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
        self._placed = None
        self._on_device.close()

    def _place(self, kind: Kind) -> Encodings:
        """Place the encoders of this kind, and them alone, where a stage finds them and leaves them."""
        if self._placed is not None and self._placed[0] == kind:
            return self._placed[1]
        self._leave_device()
        # Again: files may have changed since, and the batch size depends on the memory that is free now.
        encodings = choose_encodings(self._config, self._models, self._memo)
        self._check_same(kind, encodings)
        with ExitStack() as stack:
            if kind == "image":
                stack.enter_context(placed(self._models.vae(encodings.vae.dtype), encodings.vae.device))
            else:
                encoders = self._models.text_encoders(encodings.text_encoders.dtype)
                notes = stack.enter_context(encoders_placed(encoders, encodings.text_encoders.device))
                for name, note in notes.items():
                    logger.info("%s: %s", name, note)
            self._on_device, self._placed = stack.pop_all(), (kind, encodings)
        return encodings

    def _check_same(self, kind: Kind, now: Encodings) -> None:
        before = self.encodings
        if (before.image != now.image) if kind == "image" else (before.text != now.text):
            self.unload()
            raise ModelError(
                f"the encoders of {self._config.model.path} are not those that the service was started with: their "
                "files changed. Start it again, and it makes keys of the new ones.",
                part="vae" if kind == "image" else "text_encoder",
            )


def _group_of(task: Task) -> Hashable:
    """What the members of a batch share."""
    if isinstance(task.identity, TextIdentity):
        return task.identity.encoding.recipe
    geometry = task.identity.preparation.geometry
    return geometry.extent if geometry.num_frames is None else task.key  # a clip alone, as in a plan
