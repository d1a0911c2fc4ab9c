"""Bit rot: flipped bits, bursts, truncations, exchanged payloads and packs, in each file of a cache.

    python scripts/soak_rot.py               # 10,000 flips, 2,000 bursts, 2,000 lengths, 200 exchanges
    python scripts/soak_rot.py --n 200       # 200 flips, and the others in proportion

The cache is made by precache with the tiny models. After each damage a reader asks for every sample and prompt: what it
gets is bit for bit what was stored, or one of latentcache's own errors. Damage of the memo meets precache, not a
reader. In every tenth refused case the commands that the message names are run, and so on until all is there again, bit
for bit.
"""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from soak_crash import Precache, operations
from soaking import Goal, Soak, make_parser, run_soak

from latentcache.errors import LatentCacheError
from latentcache.identity import digest
from latentcache.loading.cache import LatentCache
from latentcache.store.upkeep import rebuild, verify

NUM_PHOTOS = 12
FIX_EVERY = 10
MAX_COMMANDS = 6
WEIGHTS = {"pack": 50, "index": 25, "manifest": 15, "memo": 5, "CACHE.json": 5}
"""How often each kind of file is damaged."""


class Victim:
    """A cache that is damaged and put back as it was, again and again."""

    def __init__(self, folder: Path):
        self.precache = Precache(folder / "photos", NUM_PHOTOS)
        operations(self.precache)  # sets the size of packs
        self.cache, self._template = folder / "cache", folder / "template"
        self.precache.run(self._template)
        self.files = {
            "pack": sorted(self._template.glob("packs/*/*.safetensors")),
            "index": [self._template / "index" / "cache.db"],
            "manifest": sorted(self._template.glob("manifests/*.safetensors")),
            "memo": [self._template / "memo"],
            "CACHE.json": [self._template / "CACHE.json"],
        }
        self.expected = self.read(self._template)
        assert len(self.expected) == NUM_PHOTOS + 1
        self.restore()

    def restore(self) -> None:
        """The whole cache as it was."""
        shutil.rmtree(self.cache, ignore_errors=True)
        shutil.copytree(self._template, self.cache)

    def choose(self, generator: random.Random, kind: str | None = None) -> tuple[str, Path, bytes]:
        """A file of the cache at random, and its bytes."""
        kind = kind or generator.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        source = generator.choice(self.files[kind])
        return kind, self.cache / source.relative_to(self._template), source.read_bytes()

    def read(self, cache: Path) -> dict[str, str]:
        """A digest of all that a reader gets for each sample and for the prompt."""
        found = {}
        with LatentCache(cache, read_only=True) as opened:
            for name in opened.sample_ids():
                batch = opened.batch([name], device="cpu", output="moments")
                for ref in opened.row(name)[1].keys():
                    batch[ref] = [json.dumps(dict(opened.store.record(ref).identity), sort_keys=True)]
                found[name] = digest_of(batch)
            found["a prompt"] = digest_of(opened.prompt("a prompt", device="cpu"))
        return found

    def read_after_precache(self, cache: Path) -> dict[str, str]:
        """As `read`, after a run of precache, which uses the memo."""
        self.precache.run(cache)
        return self.read(cache)


def digest_of(batch: Mapping[str, object]) -> str:
    """The digest of tensors and lists by name."""
    parts = []
    for name, value in sorted(batch.items()):
        if isinstance(value, torch.Tensor):
            data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            parts.append(f"{name} {value.dtype} {tuple(value.shape)} {digest(data)}")
        else:
            parts.append(f"{name} {value!r}")
    return digest("\n".join(parts).encode())


def follow(victim: Victim, message: str) -> None:
    """Run the commands that a message names. AssertionError if it names none."""
    named = re.findall(r"(?:latentcache |run )(rebuild|verify|precache)", message)
    assert named, f"no command is named: {message}"
    commands: dict[str, Callable[[Path], object]] = {"rebuild": rebuild, "verify": verify}
    for command in dict.fromkeys(named):
        commands.get(command, victim.precache.run)(victim.cache)


def fix(victim: Victim, read: Callable[[Path], dict[str, str]], message: str) -> None:
    """Follow the messages until all is there again."""
    followed = []
    for _ in range(MAX_COMMANDS):
        followed.append(message)
        try:
            follow(victim, message)
            found = read(victim.cache)
            assert found == victim.expected, f"it reads otherwise after following {followed}"
            return
        except LatentCacheError as error:
            message = str(error)
    raise AssertionError(f"not fixed after following {followed}")


