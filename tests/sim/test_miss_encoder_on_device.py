"""Encoding on a miss, on a second device: the encoders go there once, stay, and leave when they are idle."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from latentcache.config import Config
from latentcache.devices.placement import device_of
from latentcache.models.model_loader import LoadedModels
from latentcache.models.tiny import tiny_parts
from latentcache.precache.run import run_precache
from latentcache.precache.workspace import Workspace
from latentcache.service.miss_encoder import MissEncoder

ENCODERS = ("vae", "text_encoder", "text_encoder_2")


def noting(
    module: torch.nn.Module, name: str, to: Callable[..., Any], moves: list[tuple[str, str]], *where: Any
) -> Any:
    """`module.to`, which notes the moves from one device to another."""
    before = device_of(module)
    to(*where)
    if device_of(module) != before:
        moves.append((name, device_of(module).type))
    return module


def test_the_encoders_stay_on_the_device_until_they_are_idle(
    make_config: Callable[..., Config], photos: Path, device: torch.device
) -> None:
    config = make_config(**{"encode.device": str(device), "encode.text_dtype": "float32"})
    parts, precached, ours = tiny_parts(), Workspace(), Workspace()
    run_precache(config, models=LoadedModels(**parts), workspace=precached)
    moves: list[tuple[str, str]] = []
    for name in ENCODERS:
        parts[name].to = partial(noting, parts[name], name, parts[name].to, moves)

    with MissEncoder(config, ours, models=LoadedModels(**parts), idle_s=1.0) as encoder:
        for text in ("a red house", "a blue car", "a tree"):
            [future] = encoder.submit([encoder.prompt(text)]).values()
            future.result(60)
        assert moves == [("text_encoder", device.type), ("text_encoder_2", device.type)]
        [(_, task)] = encoder.image((photos / "a.png").read_bytes())
        [future] = encoder.submit([task]).values()
        future.result(60)
        # Those of the other kind make room.
        assert sorted(moves[2:4]) == [("text_encoder", "cpu"), ("text_encoder_2", "cpu")]
        assert moves[4:] == [("vae", device.type)]
        until = time.monotonic() + 60
        while encoder.loaded and time.monotonic() < until:
            time.sleep(0.05)
        assert moves[5:] == [("vae", "cpu")]
    assert len(list(ours.store.keys())) == 4
    for key in ours.store.keys():
        mine, theirs = ours.store.get(key), precached.store.get(key)
        for name, tensor in mine.tensors.items():
            torch.testing.assert_close(tensor, theirs.tensors[name], rtol=1e-4, atol=1e-4)
