"""Whatever lies where a file of a cache is expected: a typed error or success, soon, small, and nothing else changes.

    python scripts/soak_attacks.py             # all: some 4,000 cases
    python scripts/soak_attacks.py --n 200     # so many, drawn by --seed

The matrix has three sides. What is attacked: each file and folder of a cache, those that a run leaves for a time, the
config and a metrics.json. What lies there: a pipe, a socket, a device, a folder, a sparse file of 200 GB, links to
itself, to a file and to a folder outside, no bytes, noise, other JSON. What is called: each command about a cache,
through the command line, and `LatentCache.batch`.

A case has 10 s and 256 MiB. It ends in success or in one of latentcache's own errors, batches have what was stored, and
what the links lead to is not changed. Then what the message advises is done, and so on, until every sample is read as
it was stored.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import soaking
import torch
from attack_limits import MAX_S, PLANTS, make_outside, sparse, unchanged, within_limits
from soak_operations import Precache

from latentcache.cli.app import main as command_line
from latentcache.errors import LatentCacheError
from latentcache.loading.cache import LatentCache
from latentcache.store.upkeep import compact
from latentcache.validation.metrics import Metrics

ALL = 1_000_000
MAX_STEPS = 8
ADVICE = r"(?:`latentcache |run |Run )(rebuild|verify|precache|compact|prune --unfinished)"
GROWN = "200 GB more"
"""What was there, as a sparse file that goes on."""
UNEXPECTED = "this should not happen"
SAMPLE = "0.png"
ABSENT = (
    "manifests/photos.unfinished",
    *(f"{folder}/cache.db-{suffix}" for folder in ("index", "memo") for suffix in ("journal", "wal", "shm")),
    *("memo.lock", "damaged", "index.replaced-12345678", "index.removed-12345678", ".CACHE.json.12345678.tmp"),
    *("packs/00", f"packs/00/{'00' * 16}.safetensors", "manifests/.photos.safetensors.12345678.tmp", "notes.txt"),
)
"""What a cache has only at times, or what somebody else may put there."""
COMMANDS_OF = {"config.json": ("status of a config", "precache", "explain"), "metrics.json": ("metrics",)}
"""Of files that are not in the cache."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is attacked, relative to the cache's folder or by one of COMMANDS_OF; with what; what is called."""

    target: str
    plant: str
    command: str

    def __str__(self) -> str:
        return f"{self.command} with {self.plant} as {self.target}"


class Scene:
    """A cache, a config and a folder outside, which each case finds as they were."""

    def __init__(self, folder: Path, make: Callable[[Path], None], precache: Precache | None = None):
        self.folder, self.precache = folder, precache
        self.cache, self._template = folder / "cache", folder / "template"
        self.config, self.metrics, self.exported = folder / "config.json", folder / "metrics.json", folder / "exported"
        self.outside = make_outside(folder / "outside")
        make(self._template)
        self._config_text = "" if precache is None else precache.config(self.cache).model_dump_json(exclude_unset=True)
        self.restore()
        self.expected = self.read()
        self.commands: dict[str, list[object]] = {
            "status": ["status", self.cache],
            "show": ["show", SAMPLE, self.cache],
            "verify": ["verify", self.cache],
            "prune": ["prune", self.cache],
            "prune --unfinished": ["prune", self.cache, "--unfinished"],
            "compact": ["compact", self.cache],
            "rebuild": ["rebuild", self.cache],
            "export": ["export", self.exported, "--to", "ai-toolkit", "--cache", self.cache, "--manifest", "photos"],
        }
        if precache is not None:
            self.commands |= {
                "precache": ["precache", self.config],
                "explain": ["explain", SAMPLE, self.config],
                "status of a config": ["status", self.config],
            }

    def restore(self) -> None:
        """All as it was."""
        for path in (self.cache, self.exported):
            shutil.rmtree(path, ignore_errors=True)
        for path in (self.cache, self.config, self.metrics, self.exported):
            remove(path)
        shutil.copytree(self._template, self.cache)
        self.config.write_text(self._config_text)
        self.metrics.write_text("{}")

    def targets(self) -> list[str]:
        """All that can be attacked, sorted. Of several packs, and folders of one, the first."""
        names = sorted(path.relative_to(self._template).as_posix() for path in self._template.rglob("*"))
        packs = [name for name in names if name.startswith("packs/")]
        others = [name for name in names if name not in packs]
        return [*others, *packs[:2], *ABSENT, *(COMMANDS_OF if self.precache is not None else ())]

    def place(self, target: str) -> Path:
        """Where a target lies."""
        return (self.folder if target in COMMANDS_OF else self.cache) / target

    def read(self, names: Sequence[str] | None = None) -> dict[str, str]:
        """A digest of what a reader gets for each of these samples; default: for all."""
        with LatentCache(self.cache, read_only=True) as cache:
            found = {}
            for name in cache.sample_ids() if names is None else names:
                found[name] = soaking.batch_digest(cache.batch([name], device="cpu", output="moments"))
        return found

    def call(self, command: str) -> str:
        """Run a command. Returns the message of its error; nothing where there is none. AssertionError: it is raw."""
        if command == "batch":
            return self._message(lambda: self._compare(self.read(list(self.expected))))
        if command == "metrics":
            return self._message(lambda: Metrics.read(self.metrics))
        logged, out, err = io.StringIO(), io.StringIO(), io.StringIO()
        handler = logging.StreamHandler(logged)
        logging.getLogger("latentcache").addHandler(handler)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = command_line([str(argument) for argument in self.commands[command]])
        finally:
            logging.getLogger("latentcache").removeHandler(handler)
        assert UNEXPECTED not in logged.getvalue(), logged.getvalue()
        assert code in (0, 1, 2), f"exit code {code}"
        message = err.getvalue().strip() if code == 2 else ""
        assert code != 2 or message.startswith("latentcache: "), f"no message: {message!r}"
        return message

    def _message(self, call: Callable[[], object]) -> str:
        try:
            call()
            return ""
        except LatentCacheError as error:
            return f"latentcache: {error}"

    def _compare(self, found: Mapping[str, str]) -> None:
        wrong = [name for name in found if found[name] != self.expected.get(name)]
        assert not wrong, f"other values: {wrong}"

    def follow(self, message: str, command: str) -> None:
        """Do what the message of a command advises, if it names anything that can be done."""
        is_done = False
        if re.search(r"[Rr]emove (it|what is there)", message):
            path = self._named(message)
            remove(path.parent if path.parent.is_symlink() or not path.parent.is_dir() else path)
            is_done = True
        for name in re.findall(ADVICE, message):
            if name == "precache" and self.precache is not None:
                self.precache.run(self.cache)
            elif name != "precache":
                self.call(name)
            is_done = True
        if not is_done and re.search("try again|the same command", message):
            self.call(command)

    def _named(self, message: str) -> Path:
        """The first path in a message, which is below the cache."""
        found = re.search(rf"{re.escape(str(self.cache))}[^\s:;,'\"]*", message)
        assert found is not None, f"names no path of the cache: {message}"
        return Path(found[0])