def damage(goal: Goal, victim: Victim, name: str, changed: Mapping[Path, bytes | None], kind: str) -> None:
    """Write these bytes (None: no file), read, and put all back as it was."""
    original = {path: path.read_bytes() for path in changed}
    read = victim.read_after_precache if kind == "memo" else victim.read
    is_touched = kind == "memo"
    with goal.case(f"{kind}: {name}"):
        try:
            for path, data in changed.items():
                path.unlink() if data is None else path.write_bytes(data)
            try:
                found = read(victim.cache)
                assert found == victim.expected, f"SILENT: {[k for k in found if found[k] != victim.expected.get(k)]}"
                goal.count("identical")
            except LatentCacheError as error:
                goal.count("refused")
                if goal.figures["refused"] % FIX_EVERY == 0 and kind != "CACHE.json":  # no command writes that again
                    is_touched = True
                    goal.count("fixed_as_advised")
                    fix(victim, read, str(error))
        finally:
            if is_touched:
                victim.restore()
            else:
                for path, data in original.items():
                    path.write_bytes(data)


def flips(goal: Goal, victim: Victim, soak: Soak, num: int) -> None:
    for _ in range(num):
        kind, path, data = victim.choose(soak.random)
        at, bit = soak.random.randrange(len(data)), soak.random.randrange(8)
        changed = bytearray(data)
        changed[at] ^= 1 << bit
        damage(goal, victim, f"bit {bit} of byte {at} of {path.name}", {path: bytes(changed)}, kind)
        if goal.n % 1000 == 0:
            soak.say(f"{goal.n} flips: {goal.figures}, {goal.num_failures} failures")


def bursts(goal: Goal, victim: Victim, soak: Soak, num: int) -> None:
    """Up to 4,096 bytes that follow each other are random, or zeros, as of a bad block."""
    for _ in range(num):
        kind, path, data = victim.choose(soak.random)
        at, length = soak.random.randrange(len(data)), soak.random.choice([2, 16, 512, 4096])
        noise = soak.random.choice([soak.random.randbytes(length), bytes(length)])
        changed = (data[:at] + noise + data[at + length :])[: len(data)]
        damage(goal, victim, f"{length} bytes at {at} of {path.name}", {path: changed}, kind)


def lengths(goal: Goal, victim: Victim, soak: Soak, num: int) -> None:
    """Nine of ten are too short, the others too long."""
    for number in range(num):
        kind, path, data = victim.choose(soak.random)
        if number % 10:
            length = soak.random.randrange(len(data))
            damage(goal, victim, f"{path.name} cut to {length}", {path: data[:length]}, kind)
        else:
            more = soak.random.randbytes(soak.random.randint(1, 4096))
            damage(goal, victim, f"{path.name} with {len(more)} more bytes", {path: data + more}, kind)


def exchanges(goal: Goal, victim: Victim, soak: Soak, num: int) -> None:
    """Payloads of two keys of a pack, two packs, a pack over another, files of different kinds, a file that is gone."""
    for number in range(num):
        kind, path, data = victim.choose(soak.random, ("pack", "pack", "pack", "manifest", None)[number % 5])
        _, other, other_data = victim.choose(soak.random, kind)
        if number % 5 == 0:
            half = len(data) // 2  # the columns are the last part of a pack
            row = 2 * 8 * 8 * 8
            first, second = (half + row * soak.random.randrange(max(1, half // row - 1)) for _ in range(2))
            first, second = min(first, second), max(first, second)
            changed = bytearray(data)
            changed[first : first + row], changed[second : second + row] = (
                data[second : second + row],
                data[first : first + row],
            )
            damage(goal, victim, f"rows of {path.name} exchanged", {path: bytes(changed[: len(data)])}, kind)
        elif number % 5 == 4:
            damage(goal, victim, f"{path.name} gone", {path: None}, kind)
        elif number % 5 == 1:
            damage(goal, victim, f"{path.name} over {other.name}", {other: data}, kind)
        else:
            damage(goal, victim, f"{path.name} and {other.name} exchanged", {path: other_data, other: data}, kind)


def rot(soak: Soak) -> None:
    victim = Victim(soak.folder)
    n = soak.n
    for text, part, num in (
        ("single-bit flips: refused or identical, and fixed as advised", flips, n),
        ("bursts: refused or identical, and fixed as advised", bursts, max(1, n // 5)),
        ("truncation and extension: refused or identical, and fixed", lengths, max(1, n // 5)),
        ("exchanged or missing payloads, packs, files: refused, and fixed", exchanges, max(5, n // 50)),
    ):
        part(soak.goal(text), victim, soak, num)


PARTS = {"rot": (rot, 10_000, 100)}


def main() -> int:
    logging.disable(logging.CRITICAL)
    return run_soak(PARTS, make_parser(__doc__, PARTS))


if __name__ == "__main__":
    sys.exit(main())
