"""Throughput of precaching relative to its ceiling: the slower of the encoder alone and image decoding alone.

    python scripts/bench_precache.py              # a table; about ten minutes on two cores

Each figure is the ratio of two times from the same round; the methods alternate. OMP_WAIT_POLICY=passive is set unless
it is set already, as `latentcache precache` does. `run` is the real `run_precache` into a new cache on disk: planning,
decoding, encoding, writing with fsync, manifests. It excludes fixed costs: loading the models (reported separately) and
creating the cache's databases. Its ceilings:

encoder      only the encoder, with the same settings and batches, on tensors that are already on the device
decode       only reading, hashing, decoding and resizing, with one thread per core

Cases: `encoder_bound` (SDXL's VAE with a fraction of its channels), `decode_bound` (a tiny VAE, large JPEGs),
`captions` (both text encoders). On a CPU decoding competes with the encoder for cores, so decoding is kept a small part
of `encoder_bound`. bench_cuda.py measures the same on an accelerator at SDXL's full size.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as `latentcache precache` does it, before torch is loaded

import numpy as np
import torch
from benchmarking import in_turns, make_parser, ratios, run_parts, seconds_of, spread
from PIL import Image
from torch.nn.functional import interpolate

from latentcache import Config, run_precache
from latentcache.config import BucketsConfig, ImagesConfig
from latentcache.config_file import parse_config
from latentcache.dataset.bucket_rules import assign, bucket_table, fit
from latentcache.dataset.images import decode, prepare
from latentcache.devices.placement import device_named, placed, vae_batch_size
from latentcache.identity import digest
from latentcache.models.model_loader import LoadedModels
from latentcache.models.tiny import frozen, seeded, tiny_part, tiny_parts
from latentcache.models.vae import encode_images
from latentcache.precache.encodings import choose_encodings
from latentcache.precache.report import Report
from latentcache.precache.tasks import TEXT_BATCH_SIZE
from latentcache.precache.workspace import Workspace, open_workspace
from latentcache.types import Size

JPEG_QUALITY = 92
SDXL_VAE = (128, 256, 512, 512)
"""Channels per level."""
SDXL_TEXTS = {"text_encoder": (768, 12, 12), "text_encoder_2": (1280, 32, 20)}
"""Width, number of layers and number of heads of each text encoder."""
Entries = Mapping[str, Mapping[str, torch.Tensor]]


def make_vae(channels: tuple[int, ...], dtype: torch.dtype, tile: int = 512) -> Any:
    """SDXL's VAE with other channels and tile sides and with random weights, on the CPU, frozen, in eval mode."""
    tiny = tiny_part("vae")
    sizes = {"block_out_channels": channels, "norm_num_groups": min(32, channels[0]), "sample_size": tile}
    with seeded(0):
        vae = type(tiny).from_config({**tiny.config, **sizes, "layers_per_block": 2, "force_upcast": False})
    return vae.to(dtype).eval().requires_grad_(False)


def make_texts(sizes: Mapping[str, tuple[int, int, int]], dtype: torch.dtype) -> dict[str, Any]:
    """The tiny model's tokenizers and text encoders. Those in `sizes` have other sizes (see `SDXL_TEXTS`)."""
    parts = tiny_parts()
    with seeded(0):
        for name, (width, num_layers, num_heads) in sizes.items():
            layers = {"num_hidden_layers": num_layers, "num_attention_heads": num_heads}
            widths = {"hidden_size": width, "intermediate_size": 4 * width, "projection_dim": width}
            tiny = parts[name]
            parts[name] = type(tiny)(type(tiny.config).from_dict({**tiny.config.to_dict(), **layers, **widths}))
    return frozen({name: parts[name].to(dtype) for name in SDXL_TEXTS}) | {
        name: parts[name] for name in ("tokenizer", "tokenizer_2")
    }


def models_of(**parts: Any) -> LoadedModels:
    """Models with these parts; the others are tiny."""
    return LoadedModels(**tiny_parts() | parts)


