"""The modules of OneTrainer's pipelines, over any base classes, with mgds' names and OneTrainer's settings.

A function here computes the values of a module for an item. A module without one passes its input on, and must have
its random augmentation turned off.
"""

from __future__ import annotations

import inspect
import os
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

KEPT_AS = {
    ("AspectBucketing", "target_resolution_in_name"): "target_resolutions_in_name",
    ("EncodeMistralText", "hidden_state_output_index"): "hidden_state_indexes",
    ("EncodeQwenText", "hidden_state_output_index"): "hidden_state_indexes",
    ("LoadImage", "channels"): "mode",
}
"""Settings that mgds' module stores under another name."""


class Item:
    """Gives a module the values of earlier modules at one position: item(name)."""

    def __init__(self, module: Any, variation: int, index: int):
        self._place, self._module = (variation, index), module

    def __call__(self, name: str) -> Any:
        variation, index = self._place
        return self._module._get_previous_item(variation, name, index)

    @property
    def rand(self) -> Random:
        return self._module._get_rand(*self._place)


Values = dict[str, Any]
Give = Callable[[Any, Item], Values]
"""Computes the values of a module, which has its settings as attributes, for an item."""


def pass_on(module: Any, item: Item) -> Values:
    assert item(module.enabled_in_name) is False, "this augmentation is not implemented here"
    if "names" in vars(module):
        return {name: item(name) for name in module.names}
    return {module.text_out_name: item(module.text_in_name)}


# Images


def load_image(module: Any, item: Item) -> Values:
    path = item(module.path_in_name)
    if os.path.splitext(path)[1].lower() not in module.supported_extensions or not os.path.exists(path):
        return {module.image_out_name: None}
    is_mask = getattr(module, "mode", 3) == 1
    with Image.open(path) as image:
        pixels = torch.from_numpy(np.array(image.convert("L" if is_mask else "RGB")))
    pixels = (pixels[None] if is_mask else pixels.permute(2, 0, 1)).to(module.pipeline.device, torch.float32)
    return {module.image_out_name: pixels / 255 * (module.range_max - module.range_min) + module.range_min}


def generate_image_like(module: Any, item: Item) -> Values:
    value = module.color / 255 * (module.range_max - module.range_min) + module.range_min
    return {module.image_out_name: torch.full_like(item(module.image_in_name)[:1], value)}


def aspect_bucketing(module: Any, item: Item) -> Values:
    target = int(item.rand.choice(item(module.target_resolutions_in_name).split(",")))
    height, width = item(module.resolution_in_name)
    scale, step = target / (height * width) ** 0.5, module.quantization
    crop = tuple(max(step, round(side * scale / step) * step) for side in (height, width))
    factor = max(crop[0] / height, crop[1] / width)
    scaled = tuple(max(c, round(side * factor)) for c, side in zip(crop, (height, width), strict=True))
    return {module.scale_resolution_out_name: scaled, module.crop_resolution_out_name: crop}


def scale_crop_image(module: Any, item: Item) -> Values:
    scaled = item(module.scale_resolution_in_name)[-2:]
    crop = item(module.crop_resolution_in_name)[-2:]
    spare = scaled[0] - crop[0], scaled[1] - crop[1]
    top, left = spare[0] // 2, spare[1] // 2
    if item(module.enable_crop_jitter_in_name):
        rand = item.rand
        top, left = rand.randint(0, spare[0]), rand.randint(0, spare[1])
    values: Values = {module.crop_offset_out_name: (top, left)}
    for name in module.names:
        resized = F.interpolate(item(name)[None], scaled, mode="bilinear", antialias=True)[0]
        values[name] = resized[:, top : top + crop[0], left : left + crop[1]]
    return values


def random_flip(module: Any, item: Item) -> Values:
    flip = item(module.fixed_enabled_in_name)
    if item(module.enabled_in_name):
        flip = item.rand.random() < 0.5
    return {name: item(name).flip(-1) if flip else item(name) for name in module.names}


