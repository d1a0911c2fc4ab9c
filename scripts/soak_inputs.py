"""Bad input: files that change while they are read, unusable outputs, hostile names, decompression bombs.

Four goals. --n cases of races and of outputs, half as many names, and each bomb --n / 100 times. Everything goes
through `run_precache` with the tiny SDXL, or for the bombs through `images.decode`.
"""

from __future__ import annotations

import gc
import io
import itertools
import json
import os
import random
import resource
import struct
import sys
import threading
import time
import unicodedata
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import soaking
import torch
from PIL import Image

from latentcache import LatentCache, LoadedModels, run_precache
from latentcache.config import Config, ImagesConfig
from latentcache.config_file import parse_config
from latentcache.dataset.images import decode
from latentcache.errors import ImageRefused, LatentCacheError
from latentcache.identity import digest
from latentcache.models.tiny import tiny_parts

FILES_PER_RUN = 50
NUM_VERSIONS = 24
MAX_BOMB_S = 0.100
MAX_BOMB_KIB = 50 << 10
SIDE = 64


def config_of(cache: Path, dataset: Path, **source: Any) -> Config:
    return parse_config(
        {
            "cache": {"path": cache},
            "datasets": [
                {
                    "name": "photos",
                    "source": {"path": dataset, **source},
                    "buckets": {"area": SIDE * SIDE, "step": 32},
                    "images": {"min_side": 8},
                }
            ],
            "model": {"path": "tiny"},
            "encode": {"device": "cpu", "num_workers": 2},
        }
    )


def png(values: np.ndarray, **save: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG", **save)
    return file.getvalue()


def noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)


# A file that is rewritten while it is read ---------------------------------------------------------------------------


class Rewriter(threading.Thread):
    """Rewrites files with other versions, without a pause: replaced, in place, cut short and written, longer."""

    def __init__(self, files: list[Path], versions: list[bytes], seed: int):
        super().__init__(daemon=True)
        self.files, self.versions, self.dice = files, versions, random.Random(seed)
        self.done = threading.Event()
        self.touched: set[Path] = set()

    def run(self) -> None:
        while not self.done.is_set():
            path, data = self.dice.choice(self.files), self.dice.choice(self.versions)
            self.touched.add(path)
            kind = self.dice.randrange(4)
            if kind == 0:
                other = path.with_suffix(".new")
                other.write_bytes(data)
                other.replace(path)
            elif kind == 1:
                with path.open("r+b") as file:
                    file.write(data)
                    file.truncate()
            elif kind == 2:
                with path.open("wb") as file:
                    for start in range(0, len(data), 4096):
                        file.write(data[start : start + 4096])
                        file.flush()
            else:
                path.unlink()
                path.write_bytes(data)
            time.sleep(self.dice.uniform(0, 0.002))

    def end(self) -> None:
        self.done.set()
        self.join()