def make_photos(folder: Path, num_photos: int, size: int) -> list[Path]:
    """Write square JPEG files with as much detail as photographs have, no two of them alike."""
    folder.mkdir(parents=True)
    # Noise at every scale, stronger at coarse scales, as in natural images.
    generator = torch.Generator().manual_seed(0)
    canvas = torch.full((1, 3, size, size), 128.0)
    for level in range(1, size.bit_length()):
        noise = torch.randn((1, 3, 2**level, 2**level), generator=generator)
        canvas += 100 * 0.6**level * interpolate(noise, (size, size), mode="bicubic")
    pixels = canvas[0].movedim(0, -1).clip(0, 255).byte().numpy()

    def make(number: int) -> Path:
        # Rotated, rolled and tinted: drawing each from scratch would take longer than the benchmark.
        generator = np.random.default_rng(number)
        moved = np.roll(np.rot90(pixels, number % 4), int(generator.integers(size)), axis=number % 2)
        path = folder / f"{number:05d}.jpg"
        tinted = moved // 8 * 7 + generator.integers(0, 24, 3, dtype=np.uint8)
        Image.fromarray(tinted).save(path, quality=JPEG_QUALITY)
        return path

    with ThreadPoolExecutor(os.cpu_count()) as executor:
        return list(executor.map(make, range(num_photos)))


# What is measured -----------------------------------------------------------------------------------------------------


