"""Copies that overlap the computation: what waits for what. The streams only log, the values are real."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from helpers.fake_streams import Streams

from latentcache.devices.transfer import MAX_IN_FLIGHT, StreamTransfer, Transfer, transfer_to


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda self, stream: streams.log.append(f"{stream.name} uses it")
    )
    return streams


def test_the_using_stream_waits_for_an_upload_and_the_host_for_a_download_alone(streams: Streams) -> None:
    transfer = StreamTransfer(torch.device("cpu"), streams)
    host = transfer.host_memory((2, 3), torch.uint8).fill_(7)
    assert torch.equal(transfer.upload(host), host)
    assert streams.log == ["on side 1", "side 1 records 1", "off side 1", "current waits for 1", "current uses it"]
    streams.log.clear()
    results = {"moments": torch.randn(2, 3), "flags": torch.tensor([True])}
    download = transfer.download(results)
    assert streams.log == [
        *("current records 2", "side 2 waits for 2", "on side 2", "side 2 uses it", "side 2 uses it"),
        *("side 2 records 3", "off side 2"),
    ], "neither the host nor the current stream has waited"
    streams.log.clear()
    fetched = download.wait()
    assert streams.log == ["host sleeps for 3"]
    assert fetched.keys() == results.keys()
    for name, tensor in fetched.items():
        assert torch.equal(tensor, results[name]) and tensor.data_ptr() != results[name].data_ptr()


def test_a_host_batch_is_kept_until_the_copy_from_it_has_ended(streams: Streams) -> None:
    transfer = StreamTransfer(torch.device("cpu"), streams)
    hosts: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def read() -> dict[str, Any]:
        assert streams.log[-1] == "on side 1", "gathering on the device runs on the side stream too"
        hosts.add(moments := torch.zeros(2, 3))
        return {"moments": moments}

    def place(batch: dict[str, Any]) -> dict[str, Any]:
        assert streams.log[-1].startswith("side 1 records"), "it runs after the copies, on the side stream"
        return {"latents": batch["moments"].clone(), "sample_id": ["a"]}

    def waits() -> list[str]:
        return [line for line in streams.log if "for" in line]

    sent = [transfer.send(read, place) for _ in range(MAX_IN_FLIGHT)]
    assert len(hosts) == MAX_IN_FLIGHT and not waits()
    sent.append(transfer.send(read, place))
    assert waits() == ["host sleeps for 1"], "the oldest copy, before its memory is free"
    assert len(hosts) == MAX_IN_FLIGHT
    streams.ended |= {3, 5}
    sent.append(transfer.send(read, place))
    assert len(hosts) == 1, "no copy reads the other batches any more"
    streams.log.clear()
    batch = transfer.receive(sent[0])
    assert streams.log == ["current waits for 2", "current uses it"] and batch["sample_id"] == ["a"]
    transfer.finish()
    assert streams.log[-1] == "host waits for side 1" and not hosts


def test_on_the_cpu_nothing_is_copied_and_nothing_overlaps() -> None:
    transfer = transfer_to(torch.device("cpu"))
    tensor = torch.ones(3)
    assert type(transfer) is Transfer and not transfer.overlaps
    assert transfer.upload(tensor) is tensor and transfer.download({"a": tensor}).wait()["a"] is tensor
    batch = {"a": tensor}
    assert transfer.receive(transfer.send(lambda: batch, lambda read: read)) is batch
