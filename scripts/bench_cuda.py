"""What the project does on a real accelerator: checks, throughput at SDXL's size, copies, training steps, phases.

    python scripts/bench_cuda.py                        # a table; about ten minutes on an H100
    python scripts/bench_cuda.py --json > cuda.json     # one document
    python scripts/bench_cuda.py --part copies step     # some parts only
    python scripts/bench_cuda.py --tiny --device cpu    # for correctness only: it runs without an accelerator

Models have SDXL's sizes and random weights, made on the device: nothing is downloaded. Times are medians of rounds,
taken from the host's clock after the device has been synchronised. Rates are compared with ceilings of the same run.
A part that fails is reported, the others run, and the exit code is 1; a goal that is missed is marked in the table.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from itertools import islice, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from bench_precache import (
    CLIP_BIG_G,
    CLIP_L,
    SDXL_VAE,
    Case,
    TextShape,
    caption,
    captions_case,
    images_case,
    make_photos,
    make_texts,
    make_vae,
    models_of,
)
from benchmarking import in_turns, make_cache, make_parser, run_in_folder, seconds_of, spread

from latentcache import BucketBatchSampler, LatentCache, LatentDataset, LatentLoader, Phases, run_precache
from latentcache.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from latentcache.config_file import parse_config
from latentcache.devices.placement import placed
from latentcache.devices.transfer import Copies, Transfer, transfer_to
from latentcache.models.model_loader import LoadedModels
from latentcache.models.running import free_cached_memory, is_out_of_memory, weight_bytes
from latentcache.models.tiny import seeded, tiny_denoiser, tiny_parts
from latentcache.models.vae import decode_fitting, encode_images
from latentcache.phases.phases import Phase
from latentcache.precache.encodings import choose_encodings
from latentcache.types import Batch

VAE_TFLOP = {"encode": 4.88, "decode": 10.47}
"""Of one image of 1024x1024 pixels by SDXL's VAE: torch.utils.flop_counter.FlopCounterMode counted them."""
SLEEP_CYCLES = 20_000_000
"""How long the device sleeps before each upload in the check for races: some 10 ms."""


class NotTriedError(Exception):
    """This device lacks what a check needs."""