class Case:
    """New photos and models, and runs of precache over them, each into a new cache.

    The models compute in `dtype`. `side` is the side of the bucket and `photo_side` that of the JPEG files, in pixels.
    """

    def __init__(
        self,
        folder: Path,
        models: LoadedModels,
        num_photos: int,
        side: int,
        photo_side: int | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        self.folder, self.models, self.side = folder, models, side
        self.device, self.dtype = device_named(str(device)), dtype
        self.paths = make_photos(folder / "photos", num_photos, photo_side or side)

    def config(self, cache: str = "cache", **encode: Any) -> Config:
        dataset = {
            "name": "bench",
            "source": {"kind": "folder", "path": self.folder / "photos"},
            "buckets": {"area": self.side**2, "step": 8, "max_aspect": 1.0},
            "images": {"min_side": 8},
        }
        dtypes = dict.fromkeys(("vae_dtype", "text_dtype"), str(self.dtype).removeprefix("torch."))
        encode |= {"device": str(self.device), **dtypes, "store_dtype": "float16", "image_output": "mean"}
        return parse_config({"cache": {"path": self.folder / cache}, "datasets": [dataset], "encode": encode})

    @contextmanager
    def _done(self, **encode: Any) -> Iterator[tuple[Report, Workspace]]:
        """Run precache into a new cache, which is deleted after the block."""
        with TemporaryDirectory(dir=self.folder) as cache:
            config = self.config(cache, **encode)
            with open_workspace(config.cache) as workspace:
                report = run_precache(config, models=self.models, workspace=workspace)
                if report.refused or report.num_encoded != report.num_misses:
                    raise RuntimeError(f"the run is not valid as a measurement: {report.to_text()}")
                yield report, workspace

    def run(self) -> float:
        """Seconds of a run, excluding loading the models."""
        with self._done() as (report, _):
            return report.seconds["total"] - report.seconds["load"]

    def entries(self, **encode: Any) -> Entries:
        """Tensors of the entries that a run makes, by key. `encode` overrides settings of that section."""
        with self._done(**encode) as (_, workspace):
            store = workspace.store
            return {key: {name: each.clone() for name, each in store.get(key).tensors.items()} for key in store.keys()}

    def read(self, path: Path) -> np.ndarray:
        """Do the work of a decoding thread on one file."""
        data = path.read_bytes()
        digest(data)
        pixels = decode(data, str(path), ImagesConfig(min_side=8))
        size = Size(*pixels.shape[:2])
        table = bucket_table(BucketsConfig(area=self.side**2, step=8, max_aspect=1.0))
        return prepare(pixels, fit(size, assign(size, table)))


def chunks(items: Sequence[Any], *sizes: int) -> Iterator[Sequence[Any]]:
    """Split items into groups of the first size, and these into batches of the next, as a plan does."""
    if not sizes:
        yield items
        return
    for start in range(0, len(items), sizes[0]):
        yield from chunks(items[start : start + sizes[0]], *sizes[1:])


def alone(encode: Callable[[Any], object], batches: Sequence[Any], device: torch.device) -> float:
    """Seconds of an encoder over batches that are already on the device."""
    synchronize = torch.get_device_module(device).synchronize
    encode(batches[0])
    synchronize(device)
    start = time.perf_counter()
    for batch in batches:
        encode(batch)
    synchronize(device)
    return time.perf_counter() - start


def in_rounds(case: Case, rounds: int, count: int, methods: Mapping[str, Callable[[], float]]) -> dict[str, Any]:
    """Measure a run over `count` items and its ceilings in this number of rounds."""
    case.run()  # the first run imports, allocates and compiles
    methods = {"run": case.run, **methods}
    seconds = in_turns(methods, rounds)
    return {
        "count": count,
        "per_s": {name: count / spread(values)["median"] for name, values in seconds.items()},
        "fraction_of": {name: ratios(seconds[name], seconds["run"]) for name in methods if name != "run"},
    }


def images_case(case: Case, rounds: int) -> dict[str, Any]:
    """`run` against the encoder and the decoders, over the photos of the case."""
    with ThreadPoolExecutor(os.cpu_count()) as executor:
        pixels = [torch.from_numpy(array) for array in executor.map(case.read, case.paths)]
    group_size = choose_encodings(case.config(), case.models, {}).image_group_size
    batch_size, _ = vae_batch_size(case.device, case.dtype, case.side**2)
    batches = [torch.stack(list(batch)).to(case.device) for batch in chunks(pixels, group_size, batch_size)]

    def encoder_alone() -> float:
        vae = case.models.vae(case.dtype)
        with placed(vae, case.device):
            return alone(partial(encode_images, vae), batches, case.device)

    def decoders_alone() -> float:
        with ThreadPoolExecutor(os.cpu_count()) as executor:
            return seconds_of(lambda: list(executor.map(case.read, case.paths)))

    return in_rounds(case, rounds, len(case.paths), {"encoder": encoder_alone, "decode": decoders_alone})


def captions_case(case: Case, rounds: int, num_captions: int) -> dict[str, Any]:
    """`run` over `num_captions` captions of the first photo, against the text encoders alone.

    The run also encodes the empty caption, so it is included here.
    """
    captions = ["", *(f"photo {number} of a red house near a quiet river" for number in range(num_captions))]
    case.paths[0].with_suffix(".txt").write_text("\n".join(captions[1:]) + "\n", encoding="utf-8")
    parts = case.models.text(case.dtype)
    batch_size = choose_encodings(case.config(), case.models, {}).text_encoders.batch_size
    batches = []
    for batch in chunks(captions, TEXT_BATCH_SIZE, batch_size):
        ids = [tokens.input_ids for tokens in case.models.family.tokenize(parts, batch)]
        batches.append(tuple(torch.cat(column).to(case.device) for column in zip(*ids, strict=True)))

    def encoders_alone() -> float:
        encoders = [*case.models.text_encoders(case.dtype).values()]

        def encode(batch: Sequence[torch.Tensor]) -> None:
            made = [encoder(ids, output_hidden_states=True) for encoder, ids in zip(encoders, batch, strict=True)]
            torch.cat([output.hidden_states[-2] for output in made], -1)

        with placed(encoders[0], case.device), placed(encoders[1], case.device), torch.no_grad():
            return alone(encode, batches, case.device)

    return in_rounds(case, rounds, len(captions), {"encoder": encoders_alone})


def encoder_bound(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    num_photos, side, channels = (3, 64, (8, 8, 16, 16)) if options.tiny else (32, 256, (64, 128, 256, 256))
    case = Case(folder, models_of(vae=make_vae(channels, torch.float32)), num_photos, side)
    return images_case(case, options.repetitions) | {"wanted": 0.95}


def decode_bound(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    num_photos, photo_side = (3, 200) if options.tiny else (48, 3500)
    return images_case(Case(folder, models_of(), num_photos, 64, photo_side), options.repetitions) | {"wanted": 0.9}


def captions(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    sizes = {} if options.tiny else {"text_encoder": (256, 12, 4), "text_encoder_2": (384, 16, 6)}
    case = Case(folder, models_of(**make_texts(sizes, torch.float32)), 1, 64)
    return captions_case(case, options.repetitions, 5 if options.tiny else 192) | {"wanted": 0.95}


PARTS = {"encoder_bound": encoder_bound, "decode_bound": decode_bound, "captions": captions}

if __name__ == "__main__":
    sys.exit(run_parts(PARTS, make_parser(__doc__, PARTS).parse_args()))
