"""How near precaching comes to its ceiling: the encoder alone, or the decoders alone, whichever is the slower part.

    python scripts/bench_precache.py              # a table; about ten minutes on two cores
    python scripts/bench_precache.py --json       # one document
    python scripts/bench_precache.py --tiny       # for correctness only
    python scripts/bench_precache.py --full_size  # SDXL's own sizes: the default on an accelerator

Each figure is a ratio of two times of one round; methods take turns. All are measured with OMP_WAIT_POLICY=passive,
unless it is set, because `latentcache precache` sets it. `run` is the real `run_precache` into a new cache
on disk: planning, decoding, encoding, writing with fsync, the manifests. What does not grow with the dataset is not in
it: loading the models (reported apart) and making the databases of a new cache. Its ceilings:

encoder      the same encoder, settings and batches over tensors that lie on the device already, and nothing else
decode       read, hash, decode and resize by as many threads as there are cores, and nothing else

Cases: `encoder_bound` (SDXL's VAE, on a CPU with a fraction of the channels), `decode_bound` (a tiny VAE, large
JPEGs), `captions` (both text encoders). On a CPU what is decoded is taken from the encoder, so the case is chosen such
that decoding is a small share of the work, which is reported. With `--full_size` also `one_at_a_time` (decode, encode
and save each image in turn, as most trainers do) and what each setting of the encoders gains.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as `latentcache precache` does it, before torch is loaded

import benchmarking
import torch
from encoder_variants import image_variants, matmul_flops, text_variants
from precache_cases import Case, captions_case, images_case
from precache_inputs import (
    CLIP_BIG_G,
    CLIP_L,
    SDXL_VAE,
    TextShape,
    VaeShape,
    make_photos,
    make_texts,
    make_vae,
    models_of,
    narrowed,
)

from latentcache.devices.placement import device_named
from latentcache.models.vae import DTYPES

GOALS = {
    "fraction_of_ceiling": 0.95,
    "fraction_of_decode_ceiling": 0.9,
    "captions_fraction_of_ceiling": 0.95,
    "times_one_at_a_time": 2.0,
}
VAE_FLOP, TEXT_FLOP = 4.88e12, 0.11e12
"""Of an image of 1024x1024 in SDXL's VAE, and of a caption in both text encoders."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the cases are. Sides are pixels of square images: of the bucket, and of the JPEG."""

    num_images: int
    side: int
    vae: VaeShape
    num_photos: int
    photo_side: int
    photo_bucket_side: int
    num_captions: int
    text_encoder: TextShape
    text_encoder_2: TextShape
    batch_sizes: tuple[int, ...]
    text_batch_sizes: tuple[int, ...]
    matmul_side: int


TINY = Sizes(
    num_images=3,
    side=64,
    vae=VaeShape((8, 8, 16, 16), 8),
    num_photos=3,
    photo_side=200,
    photo_bucket_side=64,
    num_captions=5,
    text_encoder=TextShape(16, 2, 2, "quick_gelu"),
    text_encoder_2=TextShape(16, 3, 2, "gelu"),
    batch_sizes=(1, 2),
    text_batch_sizes=(1, 2),
    matmul_side=64,
)
ON_CPU = replace(
    TINY,
    num_images=32,
    side=256,
    vae=narrowed(SDXL_VAE, 2),
    num_photos=48,
    photo_side=3500,
    photo_bucket_side=64,
    num_captions=192,
    text_encoder=TextShape(256, 12, 4, "quick_gelu"),
    text_encoder_2=TextShape(384, 16, 6, "gelu"),
)
FULL = Sizes(
    num_images=128,
    side=1024,
    vae=SDXL_VAE,
    num_photos=256,
    photo_side=3500,
    photo_bucket_side=64,
    num_captions=4096,
    text_encoder=CLIP_L,
    text_encoder_2=CLIP_BIG_G,
    batch_sizes=(1, 4, 8, 16),
    text_batch_sizes=(1, 16, 64, 256),
    matmul_side=8192,
)


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All cases, each in a folder of its own."""
    sizes, dtype, device = options.sizes, DTYPES[options.dtype], device_named(options.device)
    result: dict[str, Any] = {"environment": benchmarking.environment(device, folder), "goals": GOALS}

    case = Case(folder / "encoder", models_of(vae=make_vae(sizes.vae, dtype)), sizes.side, options)
    paths = make_photos(case.folder / "photos", sizes.num_images, sizes.side)
    result["encoder_bound"] = images_case(case, paths)

    case = Case(folder / "decode", models_of(), sizes.photo_bucket_side, options)
    paths = make_photos(case.folder / "photos", sizes.num_photos, sizes.photo_side)
    result["decode_bound"] = images_case(case, paths)

    texts = make_texts(sizes.text_encoder, sizes.text_encoder_2, dtype)
    case = Case(folder / "captions", models_of(texts=texts), 64, options)
    [path] = make_photos(case.folder / "photos", 1, 64, sizes.num_captions)
    result["captions"] = captions_case(case, path.with_suffix(".txt").read_text(encoding="utf-8").splitlines())

    result |= {
        "fraction_of_ceiling": result["encoder_bound"]["fraction_of_encoder"]["median"],
        "fraction_of_decode_ceiling": result["decode_bound"]["fraction_of_decoders"]["median"],
        "captions_fraction_of_ceiling": result["captions"]["fraction_of_encoder"]["median"],
    }
    if options.full_size:
        result["times_one_at_a_time"] = result["encoder_bound"]["times_one_at_a_time"]["median"]
        result["settings_of_encoders"] = settings_of_encoders(sizes, device, options)
    return result


def settings_of_encoders(sizes: Sizes, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """What each setting gains, and the fraction of the device's own matmul rate that it reaches."""
    dtype = DTYPES[options.dtype]
    flops = matmul_flops(device, dtype, sizes.matmul_side, options.repetitions)
    vae = make_vae(sizes.vae, dtype)
    image_flop = VAE_FLOP * (sizes.side / 1024) ** 2
    texts = make_texts(sizes.text_encoder, sizes.text_encoder_2, dtype)
    return {
        "matmul_flops": flops,
        "images": image_variants(vae, device, sizes.side, sizes.batch_sizes, image_flop / flops, options.repetitions),
        "captions": text_variants(texts, device, sizes.text_batch_sizes, TEXT_FLOP / flops, options.repetitions),
    }


