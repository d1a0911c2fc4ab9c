"""Copies to and from a device with streams: how many streams there are, and what waits for what.

The simulated device has no streams. Here it gets some that write down what they are told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.fake_streams import Streams
from helpers.loss_cases import make_cache

from latentcache import LatentDataset
from latentcache.config import Config
from latentcache.loading.loader import LatentLoader
from latentcache.loading.sampler import BucketBatchSampler
from latentcache.precache.run import run_precache
from latentcache.precache.workspace import Workspace
from latentcache.service.miss_encoder import MissEncoder


@pytest.fixture
def streams(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Streams:
    if device.type == "cuda":
        pytest.skip("its streams are not written down")
    streams, module = Streams(), torch.get_device_module(device)
    for name in ("Stream", "Event", "stream", "current_stream"):
        monkeypatch.setattr(module, name, getattr(streams, name), raising=False)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    return streams


def config_on(device: torch.device, make_config: Callable[..., Config]) -> Config:
    return make_config(**{"encode.device": str(device), "encode.text_dtype": "float32", "encode.batch_size": 1})


def test_epochs_and_loaders_of_a_device_share_its_streams(
    tmp_path: Path, device: torch.device, streams: Streams
) -> None:
    """torch's allocator gives no memory from one stream to another: each further stream keeps some of its own."""
    make_cache(tmp_path)
    loaders = [
        LatentLoader(BucketBatchSampler(LatentDataset(tmp_path / "cache", "photos"), 2), device=device)
        for _ in range(2)
    ]

    def train(loader: LatentLoader) -> None:
        for _ in range(3):
            assert len([*loader]) == len(loader)

    threads = [threading.Thread(target=train, args=(loader,)) for loader in loaders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    train(LatentLoader(loaders[0].sampler, device=device.type))
    assert "has streams" in iter(loaders[0]).how
    assert streams.num_streams <= 2 * len(threads), "threads that begin at once may each make a pair"
    made = streams.num_streams
    train(loaders[1])
    assert streams.num_streams == made


def test_runs_and_requests_on_a_device_share_its_streams(
    make_config: Callable[..., Config], photos: Path, device: torch.device, streams: Streams
) -> None:
    config = config_on(device, make_config)
    for _ in range(2):
        assert run_precache(config, workspace=Workspace()).num_refused == 0
    with MissEncoder(config, Workspace()) as encoder:
        for name in ("a.png", "c.png"):
            [(_, image)] = encoder.image((photos / name).read_bytes())
            for task in (image, encoder.prompt(f"a photo named {name}")):
                [future] = encoder.submit([task]).values()
                future.result(60)
    assert streams.num_streams == 2


def test_an_upload_does_not_wait_behind_a_download(
    make_config: Callable[..., Config], device: torch.device, streams: Streams
) -> None:
    """A download begins when the computation has ended: what is behind it on its stream overlaps nothing."""
    run_precache(config_on(device, make_config), workspace=Workspace())
    recorded = {step.split(" records ")[1]: step.split(" records ")[0] for step in streams.log if " records " in step}
    waits = [step.split(" waits for ") for step in streams.log if " waits for " in step and "host" not in step]
    uploading = {recorded[event] for who, event in waits if who == "current"}
    downloading = {who for who, event in waits if recorded[event] == "current"}
    assert uploading and downloading and uploading.isdisjoint(downloading)
