"""The pipeline of OneTrainer's own SDXL loader: every module that it makes, with the arguments that it gives.

`onetrainer_sdxl.json` is the list as OneTrainer's loader made it for its default settings, at the commits that it
names, and a concept of OneTrainer's defaults. {"object": name} stands for what the trainer loads, {"set": ...} and
{"tuple": ...} for what JSON lacks. Modules that the host has are used as they are; of the others here are stand-ins
that request and give what mgds' do.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from helpers.pipeline_modules import random_access, settings
from helpers.pipeline_sdxl import Run, Setup

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("onetrainer_sdxl.json").read_text(encoding="utf-8"))


def default_concept(path: Path, **image_settings: Any) -> dict[str, Any]:
    """A concept with OneTrainer's defaults, but for these settings of its section `image`."""
    concept = copy.deepcopy(RECORDED["concept"]) | {"path": str(path)}
    unknown = image_settings.keys() - concept["image"].keys()
    assert not unknown, f"OneTrainer has no setting {unknown}"
    concept["image"] |= image_settings
    return concept


class RecordedSetup(Setup):
    """A setup over the recorded list."""

    def start(self, num_epochs: int = 1) -> Run:
        run = RecordedRun(self)
        for _ in range(num_epochs):
            run.next_epoch()
        return run


class RecordedRun(Run):
    """A run of the recorded list."""

    def _modules(self) -> Iterator[Any]:
        host, setup = self.setup.host, self.setup
        made = stand_ins(host)
        yield host.ConceptPipelineModule(copy.deepcopy(setup.concepts))
        yield host.SettingsPipelineModule(RECORDED["settings"] | {"target_resolution": setup.resolution})
        for name, recorded in RECORDED["modules"]:
            given = {key: _value(value, self._objects()) for key, value in recorded.items()}
            if name == "DiskCache":
                yield self._cache(given)
                continue
            kind = getattr(host, name, None) or made.get(name) or passing(host, name, given)
            yield kind(**given)

    def _cache(self, given: dict[str, Any]) -> Any:
        kind = given["cache_dir"]
        folder = {"cache_dir": str(self.setup.cache_dir / kind)}
        self.caches[kind] = self.setup.host.LatentCacheModule(**given | folder | dict(self.setup.changes))
        return self.caches[kind]

    def _objects(self) -> dict[str, Any]:
        parts = self.setup.parts
        return {
            "train_dtype": torch.float32,
            "vae_train_dtype": torch.float32,
            "autocast_context": nullcontext(),
            "vae_autocast_context": nullcontext(),
            "vae": parts["vae"],
            "tokenizer_1": parts["tokenizer"],
            "tokenizer_2": parts["tokenizer_2"],
            "text_encoder_1": parts["text_encoder"],
            "text_encoder_2": parts["text_encoder_2"],
            "add_text_encoder_1_embeddings_to_prompt": lambda prompt: prompt,  # no embeddings are trained
            "add_text_encoder_2_embeddings_to_prompt": lambda prompt: prompt,
            "prepare_vae": lambda: self.begun.append("image"),
            "before_cache_text_fun": lambda: self.begun.append("text"),
        }


def _value(recorded: Any, objects: dict[str, Any]) -> Any:
    if isinstance(recorded, list):
        return [_value(each, objects) for each in recorded]
    if isinstance(recorded, dict) and len(recorded) == 1:
        ((kind, content),) = recorded.items()
        if kind in ("object", "set", "tuple"):
            return objects[content] if kind == "object" else {"set": set, "tuple": tuple}[kind](content)
    return recorded


def passing(base: SimpleNamespace, name: str, taken: dict[str, Any]) -> type:
    """A module of this name that takes these settings, and passes its values on: all that is random in it is off."""
    names = taken.get("names") or [taken["text_out_name"]]

    class Passing(random_access(base)):
        first = names[0]

        def __init__(self, **given: Any):
            super().__init__()
            vars(self).update(given)

        def get_outputs(self) -> list[str]:
            return names

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            assert self.ask(variation, self.enabled_in_name, index) is False, "here is no such augmentation"
            return {each: self.ask(variation, each, index) for each in names}

    parameters = [inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY) for each in taken]
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    Passing.__init__.__signature__ = inspect.Signature([self_parameter, *parameters])  # the cache reads it
    Passing.__name__ = name
    return Passing


def stand_ins(base: SimpleNamespace) -> dict[str, type]:
    """Modules of the list that the pipeline of the other tests lacks."""
    Module = random_access(base)

    @settings
    class DownloadHuggingfaceDatasets(Module):
        concept_in_name: str
        path_in_name: str
        enabled_in_name: str
        concept_out_name: str

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            return {self.concept_out_name: self.ask(variation, self.concept_in_name, index)}

    @settings
    class LoadVideo(Module):
        """None, since no file here is a video; a random stream is made for each, as in mgds."""

        path_in_name: str
        target_frame_count_in_name: str
        video_out_name: str
        range_min: float
        range_max: float
        target_frame_rate: float
        supported_extensions: set[str]
        dtype: torch.dtype | None = None

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            self._get_rand(variation, index)
            self.ask(variation, self.path_in_name, index)
            return {self.video_out_name: None}

    @settings
    class GetFilename(Module):
        path_in_name: str
        filename_out_name: str
        include_extension: bool

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            return {self.filename_out_name: Path(self.ask(variation, self.path_in_name, index)).stem}

    @settings
    class SelectInput(Module):
        setting_name: str
        out_name: str
        setting_to_in_name_map: dict[str, str]
        default_in_name: str

        def get_inputs(self) -> list[str]:
            return list(self.setting_to_in_name_map.values())

        def length(self) -> int:
            return self._get_previous_length(self.get_inputs()[0])

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            chosen = self.setting_to_in_name_map[self.ask(variation, self.setting_name, index)]
            return {self.out_name: self.ask(variation, chosen, index)}

    @settings
    class RescaleImageChannels(Module):
        image_in_name: str
        image_out_name: str
        in_range_min: float
        in_range_max: float
        out_range_min: float
        out_range_max: float

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            image = self.ask(variation, self.image_in_name, index)
            factor = (self.out_range_max - self.out_range_min) / (self.in_range_max - self.in_range_min)
            return {self.image_out_name: (image - self.in_range_min) * factor + self.out_range_min}

    @settings
    class MapData(Module):
        in_name: str
        out_name: str
        map_fn: Callable[[Any], Any]

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            return {self.out_name: self.map_fn(self.ask(variation, self.in_name, index))}

    own = (DownloadHuggingfaceDatasets, LoadVideo, GetFilename, SelectInput, RescaleImageChannels, MapData)
    return {cls.__name__: cls for cls in own}