def table(result: Mapping[str, Any]) -> str:
    """The result for people."""
    lines = [f"{result['environment']['device']}, {result['environment']['cpu']}, {result['environment']['date']}"]
    for name in ("encoder_bound", "decode_bound", "captions"):
        case = result[name]
        lines.append(f"\n{name}, batches of {case['batch_size']}")
        rates = case.get("images_per_s") or case["captions_per_s"]
        lines += [f"  {method:<22}{rate:>10.2f} /s" for method, rate in rates.items()]
        for figure in ("fraction_of_encoder", "fraction_of_decoders", "fraction_of_slower", "decode_share"):
            if figure in case:
                spread = case[figure]
                lines.append(f"  {figure:<22}{spread['median']:>10.3f}  ({spread['min']:.3f} to {spread['max']:.3f})")
        lines.append("  seconds: " + ", ".join(f"{name} {value:.2f}" for name, value in case["stages_s"].items()))
    lines.append("")
    lines += [
        f"{name:<30}{result[name]:.3f}  (goal {goal})" for name, goal in result["goals"].items() if name in result
    ]
    for kind, variants in result.get("settings_of_encoders", {}).items():
        if kind == "matmul_flops":
            lines.append(f"\nmatmul {variants / 1e12:.3g} TFLOP/s")
            continue
        lines.append(f"\n{kind:<28}{'per s':>10}{'of matmul':>12}{'gain':>8}{'peak GB':>10}")
        for name, variant in variants.items():
            peak = "-" if variant["peak_memory_bytes"] is None else f"{variant['peak_memory_bytes'] / 1e9:.2f}"
            lines.append(
                f"  {name:<26}{variant['per_s']:>10.2f}{variant['fraction_of_matmul']:>12.3f}"
                f"{variant['gain']:>8.2f}{peak:>10}"
            )
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    parser = benchmarking.make_parser(__doc__)
    parser.add_argument("--device", default=str(accelerator or "cpu"))
    parser.add_argument(
        "--dtype", choices=["float32", "float16", "bfloat16"], help="default: float32 on a CPU, else bfloat16"
    )
    parser.add_argument(
        "--full_size", action=argparse.BooleanOptionalAction, help="SDXL's sizes; default: not on a CPU"
    )
    options = benchmarking.parse(parser)
    on_cpu = device_named(options.device).type == "cpu"
    options.dtype = options.dtype or ("float32" if on_cpu else "bfloat16")
    options.full_size = not on_cpu if options.full_size is None else options.full_size
    options.sizes = TINY if options.tiny else FULL if options.full_size else ON_CPU
    return options


def main() -> None:
    options = parse()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="latentcache-bench-", dir=options.folder))
        result = run(Path(folder), options)
    options.sizes = repr(options.sizes)
    benchmarking.emit(result, options, table)


if __name__ == "__main__":
    main()
