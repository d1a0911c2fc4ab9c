"""kill -9: two writers of precache at random instants, and each operation directly after each change that it makes.

    python scripts/soak_kill.py                # 500 random kills, and 20 after each labelled change
    python scripts/soak_kill.py --n 10         # 10 random kills, and none or one after each labelled change

Each process notes what it is about to seal, and what was sealed, in a file. After a kill the cache opens: no sealed
entry is lost, none is wrong or torn, nothing half done is left. At the end of a round, which has some kills, the
operation is run again and gives what an uninterrupted run gives.

A labelled change is a kind of operation on a kind of path, e.g. the rename of a pack: they are found by recording an
uninterrupted run of precache, add, import, verify, prune, compact, rebuild and of an opening after a death.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.process import BaseProcess

from file_operations import CHANGES, Change, FileOperations, preloaded
from soak_operations import NoteFile, Precache, Scene, operations, values
from soaking import Goal, Soak, make_parser, run_soak

from latentcache.precache.tasks import Shard

NUM_PHOTOS = 40
KILLS_PER_POINT = 20
KILLS_PER_ROUND = 4
NAMES = ("precache", "add", "import", "verify", "prune", "compact", "rebuild", "open")

fork = multiprocessing.get_context("fork")


def start(function: Callable[[], object]) -> BaseProcess:
    """Call the function in a fork of this process: what it has imported and loaded is there at once."""

    def call() -> None:
        function()
        os._exit(0)  # nothing of the parent's is torn down

    process = fork.Process(target=call)
    process.start()
    return process


# Random instants -----------------------------------------------------------------------------------------------------


class TwoWriters:
    """Precache by two ranks, killed at random instants."""

    def __init__(self, soak: Soak):
        self.precache = Precache(soak.folder / "many-photos", NUM_PHOTOS)
        self.scene = Scene(operations(self.precache)["precache"], soak.folder / "random")
        self.noted = NoteFile(soak.folder / "noted")
        began = time.monotonic()
        self.scene.new()
        self.wait(self.begin())
        self.seconds = time.monotonic() - began

    def begin(self) -> list[BaseProcess]:
        """Start both ranks."""
        cache = self.scene.cache

        def run(rank: int) -> None:
            self.precache.run(cache, self.noted, shard=Shard(rank, 2))

        return [start(lambda rank=rank: run(rank)) for rank in range(2)]  # type: ignore[misc]

    @staticmethod
    def wait(children: list[BaseProcess]) -> list[int | None]:
        """The exit codes."""
        for child in children:
            child.join(120)
        return [child.exitcode for child in children]

    def kill_once(self, generator: random.Random) -> int:
        """Run, kill each rank at an instant of its own, and check. Returns how many were killed."""
        children = self.begin()
        began = time.monotonic()
        instants = sorted((generator.uniform(0, self.seconds), rank) for rank in range(2))
        if generator.random() < 0.5:
            instants = [
                (instants[0][0], rank) for rank in range(2)
            ]  # both at once, as when a machine runs out of memory
        for instant, rank in instants:
            time.sleep(max(0.0, began + instant - time.monotonic()))
            children[rank].kill()
        codes = self.wait(children)
        assert set(codes) <= {0, -signal.SIGKILL}, f"a writer failed: {codes}"
        self.scene.check(sealed=self.noted.keys("sealed"))
        found = values(self.scene.cache).keys()
        unknown = found - self.scene.before.keys() - self.noted.keys("begin")
        assert not unknown, f"{len(unknown)} entries that no writer had begun to seal"
        return codes.count(-signal.SIGKILL)


def random_kills(goal: Goal, soak: Soak) -> None:
    writers = TwoWriters(soak)
    soak.say(f"an uninterrupted run of two writers takes {writers.seconds:.2f} s")
    while goal.n < soak.n:
        writers.noted.path.unlink(missing_ok=True)
        writers.scene.new()
        for _ in range(min(KILLS_PER_ROUND, soak.n - goal.n)):
            with goal.case(f"random kill {goal.n}"):
                goal.count("killed_writers", writers.kill_once(soak.random))
        with goal.case("rerun"):
            goal.n -= 1  # the rerun is a part of the cases before it
            writers.scene.finish()
        if goal.n % 100 < KILLS_PER_ROUND:
            soak.say(f"{goal.n} random kills, {goal.num_failures} failures")
    assert goal.figures.get("killed_writers"), "no writer was killed"


# Labelled changes ----------------------------------------------------------------------------------------------------


def label_of(change: Change) -> tuple[str, str]:
    """The kind of operation and the kind of path, as a pattern: names of packs and temporary files are random."""
    path = re.sub(r"[0-9a-f]{8,}", "*", change.path_2 or change.path)
    return change.operation, re.sub(r"^packs/[0-9a-f]{2}(?=/|$)", "packs/??", path)


def kills_after_changes(goal: Goal, soak: Soak, scene: Scene, kills_per_point: float) -> None:
    """Each label is tried `kills_per_point` times; with a fraction, some labels once."""
    scene.new()
    files = FileOperations(scene.cache)
    with files.recording() as changes:
        scene.run()
    counts = Counter(label_of(change) for change in changes if change.operation in CHANGES)
    noted = NoteFile(soak.folder / "noted-point")
    for (operation, pattern), count in counts.items():
        goal.count("labels")
        for _ in range(int(kills_per_point) + (soak.random.random() < kills_per_point % 1)):
            occurrence = soak.random.randint(1, count)
            with goal.case(f"{scene.operation.name}: killed after {operation} {pattern} number {occurrence}"):
                noted.path.unlink(missing_ok=True)
                scene.new()

                def run(occurrence: int = occurrence, operation: str = operation, pattern: str = pattern) -> None:
                    files.kill_after(occurrence, operation, pattern)
                    scene.run(noted)

                child = start(run)
                child.join(120)
                assert child.exitcode in (0, -signal.SIGKILL), f"exit code {child.exitcode}"
                goal.count("killed", child.exitcode != 0)
                scene.check(sealed=noted.keys("sealed"))
                scene.finish()
    soak.say(f"{scene.operation.name}: {len(counts)} labels, {goal.n} kills, {goal.num_failures} failures")


def program(soak: Soak) -> None:
    logging.disable(logging.CRITICAL)
    random_kills(soak.goal("kill -9 of two writers at random instants: 0 lost, torn, wrong or left over"), soak)
    goal = soak.goal("kill -9 after each labelled change: 0 lost, torn, wrong or left over; the rerun equals")
    chosen = operations(Precache(soak.folder / "photos"))
    for name in NAMES:
        kills_per_point = min(KILLS_PER_POINT, KILLS_PER_POINT * soak.n / 500)
        kills_after_changes(goal, soak, Scene(chosen[name], soak.folder), kills_per_point)
    assert goal.figures["killed"] >= goal.n * 0.9, "most kills must hit"


def main() -> int:
    parser = make_parser(__doc__, 500, "random kills; each labelled change gets 20 of 500")
    return preloaded(lambda: run_soak(program, parser))


if __name__ == "__main__":
    sys.exit(main())
