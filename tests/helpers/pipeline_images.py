"""The image modules of SDXL's pipeline in OneTrainer, after mgds' module contract, over any base classes."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image


def random_access(base: SimpleNamespace) -> type:
    class Module(base.PipelineModule, base.RandomAccessPipelineModule):
        """`first` is the name whose length is the module's; `ins` and `outs` are what it asks for and gives."""

        first = ""

        def length(self) -> int:
            return self._get_previous_length(self.first)

        def get_inputs(self) -> list[str]:
            return [self.first]

        def ask(self, variation: int, name: str, index: int) -> Any:
            return self._get_previous_item(variation, name, index)

    return Module


def images(base: SimpleNamespace) -> dict[str, type]:
    Module = random_access(base)

    class LoadImage(Module):
        def __init__(
            self,
            path_in_name: str,
            image_out_name: str,
            range_min: float = -1,
            range_max: float = 1,
            supported_extensions: Collection[str] = (".png",),
            channels: int = 3,
            dtype: torch.dtype | None = None,
        ):
            super().__init__()
            self.first = self.path_in_name = path_in_name
            self.image_out_name, self.dtype = image_out_name, dtype
            self.range_min, self.range_max, self.supported_extensions = range_min, range_max, supported_extensions
            self.mode = {3: "RGB", 1: "L"}[channels]

        def get_outputs(self) -> list[str]:
            return [self.image_out_name]

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            path = self.ask(variation, self.path_in_name, index)
            if os.path.splitext(path)[1].lower() not in self.supported_extensions or not os.path.exists(path):
                return {self.image_out_name: None}
            with Image.open(path) as image:
                pixels = torch.from_numpy(np.array(image.convert(self.mode)))
            pixels = pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)
            pixels = pixels.to(self.pipeline.device, self.dtype or torch.float32)
            return {self.image_out_name: pixels / 255 * (self.range_max - self.range_min) + self.range_min}

    class GenerateImageLike(Module):
        def __init__(self, image_in_name: str, image_out_name: str, color: float, range_min: float, range_max: float):
            super().__init__()
            self.first = self.image_in_name = image_in_name
            self.image_out_name, self.color = image_out_name, color
            self.range_min, self.range_max = range_min, range_max

        def get_outputs(self) -> list[str]:
            return [self.image_out_name]

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            image = self.ask(variation, self.image_in_name, index)
            value = self.color / 255 * (self.range_max - self.range_min) + self.range_min
            return {self.image_out_name: torch.full_like(image[:1], value)}

    class CalcAspect(Module):
        def __init__(self, image_in_name: str, resolution_out_name: str):
            super().__init__()
            self.first = self.image_in_name = image_in_name
            self.resolution_out_name = resolution_out_name

        def get_outputs(self) -> list[str]:
            return [self.resolution_out_name]

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            return {self.resolution_out_name: tuple(self.ask(variation, self.image_in_name, index).shape[1:])}

    class AspectBucketing(Module):
        def __init__(  # the signature that OneTrainer calls
            self,
            quantization: int,
            resolution_in_name: str,
            target_resolution_in_name: str,
            enable_target_resolutions_override_in_name: str,
            target_resolutions_override_in_name: str,
            target_frames_in_name: str,
            frame_dim_enabled: bool,
            scale_resolution_out_name: str,
            crop_resolution_out_name: str,
            possible_resolutions_out_name: str,
        ):
            super().__init__()
            self.quantization, self.frame_dim_enabled = quantization, frame_dim_enabled
            self.first = self.resolution_in_name = resolution_in_name
            self.target_resolutions_in_name = target_resolution_in_name
            self.enable_target_resolutions_override_in_name = enable_target_resolutions_override_in_name
            self.target_resolutions_override_in_name = target_resolutions_override_in_name
            self.target_frames_in_name = target_frames_in_name
            self.scale_resolution_out_name = scale_resolution_out_name
            self.crop_resolution_out_name = crop_resolution_out_name
            self.possible_resolutions_out_name = possible_resolutions_out_name

        def get_outputs(self) -> list[str]:
            return [self.scale_resolution_out_name, self.crop_resolution_out_name, self.possible_resolutions_out_name]

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

    class ScaleCropImage(Module):
        def __init__(
            self,
            names: list[str],
            scale_resolution_in_name: str,
            crop_resolution_in_name: str,
            enable_crop_jitter_in_name: str,
            crop_offset_out_name: str,
        ):
            super().__init__()
            self.first, self.names = names[0], names
            self.scale_resolution_in_name = scale_resolution_in_name
            self.crop_resolution_in_name = crop_resolution_in_name
            self.enable_crop_jitter_in_name = enable_crop_jitter_in_name
            self.crop_offset_out_name = crop_offset_out_name

        def get_outputs(self) -> list[str]:
            return [*self.names, self.crop_offset_out_name]

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

    class RandomFlip(Module):
        def __init__(self, names: list[str], enabled_in_name: str, fixed_enabled_in_name: str):
            super().__init__()
            self.first, self.names = names[0], names
            self.enabled_in_name, self.fixed_enabled_in_name = enabled_in_name, fixed_enabled_in_name

        def get_outputs(self) -> list[str]:
            return self.names

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            flip = self.ask(variation, self.fixed_enabled_in_name, index)
            if self.ask(variation, self.enabled_in_name, index):
                flip = self._get_rand(variation, index).random() < 0.5
            images = {each: self.ask(variation, each, index) for each in self.names}
            return {each: image.flip(-1) if flip else image for each, image in images.items()}

    class EncodeVAE(Module):
        def __init__(
            self,
            in_name: str,
            out_name: str,
            vae: Any,
            autocast_contexts: list[Any] | None = None,
            dtype: torch.dtype | None = None,
            sample_mode: str = "sample",
        ):
            super().__init__()
            self.first = self.in_name = in_name
            self.out_name, self.vae, self.dtype = out_name, vae, dtype
            self.autocast_contexts = autocast_contexts or [nullcontext()]

        def get_outputs(self) -> list[str]:
            return [self.out_name]

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            image = self.ask(variation, self.in_name, index)
            with self._all_contexts(self.autocast_contexts):
                return {self.out_name: self.vae.encode(image.to(dtype=self.dtype or image.dtype)[None]).latent_dist}

    class SampleVAEDistribution(Module):
        def __init__(self, in_name: str, out_name: str, mode: str = "mean"):
            super().__init__()
            self.first = self.in_name = in_name
            self.out_name, self.mode = out_name, mode

        def get_outputs(self) -> list[str]:
            return [self.out_name]

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            posterior = self.ask(variation, self.in_name, index)
            return {self.out_name: (posterior.mode() if self.mode == "mean" else posterior.sample())[0]}

    class ScaleImage(Module):
        def __init__(self, in_name: str, out_name: str, factor: float):
            super().__init__()
            self.first = self.in_name = in_name
            self.out_name, self.factor = out_name, factor

        def get_outputs(self) -> list[str]:
            return [self.out_name]

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            image = self.ask(variation, self.in_name, index)
            return {self.out_name: F.interpolate(image[None], scale_factor=self.factor, mode="nearest")[0]}

    own = (LoadImage, GenerateImageLike, CalcAspect, AspectBucketing, ScaleCropImage, RandomFlip, ScaleImage)
    return {cls.__name__: cls for cls in (*own, EncodeVAE, SampleVAEDistribution)}