def rescale_image_channels(module: Any, item: Item) -> Values:
    factor = (module.out_range_max - module.out_range_min) / (module.in_range_max - module.in_range_min)
    image = item(module.image_in_name)
    return {module.image_out_name: (image - module.in_range_min) * factor + module.out_range_min}


def encode_vae(module: Any, item: Item) -> Values:
    image = item(module.in_name)
    with ExitStack() as stack:
        for context in module.autocast_contexts:
            stack.enter_context(context)
        return {module.out_name: module.vae.encode(image.to(dtype=module.dtype or image.dtype)[None]).latent_dist}


def sample_vae_distribution(module: Any, item: Item) -> Values:
    posterior = item(module.in_name)
    return {module.out_name: (posterior.mode() if module.mode == "mean" else posterior.sample())[0]}


# Texts


def load_multiple_texts(module: Any, item: Item) -> Values:
    path = Path(item(module.path_in_name))
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {module.texts_out_name: [line.strip() for line in lines if line.strip()] or [""]}


def tokenize(module: Any, item: Item) -> Values:
    how = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    found = module.tokenizer(item(module.in_name), max_length=module.max_token_length, **how)
    found = found.to(module.pipeline.device)
    return {module.tokens_out_name: found.input_ids[0], module.mask_out_name: found.attention_mask[0]}


def encode_clip_text(module: Any, item: Item) -> Values:
    found = module.text_encoder(item(module.in_name)[None], output_hidden_states=True)
    values = {module.hidden_state_out_name: found.hidden_states[module.hidden_state_output_index][0]}
    if module.pooled_out_name:
        values[module.pooled_out_name] = (found.text_embeds if "text_embeds" in found else found.pooler_output)[0]
    return values


GIVE: dict[str, Give] = {
    "DownloadHuggingfaceDatasets": lambda module, item: {module.concept_out_name: item(module.concept_in_name)},
    "ModifyPath": lambda module, item: {
        module.out_name: os.path.splitext(item(module.in_name))[0] + module.postfix + module.extension
    },
    "LoadVideo": lambda module, item: {module.video_out_name: None},  # no file here is a video
    "GetFilename": lambda module, item: {module.filename_out_name: Path(item(module.path_in_name)).stem},
    "SelectInput": lambda module, item: {
        module.out_name: item(module.setting_to_in_name_map[item(module.setting_name)])
    },
    "MapData": lambda module, item: {module.out_name: module.map_fn(item(module.in_name))},
    "LoadImage": load_image,
    "GenerateImageLike": generate_image_like,
    "CalcAspect": lambda module, item: {module.resolution_out_name: tuple(item(module.image_in_name).shape[1:])},
    "AspectBucketing": aspect_bucketing,
    "ScaleCropImage": scale_crop_image,
    "RandomFlip": random_flip,
    "ScaleImage": lambda module, item: {
        module.out_name: F.interpolate(item(module.in_name)[None], scale_factor=module.factor)[0]
    },
    "RescaleImageChannels": rescale_image_channels,
    "EncodeVAE": encode_vae,
    "SampleVAEDistribution": sample_vae_distribution,
    "LoadMultipleTexts": load_multiple_texts,
    "SelectRandomText": lambda module, item: {module.text_out_name: item.rand.choice(item(module.texts_in_name))},
    "Tokenize": tokenize,
    "EncodeClipText": encode_clip_text,
    # A batch is one item: there is nothing to sort.
    "AspectBatchSorting": lambda module, item: {name: item(name) for name in module.names},
}


