"""Fuzz of pack headers and manifests: whatever is changed in them, only errors of latentcache come, soon and small.

Each case changes a real pack or a real manifest: bytes, or values of its JSON; then digests and lengths may be made to
fit, as someone would do who knows the format. A case fails if an error is not one of latentcache's, if it takes more
than 50 ms of CPU time or 64 MiB of memory, or if what is read differs though no digest was made to fit.

`--engine random` (default) draws cases from --seed. `--engine atheris` is guided by coverage; it needs
`pip install atheris`, and takes longer.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import soaking
from blake3 import blake3

from latentcache import LatentCache
from latentcache.dataset.manifest import read_manifest
from latentcache.errors import LatentCacheError
from latentcache.identity import canonical_json, digest
from latentcache.store.pack import WholePack, read_row

MAX_CASE_S = 0.050
MAX_CASE_KIB = 64 << 10
WARM_CASES = 200
"""Cases before memory is measured: the first ones import, compile and fill caches."""
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 64, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, 8.0),
    *("", "0", "a", "\0", "\ud800", "../../x", "/etc/passwd", "nan", "U8", "F16", "float16", "unverified", "é" * 300),
    *([], [[]], {}, {"": {}}, [1, 2], [64, 64], [0, 0], ["64", "64"], [64.0, 64.0], [2**63, 1], "x" * 5000),
    *(float("nan"), float("inf"), [None], {"format": "kohya"}, list(range(300))),
)


# Changes -------------------------------------------------------------------------------------------------------------


def change_bytes(data: bytes, dice: random.Random) -> bytes:
    """One to four changes of bytes: flips, other bytes, what is cut out, put in or said twice."""
    value = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(value) + 1)
        size = min(len(value) - at, 1 << dice.randrange(8))
        kind = dice.randrange(7)
        if kind == 0 and at < len(value):
            value[at] ^= 1 << dice.randrange(8)
        elif kind == 1 and at < len(value):
            value[at] = dice.choice(b'\0\xff"{}[]:,0-9e\\ \n')
        elif kind == 2:
            del value[at : at + size]
        elif kind == 3:
            value[at:at] = value[at : at + size]
        elif kind == 4:
            value[at:at] = dice.randbytes(size)
        elif kind == 5 and dice.random() < 0.2:
            del value[at:]
        elif kind == 6:
            value[at:at] = dice.choice([b"[" * 3000, b"{" * 10, b"1" * 400, b"\n\n", b"null", b"1e999", b"NaN"])
    return bytes(value)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each (container, index or key) of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in items:
        yield value, name
        yield from places(child)


def copy(value: Any) -> Any:
    """Of a JSON value: none may hold itself."""
    return json.loads(json.dumps(value))


def change_json(value: Any, dice: random.Random) -> Any:
    """One to three changes of values: others, removed ones, exchanged ones, further ones."""
    for _ in range(dice.randint(1, 3)):
        found = list(places(value))
        if not found:
            return copy(dice.choice(ODD))
        container, name = dice.choice(found)
        other, other_name = dice.choice(found)
        kind = dice.randrange(6)
        if kind <= 1:
            container[name] = copy(dice.choice(ODD))
        elif kind == 2:
            del container[name]
        elif kind == 3:
            container[name] = copy(other[other_name])
        elif kind == 4 and isinstance(container[name], int) and abs(container[name]) < 2**70:
            container[name] = container[name] + dice.choice((-1, 1, -64, 64, 2**32))
        elif kind == 5 and isinstance(container, list):
            container.insert(name, copy(dice.choice(ODD)))
        elif isinstance(container[name], str):
            container[name] = change_text(container[name], dice)
    return value


def change_text(text: str, dice: random.Random) -> str:
    """Another text, that may be JSON inside JSON, as the groups of a pack are."""
    try:
        inner = json.loads(text)
        if isinstance(inner, list | dict):
            return json.dumps(change_json(inner, dice))
    except (ValueError, RecursionError):
        pass
    at = dice.randrange(len(text) + 1)
    return (
        text[:at] + dice.choice(["", "0", "\0", "/", "../", "é", "9" * 30, "\ud800"]) + text[at + dice.randrange(3) :]
    )


# What is fuzzed ------------------------------------------------------------------------------------------------------


class PackTarget:
    """Pack headers, with the keys, digests and records after them."""

    name = "a pack"

    def __init__(self, folder: Path):
        cache = folder / "packs-cache"
        soaking.make_cache(cache, 4, 2)
        self.path = folder / f"{'0' * 32}.safetensors"
        self.seeds = [path.read_bytes() for path in sorted(cache.glob("packs/*/*.safetensors"))]
        self._known = {seed: self._read(seed) for seed in self.seeds}

    def change(self, data: bytes, dice: random.Random) -> tuple[bytes, bool]:
        """A changed pack, and whether its digests were made to fit."""
        head_bytes = int.from_bytes(data[:8], "little")
        text, rest = data[8 : 8 + head_bytes], data[8 + head_bytes :]
        kind = dice.randrange(8)
        if kind == 0:
            return change_bytes(data, dice), False
        if kind == 1:
            return dice.choice([0, 1, len(data), 2**20, 2**63, 2**64 - 1]).to_bytes(8, "little") + data[8:], False
        if kind == 2:
            text = change_bytes(text, dice)
            return len(text).to_bytes(8, "little") + text + rest, False
        header = change_json(json.loads(text), dice)
        fits = kind >= 5 and self._fit(header, rest)
        text = json.dumps(header, separators=(",", ":")).encode("utf-8", "surrogatepass")
        text += b" " * (-(8 + len(text)) % 64)
        if kind == 7:
            rest = rest[: dice.randrange(len(rest) + 1)] + bytes(dice.choice((0, 1, 64, 100_000)))
        return len(text).to_bytes(8, "little") + text + rest, fits

    def _fit(self, header: Any, rest: bytes) -> bool:
        """Write the digests that fit. False where the header is too odd for it."""
        try:
            metadata = header["__metadata__"]
            parts = []
            for name in ("keys", "digests", "record_offsets", "records"):
                start, end = header[f"_index/{name}"]["data_offsets"]
                parts.append(rest[start:end])
            groups = f"{metadata['latentcache']}\n{metadata['groups']}\n".encode("utf-8", "surrogatepass")
            metadata["index_digest"] = digest(groups + parts[0] + parts[1])
            metadata["records_digest"] = digest(parts[2] + parts[3])
        except (TypeError, KeyError, ValueError):
            return False
        return True

    def use(self, data: bytes, fits: bool) -> None:
        found = self._read(data)
        if not fits and found not in self._known.values():
            raise AssertionError("the pack reads as another, and no digest was made to fit")

    def _read(self, data: bytes) -> Any:
        self.path.write_bytes(data)
        head = read_row(self.path)
        whole = WholePack.in_file(self.path)
        rows = [whole.json(row) for row in range(len(head.keys))]
        # Not the layout: an entry's own digest has its dtypes and shapes, and is compared when the entry is read.
        return head.keys.tobytes(), head.digests.tobytes(), rows


class ManifestTarget:
    """Manifests; what is read of one is used for batches."""

    name = "a manifest"

    def __init__(self, folder: Path):
        cache = folder / "manifests-cache"
        soaking.make_cache(cache, 4, 4, name="fuzzed")
        self.path = cache / "manifests" / "fuzzed.safetensors"
        self.seeds = [self.path.read_bytes()]
        self._cache = LatentCache(cache, read_only=True)
        self._known = self._read(self.seeds[0])
        self.use(self.seeds[0], False)  # the first batch imports

    def change(self, data: bytes, dice: random.Random) -> tuple[bytes, bool]:
        """A changed manifest, and whether its digest was made to fit."""
        kind = dice.randrange(6)
        if kind == 0:
            return change_bytes(data, dice), False
        length = int.from_bytes(data[:8], "little")
        head, columns = json.loads(data[8 : 8 + length]), data[8 + length :]
        if kind in (1, 2):
            head = change_json(head, dice)
        elif kind == 3:
            head["__metadata__"]["header"] = json.dumps(change_json(json.loads(head["__metadata__"]["header"]), dice))
        else:
            at = dice.randrange(len(columns))
            columns = columns[:at] + bytes([columns[at] ^ 1 << dice.randrange(8)]) + columns[at + 1 :]
        fits = kind >= 2 and self._fit(head, columns)
        text = json.dumps(head).encode()
        return len(text).to_bytes(8, "little") + text + columns, fits

    def _fit(self, head: Any, columns: bytes) -> bool:
        """Set the digest, if there is a place for it."""
        try:
            head["__metadata__"].pop("digest", None)
            head["__metadata__"]["digest"] = blake3(canonical_json(head) + columns).hexdigest()
        except (ValueError, TypeError, LookupError, AttributeError):
            return False
        return True

    def use(self, data: bytes, fits: bool) -> None:
        found = self._read(data)
        if not fits and found != self._known:
            raise AssertionError("the manifest reads as another, and its digest was not made to fit")
        self._cache.refresh()
        for sample_id in self._cache.sample_ids()[:4]:
            try:
                self._cache.batch([sample_id], device="cpu", scaled=True)
            except LatentCacheError:
                continue

    def _read(self, data: bytes) -> Any:
        """As what comes from elsewhere is read. Only then it is the cache's."""
        found = read_manifest(data, "fuzzed", self.path, whole_check=True)
        self.path.write_bytes(data)
        return found


