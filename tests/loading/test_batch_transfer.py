"""Buffers and transfers: who holds a tensor keeps it valid, and a copy ends before its source is used again."""

from __future__ import annotations

import gc
import logging
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from latentcache.loading.batch_transfer import MAX_IN_FLIGHT, DirectTransfer, StreamTransfer, transfer_to
from latentcache.loading.pinned_pool import ALIGNMENT, BufferPool

SHAPES = {"moments": (torch.bfloat16, (2, 3, 5)), "pooled": (torch.float32, (2, 7)), "flag": (torch.bool, (2,))}


def test_tensors_have_their_shapes_and_start_aligned() -> None:
    tensors = BufferPool().allocate(SHAPES)
    for name, (dtype, shape) in SHAPES.items():
        tensor = tensors[name]
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape) and tensor.is_contiguous()
        assert tensor.data_ptr() % ALIGNMENT == 0
        tensor.fill_(1)
    assert all(bool((tensor == 1).all()) for tensor in tensors.values()), "they do not overlap"


@pytest.mark.parametrize("keep", ["tensor", "view", "autograd", "other"])
def test_a_buffer_comes_back_when_nothing_shares_its_memory(keep: str) -> None:
    pool = BufferPool()
    tensors = pool.allocate(SHAPES)
    address = tensors["moments"].data_ptr()
    if keep == "tensor":
        held: Any = tensors["moments"]
    elif keep == "view":
        held = tensors["moments"][1, 2:].float().new_tensor(0), tensors["moments"].flatten()[3:4]
    elif keep == "autograd":
        held = (tensors["pooled"] * torch.ones(7, requires_grad=True)).sum()
    else:
        held = tensors["flag"]  # of another field of the same batch
    del tensors
    gc.collect()
    second = pool.allocate(SHAPES)
    assert second["moments"].data_ptr() != address and pool.num_allocated == 2
    del held
    gc.collect()
    assert pool.allocate(SHAPES)["moments"].data_ptr() == address and pool.num_allocated == 2


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 6)), max_size=40))
def test_what_is_held_keeps_its_values(steps: list[tuple[int, int]]) -> None:
    pool = BufferPool(num_idle=2)
    held: list[tuple[int, torch.Tensor]] = []
    for number, (size, drop) in enumerate(steps):
        tensor = pool.allocate({"a": (torch.int64, (size,))})["a"].fill_(number)
        held.append((number, tensor))
        del tensor
        if drop < len(held):
            del held[drop]
        assert all(bool((tensor == value).all()) for value, tensor in held)


def test_memory_that_cannot_be_pinned_is_used_unpinned_and_said(caplog: pytest.LogCaptureFixture) -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine can pin")
    pool = BufferPool(pin=True)
    with caplog.at_level(logging.WARNING, logger="latentcache"):
        pool.allocate(SHAPES)
        pool.allocate(SHAPES)
    assert ["cannot be pinned" in record.getMessage() for record in caplog.records] == [True]


class Streams:
    """A device module that writes down what is asked of it. An event is done when the test says so."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.done: set[int] = set()
        self.num_events = 0
        self.inside: list[str] = []

    def Stream(self, device: torch.device) -> Side:
        return Side(self, "side")

    def current_stream(self, device: torch.device) -> Side:
        return Side(self, "current")

    @contextmanager
    def stream(self, stream: Side) -> Any:
        self.inside.append(stream.name)
        yield
        self.inside.pop()


class Side:
    def __init__(self, streams: Streams, name: str):
        self.streams, self.name = streams, name

    def record_event(self) -> Event:
        self.streams.num_events += 1
        return Event(self.streams, self.streams.num_events)

    def wait_event(self, event: Event) -> None:
        self.streams.log.append(f"{self.name} waits for {event.number}")

    def synchronize(self) -> None:
        self.streams.log.append(f"synchronize {self.name}")


class Event:
    def __init__(self, streams: Streams, number: int):
        self.streams, self.number = streams, number

    def query(self) -> bool:
        return self.number in self.streams.done

    def synchronize(self) -> None:
        self.streams.log.append(f"wait for {self.number}")
        self.streams.done.add(self.number)


def test_a_buffer_stays_lent_until_the_copy_from_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams()
    transfer = StreamTransfer(torch.device("cpu"), streams)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: streams.log.append(f"record {stream.name}"))
    pool = BufferPool()

    def read() -> dict[str, Any]:
        assert streams.inside == ["side"], "what is gathered on the device runs on the side stream too"
        return pool.allocate(SHAPES)

    def place(batch: dict[str, Any]) -> dict[str, Any]:
        assert streams.inside == ["side"]
        return {"latents": batch["moments"].clone(), "sample_id": ["a"]}

    sent = [transfer.send(read, place) for _ in range(MAX_IN_FLIGHT)]
    assert pool.num_allocated == MAX_IN_FLIGHT and streams.log == []
    sent.append(transfer.send(read, place))
    assert streams.log == ["wait for 1"], "the oldest copy, before its buffer is written again"
    assert pool.num_allocated == MAX_IN_FLIGHT
    streams.done |= {3, 5}
    sent.append(transfer.send(read, place))
    assert pool.num_allocated == MAX_IN_FLIGHT, "copies that have ended are not waited for twice"
    streams.log.clear()
    batch = transfer.receive(sent[0])
    assert streams.log == ["current waits for 2", "record current"] and batch["sample_id"] == ["a"]
    transfer.finish()
    assert streams.log[-1] == "synchronize side"
    del batch, sent
    gc.collect()
    assert len(pool._idle) == MAX_IN_FLIGHT, "all buffers are back"


def test_the_cpu_needs_no_copy() -> None:
    transfer = transfer_to(torch.device("cpu"))
    assert isinstance(transfer, DirectTransfer) and not transfer.pin and "where it was read" in transfer.reason
