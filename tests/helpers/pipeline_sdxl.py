"""SDXL's pipeline of OneTrainer over tiny encoders, with a cache module in it and counters of what is encoded."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from helpers.photo_files import write_photo

from latentcache.models.tiny import tiny_parts

SPLIT_IMAGE = ["latent_image", "original_resolution", "crop_offset"]
AGGREGATE_IMAGE = ["crop_resolution", "image_path"]
SPLIT_TEXT = [
    "tokens_1",
    "text_encoder_1_hidden_state",
    "tokens_2",
    "text_encoder_2_hidden_state",
    "text_encoder_2_pooled_state",
]
GROUP = ["concept.path", "concept.seed", "concept.include_subdirectories"]


def write_photos(folder: Path, num: int = 6) -> Path:
    """Photos in two buckets, each with a caption of its own."""
    for number in range(num):
        path = write_photo(folder / f"p{number:02}.png", number, (64, 96) if number % 2 else (96, 64))
        path.with_suffix(".txt").write_text(f"photo number {number}", encoding="utf-8")
    return folder


def concept(path: Path, seed: int = 1, **settings: Any) -> dict[str, Any]:
    """A concept as OneTrainer passes it. Settings by dotted name: concept(p, **{"image.enable_random_flip": 1})."""
    value: dict[str, Any] = {
        "path": str(path),
        "seed": seed,
        "enabled": True,
        "include_subdirectories": False,
        "balancing": 1.0,
        "balancing_strategy": "REPEATS",
        "image_variations": 1,
        "text_variations": 1,
        "image": {
            "enable_crop_jitter": False,
            "enable_random_flip": False,
            "enable_fixed_flip": False,
            "enable_resolution_override": False,
            "resolution_override": "64",
        },
        "text": {"prompt_source": "sample"},
    }
    for name, setting in settings.items():
        target = value
        *sections, last = name.split(".")
        for section in sections:
            target = target[section]
        target[last] = setting
    return value


@dataclass
class Setup:
    """What a user sets, and what the trainer loaded. `changes` go to the cache modules' constructors."""

    host: SimpleNamespace
    cache_dir: Path
    concepts: list[dict[str, Any]]
    parts: dict[str, Any] = field(default_factory=lambda: tiny_parts(0))
    resolution: str = "78"
    masks: bool = False
    cached: bool = True
    clip_layer: int = -2
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    before: Callable[[str], None] = lambda kind: None
    changes: Mapping[str, Any] = field(default_factory=dict)
    text_changes: Mapping[str, Any] = field(default_factory=dict)

    def start(self, num_epochs: int = 1) -> Run:
        """A new pipeline, as a new run of the trainer makes it, started `num_epochs` times."""
        run = Run(self)
        for _ in range(num_epochs):
            run.next_epoch()
        return run