# Running -------------------------------------------------------------------------------------------------------------


class Judge:
    """Runs cases, and notes what each of them took."""

    def __init__(self, goal: soaking.Goal):
        self.goal = goal
        self.most_s = 0.0
        self._first_kib = 0

    @contextmanager
    def case(self, what: str, shown: bytes) -> Iterator[None]:
        """A case. Errors of latentcache are what is asked for."""
        with self.goal.case(f"{what}: {shown[:3000]!r}"):
            start = time.thread_time()
            try:
                yield
                self.goal.count("num_read")
            except LatentCacheError:
                self.goal.count("num_refused")
            seconds = time.thread_time() - start
            self.most_s = max(self.most_s, seconds)
            if seconds > MAX_CASE_S:
                raise AssertionError(f"it took {seconds * 1000:.0f} ms")
            now_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            if self.goal.n <= WARM_CASES:
                self._first_kib = now_kib
            if now_kib - self._first_kib > MAX_CASE_KIB:
                self._first_kib = now_kib
                raise AssertionError(f"memory grew by more than {MAX_CASE_KIB >> 10} MiB, to {now_kib >> 10} MiB")
            self.goal.figures["max_ms"] = round(self.most_s * 1000, 1)
            self.goal.figures["memory_grew_mib"] = round((now_kib - self._first_kib) / 1024, 1)