def races(soak: soaking.Soak) -> None:
    goal = soak.goal("a source file rewritten while it is read: the entry is that of the bytes that were hashed")
    versions = [png(noise(number)) for number in range(NUM_VERSIONS)]
    calm = soak.folder / "calm"
    for number, data in enumerate(versions):
        path = calm / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    run_precache(config_of(soak.folder / "calm-cache", calm))
    known = {digest(data) for data in versions}
    folder = soak.folder / "races"
    folder.mkdir()
    files = [folder / f"{number}.png" for number in range(FILES_PER_RUN)]
    config = config_of(soak.folder / "races-cache", folder)
    with LatentCache(soak.folder / "calm-cache") as reference:
        for run in range(-(-soak.n // FILES_PER_RUN)):
            for number, path in enumerate(files):
                path.write_bytes(versions[(run + number) % NUM_VERSIONS])
            writer = Rewriter(files, versions, soak.options.seed + run)
            writer.start()
            try:
                report = run_precache(config)
            except LatentCacheError as error:
                goal.fail(f"run {run}: one file must never stop a run: {error}")
                continue
            finally:
                writer.end()
            for refusal in report.refused:
                goal.count(f"refused: {refusal.reason}")
            with LatentCache(config.cache.path) as cache:
                rows = cache.manifest("photos").rows
                for path in files:
                    with goal.case(f"run {run}, {path.name}"):
                        if path.name in rows:
                            check_race(cache, reference, rows[path.name], known, goal)
                        else:
                            goal.count("num_absent")  # it had no name at the moment when the folder was listed
            goal.count("num_runs")
            goal.count("num_rewritten", len(writer.touched))


def check_race(cache: LatentCache, reference: LatentCache, row: Any, known: set[str], goal: soaking.Goal) -> None:
    if row.refusal is not None:
        return
    for ref in row.images:
        entry = cache.get(ref.key)
        source = entry.record.identity["source"]
        if source != row.source:
            raise AssertionError(f"the manifest names the source {row.source}, the entry {source}")
        if source not in known:
            goal.count("num_mixtures")  # it was read while half of it was written, and is a whole image all the same
            continue
        calm = reference.get(ref.key)  # one source and one preparation: one key
        for name, tensor in calm.tensors.items():
            torch.testing.assert_close(entry.tensors[name], tensor, rtol=0, atol=1e-3)
        goal.count("num_compared")


# Outputs that cannot be used -----------------------------------------------------------------------------------------

OUTPUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "good": lambda row: row,
    "nan": lambda row: row.masked_fill(row == row.max(), float("nan")),
    "inf": lambda row: row.masked_fill(row == row.max(), float("inf")),
    "-inf": lambda row: row.masked_fill(row == row.min(), float("-inf")),
    "all-zero": torch.zeros_like,
    "all nan": lambda row: torch.full_like(row, float("nan")),
}
SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fewer rows": lambda out: out[..., :-1, :],
    "more columns": lambda out: torch.cat([out, out], -1),
    "half the size": lambda out: out[..., ::2, ::2],
    "turned": lambda out: out.transpose(-1, -2)[..., : out.shape[-2] // 2, :],
    "one number": lambda out: out.mean((-1, -2), keepdim=True),
}


def flagged(kind: str, seed: int) -> np.ndarray:
    """An image whose first pixels say what the VAE shall give for it."""
    values = noise(seed)
    values[:8, :8] = 20 * list(OUTPUTS).index(kind)
    return values


def kinds_of(images: torch.Tensor) -> list[str]:
    numbers = ((images[:, 0, :8, :8].float().mean((1, 2)) + 1) * 127.5 / 20).round().long()
    return [list(OUTPUTS)[number] for number in numbers.tolist()]


def outputs(soak: soaking.Soak) -> None:
    goal = soak.goal("NaN, Inf, all-zero and wrong-shape outputs are refused by name, and the others stored")
    folder = soak.folder / "outputs"
    folder.mkdir()
    num_shapes = len(SHAPES) * FILES_PER_RUN
    kinds = [name for name, _ in zip(itertools.cycle(OUTPUTS), range(max(len(OUTPUTS), soak.n - num_shapes)))]
    for number, kind in enumerate(kinds):
        (folder / f"{number}.png").write_bytes(png(flagged(kind, number)))
    config = config_of(soak.folder / "outputs-cache", folder)
    models = tiny_parts()

    asked: list[str] = []

    def look(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        asked[:] = kinds_of(arguments[0])

    def change(module: torch.nn.Module, arguments: Any, out: torch.Tensor) -> torch.Tensor:
        return torch.stack([OUTPUTS[kind](row) for kind, row in zip(asked, out, strict=True)])

    hooks = [
        models["vae"].encoder.register_forward_pre_hook(look),
        models["vae"].quant_conv.register_forward_hook(change),
    ]
    report = run_precache(config, models=LoadedModels(**models))
    for hook in hooks:
        hook.remove()
    reasons = {refusal.sample_id: f"{refusal.reason}: {refusal.detail}" for refusal in report.refused}
    with LatentCache(config.cache.path) as cache:
        for number, kind in enumerate(kinds):
            with goal.case(f"{kind} {number}"):
                found, sample_id = reasons.get(f"{number}.png"), f"{number}.png"
                if kind == "good":
                    assert found is None, found
                    assert cache.batch([sample_id], device="cpu", output="moments")["moments"].isfinite().all()
                else:
                    named = {"-inf": "inf", "all nan": "nan"}.get(kind, kind)
                    assert found is not None and found.startswith("bad-output") and named in found, found
                    row = cache.manifest("photos").rows[sample_id]
                    assert not cache.store.find([ref.key for ref in row.images])
                goal.count(f"num_{'stored' if found is None else 'refused'}")
    wrong_shapes(soak, goal, models)


def wrong_shapes(soak: soaking.Soak, goal: soaking.Goal, models: dict[str, Any]) -> None:
    for kind, change in SHAPES.items():
        folder = soak.folder / f"shapes {kind}"
        folder.mkdir()
        for number in range(FILES_PER_RUN):
            (folder / f"{number}.png").write_bytes(png(noise(number)))
        config = config_of(soak.folder / f"shapes-cache {kind}", folder)
        hook = models["vae"].quant_conv.register_forward_hook(lambda module, given, out, change=change: change(out))
        error = None
        try:
            report = run_precache(config, models=LoadedModels(**models))
            refused = {refusal.sample_id: refusal for refusal in report.refused}
        except LatentCacheError as raised:
            error, refused = raised, {}
        finally:
            hook.remove()
        with LatentCache(config.cache.path) as cache:
            stored = {record.kind for record in map(cache.store.record, cache.store.keys())}
        for number in range(FILES_PER_RUN):
            with goal.case(f"{kind} {number}"):
                assert "image" not in stored, "an output of a wrong shape is in the store"
                assert error is not None or f"{number}.png" in refused, "neither an error nor a refusal"
                goal.count("num_refused")


# Names ---------------------------------------------------------------------------------------------------------------

ODD_NAMES = (
    *("..png", "...", ". .png", " .png", "-rf.png", "--json.png", "*.png", "?.png", "%s%n.png", "$(touch x).png"),
    *("`id`.png", "a;b.png", "a|b.png", "a&b.png", "a'b\"c.png", "\\..\\..\\x.png", "C:\\x.png", "CON.png", "nul.png"),
    *("a\nb.png", "a\rb.png", "a\tb.png", "\x1b[31mred.png", "\x7f.png", "a\u2028b.png", "\u202egnp.exe.png"),
    *("é.png", "e\u0301.png", "\ufeffx.png", "\U0001f600.png", "ａ.png", "ß.png", "ẞ.png", "İ.png", "\u200b.png"),
    *("\udcff.png", "a\udc80b.png", "\udced\udca0\udc80.png", "x" * 251 + ".png", "é" * 125 + ".png", "{}.png"),
    *("{'a': 1}.png", "[1].png", "null.png", "~.png", "~root.png", "#.png", "a.png.png", "a.PNG", "prompt: .png"),
    *("negative prompt: x.png", "manifest.jsonl.png", "0.png", "1e9.png", "nan.png", "True.png", "a" * 64 + ".png"),
)
LEADING_OUT = (
    *("../victim.png", "../../victim.png", "a/../../victim.png", "/etc/hostname", "//etc/hostname", "./../victim.png"),
    *("a/b/../../../victim.png", "..", ".", "/", "", "a\0b.png", "file:///etc/hostname", "~/victim.png", "a/./../.."),
)


def draw_name(dice: random.Random) -> str:
    """A file name from odd pieces: at most 255 bytes, no slash, no NUL, not hidden."""
    pieces = (*ODD_NAMES, "\u0301", "\u202e", "\udc80", "a", " ", ".", "\\", "%00", "\n", "日本", "\U000e0001")
    name = "".join(dice.choice(pieces).removesuffix(".png") for _ in range(dice.randint(1, 4)))
    name = dice.choice([name, unicodedata.normalize("NFD", name), unicodedata.normalize("NFC", name)])
    while len(os.fsencode(name)) > 250:
        name = name[:-1]
    return ("x" + name if name.startswith(".") or not name else name) + ".png"


def stem_of(name: str) -> str:
    """The name without its suffix."""
    return name[: -len(".png")]


@contextmanager
def nothing_outside(folder: Path, *writable: str) -> Iterator[None]:
    """What lies in the folder, but for these folders, is the same before and after."""

    def listing() -> dict[str, tuple[int, int]]:
        found = {}
        for root, folders, files in os.walk(folder):
            if Path(root) == folder:
                folders[:] = [name for name in folders if name not in writable]
            for name in files:
                status = os.lstat(os.path.join(root, name))
                found[os.path.join(root, name)] = status.st_size, status.st_mtime_ns
        return found

    before = listing()
    yield
    assert listing() == before, "files outside of the cache changed"


def names(soak: soaking.Soak) -> None:
    goal = soak.goal("hostile names: read again or refused one by one, nothing is written or read outside")
    base = soak.folder / "names"
    folder = base / "photos"
    folder.mkdir(parents=True)
    victim = base / "victim.png"
    victim.write_bytes(png(noise(12345)))
    secret = digest(victim.read_bytes())
    wanted = {stem_of(name): name for name in ODD_NAMES[: soak.n]}  # one for each stem: two would share a caption
    while len(wanted) < max(1, soak.n // 2 - len(LEADING_OUT)):
        name = draw_name(soak.random)
        wanted.setdefault(stem_of(name), name)
    made = {}
    for number, (stem, name) in enumerate(wanted.items()):
        path = folder / name
        try:
            path.write_bytes(png(noise(number % 7)))
            path.with_name(stem + ".txt").write_text(f"caption {number}")
        except (OSError, ValueError):
            goal.count("num_names_that_the_file_system_refuses")
            continue
        made[name] = f"caption {number}"
    (folder / "loop").symlink_to(folder)
    (folder / "loop.png").symlink_to("loop.png")
    check_names(goal, base, folder, made, config_of(base / "cache", folder), secret=None)
    listed = base / "listed"
    listed.mkdir()
    (listed / "good.png").write_bytes(png(noise(1)))
    rows = [{"file_name": name, "text": "x"} for name in (*LEADING_OUT, "good.png")]
    (listed / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = config_of(base / "cache-listed", listed, kind="imagefolder")
    check_names(goal, base, listed, {"good.png": "x"}, config, secret=secret, num_refused=len(LEADING_OUT))


def check_names(
    goal: soaking.Goal,
    base: Path,
    folder: Path,
    made: dict[str, str],
    config: Config,
    secret: str | None,
    num_refused: int | None = None,
) -> None:
    with goal.case(f"the run over {folder.name}"), nothing_outside(base, Path(config.cache.path).name):
        report = run_precache(config)
        if num_refused is not None:
            assert len(report.refused) == num_refused, [refusal.to_json() for refusal in report.refused]
            goal.n += num_refused - 1
    refused = {refusal.sample_id for refusal in report.refused}
    with LatentCache(config.cache.path) as cache:
        rows = cache.manifest("photos").rows
        for name, caption in made.items():
            with goal.case(f"{name!r}"):
                if name.startswith("."):
                    assert name not in rows and name not in refused, "a hidden file is no sample"
                    continue
                assert name in rows or name in refused, "the file is in no list"
                if name in refused:
                    goal.count("num_refused")
                    continue
                batch = cache.batch([name], device="cpu")
                assert batch["sample_id"] == [name] and batch["caption"] == [caption]
                goal.count("num_read_again")
        if secret is not None:
            with goal.case("no entry is made from a file outside"):
                assert secret not in {row.source for row in rows.values()}


# Bombs ---------------------------------------------------------------------------------------------------------------


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_bomb(height: int, width: int, *more: bytes, rows: int | None = None) -> bytes:
    """A PNG of one colour, whose pixels are compressed to almost nothing."""
    packer = zlib.compressobj(9)
    line = bytes(1 + (width + 7) // 8)
    data = b"".join(packer.compress(line) for _ in range(height if rows is None else rows)) + packer.flush()
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(more) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def jpeg_with_size(height: int, width: int) -> bytes:
    """A small JPEG whose header claims another size."""
    file = io.BytesIO()
    Image.fromarray(noise(0)).save(file, "JPEG")
    data = bytearray(file.getvalue())
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def webp_with_size(side: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, "WEBP", lossless=True, quality=0, method=0)
    return file.getvalue()


def bombs() -> dict[str, tuple[str, bytes]]:
    packed = zlib.compress(bytes(200 << 20), 9)
    icc, text = chunk(b"iCCP", b"x\0\0" + packed), chunk(b"zTXt", b"x\0\0" + packed)
    long_text = chunk(b"iTXt", b"x\0\1\0\0\0" + packed)
    small = {"height": 64, "width": 64}
    return {
        "PNG of 20,000 x 20,000": ("a.png", png_bomb(20_000, 20_000)),
        "PNG of 12,000 x 12,000": ("a.png", png_bomb(12_000, 12_000)),
        "PNG of 2^31 - 1 squared": ("a.png", png_bomb(2**31 - 1, 2**31 - 1, rows=0)),
        "PNG of 1 x 100,000,000": ("a.png", png_bomb(100_000_000, 1, rows=0)),
        "PNG with an ICC profile of 200 MiB": ("a.png", png_bomb(**small, rows=64)[:33] + icc + png_bomb(**small)[33:]),
        "PNG with a text of 200 MiB": ("a.png", png_bomb(**small)[:33] + text + png_bomb(**small)[33:]),
        "PNG with a long text of 200 MiB": ("a.png", png_bomb(**small)[:33] + long_text + png_bomb(**small)[33:]),
        "PNG with 64 texts": ("a.png", png_bomb(**small)[:33] + 64 * text + png_bomb(**small)[33:]),
        "PNG with too many pixels in its data": ("a.png", png_bomb(**small, rows=2_000_000)),
        "JPEG of 65,535 x 65,535": ("a.jpg", jpeg_with_size(65_535, 65_535)),
        "JPEG of 10,001 x 10,000": ("a.jpg", jpeg_with_size(10_001, 10_000)),
        "WebP of 12,000 x 12,000": ("a.webp", webp_with_size(12_000)),
        "GIF of 65,535 x 65,535": ("a.gif", b"GIF89a\xff\xff\xff\xff\x00\x00\x00,\0\0\0\0\xff\xff\xff\xff\0\x02\0;"),
    }


HARMLESS = ("PNG with too many pixels in its data",)
"""Those that may be read as the small image that their header says, as long as it costs no more."""


def defuse(soak: soaking.Soak) -> None:
    goal = soak.goal("decompression bombs: refused within 100 ms and 50 MiB each")
    found = bombs()
    gc.collect()
    decode(png(noise(0)), "warm.png", ImagesConfig(min_side=8))
    most = 0.0
    for number, (name, (path, data)) in itertools.product(range(max(1, soak.n // 100)), found.items()):
        with goal.case(f"{name} {number}"):
            # The high-water mark of a process never falls: each case has one of its own.
            seconds, grown, verdict = in_child(partial(decode, data, path, ImagesConfig(min_side=8)))
            most = max(most, seconds)
            goal.figures["max_ms"] = round(1000 * most, 1)
            goal.figures["max_mib"] = max(goal.figures.get("max_mib", 0), round(grown / 1024, 1))
            assert verdict == "ImageRefused" or (verdict == "read" and name in HARMLESS), verdict
            assert seconds <= MAX_BOMB_S, f"it took {1000 * seconds:.0f} ms"
            assert grown <= MAX_BOMB_KIB, f"memory grew by {grown >> 10} MiB"


def in_child(call: Callable[[], Any]) -> tuple[float, int, str]:
    """Seconds of CPU, KiB of memory that it took, and how it ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.process_time()
        try:
            call()
            verdict = "read"
        except ImageRefused:
            verdict = "ImageRefused"
        except BaseException as error:
            verdict = repr(error)
        seconds = time.process_time() - start
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(writer, f"{seconds} {grown} {verdict}".encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        text = file.read().decode()
    os.waitpid(child, 0)
    seconds_text, grown_text, verdict = text.split(" ", 2) if text else ("0", "0", "the process died")
    return float(seconds_text), int(grown_text), verdict


PARTS = {"bombs": defuse, "races": races, "outputs": outputs, "names": names}


def program(soak: soaking.Soak) -> None:
    torch.set_num_threads(1)
    for name, part in PARTS.items():
        if soak.options.only in (None, name):
            start = time.monotonic()
            part(soak)
            soak.say(f"{name}: {time.monotonic() - start:.0f} s")


def main() -> int:
    parser = soaking.make_parser(__doc__, 1000, "races, and outputs; half as many names")
    parser.add_argument("--only", choices=PARTS, help="one of the goals (default: all)")
    return soaking.run_soak(program, parser)


if __name__ == "__main__":
    sys.exit(main())
