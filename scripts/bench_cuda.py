"""Correctness checks and benchmarks on a real accelerator: SDXL throughput, copies, training steps, phase switches.

    python scripts/bench_cuda.py                        # a table; about ten minutes on an H100
    python scripts/bench_cuda.py --json > cuda.json     # one document
    python scripts/bench_cuda.py --part copies step     # some parts only
    python scripts/bench_cuda.py --tiny --device cpu    # for correctness only: it runs without an accelerator

Models have SDXL's sizes and random weights, created on the device, so nothing is downloaded. Times are medians over
interleaved rounds, measured on the host's clock after synchronising the device. Ceilings are measured in the same run.
If a part fails, the others still run and the exit code is 1. The table marks each missed goal. A check is a part too:
it says what it found, or why this device cannot run it.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from itertools import islice, product, repeat
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic kernels need it; as on an H100 by default

import bench_precache as precache
import numpy as np
import torch
from benchmarking import in_turns, make_cache, make_parser, run_parts, seconds_of, spread
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from latentcache import BucketBatchSampler, LatentCache, LatentDataset, LatentLoader, Phases, run_precache
from latentcache.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from latentcache.config_file import parse_config
from latentcache.devices.placement import device_named, placed, vae_batch_size
from latentcache.devices.transfer import Copies, Transfer, transfer_to
from latentcache.families import DEFAULT, family_named
from latentcache.models.model_loader import LoadedModels
from latentcache.models.running import free_cached_memory, is_out_of_memory, weight_bytes
from latentcache.models.tiny import seeded, tiny_denoiser, tiny_part
from latentcache.models.vae import decode_fitting, decode_latents, encode_images
from latentcache.phases.phases import Phase
from latentcache.precache.encodings import choose_encodings
from latentcache.types import Batch
from latentcache.validation.noise_schedule import NoiseSchedule

ENCODE_TFLOP, DECODE_TFLOP = 4.88, 10.47
"""TFLOP per image of 1024x1024 pixels in SDXL's VAE, counted with torch.utils.flop_counter.FlopCounterMode."""
SLEEP_CYCLES = 20_000_000
"""How long the device sleeps before each upload in the race check: about 10 ms."""
SDXL_UNET = {
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "norm_num_groups": 32,
    "layers_per_block": 2,
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
"""What SDXL's UNet has other than the tiny one."""
LAYOUTS = torch.contiguous_format, torch.channels_last
MAX_GROWTH = 4 << 20
"""Allowed growth of reserved memory in bytes: two small blocks of torch's allocator."""


class Bench:
    """The device, the sizes, and the folder and the figures of a part."""

    folder: Path

    def __init__(self, options: argparse.Namespace):
        self.options, self.tiny = options, options.tiny
        # With its index: tensors report it, and set_per_process_memory_fraction requires it.
        self.device = device_named(options.device)
        self.module = torch.get_device_module(self.device)
        self.overlaps = transfer_to(self.device).overlaps
        self.side = 64 if self.tiny else 1024
        is_cpu = self.device.type == "cpu"
        self.half = torch.float32 if is_cpu else torch.float16
        self.train_dtype = torch.float32 if is_cpu else torch.bfloat16
        self.figures: dict[str, dict[str, Any]] = {}

    def run(self, part: Callable[[Bench], str | None], folder: Path, options: argparse.Namespace) -> Any:
        """The figures of a part, or what a check says."""
        self.free()
        self.folder, self.figures = folder, {}
        return part(self) or self.figures

    def add(self, name: str, value: float, unit: str, *, least: float | None = None, most: float | None = None) -> None:
        """Record a figure. `least` and `most` are its goals, which count at full size only."""
        goal = reached = None
        if not self.tiny and (least is not None or most is not None):
            goal = f">= {least:g}" if least is not None else f"<= {most:g}"
            reached = value >= least if least is not None else value <= (most or 0)
        self.figures[name] = {"value": value, "unit": unit, "goal": goal, "reached": reached}

    def end(self, method: Callable[[], Any]) -> None:
        """Call the method and synchronise the device."""
        method()
        self.module.synchronize(self.device)

    def seconds(self, methods: Mapping[str, Callable[[], Any]], *, warm: bool = True) -> dict[str, float]:
        """Median seconds of each method over interleaved rounds, including synchronisation.

        `warm`: call each method twice before the rounds, and once directly before each timed call.
        """
        warm = warm and not self.tiny
        for method, _ in product(methods.values(), range(2 if warm else 0)):
            method()

        def timed(method: Callable[[], Any]) -> float:
            self.module.synchronize(self.device)
            return seconds_of(partial(self.end, method))

        timers = {name: partial(timed, method) for name, method in methods.items()}
        taken = in_turns(timers, self.options.repetitions, warm=warm)
        return {name: spread(values)["median"] for name, values in taken.items()}

    def free(self) -> None:
        """Free the device memory that a part left behind."""
        gc.collect()
        free_cached_memory(self.device)

    def can(self, function: str) -> bool:
        """Whether the device's module in torch has this function."""
        return hasattr(self.module, function)

    def num_bytes(self, name: str) -> int:
        """An allocator statistic: `memory_reserved`, `memory_allocated` or `max_memory_allocated`.

        On a device without these statistics: the bytes of all live tensors.
        """
        if self.can(name):
            return int(getattr(self.module, name)(self.device))
        gc.collect()
        return sum(each.nbytes for each in gc.get_objects() if type(each) is torch.Tensor)

    def add_peak(self, name: str, method: Callable[[], Any]) -> None:
        """Record a call's peak memory if the device has memory statistics."""
        if self.can("max_memory_allocated"):
            self.add(f"{name}: peak", self.peak_of(method) / 1e9, "GB")

    def peak_of(self, method: Callable[[], Any]) -> int:
        """Peak memory of a call in bytes, above what was already allocated."""
        self.free()
        self.module.reset_peak_memory_stats(self.device)
        before = self.num_bytes("memory_allocated")
        self.end(method)
        return self.num_bytes("max_memory_allocated") - before

    @contextmanager
    def limited(self, num_bytes: float) -> Iterator[None]:
        """Limit this process to `num_bytes` more device memory inside the block."""
        self.free()
        total = self.module.mem_get_info(self.device)[1]
        share = (self.num_bytes("memory_reserved") + num_bytes) / total
        self.module.set_per_process_memory_fraction(share, self.device)
        try:
            yield
        finally:
            self.module.set_per_process_memory_fraction(1.0, self.device)

    @cached_property
    def copy_rates(self) -> dict[str, float]:
        """Bytes per second of copies in both directions, from pageable memory and, if it is used, pinned memory."""
        host = torch.empty(1 << 20 if self.tiny else 256 << 20, dtype=torch.uint8)
        there = torch.empty_like(host, device=self.device)
        copies: dict[str, Callable[[], Any]] = {}
        for kind, memory in ({"pageable": host} | ({"pinned": host.pin_memory()} if self.overlaps else {})).items():
            copies[f"host to device, {kind}"] = partial(there.copy_, memory, non_blocking=True)
            copies[f"device to host, {kind}"] = partial(memory.copy_, there, non_blocking=True)
        return {name: host.nbytes / seconds for name, seconds in self.seconds(copies).items()}

    @cached_property
    def conv_flops(self) -> dict[str, float]:
        """FLOP/s of a 3x3 convolution with 128 channels over 1024x1024 pixels, batch 4."""
        found = {}
        for dtype, layout in product((torch.bfloat16, torch.float32), LAYOUTS):
            module: Any = torch.nn.Conv2d(128, 128, 3, padding=1, device=self.device, dtype=dtype)
            module.to(memory_format=layout).requires_grad_(False)
            images = torch.randn(4, 128, self.side, self.side, device=self.device, dtype=dtype)
            seconds = self.seconds({"conv": partial(module, images.to(memory_format=layout))})["conv"]
            name = f"convolution, {dtype}, {layout}".replace("torch.", "")
            found[name] = 2 * 9 * 128 * 128 * 4 * self.side**2 / seconds
        return found

    def add_over_conv(self, name: str, images_per_s: float, tflop: float, least: float) -> None:
        """Record the VAE's FLOP/s divided by those of the fastest convolution, at full size."""
        if not self.tiny:
            self.add(name, images_per_s * tflop * 1e12 / max(self.conv_flops.values()), "", least=least)

    def vae(self, dtype: torch.dtype) -> Any:
        """SDXL's VAE with random weights, on the CPU. Its tiles have half the height and width of the images."""
        return precache.make_vae((8, 16, 32, 32) if self.tiny else precache.SDXL_VAE, dtype, tile=self.side // 2)

    def texts(self, dtype: torch.dtype) -> dict[str, Any]:
        """SDXL's text encoders with random weights, on the CPU."""
        return precache.make_texts({} if self.tiny else precache.SDXL_TEXTS, dtype)

    def case(self, name: str, models: LoadedModels, num_photos: int, **options: Any) -> precache.Case:
        """Runs of precache over `num_photos` photos. The models compute in `dtype` (default: `half`)."""
        options = {"device": self.device, "dtype": self.half, **options}
        return precache.Case(self.folder / name, models, num_photos, self.side, **options)

    def sampler(self, num_samples: int, batch_size: int, *, tiny: bool = True) -> BucketBatchSampler:
        """A sampler over a new cache of random samples with SDXL's shapes, or tiny ones."""
        make_cache(self.folder / "samples", num_samples, tiny=tiny)
        return BucketBatchSampler(LatentDataset(self.folder / "samples"), batch_size, seed=0)

    def loader(self, sampler: BucketBatchSampler, **options: Any) -> LatentLoader:
        """A loader configured as for training on the device."""
        return LatentLoader(sampler, device=self.device, dtype=torch.float32, scaled=True, **options)


# Training


class Step:
    """A LoRA of SDXL's UNet, or of a tiny one, in bfloat16 with gradient checkpointing, and its optimizer."""

    def __init__(self, bench: Bench, *, tiny: bool):
        from diffusers.training_utils import cast_training_params
        from peft import LoraConfig

        self.device, self.dtype = bench.device, bench.train_dtype
        self.family = family_named(DEFAULT)
        self.schedule = NoiseSchedule.of(tiny_part("scheduler")).to(self.device)
        small = tiny_denoiser()
        with torch.device(self.device), seeded(0):
            unet = small if tiny else type(small).from_config({**small.config, **SDXL_UNET})
        self.unet = unet.to(self.device, self.dtype).requires_grad_(False).train()
        self.unet.add_adapter(LoraConfig(r=16, target_modules=[*self.family.lora_targets]))
        cast_training_params(self.unet, torch.float32)
        self.unet.enable_gradient_checkpointing()
        self.parameters = [each for each in self.unet.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=True)

    def run(self, batch: Batch) -> None:
        """One training step. The host never waits for the device."""
        latents = batch["latents"]
        noise = torch.randn_like(latents)
        index = torch.randint(0, len(self.schedule.timesteps), (len(latents),), device=self.device)
        noisy = self.schedule.noised(latents, noise, index).to(self.dtype)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype is torch.bfloat16):
            predicted = self.family.predict(self.unet, noisy, self.schedule.timesteps[index], batch)
        torch.nn.functional.mse_loss(predicted.float(), self.schedule.target(latents, noise, index)).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, max_norm=1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


# Checks


def check_batches(bench: Bench) -> str:
    """Each batch equals the CPU's although uploads are delayed and the consumer's stream is busy.

    Runs four epochs each on the current stream, on a stream of the consumer's own, and in a thread that names the
    device without an index.
    """
    sleep = getattr(bench.module, "_sleep", lambda cycles: None)
    sampler = bench.sampler(32, 4)
    kind = type(transfer_to(bench.device))
    send = kind.send

    def late(transfer: Transfer, read: Callable[[], Batch], place: Callable[[Batch], Batch]) -> Copies:
        def slept() -> Batch:
            sleep(SLEEP_CYCLES)  # on the stream of uploads, before their copies
            return read()

        return send(transfer, slept, place)

    def compare(device: torch.device) -> int:
        side, held = 64 if bench.tiny else 2048, list[tuple[torch.Tensor, torch.Tensor]]()
        busy = torch.randn(side, side, device=device)
        with (
            LatentCache(bench.folder / "samples") as cache,
            LatentLoader(sampler, device=device, output="moments") as loader,
        ):
            for batch in islice(loader.forever(), 4 * len(sampler)):
                busy = torch.mm(busy, busy).clamp(-1, 1)
                right = cache.batch(list(batch["sample_id"]), device="cpu", output="moments")
                for name in ("moments", "prompt_embeds"):
                    assert torch.equal(batch[name].cpu(), right[name]), f"batch {len(held)}: other {name}"
                held.append((batch["moments"], right["moments"]))
            for number, (there, expected) in enumerate(held):
                assert torch.equal(there.cpu(), expected), f"batch {number} changed after the loader returned it"
        return len(held)

    own = bench.module.stream(bench.module.Stream(bench.device)) if bench.overlaps else nullcontext()
    with patch.object(kind, "send", late), ThreadPoolExecutor(1) as thread:
        num_equal = compare(bench.device)
        with own:
            num_equal += compare(bench.device)
        num_equal += thread.submit(compare, torch.device(bench.device.type)).result()
    return f"{num_equal} batches equal"


class Reads(TorchDispatchMode):
    """Raises RuntimeError when this thread reads a tensor's value, which would synchronise with an accelerator."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("the host reads the value of a tensor")
        return func(*args, **(kwargs or {}))


def check_syncs(bench: Bench) -> str:
    """Neither the loader nor a training step synchronises with the device.

    On a device without a sync debug mode, `Reads` watches this thread instead, and the loader reads in it.
    """
    told, training = bench.can("set_sync_debug_mode"), Step(bench, tiny=True)
    sampler = bench.sampler(16, 4)
    with bench.loader(sampler, prefetch=2 if told else 0) as loader, ExitStack() as watching:
        batches = loader.forever()
        training.run(next(batches))
        if told:
            watching.callback(bench.module.set_sync_debug_mode, "default")
            bench.module.set_sync_debug_mode("error")
        else:
            watching.enter_context(Reads())  # type: ignore[no-untyped-call]
        for batch in islice(batches, 8):
            training.run(batch)
    return f"8 batches and steps without a sync, by {'sync debug mode' if told else 'watching reads of values'}"


def check_memory(bench: Bench) -> str:
    """Memory after 40 epochs is what it was after 4."""
    sampler, held = bench.sampler(16, 4), []
    with bench.loader(sampler) as loader:
        batches = loader.forever()
        for num_epochs in (4, 36):
            for _ in islice(batches, num_epochs * len(sampler)):
                pass
            held.append(bench.num_bytes("memory_reserved"))
    assert held[1] - held[0] <= MAX_GROWTH, f"{held[0]:,} bytes after 4 epochs, {held[1]:,} after 40"
    return f"{held[0] / 1e6:.0f} MB, {held[1] / 1e6:.0f} MB"


def difference(found: precache.Entries, right: precache.Entries) -> float:
    """The largest difference of any tensor, relative to its largest value. AssertionError if the keys differ."""
    assert found.keys() == right.keys(), f"the keys differ: {found.keys() ^ right.keys()}"
    pairs = [(found[key][name].float(), tensor.float()) for key, each in right.items() for name, tensor in each.items()]
    return max(((one - other).abs().max() / other.abs().max()).item() for one, other in pairs)


def check_flags(bench: Bench) -> str:
    """A trainer's TF32 and cuDNN settings do not change a bit of the stored entries."""
    case = bench.case("flags", precache.models_of(), 8, dtype=torch.float32)
    before, precision = case.entries(), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
            assert difference(case.entries(), before) == 0
    finally:
        torch.set_float32_matmul_precision(precision)
    return f"{len(before)} entries equal"


def check_numbers(bench: Bench) -> str:
    """Moments in float32 without TF32 equal the CPU's up to rounding."""
    vae, pixels = tiny_part("vae"), torch.randint(0, 256, (4, 64, 64, 3), dtype=torch.uint8)
    right = encode_images(vae, pixels)
    # The pin would enable TF32 for convolutions.
    unpinned = patch("latentcache.models.vae.pinned_numerics", nullcontext)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False), unpinned, placed(vae, bench.device):
        found = encode_images(vae, pixels.to(bench.device)).cpu()
    worst = difference({"vae": {"moments": found}}, {"vae": {"moments": right}})
    assert worst < 1e-3, f"a relative difference of {worst:.1e}"
    return f"relative difference {worst:.0e}"


