"""The pipeline of OneTrainer's own SDXL loader, over tiny encoders, with a cache module and counters in it.

`onetrainer_sdxl.json` records a default concept, and every module with its arguments as OneTrainer's loader made them
at the commits that it names. {"object": name} is an object of the trainer, {"set": ...} and {"tuple": ...} are types
that JSON lacks.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from helpers.photo_files import write_photo

from latentcache.models.tiny import tiny_parts

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("onetrainer_sdxl.json").read_text(encoding="utf-8"))


def write_photos(folder: Path, num: int = 6) -> Path:
    """Write photos in two buckets, each with its own caption."""
    for number in range(num):
        path = write_photo(folder / f"p{number:02}.png", number, (64, 96) if number % 2 else (96, 64))
        path.with_suffix(".txt").write_text(f"photo number {number}", encoding="utf-8")
    return folder


def concept(path: Path, **changes: Any) -> dict[str, Any]:
    """A concept with OneTrainer's defaults, except for crop jitter and these settings by dotted name."""
    value = copy.deepcopy(RECORDED["concept"]) | {"path": str(path)}
    for name, setting in ({"image.enable_crop_jitter": False} | changes).items():
        target = value
        *sections, last = name.split(".")
        for section in sections:
            target = target[section]
        assert last in target, f"OneTrainer has no setting {name}"
        target[last] = setting
    return value


def exact(item: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The item for `==`, in which dtypes, types and the bits of tensors count."""
    return {name: (v.dtype, v.tolist()) if torch.is_tensor(v) else (type(v), v) for name, v in item.items()}


@dataclass
class Setup:
    """The user's settings and the loaded models. `changes` go to the constructors of the cache modules."""

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

    def start(self, num_epochs: int = 1) -> Run:
        """A new pipeline, as in a new run of the trainer, started `num_epochs` times."""
        run = Run(self)
        for _ in range(num_epochs):
            run.next_epoch()
        return run


class Run:
    """A run. `items` are those of the last epoch in the cache's order, `encoded` counts the calls of encoders."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self.encoded: Counter[str] = Counter()
        self.begun: list[str] = []
        self.caches: dict[str, Any] = {}
        self.state = setup.host.PipelineState(2)
        self.pipeline = setup.host.LoadingPipeline(
            device=setup.device, modules=list(self._modules()), batch_size=1, seed=42, state=self.state
        )

    def next_epoch(self) -> None:
        """Start an epoch, and count the calls of encoders."""
        with self.counting():
            self.pipeline.start_next_epoch()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the calls of encoders."""
        handles, parts = [], self.setup.parts
        for part in ("vae", "text_encoder", "text_encoder_2"):
            module = parts["vae"].encoder if part == "vae" else parts[part]
            handles.append(module.register_forward_hook(lambda *_, part=part: self.encoded.update([part])))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def cache_items(self, kind: str) -> list[dict[str, Any]]:
        """The outputs of the cache of this kind, by name."""
        cache = self.caches[kind]
        with torch.no_grad():
            return [
                {name: cache.get_item(index, name)[name] for name in cache.get_outputs()}
                for index in range(cache.length())
            ]

    @property
    def items(self) -> list[dict[str, Any]]:
        """The image and text of each item, joined by position."""
        pairs = zip(self.cache_items("image"), self.cache_items("text"), strict=True)
        return [image | text for image, text in pairs]

    def by_photo(self) -> dict[str, dict[str, Any]]:
        return {Path(item["image_path"]).name: item for item in self.items}

    def _begin(self, kind: str) -> None:
        self.begun.append(kind)
        self.setup.before(kind)

    def _modules(self) -> Iterator[Any]:
        make, setup, objects = self.setup.host.make, self.setup, self._objects()
        changes: dict[str, dict[str, Any]] = {
            "AspectBucketing": {"quantization": 32},
            "EncodeClipText": {"hidden_state_output_index": setup.clip_layer},
        }
        if setup.masks:
            changes |= {key: {"names": ["image", "mask"]} for key in ("ScaleCropImage", "RandomFlip")}
        yield make("ConceptPipelineModule", concepts=copy.deepcopy(setup.concepts))
        yield make("SettingsPipelineModule", settings=RECORDED["settings"] | {"target_resolution": setup.resolution})
        for name, recorded in RECORDED["modules"]:
            given = {key: _value(value, objects) for key, value in recorded.items()} | changes.get(name, {})
            if name == "CalcAspect" and setup.masks:
                pixels: dict[str, Any] = {"image_out_name": "mask", "range_min": 0, "range_max": 1}
                yield make(
                    "ModifyPath", in_name="image_path", out_name="mask_path", postfix="-masklabel", extension=".png"
                )
                yield make("GenerateImageLike", image_in_name="image", color=255, **pixels)
                yield make("LoadImage", path_in_name="mask_path", supported_extensions={".png"}, channels=1, **pixels)
            if name != "DiskCache":
                yield make(name, **given)
            elif setup.cached:
                yield self._cache(given)
            if name == "SampleVAEDistribution" and setup.masks:
                yield make("ScaleImage", in_name="mask", out_name="latent_mask", factor=0.125)

    def _cache(self, given: dict[str, Any]) -> Any:
        kind, setup = given["cache_dir"], self.setup
        masks = ["latent_mask"] if setup.masks and kind == "image" else []
        own = {"cache_dir": str(setup.cache_dir / kind), "split_names": [*given["split_names"], *masks]}
        own["after_cache_fun"] = partial(self.begun.append, "after")
        self.caches[kind] = setup.host.LatentCacheModule(**given | own | dict(setup.changes))
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
            "prepare_vae": partial(self._begin, "image"),
            "before_cache_text_fun": partial(self._begin, "text"),
        }


def _value(recorded: Any, objects: dict[str, Any]) -> Any:
    if isinstance(recorded, list):
        return [_value(each, objects) for each in recorded]
    if isinstance(recorded, dict) and len(recorded) == 1:
        ((kind, content),) = recorded.items()
        if kind in ("object", "set", "tuple"):
            return objects[content] if kind == "object" else {"set": set, "tuple": tuple}[kind](content)
    return recorded