class Run:
    """One run: `items` are those of the last epoch in the cache's order, `encoded` counts what was encoded so far."""

    split_text = SPLIT_TEXT
    encoders: Mapping[str, str | None] = {"vae": "encoder", "text_encoder": None, "text_encoder_2": None}
    """Those that are counted, and the child that is called."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self.encoded: Counter[str] = Counter()
        self.begun: list[str] = []
        self.caches: dict[str, Any] = {}
        host = setup.host
        self.state = host.PipelineState(2)
        self.pipeline = host.LoadingPipeline(
            device=setup.device, modules=list(self._modules()), batch_size=1, seed=42, state=self.state
        )

    def next_epoch(self) -> None:
        """Start an epoch; calls of encoders are counted."""
        with self.counting():
            self.pipeline.start_next_epoch()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the calls of encoders."""
        handles = []
        for part, child in self.encoders.items():
            module = self.setup.parts[part] if child is None else getattr(self.setup.parts[part], child)
            handles.append(module.register_forward_hook(lambda *_, part=part: self.encoded.update([part])))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def cache_items(self, kind: str) -> list[dict[str, Any]]:
        """What the cache of this kind gives for each of its outputs, name by name."""
        cache = self.caches[kind]
        with torch.no_grad():
            return [
                {name: cache.get_item(index, name)[name] for name in cache.get_outputs()}
                for index in range(cache.length())
            ]

    @property
    def items(self) -> list[dict[str, Any]]:
        """Image and text of each output: they are joined by position."""
        pairs = zip(self.cache_items("image"), self.cache_items("text"), strict=True)
        return [image | text for image, text in pairs]

    def by_photo(self) -> dict[str, dict[str, Any]]:
        return {Path(item["image_path"]).name: item for item in self.items}

    def _modules(self) -> list[Any]:
        host, setup = self.setup.host, self.setup
        modules = [
            host.ConceptPipelineModule(copy.deepcopy(setup.concepts)),
            host.SettingsPipelineModule({"target_resolution": setup.resolution, "target_frames": "1"}),
            host.CollectPaths(
                concept_in_name="concept",
                path_in_name="path",
                include_subdirectories_in_name="concept.include_subdirectories",
                enabled_in_name="enabled",
                path_out_name="image_path",
                concept_out_name="concept",
                extensions=[".png"],
                include_postfix=None,
                exclude_postfix=["-masklabel"],
            ),
            host.ModifyPath(in_name="image_path", out_name="mask_path", postfix="-masklabel", extension=".png"),
            host.ModifyPath(in_name="image_path", out_name="text_path", postfix="", extension=".txt"),
            *self._images(),
            *self._texts(),
        ]
        if setup.cached:
            modules += self._caches()
        return modules + self._after()

    def _images(self) -> list[Any]:
        host, setup = self.setup.host, self.setup
        names = ["image", "mask"] if setup.masks else ["image"]
        modules = [host.LoadImage("image_path", "image")]
        if setup.masks:
            modules.append(host.GenerateImageLike("image", "mask", 255, 0, 1))
            modules.append(host.LoadImage("mask_path", "mask", channels=1))
        modules += [
            host.CalcAspect("image", "original_resolution"),
            host.AspectBucketing(
                quantization=32,
                resolution_in_name="original_resolution",
                target_resolution_in_name="settings.target_resolution",
                enable_target_resolutions_override_in_name="concept.image.enable_resolution_override",
                target_resolutions_override_in_name="concept.image.resolution_override",
                target_frames_in_name="settings.target_frames",
                frame_dim_enabled=False,
                scale_resolution_out_name="scale_resolution",
                crop_resolution_out_name="crop_resolution",
                possible_resolutions_out_name="possible_resolutions",
            ),
            host.ScaleCropImage(
                names, "scale_resolution", "crop_resolution", "concept.image.enable_crop_jitter", "crop_offset"
            ),
            host.RandomFlip(names, "concept.image.enable_random_flip", "concept.image.enable_fixed_flip"),
            host.EncodeVAE("image", "latent_distribution", setup.parts["vae"], dtype=torch.float32),
            host.SampleVAEDistribution("latent_distribution", "latent_image", mode="mean"),
        ]
        return [*modules, host.ScaleImage("mask", "latent_mask", 0.125)] if setup.masks else modules

    def _texts(self) -> list[Any]:
        host, parts, layer = self.setup.host, self.setup.parts, self.setup.clip_layer
        return [
            host.LoadMultipleTexts("text_path", "texts"),
            host.SelectRandomText("texts", "prompt"),
            host.Tokenize("prompt", "tokens_1", "tokens_mask_1", parts["tokenizer"], 77),
            host.Tokenize("prompt", "tokens_2", "tokens_mask_2", parts["tokenizer_2"], 77),
            host.EncodeClipText(
                in_name="tokens_1",
                tokens_attention_mask_in_name=None,
                hidden_state_out_name="text_encoder_1_hidden_state",
                pooled_out_name=None,
                text_encoder=parts["text_encoder"],
                add_layer_norm=False,
                hidden_state_output_index=layer,
            ),
            host.EncodeClipText(
                in_name="tokens_2",
                tokens_attention_mask_in_name=None,
                hidden_state_out_name="text_encoder_2_hidden_state",
                pooled_out_name="text_encoder_2_pooled_state",
                text_encoder=parts["text_encoder_2"],
                add_layer_norm=False,
                hidden_state_output_index=layer,
            ),
        ]

    def _caches(self) -> list[Any]:
        setup = self.setup
        split = SPLIT_IMAGE + (["latent_mask"] if setup.masks else [])
        for kind, names, aggregate in (("image", split, AGGREGATE_IMAGE), ("text", self.split_text, [])):

            def begin(kind: str = kind) -> None:
                self.begun.append(kind)
                setup.before(kind)

            self.caches[kind] = setup.host.LatentCacheModule(
                **{
                    "cache_dir": str(setup.cache_dir / kind),
                    "split_names": names,
                    "aggregate_names": aggregate,
                    "variations_in_name": f"concept.{kind}_variations",
                    "balancing_in_name": "concept.balancing",
                    "balancing_strategy_in_name": "concept.balancing_strategy",
                    "variations_group_in_name": [*GROUP, f"concept.{kind}"],
                    "group_enabled_in_name": "concept.enabled",
                    "before_cache_fun": begin,
                    **setup.changes,
                    **(setup.text_changes if kind == "text" else {}),
                }
            )
        return list(self.caches.values())

    def _after(self) -> list[Any]:
        host = self.setup.host
        names = [*SPLIT_IMAGE, *AGGREGATE_IMAGE, *self.split_text, "prompt", "concept"]
        names += ["latent_mask"] if self.setup.masks else []
        sorting = host.VariationSorting(
            names=["prompt", "concept"],
            balancing_in_name="concept.balancing",
            balancing_strategy_in_name="concept.balancing_strategy",
            variations_group_in_name=[*GROUP, "concept.image"],
            group_enabled_in_name="concept.enabled",
        )
        batches = host.AspectBatchSorting("crop_resolution", names, 1)
        return [sorting, batches, host.OutputPipelineModule(names)]