class Bench:
    """The device, the sizes, and the figures so far."""

    def __init__(self, folder: Path, options: argparse.Namespace):
        self.folder, self.options, self.tiny = folder, options, options.tiny
        self.device = torch.device(options.device)
        self.module = torch.get_device_module(self.device)
        self.overlaps = transfer_to(self.device).overlaps
        self.side = 64 if self.tiny else 1024
        self.half = torch.float32 if self.device.type == "cpu" else torch.float16
        self.train_dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        self.rows: list[dict[str, Any]] = []
        self.part = ""

    def add(self, name: str, value: float, unit: str, *, least: float | None = None, most: float | None = None) -> None:
        """Note a figure. `least` and `most` are goals for real sizes; a row without one has None for it."""
        goal = reached = None
        if not self.tiny and (least is not None or most is not None):
            goal = f">= {least:g}" if least is not None else f"<= {most:g}"
            reached = value >= least if least is not None else value <= (most or 0)
        row = {"part": self.part, "name": name, "value": value, "unit": unit, "goal": goal, "reached": reached}
        self.rows.append(row)

    def synchronize(self) -> None:
        """Wait for the device."""
        self.module.synchronize(self.device)

    def end(self, method: Callable[[], Any]) -> None:
        """Call it, and wait until the device has done what it launched."""
        method()
        self.synchronize()

    def seconds(self, methods: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        """Median seconds of each method, in interleaved rounds, until the device has ended it."""

        def timed(method: Callable[[], Any]) -> float:
            self.synchronize()
            return seconds_of(lambda: self.end(method))

        for method, _ in product(methods.values(), range(0 if self.tiny else 2)):
            method()
        taken = in_turns(methods, self.options.repetitions, warm=not self.tiny, clock=timed)
        return {name: spread(values)["median"] for name, values in taken.items()}

    def need(self, function: str, lacking: str) -> None:
        """NotTriedError where the device's module in torch has no such function."""
        if not hasattr(self.module, function):
            raise NotTriedError(lacking)

    @contextmanager
    def limited(self, num_bytes: float) -> Iterator[None]:
        """The device gives this process no more bytes in the block."""
        total = self.module.mem_get_info(self.device)[1]
        self.free()
        self.module.set_per_process_memory_fraction(num_bytes / total, self.device)
        try:
            yield
        finally:
            self.module.set_per_process_memory_fraction(1.0, self.device)

    def free(self) -> None:
        """Let go of what a part left on the device."""
        gc.collect()
        free_cached_memory(self.device)

    def peak(self, name: str = "max_memory_allocated") -> int:
        """Bytes of the device as its allocator counts them; 0 where it does not."""
        count = getattr(self.module, name, None)
        return count(self.device) if count is not None else 0

    @cached_property
    def pinned_rate(self) -> float:
        """Bytes per second of one copy from pinned memory to the device; from pageable memory without streams."""
        host = torch.empty(1 << 20 if self.tiny else 256 << 20, dtype=torch.uint8, pin_memory=self.overlaps)
        there = torch.empty_like(host, device=self.device)
        return host.nbytes / self.seconds({"copy": lambda: there.copy_(host, non_blocking=True)})["copy"]

    @cached_property
    def conv_flops(self) -> float:
        """Operations per second of the best 3x3 convolution of 128 channels, batch 4, in bfloat16."""
        return max(
            conv_flops(self, torch.bfloat16, layout) for layout in (torch.contiguous_format, torch.channels_last)
        )

    def vae(self, dtype: torch.dtype) -> Any:
        """SDXL's VAE with random weights, on the CPU."""
        return make_vae((8, 16, 32, 32) if self.tiny else SDXL_VAE, dtype)

    def texts(self, dtype: torch.dtype) -> dict[str, Any]:
        """SDXL's text encoders with random weights, on the CPU."""
        small = TextShape(32, 2, 2, "gelu"), TextShape(48, 2, 2, "gelu")
        return make_texts(*(small if self.tiny else (CLIP_L, CLIP_BIG_G)), dtype)

    def unet(self, dtype: torch.dtype) -> Any:
        """SDXL's UNet with random weights, on the device."""
        from diffusers import UNet2DConditionModel

        if self.tiny:
            return tiny_denoiser().to(self.device, dtype)
        with torch.device(self.device), seeded(0):
            unet = UNet2DConditionModel(
                sample_size=128,
                block_out_channels=(320, 640, 1280),
                down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
                transformer_layers_per_block=(1, 2, 10),
                attention_head_dim=(5, 10, 20),
                cross_attention_dim=2048,
                addition_embed_type="text_time",
                addition_time_embed_dim=256,
                projection_class_embeddings_input_dim=2816,
                use_linear_projection=True,
            )
        return unet.to(dtype)

    def case(self, name: str, models: LoadedModels) -> Case:
        """Runs of precache over these models."""
        dtype = str(self.half).removeprefix("torch.")
        settings = argparse.Namespace(**vars(self.options) | {"dtype": dtype})
        return Case(self.folder / name, models, self.side, settings)

    def dataset(self, name: str, num_samples: int, scale: int) -> LatentDataset:
        """A cache of random samples of SDXL's shapes; `scale` divides their sides."""
        make_cache(self.folder / name, num_samples, scale)
        return LatentDataset(self.folder / name)


# Ceilings


def conv_flops(bench: Bench, dtype: torch.dtype, layout: torch.memory_format) -> float:
    """Operations per second of a 3x3 convolution of 128 channels over 1024x1024 pixels, batch 4."""
    module: Any = torch.nn.Conv2d(128, 128, 3, padding=1, device=bench.device, dtype=dtype)
    module.to(memory_format=layout)
    images = torch.randn(4, 128, bench.side, bench.side, device=bench.device, dtype=dtype).to(memory_format=layout)
    with torch.no_grad():
        seconds = bench.seconds({"conv": lambda: module(images)})["conv"]
    return 2 * 9 * 128 * 128 * 4 * bench.side**2 / seconds


def ceilings(bench: Bench) -> None:
    """What the card can do at best: copies in both directions, a matmul, convolutions."""
    host = torch.empty(1 << 20 if bench.tiny else 256 << 20, dtype=torch.uint8)
    there = torch.empty_like(host, device=bench.device)
    hosts = {"pageable": host} | ({"pinned": host.pin_memory()} if bench.overlaps else {})
    copies: dict[str, Callable[[], Any]] = {}
    for kind, memory in hosts.items():
        copies[f"host to device, {kind}"] = partial(there.copy_, memory, non_blocking=True)
        copies[f"device to host, {kind}"] = partial(memory.copy_, there, non_blocking=True)
    for name, seconds in bench.seconds(copies).items():
        bench.add(name, host.nbytes / seconds / 1e9, "GB/s")
    side = 64 if bench.tiny else 8192
    one, other = (torch.randn(side, side, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    seconds = bench.seconds({"matmul": lambda: torch.mm(one, other)})["matmul"]
    bench.add(f"matmul of {side}x{side}, bfloat16", 2 * side**3 / seconds / 1e12, "TFLOP/s")
    for dtype, layout in product((torch.bfloat16, torch.float32), (torch.contiguous_format, torch.channels_last)):
        name = f"convolution, {dtype}, {layout}".replace("torch.", "")
        bench.add(name, conv_flops(bench, dtype, layout) / 1e12, "TFLOP/s")


# Checks


def check_batches(bench: Bench) -> str:
    """Each batch of four epochs equals the CPU's, though each upload comes late and the current stream is busy."""
    sleep = getattr(bench.module, "_sleep", lambda cycles: None)
    sampler = BucketBatchSampler(bench.dataset("races", 32, 16), 4, seed=0)
    kind = type(transfer_to(bench.device))
    send, held = kind.send, list[tuple[torch.Tensor, torch.Tensor]]()

    def late(transfer: Transfer, read: Callable[[], Batch], place: Callable[[Batch], Batch]) -> Copies:
        def slept() -> Batch:
            sleep(SLEEP_CYCLES)  # on the stream of uploads, before their copies
            return read()

        return send(transfer, slept, place)

    side = 64 if bench.tiny else 2048
    busy = torch.randn(side, side, device=bench.device)
    with (
        patch.object(kind, "send", late),
        LatentCache(bench.folder / "races") as cache,
        LatentLoader(sampler, device=bench.device, output="moments") as loader,
    ):
        for batch in islice(loader.forever(), 4 * len(sampler)):
            busy = torch.mm(busy, busy).clamp(-1, 1)
            right = cache.batch(list(batch["sample_id"]), device="cpu", output="moments")
            for name in ("moments", "prompt_embeds"):
                assert torch.equal(batch[name].cpu(), right[name]), f"batch {len(held)}: other {name}"
            held.append((batch["moments"], right["moments"]))
        for number, (there, expected) in enumerate(held):
            assert torch.equal(there.cpu(), expected), f"batch {number} changed after it was given"
    return f"{len(held)} batches equal"


def check_syncs(bench: Bench) -> str:
    """The loader makes the host wait for nothing on the device."""
    bench.need("set_sync_debug_mode", "this device does not tell when the host waits for it")
    loader = LatentLoader(BucketBatchSampler(bench.dataset("syncs", 16, 16), 4, seed=0), device=bench.device)
    with loader:
        batches = loader.forever()
        next(batches)
        bench.module.set_sync_debug_mode("error")
        try:
            for batch in islice(batches, 8):
                batch["latents"].float().square().mean()
        finally:
            bench.module.set_sync_debug_mode("default")
    return "8 batches without one"


def check_memory(bench: Bench) -> str:
    """Forty epochs reserve no more of the device than four."""
    bench.need("memory_reserved", "this device does not count its memory")
    sampler = BucketBatchSampler(bench.dataset("memory", 16, 8), 4, seed=0)
    reserved = []
    with LatentLoader(sampler, device=bench.device) as loader:
        for number, _ in enumerate(islice(loader.forever(), 40 * len(sampler)), 1):
            if number % (4 * len(sampler)) == 0:
                reserved.append(bench.peak("memory_reserved"))
    assert reserved[-1] <= reserved[0], f"{reserved[0]:,} bytes after 4 epochs, {reserved[-1]:,} after 40"
    return f"{reserved[-1] / 1e6:.0f} MB"


def dataset_of(name: str, photos: Path) -> dict[str, Any]:
    """A dataset of the config: small photos in small buckets."""
    sizes = {"buckets": {"area": 4096, "step": 8}, "images": {"min_side": 8}}
    return {"name": name, "source": {"path": photos}, **sizes}


def entries_of(bench: Bench, name: str, **encode: Any) -> dict[str, Mapping[str, torch.Tensor]]:
    """What precache makes of eight photos with the tiny model on the device."""
    photos = bench.folder / "photos-of-checks"
    if not photos.exists():
        make_photos(photos, 8, 96, 3)
    config = parse_config(
        {
            "cache": {"path": bench.folder / name},
            "datasets": [dataset_of("photos", photos)],
            "model": {"path": "tiny"},
            "encode": {"device": str(bench.device), **encode},
        }
    )
    report = run_precache(config)
    assert not report.refused and report.num_encoded, report.to_text()
    with LatentCache(bench.folder / name) as cache:
        return {key: cache.get(key).tensors for key in cache.store.keys()}


def check_flags(bench: Bench) -> str:
    """A trainer's settings for TF32 and cuDNN change no bit of what is stored."""
    backends: Any = torch.backends
    before = entries_of(bench, "flags-default")
    flags = backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32, backends.cudnn.benchmark
    backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32, backends.cudnn.benchmark = True, False, True
    try:
        after = entries_of(bench, "flags-changed")
    finally:
        backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32, backends.cudnn.benchmark = flags
    assert before.keys() == after.keys(), "other keys"
    for key, tensors in before.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, after[key][name]), f"{key}: other {name}"
    return f"{len(before)} entries equal"


def check_numbers(bench: Bench) -> str:
    """The device's moments in float32 without TF32 are the CPU's, but for rounding."""
    vae, pixels = tiny_parts()["vae"], torch.randint(0, 256, (4, 64, 64, 3), dtype=torch.uint8)
    right = encode_images(vae, pixels)
    with torch.backends.cudnn.flags(allow_tf32=False), placed(vae, bench.device):
        found = encode_images(vae, pixels.to(bench.device)).cpu()
    worst = ((found - right).abs().max() / right.abs().max()).item()
    assert worst < 1e-3, f"a relative difference of {worst:.1e}"
    return f"relative difference {worst:.0e}"


def check_halving(bench: Bench) -> str:
    """A batch that does not fit is halved, and the entries are those of smaller batches."""
    bench.need("set_per_process_memory_fraction", "the device's memory cannot be limited")
    vae = bench.vae(torch.float16).to(bench.device)
    pixels = torch.randint(0, 256, (8, bench.side, bench.side, 3), dtype=torch.uint8, device=bench.device)
    peaks = []
    for size in (4, 8):
        bench.free()
        bench.module.reset_peak_memory_stats(bench.device)
        encode_images(vae, pixels[:size])
        peaks.append(bench.peak())
    with bench.limited(sum(peaks) / 2):
        try:
            encode_images(vae, pixels)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        else:
            raise AssertionError("the limit lets eight through: nothing was tried")
        case = bench.case("halving", models_of(vae=vae.cpu()))
        make_photos(bench.folder / "halving" / "photos", 8, bench.side)
        case.run()
    return "8 images stored where 8 do not fit at once"


def check_hooks(bench: Bench) -> str:
    """A VAE under accelerate's offload hook encodes, and is back on the CPU afterwards."""
    from accelerate import cpu_offload_with_hook

    if bench.device.type == "cpu":
        raise NotTriedError("there is nothing to offload from")
    parts = tiny_parts()
    parts["vae"], _ = cpu_offload_with_hook(parts["vae"], bench.device)
    make_photos(bench.folder / "hooks" / "photos", 4, bench.side)
    case = bench.case("hooks", LoadedModels(**parts))
    case.run()
    where = {parameter.device.type for parameter in parts["vae"].parameters()}
    assert where == {"cpu"}, f"the VAE is left on {where}"
    return "4 images"


def check_ddp(bench: Bench) -> str:
    """DistributedDataParallel reduces gradients after a phase that parks all that it may, by one process."""
    distributed, rendezvous = torch.distributed, bench.folder / "ranks"
    backend, buckets = "nccl" if bench.device.type == "cuda" else "gloo", list[int]()
    distributed.init_process_group(backend, init_method=rendezvous.as_uri(), rank=0, world_size=1)
    try:
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).to(bench.device))

        def reduce(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, which are strings here
            buckets.append(bucket.index())
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        net.register_comm_hook(None, reduce)
        phases = Phases({"unet": net}, device=bench.device)
        phases.start("train")
        with phases.enter(Phase(on_device=())):
            pass
        net(torch.ones(1, 8, device=bench.device)).sum().backward()
    finally:
        distributed.destroy_process_group()
        rendezvous.unlink(missing_ok=True)
    assert buckets, "its hooks are lost: training would go on without reducing"
    return f"{len(buckets)} bucket of gradients"


def check_leaving(bench: Bench) -> str:
    """A phase that swaps two parts, of which the device holds one, ends with the first one back in its place."""
    bench.need("set_per_process_memory_fraction", "the device's memory cannot be limited")
    size = 1 << (6 if bench.tiny else 14)  # a part of 1 GiB
    parts = {name: torch.nn.Linear(size, size, bias=False, device="cpu") for name in ("unet", "vae")}
    parts["vae"].requires_grad_(False)
    phases = Phases(parts, device=bench.device)
    phases.start("train")  # with the part that is trained on the device
    with bench.limited(1.5 * parts["vae"].weight.nbytes), phases.enter(Phase(on_device=("vae",))):
        assert parts["vae"].weight.device == bench.device and parts["unet"].weight.device.type == "cpu"
    assert parts["unet"].weight.device == bench.device and parts["vae"].weight.device.type == "cpu"
    return "one part at a time"


def check_validation(bench: Bench) -> str:
    """Training for six steps gives the same bits with validations in between, of which the first fills the cache."""
    from train_lora import Options, train

    photos = bench.folder / "photos-of-training"
    make_photos(photos, 8, 96)
    held_out = bench.folder / "photos-held-out"
    make_photos(held_out, 4, 96)
    sets = [dataset_of("train", photos), dataset_of("held_out", held_out) | {"role": "validation"}]
    losses = {}
    deterministic = torch.are_deterministic_algorithms_enabled()
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
        torch.use_deterministic_algorithms(deterministic)
    assert losses[0] == losses[2], f"losses {losses[0]} without validation, {losses[2]} with it"
    return "6 losses equal"


CHECKS = (
    check_batches,
    check_syncs,
    check_memory,
    check_flags,
    check_numbers,
    check_halving,
    check_hooks,
    check_ddp,
    check_leaving,
    check_validation,
)


def checks(bench: Bench) -> None:
    """Whether what the device computes and gives is right. Each check runs; those that fail end the part."""
    failures, num_passed = [], 0
    for check in CHECKS:
        name = check.__name__.removeprefix("check_")
        try:
            print(f"{name}: {check(bench)}", file=sys.stderr, flush=True)
            num_passed += 1
        except NotTriedError as error:
            print(f"{name}: not tried, as {error}", file=sys.stderr, flush=True)
        except Exception as error:
            traceback.print_exc()
            failures.append(f"{name}: {type(error).__name__}: {error}")
        bench.free()
    bench.add("checks passed", num_passed, f"of {len(CHECKS)}", least=len(CHECKS))
    if failures:
        raise AssertionError("; ".join(failures))


# Throughput


def vae(bench: Bench) -> None:
    """Images per second of the VAE's encoder, by dtype and batch; and of precache with what it chooses."""
    rates: dict[str, float] = {}
    dtypes = (torch.float32,) if bench.device.type == "cpu" else (torch.float32, torch.float16, torch.bfloat16)
    sizes = (1, 2) if bench.tiny else (1, 2, 4, 8, 16)
    pixels = torch.randint(0, 256, (sizes[-1], bench.side, bench.side, 3), dtype=torch.uint8, device=bench.device)
    for dtype in dtypes:
        model = bench.vae(dtype).to(bench.device)
        for size in sizes:
            name = f"{dtype}, batch {size}".replace("torch.", "")
            try:
                rates[name] = size / bench.seconds({name: partial(encode_images, model, pixels[:size])})[name]
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                print(f"{name}: does not fit into memory", file=sys.stderr)
        del model
        bench.free()
    best = max(rates, key=lambda name: rates[name])
    for name, rate in rates.items():
        bench.add(name, rate, "images/s")
    if not bench.tiny:
        bench.add(f"best ({best}) over a convolution", rates[best] * VAE_TFLOP["encode"] * 1e12 / bench.conv_flops, "")
    case = bench.case("vae", models_of(vae=bench.vae(bench.half)))
    chosen = choose_encodings(case.config(), case.models, {}).vae
    model = case.models.vae(chosen.dtype)
    with placed(model, bench.device):
        size = min(chosen.batch_size, len(pixels))
        rate = size / bench.seconds({"chosen": partial(encode_images, model, pixels[:size])})["chosen"]
    half = [value for name, value in rates.items() if str(chosen.dtype).removeprefix("torch.") in name]
    bench.add(f"chosen (batch {size}) over the best of its dtype", rate / max(half), "", least=0.97)
    del model, pixels
    bench.free()
    paths = make_photos(case.folder / "photos", 4 if bench.tiny else 256, bench.side)
    found = images_case(case, paths)
    per_s = found["per_s"]
    bench.add("precache", per_s["run"], "images/s")
    bench.add("precache over the encoder alone", found["fraction_of"]["encoder"]["median"], "", least=0.95)
    bench.add("decoding threads over the encoder", per_s["decode"] / per_s["encoder"], "", least=1.0)


def text(bench: Bench) -> None:
    """Captions per second of both text encoders, by batch; and of precache with what it chooses."""
    parts = bench.texts(bench.half)
    case = bench.case("text", models_of(texts=parts))
    sizes = (2, 4) if bench.tiny else (16, 32, 64, 128, 256)
    chosen = choose_encodings(case.config(), case.models, {}).text_encoders.batch_size
    encoders = [parts["text_encoder"], parts["text_encoder_2"]]
    vocab_size = encoders[0].config.vocab_size
    ids = torch.randint(0, vocab_size - 2, (max(*sizes, chosen), 77), device=bench.device)
    rates = {}
    with ExitStack() as stack, torch.no_grad():
        for encoder in encoders:
            stack.enter_context(placed(encoder, bench.device))

        def encode(size: int) -> None:
            for encoder in encoders:
                encoder(ids[:size], output_hidden_states=True)

        for size in {*sizes, chosen}:
            rates[size] = size / bench.seconds({"encode": partial(encode, size)})["encode"]
    for size in sorted(rates):
        bench.add(f"batch {size}", rates[size], "captions/s")
    bench.add(f"chosen (batch {chosen}) over the best", rates[chosen] / max(rates.values()), "", least=0.95)
    import numpy as np

    generator = np.random.default_rng(1)
    captions = [caption(generator, number) for number in range(8 if bench.tiny else 8192)]
    (path,) = make_photos(case.folder / "photos", 1, bench.side)
    path.with_suffix(".txt").write_text("\n".join(captions) + "\n", encoding="utf-8")
    found = captions_case(case, captions)
    bench.add("precache", found["per_s"]["run"], "captions/s")
    bench.add("precache over the encoders alone", found["fraction_of"]["encoder"]["median"], "", least=0.9)


def copies(bench: Bench) -> None:
    """The loader's uploads against one copy of as many bytes from pinned memory."""
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


# Training


class Step:
    """A LoRA of SDXL's UNet in bfloat16 with gradient checkpointing, and its optimizer."""

    def __init__(self, bench: Bench):
        from diffusers.training_utils import cast_training_params
        from peft import LoraConfig

        self.bench = bench
        self.unet = bench.unet(bench.train_dtype).requires_grad_(False).train()
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        self.unet.add_adapter(LoraConfig(r=4 if bench.tiny else 16, target_modules=targets))
        cast_training_params(self.unet, torch.float32)
        self.unet.enable_gradient_checkpointing()
        self.parameters = [each for each in self.unet.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=True)

    def run(self, batch: Mapping[str, Any]) -> None:
        """One step on a batch of the loader's, whose sizes may be other ones than this UNet's: they are cut to fit."""
        device, config = self.bench.device, self.unet.config
        latents = batch["latents"]
        count = len(latents)
        embeds = batch["prompt_embeds"][..., : config.cross_attention_dim]
        width = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        added = {"text_embeds": batch["pooled_prompt_embeds"][:, :width], "time_ids": batch["add_time_ids"]}
        timesteps = torch.randint(0, 1000, (count,), device=device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            predicted = self.unet(latents, timesteps, encoder_hidden_states=embeds, added_cond_kwargs=added).sample
            loss = torch.nn.functional.mse_loss(predicted.float(), latents.float())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def step(bench: Bench) -> None:
    """Steps of a real LoRA with the loader, against as many with one batch that lies on the device."""
    training = Step(bench)
    config = training.unet.config
    scale = 16 if bench.tiny else 1
    dataset = bench.dataset("steps", 8 if bench.tiny else 512, scale)
    sampler = BucketBatchSampler(dataset, 2 if bench.tiny else 4, seed=0)
    num_steps = 4 if bench.tiny else 60
    if bench.tiny:
        assert config.cross_attention_dim <= 2048 // scale, "the tiny samples are too narrow for the tiny UNet"
    waited: list[float] = []
    with LatentLoader(sampler, device=bench.device, dtype=torch.float32, scaled=True) as loader:
        batches = loader.forever()
        fixed = next(batches)

        def with_loader() -> None:
            for _ in range(num_steps):
                start = time.perf_counter()
                batch = next(batches)
                waited.append(time.perf_counter() - start)
                training.run(batch)

        def with_one_batch() -> None:
            for _ in range(num_steps):
                training.run(fixed)

        taken = bench.seconds({"loader": with_loader, "fixed": with_one_batch})
    bench.add("step", taken["fixed"] / num_steps * 1e3, "ms")
    bench.add("step with the loader over one batch", taken["loader"] / taken["fixed"], "", most=1.01)
    share = sum(waited) / len(waited) * num_steps / taken["loader"]
    bench.add("waiting, share of a step", share, "", most=0.005)
    bench.add("waiting, p99", sorted(waited)[int(0.99 * (len(waited) - 1))] * 1e3, "ms")


def phases(bench: Bench) -> None:
    """Switches between phases, with SDXL's parts: the UNet trained on the device, the others parked."""
    training = Step(bench)
    parts = {"unet": training.unet, "optimizer": training.optimizer, "vae": bench.vae(torch.float32)}
    parts |= {name: part for name, part in bench.texts(bench.train_dtype).items() if isinstance(part, torch.nn.Module)}
    switch = Phases(parts, device=bench.device)
    switch.start("train")
    sizes = {name: weight_bytes(part) for name, part in parts.items() if isinstance(part, torch.nn.Module)}
    encoders = ("text_encoder", "text_encoder_2")

    validate = partial(switch.enter, "validate")

    def entered(open_one: Callable[[], Any]) -> None:
        with open_one():
            pass

    taken = bench.seconds(
        {
            "enter and leave validate": partial(entered, validate),
            "lend the VAE": partial(entered, partial(switch.lend, "vae")),
            "lend the text encoders": partial(entered, partial(switch.lend, *encoders)),
        }
    )
    bench.add("enter and leave validate", taken["enter and leave validate"], "s", most=0.15)
    for name, lent in (("lend the VAE", ("vae",)), ("lend the text encoders", encoders)):
        ideal = sum(sizes[part] for part in lent) / bench.pinned_rate
        bench.add(name, taken[name], "s")
        bench.add(f"{name}, over a pinned copy", taken[name] / ideal, "", most=3.0)
    dataset = bench.dataset("phases", 8, 16 if bench.tiny else 1)
    sampler = BucketBatchSampler(dataset, 2 if bench.tiny else 4, seed=0)
    with LatentLoader(sampler, device=bench.device, dtype=torch.float32, scaled=True) as loader:
        batch = next(iter(loader.forever()))
    usual = bench.seconds({"step": partial(training.run, batch)})["step"]
    entered(validate)
    bench.synchronize()
    first = seconds_of(lambda: bench.end(partial(training.run, batch)))
    bench.add("first step after a phase over a usual one", first / usual, "", most=1.3)
    stats: Callable[[torch.device], dict[str, int]] = getattr(bench.module, "memory_stats", lambda device: {})
    bench.add("allocations that were tried again", stats(bench.device).get("num_alloc_retries", 0), "", most=0)


def decode(bench: Bench) -> None:
    """Decoding a sample image, and saving and loading a LoRA's training."""
    model = bench.vae(bench.half).to(bench.device)
    latents = torch.randn(1, 4, bench.side // 8, bench.side // 8, device=bench.device)
    seconds = bench.seconds({"decode": partial(decode_fitting, model, latents)})["decode"]
    bench.add("decode an image", seconds * 1e3, "ms")
    if not bench.tiny:
        rate = VAE_TFLOP["decode"] * 1e12 / seconds
        bench.add("decoding over a convolution", rate / bench.conv_flops, "", least=0.5)
    del model
    bench.free()
    training = Step(bench)
    path = bench.folder / "checkpoint"
    state: dict[str, Any] = {"model": training.unet, "optimizer": training.optimizer}
    taken = bench.seconds(
        {
            "save": lambda: save_checkpoint(path, **state, step=1),
            "load": lambda: load_checkpoint(path, **state),
        }
    )
    num_bytes = sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file())
    for name, value in taken.items():
        bench.add(f"{name} a checkpoint of {num_bytes / 1e9:.2f} GB", value, "s")


PARTS: dict[str, Callable[[Bench], None]] = {
    each.__name__: each for each in (ceilings, checks, vae, text, copies, step, phases, decode)
}


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run the parts, and collect the figures, what failed, and how long each took."""
    bench = Bench(folder, options)
    failed, seconds = {}, {}
    for name in options.part:
        print(f"{name} ...", file=sys.stderr, flush=True)
        bench.part, start = name, time.perf_counter()
        try:
            PARTS[name](bench)
        except Exception as error:
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"
        seconds[name] = time.perf_counter() - start
        bench.free()
    missed = [f"{row['part']}: {row['name']}" for row in bench.rows if row["reached"] is False]
    return {"rows": bench.rows, "failed": failed, "missed": missed, "seconds": seconds}


def to_text(result: Mapping[str, Any]) -> str:
    """A table of the figures, part by part."""
    where = result["environment"]
    lines = [f"{where['device']}, torch {where['torch']}, {where['date']}"]
    part = ""
    for row in result["rows"]:
        if row["part"] != part:
            part = row["part"]
            lines.append(f"\n{part} ({result['seconds'][part]:.0f} s)")
        goal = "" if row["goal"] is None else f"{row['goal']:>9}" + ("" if row["reached"] else "  MISSED")
        lines.append(f"  {row['name']:52}{row['value']:>12.4g} {row['unit']:<11}{goal}".rstrip())
    lines += [f"\nFAILED {name}: {error}" for name, error in result["failed"].items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, PARTS)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    parser.add_argument("--device", default=str(accelerator or "cpu"))
    parser.set_defaults(repetitions=5, part=list(PARTS))
    options = parser.parse_args(arguments)
    if torch.device(options.device).type == "cpu" and not options.tiny:
        parser.error("there is no accelerator here, and a CPU takes hours at these sizes: give --tiny --device cpu")
    return 1 if run_in_folder(run, options, to_text)["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