def module_maker(base: SimpleNamespace) -> Callable[..., Any]:
    """Return a function make(name, **settings) over the base classes in `base`."""

    class Module(base.PipelineModule, base.RandomAccessPipelineModule):
        """Its inputs and outputs are derived from the names of its settings."""

        def __init__(self, **given: Any):
            super().__init__()
            kind = type(self).__name__
            vars(self).update({KEPT_AS.get((kind, name), name): value for name, value in given.items()})

        @property
        def first(self) -> str:
            """The input that determines the module's length."""
            names = vars(self).get("names")
            return names[0] if names else next(v for k, v in vars(self).items() if k.endswith("in_name"))

        def length(self) -> int:
            return self._get_previous_length(self.first)

        def get_inputs(self) -> list[str]:
            return [self.first]

        @cached_property
        def _outputs(self) -> list[str]:
            own = [value for name, value in vars(self).items() if name.endswith("out_name") and value]
            return [*vars(self).get("names", []), *own]

        def get_outputs(self) -> list[str]:
            return self._outputs

        def get_item(self, variation: int, index: int, name: str | None = None) -> Values:
            return GIVE.get(type(self).__name__, pass_on)(self, Item(self, variation, index))

    special = {cls.__name__: cls for cls in _with_state(Module)}

    def make(name: str, **settings: Any) -> Any:
        class Made(special.get(name, Module)):
            def __init__(self, **given: Any):
                super().__init__(**given)

        # The cache reads which settings a module's constructor takes.
        parameters = [inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY) for each in ("self", *settings)]
        Made.__init__.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        Made.__name__ = name
        return Made(**settings)

    return make


def _with_state(Module: type) -> tuple[type, ...]:
    """Modules whose length or values depend on more than the item."""

    class ConceptPipelineModule(Module):
        def length(self) -> int:
            return len(self.concepts)

        def get_outputs(self) -> list[str]:
            return ["concept"]

        def get_item(self, variation: int, index: int, name: str | None = None) -> Values:
            return {"concept": self.concepts[index]}

    class SettingsPipelineModule(Module):
        def get_outputs(self) -> list[str]:
            return ["settings"]

        def get_item(self, variation: int, index: int, name: str | None = None) -> Values:
            return {"settings": self.settings}

    class CollectPaths(Module):
        def length(self) -> int:
            return len(self.found)

        def start(self, variation: int) -> None:
            self.found: list[tuple[str, Values]] = []
            for index in range(self._get_previous_length(self.concept_in_name)):
                concept = self._get_previous_item(variation, self.concept_in_name, index)
                files = sorted(Path(concept[self.path_in_name]).iterdir()) if concept[self.enabled_in_name] else []
                for file in files:
                    if file.suffix.lower() in self.extensions and not file.stem.endswith(tuple(self.exclude_postfix)):
                        self.found.append((str(file), concept))

        def get_item(self, variation: int, index: int, name: str | None = None) -> Values:
            path, concept = self.found[index]
            return {self.path_out_name: path, self.concept_out_name: concept}

    class VariationSorting(Module):
        """Balances names that are not cached like a cache does: groups of floor(n * repeats)."""

        def length(self) -> int:
            groups = vars(self).get("groups")
            return super().length() if groups is None else sum(num_out for _, num_out in groups)

        def start(self, variation: int) -> None:
            members = defaultdict[str, list[int]](list)
            for index in range(self._get_previous_length(self.first)):
                item = Item(self, 0, index)
                if item(self.group_enabled_in_name):
                    members[repr([item(name) for name in self.variations_group_in_name])].append(index)
            self.groups: list[tuple[list[int], int]] = []
            for indices in members.values():
                item = Item(self, 0, indices[0])
                repeats, balancing = item(self.balancing_strategy_in_name) == "REPEATS", item(self.balancing_in_name)
                self.groups.append((indices, int(len(indices) * balancing) if repeats else int(balancing)))

        def get_item(self, variation: int, index: int, name: str | None = None) -> Values:
            assert name is not None
            for indices, num_out in self.groups:
                if index < num_out:
                    place = indices[(index + variation * num_out) % len(indices)]
                    return {name: Item(self, variation, place)(name)}
                index -= num_out
            raise IndexError(index)

    return ConceptPipelineModule, SettingsPipelineModule, CollectPaths, VariationSorting
