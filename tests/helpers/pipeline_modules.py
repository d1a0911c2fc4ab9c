"""The modules that SDXL's pipeline in OneTrainer is made of, after mgds' module contract, over any base classes.

They have mgds' names and settings, as far as these matter here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

settings = dataclass(eq=False, repr=False)
"""The fields of a module are the parameters of its constructor, in the order in which OneTrainer gives them."""


def random_access(base: SimpleNamespace) -> type:
    """The class that the modules derive from. Its inputs and outputs follow from the names of its settings."""

    class Module(base.PipelineModule, base.RandomAccessPipelineModule):
        def __post_init__(self) -> None:
            super().__init__()

        @property
        def first(self) -> str:
            """The name whose length is the module's."""
            names = vars(self).get("names")
            return names[0] if names else next(v for k, v in vars(self).items() if k.endswith("in_name"))

        def length(self) -> int:
            return self._get_previous_length(self.first)

        def get_inputs(self) -> list[str]:
            return [self.first]

        def get_outputs(self) -> list[str]:
            own = [value for name, value in vars(self).items() if name.endswith("out_name") and value]
            return [*vars(self).get("names", []), *own]

        def ask(self, variation: int, name: str, index: int) -> Any:
            return self._get_previous_item(variation, name, index)

    return Module


def make(base: SimpleNamespace) -> dict[str, type]:
    """The classes, by name. `base` has PipelineModule and the classes that say how a module gives its values."""
    return _collecting(base) | _images(base) | _texts(base) | _sorting(base)


def _collecting(base: SimpleNamespace) -> dict[str, type]:
    Module = random_access(base)

    @settings
    class ConceptPipelineModule(Module):
        concepts: list[dict[str, Any]]

        def length(self) -> int:
            return len(self.concepts)

        def get_inputs(self) -> list[str]:
            return []

        def get_outputs(self) -> list[str]:
            return ["concept"]

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            return {"concept": self.concepts[index]}

    @settings
    class SettingsPipelineModule(Module):
        settings: dict[str, Any]

        def length(self) -> int:
            return 1

        def get_inputs(self) -> list[str]:
            return []

        def get_outputs(self) -> list[str]:
            return ["settings"]

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            return {"settings": self.settings}

    @settings
    class CollectPaths(Module):
        concept_in_name: str
        path_in_name: str
        include_subdirectories_in_name: str
        enabled_in_name: str
        path_out_name: str
        concept_out_name: str
        extensions: list[str]
        include_postfix: list[str] | None
        exclude_postfix: list[str]

        def length(self) -> int:
            return len(self.found)

        def start(self, variation: int) -> None:
            self.found: list[tuple[str, dict[str, Any]]] = []
            for index in range(self._get_previous_length(self.concept_in_name)):
                concept = self.ask(variation, self.concept_in_name, index)
                files = sorted(Path(concept[self.path_in_name]).iterdir()) if concept[self.enabled_in_name] else []
                for file in files:
                    if file.suffix.lower() in self.extensions and not file.stem.endswith(tuple(self.exclude_postfix)):
                        self.found.append((str(file), concept))

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            path, concept = self.found[index]
            return {self.path_out_name: path, self.concept_out_name: concept}

    @settings
    class ModifyPath(Module):
        in_name: str
        out_name: str
        postfix: str
        extension: str

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            path = self.ask(variation, self.in_name, index)
            return {self.out_name: os.path.splitext(path)[0] + self.postfix + self.extension}

    return {cls.__name__: cls for cls in (ConceptPipelineModule, SettingsPipelineModule, CollectPaths, ModifyPath)}


