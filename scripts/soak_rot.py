"""Bit rot: flipped bits, bursts, truncations, swapped payloads and packs in every kind of file of a cache.

    python scripts/soak_rot.py               # 10,000 flips, 2,000 bursts, 2,000 lengths, 200 exchanges
    python scripts/soak_rot.py --n 200       # 200 flips, and the others in proportion

Precache makes the cache with the tiny models. After each damage every sample and prompt is read: the result must be
bit-identical to what was stored, or one of latentcache's own errors. For damage of the memo precache runs first, since
readers do not use it. In every tenth refused case the commands named in the messages are run until everything can be
read again, bit for bit.
"""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path

from soak_crash import PACK_ENTRIES, Precache
from soaking import Goal, Soak, digest_of, run_soak, say

from latentcache.errors import LatentCacheError
from latentcache.loading.cache import LatentCache
from latentcache.store import writer
from latentcache.store.upkeep import rebuild, verify

NUM_PHOTOS = 12
FIX_EVERY = 10
MAX_COMMANDS = 6
WEIGHTS = {"pack": 50, "index": 25, "manifest": 15, "memo": 5, "CACHE.json": 5}
"""Relative frequency of damage by kind of file."""

Change = Callable[[bytes, random.Random], bytes]
Damage = tuple[str, str, Mapping[str, bytes | None]]
"""Description, kind of file, and the new bytes of each damaged file (None: removed)."""


class Victim:
    """A cache that is repeatedly damaged and restored."""

    def __init__(self, folder: Path):
        writer.PACK_ENTRIES = PACK_ENTRIES
        self.precache = Precache(folder / "photos", NUM_PHOTOS)
        self.cache, self._template = folder / "cache", folder / "template" / "cache"
        self.precache.run(self._template)
        self.files = {
            "pack": sorted(self._template.glob("packs/*/*.safetensors")),
            "index": [self._template / "index" / "cache.db"],
            "manifest": sorted(self._template.glob("manifests/*.safetensors")),
            "memo": [self._template / "memo"],
            "CACHE.json": [self._template / "CACHE.json"],
        }
        self.expected = self.read("manifest", self._template)
        assert len(self.expected) == NUM_PHOTOS + 1

    def choose(self, dice: random.Random, kind: str | None = None) -> tuple[str, str, bytes]:
        """The kind, path and bytes of a random file of the cache."""
        kind = kind or dice.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        source = dice.choice(self.files[kind])
        return kind, str(source.relative_to(self._template)), source.read_bytes()

    def read(self, kind: str, cache: Path) -> dict[str, str]:
        """A digest of everything that a reader gets for each sample and the prompt. Only precache uses the memo."""
        if kind == "memo":
            self.precache.run(cache)
        found = {}
        with LatentCache(cache, read_only=True) as opened:
            for name in opened.sample_ids():
                batch = opened.batch([name], device="cpu", output="moments")
                for ref in opened.row(name)[1].keys():
                    batch[ref] = [json.dumps(dict(opened.store.record(ref).identity), sort_keys=True)]
                found[name] = digest_of(batch)
            found["a prompt"] = digest_of(opened.prompt("a validation prompt", device="cpu"))
        return found

    def fix(self, kind: str, message: str) -> None:
        """Run the commands named in the error messages until everything can be read again."""
        commands: dict[str, Callable[[Path], object]] = {"rebuild": rebuild, "verify": verify}
        followed = []
        for _ in range(MAX_COMMANDS):
            followed.append(message)
            named = re.findall(r"(?:latentcache |run )(rebuild|verify|precache)", message)
            assert named, f"the message names no command: {message}"
            try:
                for command in dict.fromkeys(named):
                    commands.get(command, self.precache.run)(self.cache)
                assert self.read(kind, self.cache) == self.expected, f"different values after following {followed}"
                return
            except LatentCacheError as error:
                message = str(error)
        raise AssertionError(f"not fixed after following {followed}")

    def suffer(self, goal: Goal, kind: str, changed: Mapping[str, bytes | None]) -> None:
        """Write these bytes into a new copy of the cache, and read it."""
        shutil.rmtree(self.cache, ignore_errors=True)
        shutil.copytree(self._template, self.cache)
        for name, data in changed.items():
            path = self.cache / name
            path.unlink() if data is None else path.write_bytes(data)
        try:
            found = self.read(kind, self.cache)
            assert found == self.expected, f"SILENT: {[k for k in found if found[k] != self.expected.get(k)]}"
            goal.count("identical")
        except LatentCacheError as error:
            goal.count("refused")
            if goal.figures["refused"] % FIX_EVERY == 0 and kind != "CACHE.json":  # no command restores it
                goal.count("fixed_as_advised")
                self.fix(kind, str(error))


