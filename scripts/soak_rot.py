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
from pathlib import Path

from soak_crash import Precache, operations
from soaking import Goal, Soak, digest_of, run_soak

from latentcache.errors import LatentCacheError
from latentcache.loading.cache import LatentCache
from latentcache.store.upkeep import rebuild, verify

NUM_PHOTOS = 12
FIX_EVERY = 10
MAX_COMMANDS = 6
WEIGHTS = {"pack": 50, "index": 25, "manifest": 15, "memo": 5, "CACHE.json": 5}
"""Relative frequency of damage by kind of file."""

Damage = tuple[str, str, Mapping[Path, bytes | None]]
"""Description, kind of file, and the new bytes of each damaged file (None: removed)."""


class Victim:
    """A cache that is repeatedly damaged and restored."""

    def __init__(self, folder: Path):
        self.precache = Precache(folder / "photos", NUM_PHOTOS)
        operations(self.precache)  # sets the pack size
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
        """Restore the whole cache."""
        shutil.rmtree(self.cache, ignore_errors=True)
        shutil.copytree(self._template, self.cache)

    def choose(self, generator: random.Random, kind: str | None = None) -> tuple[str, Path, bytes]:
        """A random file of the cache, and its bytes."""
        kind = kind or generator.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        source = generator.choice(self.files[kind])
        return kind, self.cache / source.relative_to(self._template), source.read_bytes()

    def read(self, cache: Path) -> dict[str, str]:
        """A digest of everything that a reader gets for each sample and the prompt."""
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
        """Like `read`, after a run of precache, which uses the memo."""
        self.precache.run(cache)
        return self.read(cache)

    def fix(self, read: Callable[[Path], dict[str, str]], message: str) -> None:
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
                assert read(self.cache) == self.expected, f"different values after following {followed}"
                return
            except LatentCacheError as error:
                message = str(error)
        raise AssertionError(f"not fixed after following {followed}")

    def suffer(self, goal: Goal, kind: str, changed: Mapping[Path, bytes | None]) -> None:
        """Write these bytes, read, and restore the files."""
        original = {path: path.read_bytes() for path in changed}
        read = self.read_after_precache if kind == "memo" else self.read
        is_touched = kind == "memo"
        try:
            for path, data in changed.items():
                path.unlink() if data is None else path.write_bytes(data)
            try:
                found = read(self.cache)
                assert found == self.expected, f"SILENT: {[k for k in found if found[k] != self.expected.get(k)]}"
                goal.count("identical")
            except LatentCacheError as error:
                goal.count("refused")
                if goal.figures["refused"] % FIX_EVERY == 0 and kind != "CACHE.json":  # no command restores it
                    is_touched = True
                    goal.count("fixed_as_advised")
                    self.fix(read, str(error))
        finally:
            if is_touched:
                self.restore()
            else:
                for path, data in original.items():
                    path.write_bytes(data)


def flips(victim: Victim, dice: random.Random) -> Iterator[Damage]:
    while True:
        kind, path, data = victim.choose(dice)
        at, bit, changed = dice.randrange(len(data)), dice.randrange(8), bytearray(data)
        changed[at] ^= 1 << bit
        yield f"bit {bit} of byte {at} of {path.name}", kind, {path: bytes(changed)}


def bursts(victim: Victim, dice: random.Random) -> Iterator[Damage]:
    """Replace up to 4,096 consecutive bytes with random ones, or with zeros as in a bad block."""
    while True:
        kind, path, data = victim.choose(dice)
        at, length = dice.randrange(len(data)), dice.choice([2, 16, 512, 4096])
        noise = dice.choice([dice.randbytes(length), bytes(length)])
        changed = (data[:at] + noise + data[at + length :])[: len(data)]
        yield f"{length} bytes at {at} of {path.name}", kind, {path: changed}


def lengths(victim: Victim, dice: random.Random) -> Iterator[Damage]:
    """Truncate files; extend every tenth."""
    while True:
        kind, path, data = victim.choose(dice)
        change = dice.randbytes(dice.randint(1, 4096)) if dice.random() < 0.1 else None
        changed = data[: dice.randrange(len(data))] if change is None else data + change
        yield f"{path.name} of {len(data)} bytes has {len(changed)}", kind, {path: changed}


def exchanges(victim: Victim, dice: random.Random) -> Iterator[Damage]:
    """Swap payloads of two keys, two packs or two manifests; copy a pack over another; remove a file."""
    while True:
        _, pack, data = victim.choose(dice, "pack")
        _, other, other_data = victim.choose(dice, "pack")
        row, half = 2 * 8 * 8 * 8, len(data) // 2  # columns are at the end of a pack
        first, second = sorted(half + row * dice.randrange(max(1, half // row - 1)) for _ in range(2))
        changed = bytearray(data)
        changed[first : first + row], changed[second : second + row] = (
            data[second : second + row],
            data[first : first + row],
        )
        yield f"rows of {pack.name} exchanged", "pack", {pack: bytes(changed[: len(data)])}
        yield f"{pack.name} over {other.name}", "pack", {other: data}
        yield f"{pack.name} and {other.name} exchanged", "pack", {pack: other_data, other: data}
        _, one, data = victim.choose(dice, "manifest")
        _, other, other_data = victim.choose(dice, "manifest")
        yield f"{one.name} and {other.name} exchanged", "manifest", {one: other_data, other: data}
        kind, path, _ = victim.choose(dice)
        yield f"{path.name} gone", kind, {path: None}


def rot(soak: Soak) -> None:
    victim = Victim(soak.folder)
    for text, damages, num in (
        ("single-bit flips: refused or identical, and fixed as advised", flips, soak.n),
        ("bursts: refused or identical, and fixed as advised", bursts, max(1, soak.n // 5)),
        ("truncation and extension: refused or identical, and fixed", lengths, max(1, soak.n // 5)),
        ("exchanged or missing payloads, packs, files: refused, and fixed", exchanges, max(5, soak.n // 50)),
    ):
        goal = soak.goal(text)
        for (name, kind, changed), _ in zip(damages(victim, soak.random), range(num), strict=False):
            with goal.case(f"{kind}: {name}"):
                victim.suffer(goal, kind, changed)
        soak.say(f"{text}: {goal.figures}, {goal.failures} failures")


PARTS = {"rot": (rot, 10_000, 100)}


def main() -> int:
    logging.disable(logging.CRITICAL)
    return run_soak(PARTS, __doc__)


if __name__ == "__main__":
    sys.exit(main())