def remove(path: Path) -> None:
    """Remove what lies there, whatever it is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def run_case(scene: Scene, case: Case, max_wait_s: float = MAX_S) -> str:
    """Attack and call. Returns the message; AssertionError if anything is not as it shall be."""
    place = scene.place(case.target)
    before = place.read_bytes() if place.is_file() else b""
    remove(place)
    place.parent.mkdir(exist_ok=True)
    if case.plant == GROWN:
        sparse(place, before)
    else:
        PLANTS[case.plant](place, scene.outside)
    with unchanged(scene.outside), within_limits(max_wait_s=max_wait_s):
        return scene.call(case.command)


def fix(scene: Scene, message: str, command: str) -> None:
    """Follow the messages until all samples are read as they were stored."""
    followed = []
    with unchanged(scene.outside):
        for _ in range(MAX_STEPS):
            if message:
                followed.append(message)
                try:
                    scene.follow(message, command)
                except LatentCacheError as error:
                    message = f"latentcache: {error}"
                    continue
            message, command = scene.call("batch"), "batch"
            if not message:
                return
    raise AssertionError(f"not fixed after {followed}")


def cases(scene: Scene) -> Iterator[Case]:
    """The whole matrix."""
    for target in scene.targets():
        for plant in (*PLANTS, GROWN):
            commands = COMMANDS_OF.get(target, (*scene.commands, "batch"))
            yield from (Case(target, plant, command) for command in commands)


def program(soak: soaking.Soak) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    precache = Precache(soak.folder / "photos")

    def make(cache: Path) -> None:
        precache.run(cache)
        compact(cache)

    scene = Scene(soak.folder, make, precache)
    for command in (*scene.commands, "batch"):  # imports and warm memory are no case's
        assert not scene.call(command), command
        scene.restore()
    chosen = list(cases(scene))
    if soak.n < len(chosen):
        chosen = soak.random.sample(chosen, soak.n)
    goal = soak.goal("what lies where a file of a cache is expected: own errors or success, 10 s and 256 MiB a case")
    fixed = soak.goal("after an attack the advice of the messages brings every sample back")
    for case in chosen:
        if soak.options.only and soak.options.only not in str(case):
            continue
        scene.restore()
        message = None
        with goal.case(str(case)):
            message = run_case(scene, case)
            goal.count("refused" if message else "succeeded")
        if message is not None and case.target not in COMMANDS_OF:
            with fixed.case(f"{case}: {message[:300]}"):
                fix(scene, message, case.command)
        if goal.n % 200 == 0:
            soak.say(
                f"{goal.n} of {len(chosen)}: {goal.figures}, {goal.num_failures} and {fixed.num_failures} failures"
            )


def main() -> int:
    parser = soaking.make_parser(__doc__, ALL, "cases of the matrix at most")
    parser.add_argument(
        "--only", metavar="TEXT", help="cases whose name has this, e.g. `status with pipe as CACHE.json`"
    )
    return soaking.run_soak(program, parser)


if __name__ == "__main__":
    sys.exit(main())