def flip(data: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1 :]


def burst(data: bytes, dice: random.Random) -> bytes:
    """Replace up to 4,096 consecutive bytes with random ones, or with zeros as in a bad block."""
    at, length = dice.randrange(len(data)), dice.choice([2, 16, 512, 4096])
    noise = dice.choice([dice.randbytes(length), bytes(length)])
    return (data[:at] + noise + data[at + length :])[: len(data)]


def resize(data: bytes, dice: random.Random) -> bytes:
    """Truncate; extend every tenth file."""
    return data + dice.randbytes(dice.randint(1, 4096)) if dice.random() < 0.1 else data[: dice.randrange(len(data))]


def exchange_rows(data: bytes, dice: random.Random) -> bytes:
    """Exchange two payloads of a pack."""
    row, half, changed = 2 * 8 * 8 * 8, len(data) // 2, bytearray(data)  # columns are at the end of a pack
    rows = [half + row * dice.randrange(max(1, half // row - 1)) for _ in range(2)]
    for at, source in zip(rows, reversed(rows), strict=True):
        changed[at : at + row] = data[source : source + row]
    return bytes(changed[: len(data)])


def damaged(change: Change, victim: Victim, dice: random.Random) -> Iterator[Damage]:
    """Change random files."""
    while True:
        kind, name, data = victim.choose(dice)
        yield f"{change.__name__} in {name}", kind, {name: change(data, dice)}


def exchanges(victim: Victim, dice: random.Random) -> Iterator[Damage]:
    """Swap payloads of two keys, two packs or two manifests; copy a pack over another; remove a file."""
    while True:
        _, pack, data = victim.choose(dice, "pack")
        _, other, other_data = victim.choose(dice, "pack")
        yield f"rows of {pack} exchanged", "pack", {pack: exchange_rows(data, dice)}
        yield f"{pack} over {other}", "pack", {other: data}
        yield f"{pack} and {other} exchanged", "pack", {pack: other_data, other: data}
        _, one, data = victim.choose(dice, "manifest")
        _, other, other_data = victim.choose(dice, "manifest")
        yield f"{one} and {other} exchanged", "manifest", {one: other_data, other: data}
        kind, name, _ = victim.choose(dice)
        yield f"{name} gone", kind, {name: None}


def rot(soak: Soak) -> None:
    victim, dice, fifth = Victim(soak.folder), soak.random, max(1, soak.n // 5)
    for text, damages, num in (
        ("single-bit flips: refused or identical, and fixed as advised", damaged(flip, victim, dice), soak.n),
        ("bursts: refused or identical, and fixed as advised", damaged(burst, victim, dice), fifth),
        ("truncation and extension: refused or identical, and fixed", damaged(resize, victim, dice), fifth),
        ("exchanged or missing payloads and files: refused, and fixed", exchanges(victim, dice), max(5, fifth // 10)),
    ):
        goal = soak.goal(text)
        for name, kind, changed in islice(damages, num):
            with goal.case(name):
                victim.suffer(goal, kind, changed)
        say(f"{text}: {goal.figures}, {goal.failures} failures")


PARTS = {"rot": (rot, 10_000, 100)}


def main() -> int:
    logging.disable(logging.CRITICAL)
    return run_soak(PARTS, __doc__)


if __name__ == "__main__":
    sys.exit(main())
