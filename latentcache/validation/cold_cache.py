"""Filling a cold cache in the middle of training, with the encoders that the caller has in memory."""

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
from latentcache.precache.plan import Shard
from latentcache.precache.prompts import cache_prompts
from latentcache.precache.report import Report
from latentcache.precache.run import run_precache
from latentcache.precache.workspace import Workspace, open_workspace
from latentcache.validation.sample_images import PromptPair

logger = logging.getLogger("latentcache")

FILL = Phase(on_device=())
"""While a cache is filled every part is parked: the encoders are on the device one after the other, and need room."""


class ColdCacheFiller:
    """Encodes what validation needs and the cache lacks.

    Nothing is encoded where `parts` lack encoders, or the cache is read only: `obstacle` says which.
    """

    def __init__(self, parts: Mapping[str, Any], cache: LatentCache, config: Config, phases: Phases):
        self._parts, self._cache, self._phases = parts, cache, phases
        self._config = config
        self._device = device_named(config.encode.device)
        if config.encode.device == "auto" and self._device.type == phases.device.type:
            # Of several accelerators, the one that is trained on. A device that the config names stays, for its dtypes.
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
        """Encode the validation sets of which the cache lacks anything. Returns notes for the report.

        The manifests decide: finding files that changed since they were written is precache's work. StoreError, with
        the command to run, where a whole set is missing and cannot be encoded.
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
        with self._encoding() as (workspace, models):
            config = self._config.model_copy(update={"datasets": tuple(cold)})
            # All of it: this process fills alone, and must not leave a share to the ranks that torchrun declares.
            report: Report = run_precache(config, models=models, workspace=workspace, shard=Shard())
        self.num_filled += report.num_encoded
        refused = [f"{names}: {report.num_refused} refused"] if report.num_refused else []
        return refused + self._encoded_otherwise([dataset.name for dataset in cold])

    def fill_prompts(self, pairs: Sequence[PromptPair]) -> None:
        """Encode these prompts: the `encode` of `prompt_embeddings`."""
        logger.info("%d prompts are not cached: encoding them", len(pairs))
        with self._encoding() as (workspace, models):
            self.num_filled += cache_prompts(self._config, workspace, models, pairs, device=self._device)

    def _encoded_otherwise(self, filled: Sequence[str]) -> list[str]:
        """A note for each dataset of the config that was cached with other encoders than the `filled` ones.

        A trainer's VAE in float16 is another one than the float32 VAE of its file, and gives other latents.
        """
        cached = set(self._cache.manifests.names())
        filled_with = self._cache.manifest(filled[0]).common
        notes = []
        for dataset in self._config.datasets:
            if dataset.name in filled or dataset.name not in cached:
                continue
            common = self._cache.manifest(dataset.name).common
            differing = [
                name
                for kind in ("image_encoding", "text_encoding")
                for name, value in filled_with[kind].items()
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
        """How many entries of the manifest the store lacks; None where there is no manifest."""
        if dataset.name not in self._cache.manifests.names():
            return None
        keys = self._cache.manifest(dataset.name).keys()
        return len(keys) - len(self._cache.store.find(keys))

    @contextmanager
    def _encoding(self) -> Iterator[tuple[Workspace, LoadedModels]]:
        """A workspace and the encoders, with every part parked. Afterwards the placement is declared again."""
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