def check_halving(bench: Bench) -> str:
    """A batch that does not fit into memory is halved, and the entries equal those of smaller batches.

    With --tiny, or if the device's memory cannot be limited, the VAE raises OutOfMemoryError above four images.
    """
    vae, sizes = bench.vae(bench.half), []
    case = bench.case("halving", precache.models_of(vae=vae), 8)
    right = case.entries(batch_size=4)
    limits = not bench.tiny and bench.can("set_per_process_memory_fraction")
    room: Any = nullcontext()
    if limits:
        pixels = torch.randint(0, 256, (8, bench.side, bench.side, 3), dtype=torch.uint8, device=bench.device)
        with placed(vae, bench.device):
            peaks = [bench.peak_of(partial(encode_images, vae, pixels[:size])) for size in (4, 8)]
        del pixels
        room = bench.limited(sum(peaks) / 2 + weight_bytes(vae))

    def seen(encoder: torch.nn.Module, given: tuple[torch.Tensor]) -> None:
        sizes.append(len(given[0]))
        if not limits and sizes[-1] > 4:
            raise torch.OutOfMemoryError("simulated: no memory for more than four images")

    vae.encoder.register_forward_pre_hook(seen)
    with room:
        worst = difference(case.entries(batch_size=8), right)
    assert sizes == [8, 4, 4], f"batches of {sizes}"
    assert worst <= 1e-2, f"a relative difference of {worst:.1e}"
    return f"8 images, then 4 and 4 ({'with limited memory' if limits else 'with a simulated OutOfMemoryError'})"


