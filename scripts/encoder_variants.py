"""What each setting of the encoders gains, on tensors that lie on the device: for bench_precache.py."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import benchmarking
import torch

from latentcache.devices.placement import placed
from latentcache.models.running import free_cached_memory, is_out_of_memory
from latentcache.models.vae import encode_images

Variant = tuple[Sequence[Callable[[], Any]], int]
"""Settings, and the size of a batch."""


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


@dataclass(slots=True)
class Peak:
    """Largest memory of the device, or None where it does not tell."""

    num_bytes: int | None = None


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure what is allocated at most inside."""
    module = torch.get_device_module(device)
    peak = Peak()
    has_peak = hasattr(module, "reset_peak_memory_stats")
    if has_peak:
        free_cached_memory(device)
        module.reset_peak_memory_stats(device)
    yield peak
    if has_peak:
        peak.num_bytes = module.max_memory_allocated(device)


def matmul_flops(device: torch.device, dtype: torch.dtype, side: int, repetitions: int) -> float:
    """Floating point operations per second of a large matmul: the rate that the device reaches at best."""
    first, second = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))

    def multiply() -> None:
        for _ in range(10):
            torch.mm(first, second)
        synchronize(device)

    multiply()
    seconds = benchmarking.in_turns({"matmul": multiply}, repetitions)["matmul"]
    return 10 * 2 * side**3 / benchmarking.spread(seconds)["median"]


@contextmanager
def channels_last(module: Any) -> Iterator[None]:
    module.to(memory_format=torch.channels_last)
    yield
    module.to(memory_format=torch.contiguous_format)


@contextmanager
def compiled(*modules: torch.nn.Module) -> Iterator[None]:
    for module in modules:
        module.compile(dynamic=False)
    yield
    for module in modules:
        module._compiled_call_impl = None


@contextmanager
def cudnn_benchmark() -> Iterator[None]:
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    yield
    torch.backends.cudnn.benchmark = before


@contextmanager
def attention(name: str, parts: Mapping[str, Any]) -> Iterator[None]:
    """Another attention of transformers in both text encoders."""
    encoders = (parts["text_encoder"], parts["text_encoder_2"])
    before = [encoder.config._attn_implementation for encoder in encoders]
    for encoder in encoders:
        encoder.set_attn_implementation(name)
    yield
    for encoder, implementation in zip(encoders, before, strict=True):
        encoder.set_attn_implementation(implementation)


def image_variants(
    vae: Any, device: torch.device, side: int, batch_sizes: Sequence[int], share: float, repetitions: int
) -> dict[str, Any]:
    """Images per second of the VAE's encoder with one setting after the other; `gain` is over plain batches of one.

    `share` is the time of an image at the device's matmul rate, in seconds.
    """
    settings: dict[str, Sequence[Callable[[], Any]]] = {
        "plain": (),
        "cudnn_benchmark": (cudnn_benchmark,),
        "channels_last": (partial(channels_last, vae),),
        "channels_last, benchmark": (partial(channels_last, vae), cudnn_benchmark),
        "channels_last, compile": (partial(channels_last, vae), partial(compiled, vae.encoder)),
    }
    most = max(batch_sizes)
    variants: dict[str, Variant] = {f"plain, batch {size}": ((), size) for size in batch_sizes}
    variants |= {f"{name}, batch {most}": (use, most) for name, use in settings.items() if use}
    with placed(vae, device):

        def encode(batch: torch.Tensor) -> None:
            encode_images(vae, batch)

        pixels = torch.randint(0, 256, (most, side, side, 3), dtype=torch.uint8).to(device)
        return _measured(variants, lambda size: partial(encode, pixels[:size]), device, share, repetitions)


def text_variants(
    parts: Mapping[str, Any], device: torch.device, batch_sizes: Sequence[int], share: float, repetitions: int
) -> dict[str, Any]:
    """Captions per second of both text encoders, as `image_variants`."""
    encoders = (parts["text_encoder"], parts["text_encoder_2"])
    most = max(batch_sizes)
    variants: dict[str, Variant] = {f"sdpa, batch {size}": ((), size) for size in batch_sizes}
    variants[f"eager attention, batch {most}"] = ((partial(attention, "eager", parts),), most)
    variants[f"compile, batch {most}"] = ((partial(compiled, *encoders),), most)
    vocab_size = parts["text_encoder"].config.vocab_size
    with placed(encoders[0], device), placed(encoders[1], device), torch.no_grad():

        def encode(ids: torch.Tensor) -> None:
            for encoder in encoders:
                encoder(ids, output_hidden_states=True)

        ids = torch.randint(0, vocab_size - 2, (most, parts["tokenizer"].model_max_length)).to(device)
        return _measured(variants, lambda size: partial(encode, ids[:size]), device, share, repetitions)


def _measured(
    variants: Mapping[str, Variant],
    encode_of: Callable[[int], Callable[[], None]],
    device: torch.device,
    share: float,
    repetitions: int,
) -> dict[str, Any]:
    """Each variant's rate, in interleaved rounds. One that does not fit into memory is left out, and named so."""

    def with_settings(name: str) -> float:
        use, size = variants[name]
        encode = encode_of(size)

        def encoded() -> None:
            encode()
            synchronize(device)

        with ExitStack() as stack:
            for setting in use:
                stack.enter_context(setting())
            encoded()  # compiles, races kernels, fills caches
            return benchmarking.seconds_of(encoded)

    peaks: dict[str, int | None] = {}
    for name in variants:
        try:
            with peak_memory(device) as peak:
                with_settings(name)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            print(f"{name}: does not fit into memory", flush=True)
            continue
        peaks[name] = peak.num_bytes
        gc.collect()
    methods = {name: partial(with_settings, name) for name in peaks}
    seconds = benchmarking.in_turns(methods, repetitions, clock=lambda method: method())
    first = next(iter(seconds))
    result = {}
    for name, values in seconds.items():
        size = variants[name][1]
        per_s = size / benchmarking.spread(values)["median"]
        gains = benchmarking.ratios(seconds[first], values)["median"] * size / variants[first][1]
        result[name] = {
            "batch_size": size,
            "per_s": per_s,
            "fraction_of_matmul": per_s * share,
            "gain": gains,
            "peak_memory_bytes": peaks[name],
        }
    return result
