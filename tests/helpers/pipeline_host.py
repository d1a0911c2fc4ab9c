"""A small host for pipeline modules that follows mgds' module contract. The same tests can run in mgds itself.

`host("mgds")` takes the base classes, and all modules that do not need torchvision, from an installed mgds or from the
`src` folder in MGDS_SRC. `host("own")` needs neither.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import pipeline_modules

from latentcache.integrations.onetrainer import module_class


class PipelineState:
    """State shared by all modules of a pipeline."""

    def __init__(self, max_threads: int | None = None):
        self.executor = ThreadPoolExecutor(max_threads)


class RandomAccessPipelineModule:
    """get_item(variation, index, name); started once."""

    started = False

    def start(self, variation: int) -> None: ...


class SingleVariationRandomAccessPipelineModule:
    """get_item(index, name); started each epoch."""

    current_variation = -1

    def start(self, variation: int) -> None: ...


class PipelineModule:
    """The base class of all modules."""

    def __init__(self) -> None:
        super().__init__()
        self.clear_item_cache()

    def init(self, pipeline: Any, base_seed: int, module_index: int, state: PipelineState) -> None:
        self.pipeline, self._state = pipeline, state
        self.__base_seed, self.__module_index = base_seed, module_index

    def clear_item_cache(self) -> None:
        self.__last = threading.local()  # the last item of each thread

    def _get_previous_item(self, variation: int, name: str, index: int) -> Any:
        head, *path = name.split(".")
        item = None
        for module in reversed(self.pipeline.modules[: self.__module_index]):
            if head in module.get_outputs():
                item = module.__item(variation, head, index)
                if item is not None:
                    break
        for part in path:
            item = item.get(part)
            if item is None:
                break
        return item

    def __item(self, variation: int, name: str, index: int) -> Any:
        last = self.__last
        if getattr(last, "place", None) != (variation, index):
            last.place, last.values = (variation, index), {}
        if name not in last.values:
            if isinstance(self, RandomAccessPipelineModule):
                last.values |= self.get_item(variation, index, name)
            else:
                assert variation == self.current_variation, f"{self} was started with {self.current_variation}"
                last.values |= self.get_item(index, name)
        return last.values[name]

    def _get_previous_length(self, name: str) -> int:
        head = name.split(".")[0]
        return next(
            m for m in reversed(self.pipeline.modules[: self.__module_index]) if head in m.get_outputs()
        ).length()

    def _get_rand(self, variation: int, index: int = -1) -> Random:
        return Random(hash((self.__base_seed, self.__module_index, variation, index)))


class LoadingPipeline:
    """A chain of modules. `start_next_epoch` starts them in order; iterating yields the outputs of the last one."""

    def __init__(self, device: torch.device, modules: list[Any], batch_size: int, seed: int, state: PipelineState):
        self.device, self.modules = device, modules
        self._epoch = -1
        for index, module in enumerate(modules):
            module.init(self, seed, index, state)

    def start_next_epoch(self) -> None:
        self._epoch += 1
        with torch.no_grad():
            for module in self.modules:
                module.clear_item_cache()
                if isinstance(module, RandomAccessPipelineModule):
                    if not module.started:
                        module.start(self._epoch)
                    module.started = True
                else:
                    module.current_variation = self._epoch
                    module.start(self._epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        output = self.modules[-1]
        for index in range(output.length()):
            with torch.no_grad():
                yield output.get_item(index)


class OutputPipelineModule(PipelineModule, SingleVariationRandomAccessPipelineModule):
    """The last module: items by name, tensors on the pipeline's device."""

    def __init__(self, names: list[str | tuple[str, str]]):
        super().__init__()
        self.names = dict((name, name) if isinstance(name, str) else name for name in names)

    def length(self) -> int:
        return self._get_previous_length(next(iter(self.names)))

    def get_outputs(self) -> list[str]:
        return list(self.names.values())

    def get_item(self, index: int, name: str | None = None) -> dict[str, Any]:
        values = {out: self._get_previous_item(self.current_variation, name, index) for name, out in self.names.items()}
        return {n: v.to(self.pipeline.device) if torch.is_tensor(v) else v for n, v in values.items() if v is not None}


OWN_ALWAYS = frozenset({"LoadImage", "LoadVideo", "ScaleCropImage", "ScaleImage", "RandomFlip", "RandomRotate"})
OWN_ALWAYS |= {f"Random{name}" for name in ("Brightness", "Contrast", "Saturation", "Hue")}
"""In mgds these need torchvision or a video, so its pipelines use the modules of this host."""


def host(name: str) -> SimpleNamespace:
    """Base classes, the cache module, and `make(name, **settings)` for other modules. Skips the test without mgds."""
    is_own = name == "own"
    bases = SimpleNamespace(
        **{each: globals()[each] if is_own else _of_mgds(home, each) for each, home in BASES.items()}
    )
    make_own = pipeline_modules.module_maker(bases)

    def make(module: str, **settings: Any) -> Any:
        if is_own and module == "OutputPipelineModule":
            return OutputPipelineModule(**settings)
        if is_own or module in OWN_ALWAYS:
            return make_own(module, **settings)
        home = "mgds" if module.endswith("PipelineModule") else "mgds.pipelineModules"
        return _of_mgds(f"{home}.{module}", module)(**settings)

    bases.make = make
    bases.LatentCacheModule = module_class(bases.PipelineModule, bases.SingleVariationRandomAccessPipelineModule)
    return bases


BASES = {
    "PipelineState": "mgds.PipelineModule",
    "PipelineModule": "mgds.PipelineModule",
    "RandomAccessPipelineModule": "mgds.pipelineModuleTypes.RandomAccessPipelineModule",
    "SingleVariationRandomAccessPipelineModule": "mgds.pipelineModuleTypes.SingleVariationRandomAccessPipelineModule",
    "LoadingPipeline": "mgds.LoadingPipeline",
}
"""The classes of this file that mgds has too, with their modules."""


def _of_mgds(home: str, name: str) -> Any:
    source = os.environ.get("MGDS_SRC")
    if source and source not in sys.path:
        sys.path.append(source)
    pytest.importorskip("mgds.PipelineModule", reason="mgds is not installed; name its src in MGDS_SRC")
    return getattr(importlib.import_module(home), name)