def check_ddp(bench: Bench) -> str:
    """DistributedDataParallel still reduces gradients after a phase that parks everything it may. One process."""
    buckets: list[int] = []
    rendezvous = (bench.folder / "ranks").as_uri()
    torch.distributed.init_process_group(init_method=rendezvous, rank=0, world_size=1)  # gloo, or nccl for CUDA
    try:
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).to(bench.device))

        def reduce(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, which are strings here
            buckets.append(bucket.index())
            return allreduce_hook(state, bucket)

        net.register_comm_hook(None, reduce)
        phases = Phases({"unet": net}, device=bench.device)
        phases.start("train")
        with phases.enter(Phase(on_device=())):
            pass
        net(torch.ones(1, 8, device=bench.device)).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    assert buckets, "DDP lost its hooks: training would go on without reducing gradients"
    return f"{len(buckets)} bucket of gradients"


def check_leaving(bench: Bench) -> str:
    """A phase that swaps two parts on a device with room for one ends with the first one back."""
    if bench.device.type == "cpu":
        return "skipped: parts are parked on the CPU, which is the device itself"
    size = 1 << (12 if bench.tiny else 14)  # a part of 64 MiB or 1 GiB
    parts = {name: torch.nn.Linear(size, size, bias=False, device="cpu") for name in ("unet", "vae")}
    parts["vae"].requires_grad_(False)
    phases = Phases(parts, device=bench.device)
    phases.start("train")  # the trained part is on the device
    limits = bench.can("set_per_process_memory_fraction")
    with bench.limited(parts["vae"].weight.nbytes / 2) if limits else nullcontext():
        with phases.enter(Phase(on_device=("vae",))):
            assert parts["vae"].weight.device == bench.device and parts["unet"].weight.device.type == "cpu"
        assert parts["unet"].weight.device == bench.device and parts["vae"].weight.device.type == "cpu"
    return f"one part at a time{'' if limits else ' (memory was not limited)'}"


def check_validation(bench: Bench) -> str:
    """Six training steps give the same bits with validations in between, the first of which fills the cache."""
    from train_lora import Options, train

    sizes = {"buckets": {"area": 4096, "step": 8}, "images": {"min_side": 8}}
    sets = []
    for role, num_photos in (("train", 8), ("validation", 4)):
        precache.make_photos(bench.folder / role, num_photos, 96)
        sets.append({"name": role, "role": role, "source": {"path": bench.folder / role}, **sizes})
    losses = {}
    torch.use_deterministic_algorithms(True)
    try:
        for every in (0, 2):
            folder = bench.folder / f"training-{every}"
            document = {
                "cache": {"path": folder / "cache"},
                "model": {"path": "tiny"},
                "encode": {"device": str(bench.device)},
                "validation": {"path": folder / "validation"},
            }
            run_precache(parse_config({**document, "datasets": sets[:1]}))
            config = parse_config({**document, "datasets": sets if every else sets[:1]})
            options = Options(6, batch_size=2, validate_every=every, out=folder / "lora", device=str(bench.device))
            losses[every] = train(config, options)["losses"]
    finally:
        torch.use_deterministic_algorithms(False)
    assert losses[0] == losses[2], f"losses {losses[0]} without validation, {losses[2]} with it"
    return "6 losses equal"


# Throughput


def ceilings(bench: Bench) -> None:
    """The device's peak rates: copies in both directions, a matmul, convolutions."""
    for name, rate in bench.copy_rates.items():
        bench.add(name, rate / 1e9, "GB/s")
    side = 64 if bench.tiny else 8192
    one, other = (torch.randn(side, side, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    seconds = bench.seconds({"matmul": lambda: torch.mm(one, other)})["matmul"]
    bench.add(f"matmul of {side}x{side}, bfloat16", 2 * side**3 / seconds / 1e12, "TFLOP/s")
    for name, flops in bench.conv_flops.items():
        bench.add(name, flops / 1e12, "TFLOP/s")


def rates(
    bench: Bench, name: str, sizes: Collection[int], encode: Callable[[Any], Any], items: torch.Tensor, unit: str
) -> dict[int, float]:
    """Items per second for each batch size that fits into memory. Records rates and peak memory."""
    found = {}
    for size in sorted(sizes):
        label, method = f"{name}batch {size}", partial(encode, items[:size])
        try:
            found[size] = size / bench.seconds({label: method})[label]
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            print(f"{label}: does not fit into memory", file=sys.stderr)
        else:
            bench.add(label, found[size], unit)
            bench.add_peak(label, method)
    return found


def vae(bench: Bench) -> None:
    """Images per second of the VAE's encoder by dtype, memory layout and batch size, and of precache."""
    dtypes = dict.fromkeys((torch.float32, bench.half, bench.train_dtype))  # on a CPU one
    chosen = vae_batch_size(bench.device, bench.half, bench.side**2)[0]
    sizes = {chosen, *((1, 2) if bench.tiny else (1, 2, 4, 8, 16))}
    pixels = torch.randint(0, 256, (max(sizes), bench.side, bench.side, 3), dtype=torch.uint8).to(bench.device)
    found = {}
    for dtype, layout in product(dtypes, LAYOUTS):
        model = bench.vae(dtype).to(bench.device, memory_format=layout)
        name = f"{dtype}, {layout}, ".replace("torch.", "")
        found[dtype, layout] = rates(bench, name, sizes, partial(encode_images, model), pixels, "images/s")
        if not bench.tiny:
            bench.add(f"{name}best", max(found[dtype, layout].values()) * ENCODE_TFLOP, "TFLOP/s")
    best = {dtype: max(rate for layout in LAYOUTS for rate in found[dtype, layout].values()) for dtype in dtypes}
    bench.add_over_conv("best over a convolution", max(best.values()), ENCODE_TFLOP, 0.6)
    share = found[bench.half, torch.contiguous_format][chosen] / best[bench.half]
    bench.add(f"what precache uses (batch {chosen}) over the best of its dtype", share, "", least=0.97)
    models = precache.models_of(vae=bench.vae(bench.half))
    for name, num_photos, photo_side in (("photos", 256, bench.side), ("photos of 12 megapixels", 128, 3500)):
        case = bench.case(name, models, 4 if bench.tiny else num_photos, photo_side=200 if bench.tiny else photo_side)
        per_s = precache.images_case(case, bench.options.repetitions)["per_s"]
        bench.add(f"precache of {name}", per_s["run"], "images/s")
        ceiling = min(per_s["encoder"], per_s["decode"])
        bench.add(f"precache of {name} over its ceiling", per_s["run"] / ceiling, "", least=0.95)
        bench.add(f"decoding {name} over the encoder", per_s["decode"] / per_s["encoder"], "", least=1.0)


def text(bench: Bench) -> None:
    """Captions per second of both text encoders by batch size, and of precache."""
    parts = bench.texts(bench.half)
    case = bench.case("text", precache.models_of(**parts), 1)
    chosen = choose_encodings(case.config(), case.models, {}).text_encoders.batch_size
    sizes = {chosen, *((2, 4) if bench.tiny else (16, 32, 64, 128, 256))}
    encoders = [parts["text_encoder"], parts["text_encoder_2"]]
    ids = torch.randint(0, encoders[0].config.vocab_size - 2, (max(sizes), 77), device=bench.device)
    family = case.models.family
    captions = family.tokenize(parts, [f"caption {number}" for number in range(chosen)])

    def encode(ids: torch.Tensor) -> None:
        for encoder in encoders:
            encoder(ids, output_hidden_states=True)

    with placed(encoders[0], bench.device), placed(encoders[1], bench.device), torch.no_grad():
        found = rates(bench, "", sizes, encode, ids, "captions/s")
        prompts = bench.seconds({"encode_prompt": lambda: family.encode_text(parts, captions, family.text_recipe())})
    rate = chosen / prompts["encode_prompt"]
    bench.add("encode_prompt over the encoders alone", rate / found[chosen], "")
    bench.add(f"chosen (batch {chosen}) over the best", found[chosen] / max(found.values()), "", least=0.95)
    run = precache.captions_case(case, bench.options.repetitions, 8 if bench.tiny else 8192)
    bench.add("precache", run["per_s"]["run"], "captions/s")
    bench.add("precache over the encoders alone", run["fraction_of"]["encoder"]["median"], "", least=0.9)


def copies(bench: Bench) -> None:
    """The loader's uploads against one copy of the same number of bytes from pinned memory."""
    transfer = transfer_to(bench.device)
    mega = 1 << 12 if bench.tiny else 1 << 20
    for name, sizes, least in (
        ("batch of 4", [2 * mega, mega // 3], None),
        ("batch of 16", [8 * mega, 5 * mega // 4], 0.9),
        ("clip", [97 * mega], 0.97),
    ):
        batch = {str(number): transfer.host_memory((size,), torch.uint8) for number, size in enumerate(sizes)}
        flat = transfer.host_memory((sum(sizes),), torch.uint8)
        there = torch.empty_like(flat, device=bench.device)

        def send(batch: Batch = batch) -> None:
            transfer.receive(transfer.send(lambda: batch, lambda moved: moved))

        taken = bench.seconds({"send": send, "copy": partial(there.copy_, flat, non_blocking=True)})
        transfer.finish()
        bench.add(f"{name}, {sum(sizes) / 1e6:.1f} MB", sum(sizes) / taken["send"] / 1e9, "GB/s")
        bench.add(f"{name} over one copy", taken["copy"] / taken["send"], "", least=least)


def step(bench: Bench) -> None:
    """Real LoRA steps with our loader and with a DataLoader, against the same steps on one fixed batch."""
    training, num_steps = Step(bench, tiny=bench.tiny), 2 if bench.tiny else 12
    sampler = bench.sampler(8 if bench.tiny else 512, 2 if bench.tiny else 4, tiny=bench.tiny)
    dataset, waited = sampler.dataset, dict[str, list[float]](loader=[], DataLoader=[], fixed=[])
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "pin_memory": bench.overlaps}
    theirs = DataLoader(dataset, batch_sampler=BucketBatchSampler(dataset, sampler.batch_size, seed=0), **options)

    def placed_batches() -> Iterator[Batch]:
        while True:
            for batch in theirs:
                yield dataset.place(batch, device=bench.device, dtype=torch.float32, scaled=True)

    def steps(name: str) -> None:
        for _ in range(num_steps):
            start = time.perf_counter()
            batch = next(batches[name])
            waited[name].append(time.perf_counter() - start)
            training.run(batch)

    batches: dict[str, Any] = {"DataLoader": placed_batches()}
    fixed = next(batches["DataLoader"])  # forks its workers before our loader starts a thread
    training.run(fixed)
    with bench.loader(sampler) as loader:
        batches |= {"fixed": repeat(fixed), "loader": loader.forever()}
        next(batches["loader"])
        taken = bench.seconds({name: partial(steps, name) for name in waited}, warm=False)
    batches["DataLoader"].close()
    bench.add("step", taken["fixed"] / num_steps * 1e3, "ms")
    for name, most, share in (("loader", 1.01, 0.005), ("DataLoader", None, None)):
        bench.add(f"step with the {name} over one batch", taken[name] / taken["fixed"], "", most=most)
        mean = statistics.mean(waited[name])
        bench.add(f"waiting for the {name}, share of a step", mean * num_steps / taken[name], "", most=share)
        bench.add(f"waiting for the {name}, p99", float(np.quantile(waited[name], 0.99)) * 1e3, "ms")


def phases(bench: Bench) -> None:
    """Phase switches with SDXL's parts: the UNet is trained on the device, the others are parked."""
    training = Step(bench, tiny=bench.tiny)
    parts = {"unet": training.unet, "optimizer": training.optimizer, "vae": bench.vae(torch.float32)}
    parts |= {name: part for name, part in bench.texts(bench.train_dtype).items() if isinstance(part, torch.nn.Module)}
    switch = Phases(parts, device=bench.device)
    switch.start("train")
    lent = {"lend the VAE": ("vae",), "lend the text encoders": ("text_encoder", "text_encoder_2")}
    switches: dict[str, Callable[[], Any]] = {
        "enter and leave validate": partial(switch.enter, "validate"),
        "park all and bring it back": partial(switch.enter, Phase(on_device=())),
        **{name: partial(switch.lend, *names) for name, names in lent.items()},
    }

    def entered(name: str) -> None:
        with switches[name]():
            pass

    fastest = bench.copy_rates[f"host to device, {'pinned' if bench.overlaps else 'pageable'}"]
    bench.free()
    reserved = bench.num_bytes("memory_reserved")
    taken = bench.seconds({name: partial(entered, name) for name in switches})
    for name, seconds in taken.items():
        bench.add(name, seconds, "s", most=0.15 if name == "enter and leave validate" else None)
        if name in lent:
            size = sum(weight_bytes(parts[part]) for part in lent[name])
            bench.add(f"{name}, rate", size / seconds / 1e9, "GB/s")
            bench.add(f"{name}, over the fastest copy", seconds * fastest / size, "", most=3.0)
    bench.free()
    growth = bench.num_bytes("memory_reserved") / reserved
    bench.add("memory reserved after the switches over before", growth, "", most=1.01)
    with bench.loader(bench.sampler(8, 2 if bench.tiny else 4, tiny=bench.tiny)) as loader:
        batch = next(loader.forever())
    usual = bench.seconds({"step": partial(training.run, batch)})["step"]
    entered("enter and leave validate")
    first = seconds_of(lambda: bench.end(partial(training.run, batch)))
    bench.add("first step after a phase over a typical one", first / usual, "", most=1.3)
    if bench.can("memory_stats"):
        retries = bench.module.memory_stats(bench.device).get("num_alloc_retries", 0)
        bench.add("allocation retries", retries, "", most=0)


def decode(bench: Bench) -> None:
    """Decode a sample image, whole and in tiles."""
    model = bench.vae(bench.half).to(bench.device)
    latents = torch.randn(1, 4, bench.side // 8, bench.side // 8, device=bench.device)
    ways: dict[str, Callable[[], Any]] = {
        "whole": partial(decode_fitting, model, latents),
        "in tiles": partial(decode_latents, model, latents, tiled=True),
    }
    for name, seconds in bench.seconds(ways).items():
        bench.add(f"decode an image {name}", seconds * 1e3, "ms")
        bench.add_peak(f"decode an image {name}", ways[name])
        if name == "whole":
            bench.add_over_conv("decoding over a convolution", 1 / seconds, DECODE_TFLOP, 0.5)


def checkpoint(bench: Bench) -> None:
    """Save and load a LoRA with its optimizer, and the whole UNet."""
    training, path = Step(bench, tiny=bench.tiny), bench.folder / "checkpoint"
    for parameter in training.parameters:
        parameter.grad = torch.zeros_like(parameter)
    training.optimizer.step()  # creates the moments
    named = training.unet.named_modules()
    lora = {name.replace(".", "/"): each for name, each in named if name.endswith(("lora_A", "lora_B"))}
    for name, state in (
        ("a LoRA and AdamW", {"model": lora, "optimizer": training.optimizer}),
        ("the UNet", {"model": training.unet}),
    ):
        ways: dict[str, Callable[[], Any]] = {
            "save": partial(save_checkpoint, path, **state),
            "load": partial(load_checkpoint, path, **state),
        }
        taken, size = bench.seconds(ways, warm=False), path.stat().st_size
        for way, seconds in taken.items():
            bench.add(f"{way} {name}, {size / 1e9:.2f} GB", seconds, "s")
        upload = size / bench.copy_rates["host to device, pageable"]
        bench.add(f"load {name}, over a pageable copy", taken["load"] / upload, "")


CHECKS = {name.removeprefix("check_"): part for name, part in [*globals().items()] if name.startswith("check_")}
PARTS: dict[str, Callable[[Bench], str | None]] = CHECKS | {
    each.__name__: each for each in (ceilings, vae, text, copies, step, phases, decode, checkpoint)
}


def main() -> int:
    parser = make_parser(__doc__, PARTS)
    parser.add_argument("--device", default="auto")
    parser.set_defaults(repetitions=5)
    options = parser.parse_args()
    options.device = str(device_named(options.device))
    if options.device == "cpu" and not options.tiny:
        parser.error("there is no accelerator, and a CPU takes hours at these sizes: give --tiny --device cpu")
    bench = Bench(options)
    return run_parts({name: partial(bench.run, part) for name, part in PARTS.items()}, options)


if __name__ == "__main__":
    sys.exit(main())