def _images(base: SimpleNamespace) -> dict[str, type]:
    Module = random_access(base)

    @settings
    class LoadImage(Module):
        path_in_name: str
        image_out_name: str
        range_min: float = -1
        range_max: float = 1
        supported_extensions: Collection[str] = (".png",)
        channels: int = 3
        dtype: torch.dtype | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            self.mode = {3: "RGB", 1: "L"}[self.channels]

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            path = self.ask(variation, self.path_in_name, index)
            if os.path.splitext(path)[1].lower() not in self.supported_extensions or not os.path.exists(path):
                return {self.image_out_name: None}
            with Image.open(path) as image:
                pixels = torch.from_numpy(np.array(image.convert(self.mode)))
            pixels = pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)
            pixels = pixels.to(self.pipeline.device, self.dtype or torch.float32)
            return {self.image_out_name: pixels / 255 * (self.range_max - self.range_min) + self.range_min}

    @settings
    class GenerateImageLike(Module):
        image_in_name: str
        image_out_name: str
        color: float
        range_min: float
        range_max: float

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            image = self.ask(variation, self.image_in_name, index)
            value = self.color / 255 * (self.range_max - self.range_min) + self.range_min
            return {self.image_out_name: torch.full_like(image[:1], value)}

    @settings
    class CalcAspect(Module):
        image_in_name: str
        resolution_out_name: str

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            return {self.resolution_out_name: tuple(self.ask(variation, self.image_in_name, index).shape[1:])}

    @settings
    class AspectBucketing(Module):
        quantization: int
        resolution_in_name: str
        target_resolution_in_name: str
        enable_target_resolutions_override_in_name: str
        target_resolutions_override_in_name: str
        target_frames_in_name: str
        frame_dim_enabled: bool
        scale_resolution_out_name: str
        crop_resolution_out_name: str
        possible_resolutions_out_name: str

        def __post_init__(self) -> None:
            super().__post_init__()
            self.target_resolutions_in_name = self.target_resolution_in_name  # where mgds' module keeps it

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            targets = self.ask(variation, self.target_resolutions_in_name, index).split(",")
            target = int(self._get_rand(variation, index).choice(targets))
            height, width = self.ask(variation, self.resolution_in_name, index)
            scale = target / (height * width) ** 0.5
            step = self.quantization
            crop = tuple(max(step, round(side * scale / step) * step) for side in (height, width))
            factor = max(crop[0] / height, crop[1] / width)
            scaled = tuple(max(c, round(side * factor)) for c, side in zip(crop, (height, width), strict=True))
            return {self.scale_resolution_out_name: scaled, self.crop_resolution_out_name: crop}

    @settings
    class ScaleCropImage(Module):
        names: list[str]
        scale_resolution_in_name: str
        crop_resolution_in_name: str
        enable_crop_jitter_in_name: str
        crop_offset_out_name: str

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            scaled = self.ask(variation, self.scale_resolution_in_name, index)[-2:]
            crop = self.ask(variation, self.crop_resolution_in_name, index)[-2:]
            spare = scaled[0] - crop[0], scaled[1] - crop[1]
            if self.ask(variation, self.enable_crop_jitter_in_name, index):
                rand = self._get_rand(variation, index)
                top, left = (rand.randint(0, space) for space in spare)
            else:
                top, left = (space // 2 for space in spare)
            item: dict[str, Any] = {self.crop_offset_out_name: (top, left)}
            for each in self.names:
                image = self.ask(variation, each, index)
                resized = F.interpolate(image[None], scaled, mode="bilinear", antialias=True)[0]
                item[each] = resized[:, top : top + crop[0], left : left + crop[1]]
            return item

    @settings
    class RandomFlip(Module):
        names: list[str]
        enabled_in_name: str
        fixed_enabled_in_name: str

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            flip = self.ask(variation, self.fixed_enabled_in_name, index)
            if self.ask(variation, self.enabled_in_name, index):
                flip = self._get_rand(variation, index).random() < 0.5
            images = {each: self.ask(variation, each, index) for each in self.names}
            return {each: image.flip(-1) if flip else image for each, image in images.items()}

    @settings
    class EncodeVAE(Module):
        in_name: str
        out_name: str
        vae: Any
        autocast_contexts: list[Any] | None = None
        dtype: torch.dtype | None = None
        sample_mode: str = "sample"

        def __post_init__(self) -> None:
            super().__post_init__()
            self.autocast_contexts = self.autocast_contexts or [nullcontext()]

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            image = self.ask(variation, self.in_name, index)
            with self._all_contexts(self.autocast_contexts):
                return {self.out_name: self.vae.encode(image.to(dtype=self.dtype or image.dtype)[None]).latent_dist}

    @settings
    class SampleVAEDistribution(Module):
        in_name: str
        out_name: str
        mode: str = "mean"

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            posterior = self.ask(variation, self.in_name, index)
            return {self.out_name: (posterior.mode() if self.mode == "mean" else posterior.sample())[0]}

    @settings
    class ScaleImage(Module):
        in_name: str
        out_name: str
        factor: float

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            image = self.ask(variation, self.in_name, index)
            return {self.out_name: F.interpolate(image[None], scale_factor=self.factor, mode="nearest")[0]}

    own = (LoadImage, GenerateImageLike, CalcAspect, AspectBucketing, ScaleCropImage, RandomFlip, ScaleImage)
    return {cls.__name__: cls for cls in (*own, EncodeVAE, SampleVAEDistribution)}


def _texts(base: SimpleNamespace) -> dict[str, type]:
    Module = random_access(base)

    @settings
    class LoadMultipleTexts(Module):
        path_in_name: str
        texts_out_name: str

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            path = Path(self.ask(variation, self.path_in_name, index))
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            return {self.texts_out_name: [line.strip() for line in lines if line.strip()] or [""]}

    @settings
    class SelectRandomText(Module):
        texts_in_name: str
        text_out_name: str

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            texts = self.ask(variation, self.texts_in_name, index)
            return {self.text_out_name: self._get_rand(variation, index).choice(texts)}

    @settings
    class Tokenize(Module):
        in_name: str
        tokens_out_name: str
        mask_out_name: str
        tokenizer: Callable[..., Any]
        max_token_length: int

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            text = self.ask(variation, self.in_name, index)
            how = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
            found = self.tokenizer(text, max_length=self.max_token_length, **how).to(self.pipeline.device)
            return {self.tokens_out_name: found.input_ids[0], self.mask_out_name: found.attention_mask[0]}

    @settings
    class EncodeClipText(Module):
        in_name: str
        tokens_attention_mask_in_name: str | None
        hidden_state_out_name: str
        pooled_out_name: str | None
        text_encoder: Any
        add_layer_norm: bool
        hidden_state_output_index: int | None = None
        autocast_contexts: list[Any] | None = None
        dtype: torch.dtype | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            self.autocast_contexts = self.autocast_contexts or [nullcontext()]

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            tokens = self.ask(variation, self.in_name, index)
            with self._all_contexts(self.autocast_contexts):
                found = self.text_encoder(tokens[None], output_hidden_states=True)
            item = {self.hidden_state_out_name: found.hidden_states[self.hidden_state_output_index][0]}
            if self.pooled_out_name:
                item[self.pooled_out_name] = (found.text_embeds if "text_embeds" in found else found.pooler_output)[0]
            return item

    return {cls.__name__: cls for cls in (LoadMultipleTexts, SelectRandomText, Tokenize, EncodeClipText)}


def _sorting(base: SimpleNamespace) -> dict[str, type]:
    Module = random_access(base)

    @settings
    class VariationSorting(Module):
        """The balancing of a cache, for names that are not cached. Groups as in the contract: floor(n * repeats)."""

        names: list[str]
        balancing_in_name: str | None = None
        balancing_strategy_in_name: str | None = None
        variations_group_in_name: list[str] | None = None
        group_enabled_in_name: str | None = None

        def length(self) -> int:
            groups = vars(self).get("groups")
            return super().length() if groups is None else sum(num_out for _, num_out in groups)

        def start(self, variation: int) -> None:
            members: dict[str, list[int]] = {}
            for index in range(self._get_previous_length(self.first)):
                if self.group_enabled_in_name and not self.ask(0, self.group_enabled_in_name, index):
                    continue
                key = repr([self.ask(0, name, index) for name in self.variations_group_in_name or []])
                members.setdefault(key, []).append(index)
            self.groups: list[tuple[list[int], int]] = []
            for indices in members.values():
                balancing = self.ask(0, self.balancing_in_name, indices[0])
                repeats = self.ask(0, self.balancing_strategy_in_name, indices[0]) == "REPEATS"
                self.groups.append((indices, int(len(indices) * balancing) if repeats else int(balancing)))

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            assert name is not None
            for indices, num_out in self.groups:
                if index < num_out:
                    return {name: self.ask(variation, name, indices[(index + variation * num_out) % len(indices)])}
                index -= num_out
            raise IndexError(index)

    class AspectBatchSorting(base.PipelineModule, base.SingleVariationRandomAccessPipelineModule):
        """Items of one resolution one after the other, so that a batch has one shape."""

        def __init__(self, resolution_in_name: str, names: list[str], batch_size: int):
            super().__init__()
            self.resolution_in_name, self.names, self.batch_size = resolution_in_name, names, batch_size
            self.order: list[int] = []

        def length(self) -> int:
            return len(self.order)

        def get_inputs(self) -> list[str]:
            return [self.resolution_in_name, *self.names]

        def get_outputs(self) -> list[str]:
            return self.names

        def start(self, variation: int) -> None:
            buckets: dict[tuple[int, ...], list[int]] = {}
            for index in range(self._get_previous_length(self.resolution_in_name)):
                resolution = self._get_previous_item(self.current_variation, self.resolution_in_name, index)
                buckets.setdefault(resolution, []).append(index)
            rand = self._get_rand(variation)
            for bucket in buckets.values():
                rand.shuffle(bucket)
                del bucket[len(bucket) - len(bucket) % self.batch_size :]
            self.order = [index for bucket in buckets.values() for index in bucket]

        def get_item(self, index: int, name: str | None = None) -> dict[str, Any]:
            place = self.order[index]
            return {each: self._get_previous_item(self.current_variation, each, place) for each in self.names}

    return {cls.__name__: cls for cls in (VariationSorting, AspectBatchSorting)}
