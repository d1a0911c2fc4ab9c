"""A cold cache, filled in the middle of training: with the encoders that the caller has in memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from latentcache.config import Config, DatasetConfig
from latentcache.devices.placement import device_named
from latentcache.errors import StoreError
from latentcache.loading.cache import LatentCache
from latentcache.models.model_loader import PARTS, LoadedModels
from latentcache.phases.phases import Phase, Phases
from latentcache.precache.prompts import cache_prompts
from latentcache.precache.report import Report
from latentcache.precache.run import run_precache
from latentcache.precache.shard import Shard
from latentcache.precache.workspace import Workspace, open_workspace
from latentcache.validation.prompt_set import Pair

logger = logging.getLogger("latentcache")

FILL = Phase(on_device=())
"""While a cache is filled every part is parked: the encoders come one after the other, and need the room."""


class Filling:
    """Encodes what validation needs and the cache does not hold.

    Nothing is encoded where `parts` lack encoders, or the cache is read only: then it says so.
    """

    def __init__(self, parts: Mapping[str, Any], cache: LatentCache, config: Config, phases: Phases):
        self._parts, self._cache, self._phases = parts, cache, phases
        self._config = config
        self._device = device_named(config.encode.device)
        if config.encode.device == "auto" and self._device.type == phases.device.type:
            # Of several accelerators, the one that is trained on. The config's own choice stays: dtypes follow it.
            self._device = phases.device
            encode = config.encode.model_copy(update={"device": str(self._device)})
            self._config = config.model_copy(update={"encode": encode})
        self.num_filled = 0

    @property
    def obstacle(self) -> str | None:
        """Why nothing can be encoded, or None if it can."""
        missing = [name for name in PARTS if self._parts.get(name) is None]
        if missing:
            return f"{', '.join(missing)} {'was' if len(missing) == 1 else 'were'} not given to encode it"
        return "this cache is open for reading only" if self._cache.store.read_only else None

    def fill_datasets(self) -> list[str]:
        """Encode the validation sets of which the cache lacks anything; gives what is to be noted of it.

        The manifests decide: a file that changed since they were written is not looked for, that is precache's work.
        StoreError, with the command to run, where a whole set is missing and cannot be encoded.
        """
        sets = [dataset for dataset in self._config.datasets if dataset.role == "validation"]
        num_lost = {dataset.name: self._num_lost(dataset) for dataset in sets}
        cold = [dataset for dataset in sets if num_lost[dataset.name] != 0]
        if not cold:
            return []
        if self.obstacle:
            absent = ", ".join(dataset.name for dataset in cold if num_lost[dataset.name] is None)
            if absent:
                raise StoreError(
                    f"{self._cache.path or 'cpu store'}: the validation set {absent} is not cached, and "
                    f"{self.obstacle}: run `latentcache precache CONFIG`"
                )
            # Their samples are skipped and listed: a few that are lost must not stop a validation.
            return [f"{each.name}: {num_lost[each.name]} entries are lost: run precache again" for each in cold]
        names = ", ".join(dataset.name for dataset in cold)
        logger.info("validation set %s is not cached, or not whole: encoding it", names)
        with self._filling() as (workspace, models):
            config = self._config.model_copy(update={"datasets": tuple(cold)})
            # All of it: a process that fills alone must not leave a share to others, which torchrun tells it of.
            report: Report = run_precache(config, models=models, workspace=workspace, shard=Shard())
        self.num_filled += report.num_encoded
        refused = [f"{names}: {report.num_refused} refused"] if report.num_refused else []
        return refused + self._encoded_otherwise([dataset.name for dataset in cold])

    def fill_prompts(self, pairs: Sequence[Pair]) -> None:
        """Encode these prompts, pairs of a text and whether it is a negative one. For `prompt_embeddings(encode=)`."""
        logger.info("%d prompts are not cached: encoding them", len(pairs))
        with self._filling() as (workspace, models):
            self.num_filled += cache_prompts(self._config, workspace, models, pairs, device=self._device)

    def _encoded_otherwise(self, filled: Sequence[str]) -> list[str]:
        """A note for each dataset of the config that was cached with other encoders than what was filled just now.

        A VAE that a trainer holds in float16 is another one than the float32 VAE of its file, and gives other latents.
        """
        cached = set(self._cache.manifests.names())
        made = self._cache.manifest(filled[0]).common
        notes = []
        for dataset in self._config.datasets:
            if dataset.name in filled or dataset.name not in cached:
                continue
            common = self._cache.manifest(dataset.name).common
            differing = [
                name
                for kind in ("image_encoding", "text_encoding")
                for name, value in made[kind].items()
                if common[kind].get(name) != value
            ]
            if differing:
                notes.append(
                    f"{', '.join(filled)} was encoded otherwise than {dataset.name} ({', '.join(differing)}): give the "
                    "parts that precache had, or run `latentcache precache CONFIG` for both"
                )
        for note in notes:
            logger.warning("%s", note)
        return notes

    def _num_lost(self, dataset: DatasetConfig) -> int | None:
        """How many entries of the manifest are not in the store; None where there is no manifest."""
        if dataset.name not in self._cache.manifests.names():
            return None
        keys = self._cache.manifest(dataset.name).keys()
        return len(keys) - len(self._cache.store.find(keys))

    @contextmanager
    def _filling(self) -> Iterator[tuple[Workspace, LoadedModels]]:
        """A place to write to and the encoders, with everything parked. Then the placement is declared again."""
        models = LoadedModels(**{name: self._unwrapped(name) for name in PARTS})
        cache, phases = self._cache, self._phases
        with phases.enter(FILL):
            if cache.path is None:
                yield Workspace(cache.store, cache.manifests), models
            else:
                path = cache.path
                with open_workspace(self._config.cache.model_copy(update={"path": path, "store": "disk"})) as workspace:
                    yield workspace, models
        cache.refresh()
        phases.place()

    def _unwrapped(self, name: str) -> Any:
        return self._phases.module(name) if self._phases.has(name) else self._parts.get(name)
