"""Copies beside the computation: what waits for what. The streams are written down, the values are real."""

from __future__ import annotations

import logging

import pytest
import torch
from helpers.fake_streams import Streams

from latentcache.devices.transfer import DirectCopies, StreamCopies, copies_with


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda self, stream: streams.log.append(f"{stream.name} uses it")
    )
    return streams


def test_an_upload_is_awaited_by_the_stream_that_uses_it(streams: Streams) -> None:
    copies = StreamCopies(torch.device("cpu"), streams)
    host = copies.host((2, 3), torch.uint8).fill_(7)
    assert torch.equal(copies.upload(host), host)
    assert streams.log == ["on side", "side records 1", "off side", "current waits for 1", "current uses it"]


def test_a_download_waits_for_the_results_and_the_host_for_the_copy_alone(streams: Streams) -> None:
    copies = StreamCopies(torch.device("cpu"), streams)
    results = {"moments": torch.randn(2, 3), "flags": torch.tensor([True])}
    download = copies.download(results)
    assert streams.log == [
        "current records 1",
        "side waits for 1",
        "on side",
        "side uses it",
        "side uses it",
        "side records 2",
        "off side",
    ], "the host has waited for nothing, and the current stream neither"
    streams.log.clear()
    fetched = download.wait()
    assert streams.log == ["host sleeps for 2"]
    assert fetched.keys() == results.keys()
    for name, tensor in fetched.items():
        assert torch.equal(tensor, results[name]) and tensor.data_ptr() != results[name].data_ptr()


def test_a_backend_without_sleeping_events_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    streams = Streams(choice_of_events=False)
    StreamCopies(torch.device("cpu"), streams).download({"a": torch.ones(1)}).wait()
    assert streams.log[-1] == "host spins for 2"


def test_memory_that_cannot_be_pinned_is_used_unpinned_and_said_once(
    streams: Streams, caplog: pytest.LogCaptureFixture
) -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine can pin")
    copies = StreamCopies(torch.device("cpu"), streams)
    with caplog.at_level(logging.WARNING, logger="latentcache"):
        tensors = [copies.host((4,), torch.float32) for _ in range(2)]
    assert [tuple(tensor.shape) for tensor in tensors] == [(4,), (4,)]
    assert ["cannot be pinned" in record.getMessage() for record in caplog.records] == [True]


def test_on_the_cpu_nothing_is_copied_and_nothing_runs_beside() -> None:
    copies = copies_with(torch.device("cpu"))
    tensor = torch.ones(3)
    assert isinstance(copies, DirectCopies) and not copies.are_beside and copies.reason
    assert copies.upload(tensor) is tensor and copies.download({"a": tensor}).wait()["a"] is tensor


@pytest.mark.parametrize("has_streams", [True, False])
def test_how_copies_are_made_follows_the_devices_module(monkeypatch: pytest.MonkeyPatch, has_streams: bool) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: Streams() if has_streams else object())
    copies = copies_with(torch.device("mps"))
    assert copies.are_beside is has_streams
    assert "has streams" in copies.reason if has_streams else "has no streams (Stream, Event" in copies.reason