def fuzz_at_random(soak: soaking.Soak, target: Any, judge: Judge, n: int) -> None:
    for number in range(n):
        dice = random.Random(f"{soak.options.seed} {target.name} {number}")
        data, fits = target.change(dice.choice(target.seeds), dice)
        with judge.case(f"{target.name} {number}", data):
            target.use(data, fits)


def fuzz_with_atheris(soak: soaking.Soak, target: Any, judge: Judge, n: int) -> None:
    """In a child, for atheris ends its process. Its figures come back as a file."""
    import multiprocessing

    result = soak.folder / "atheris.json"
    child = multiprocessing.get_context("fork").Process(target=_atheris, args=(soak, target, judge, n, result))
    child.start()
    child.join()
    found = json.loads(result.read_text())
    judge.goal.n, judge.goal.num_failures = found["n"], found["num_failures"]
    judge.goal.failures, judge.goal.figures = found["failures"], found["figures"] | {"engine": "atheris"}
    if judge.goal.n < n:
        judge.goal.fail(f"atheris stopped after {judge.goal.n} of {n} cases, with exit code {child.exitcode}")


def _atheris(soak: soaking.Soak, target: Any, judge: Judge, n: int, result: Path) -> None:
    import atheris  # optional

    corpus = soak.folder / f"corpus of {target.name}"
    corpus.mkdir()
    for number, seed in enumerate(target.seeds):
        (corpus / str(number)).write_bytes(b"\0" + seed)

    def mutate(data: bytes, max_bytes: int, seed: int) -> bytes:
        changed, fits = target.change(data[1:] or target.seeds[0], random.Random(seed))
        return bytes([fits, *changed])[:max_bytes]

    def safely(data: bytes, max_bytes: int, seed: int) -> bytes:
        try:
            return mutate(data, max_bytes, seed)
        except (ValueError, RecursionError, TypeError, IndexError):  # it was no JSON any more
            return mutate(b"\0" + target.seeds[seed % len(target.seeds)], max_bytes, seed)

    def test(data: bytes) -> None:
        with judge.case(target.name, data[1:]):
            # A case may stem from one whose digest was made to fit.
            target.use(data[1:], fits=True)
        if judge.goal.n >= n:
            goal = judge.goal
            keep = {"n": goal.n, "num_failures": goal.num_failures, "failures": goal.failures, "figures": goal.figures}
            result.write_text(json.dumps(keep))

    for module in ("latentcache.store.pack", "latentcache.store.layout", "latentcache.dataset.manifest"):
        for value in vars(sys.modules[module]).values():
            if callable(value) and getattr(value, "__module__", None) == module and hasattr(value, "__code__"):
                atheris.instrument_func(value)
    sizes = [f"-max_len={4 * max(map(len, target.seeds))}", f"-runs={n + 10}", f"-seed={soak.options.seed + 1}"]
    atheris.Setup([sys.argv[0], *sizes, "-verbosity=0", str(corpus)], test, custom_mutator=safely)
    atheris.Fuzz()


TARGETS: dict[str, Callable[[Path], Any]] = {"packs": PackTarget, "manifests": ManifestTarget}


def program(soak: soaking.Soak) -> None:
    engine: Callable[..., None] = fuzz_with_atheris if soak.options.engine == "atheris" else fuzz_at_random
    np.seterr(all="raise")
    targets = TARGETS if soak.options.only is None else {soak.options.only: TARGETS[soak.options.only]}
    for name, make in targets.items():
        goal = soak.goal(f"changed {name}: only errors of latentcache, 50 ms and 64 MiB a case")
        engine(soak, make(soak.folder), Judge(goal), max(1, soak.n // len(targets)))
        soak.say(f"{goal.goal}: {goal.n} cases, {goal.num_failures} failures, {goal.figures}")


def main() -> int:
    parser = soaking.make_parser(__doc__, 1_000_000, "cases")
    parser.add_argument("--engine", choices=("random", "atheris"), default="random", help="what draws the cases")
    parser.add_argument("--only", choices=TARGETS, help="fuzz only these (default: both, half of the cases each)")
    return soaking.run_soak(program, parser)


if __name__ == "__main__":
    sys.exit(main())
