"""Reading a cache needs no package of those that encode: a trainer may have other releases of them, or none."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from helpers.photo_files import write_photo
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from latentcache.config import Config
from latentcache.precache.run import run_precache
from latentcache.utils.extras import EXTRAS

ROOT = Path(__file__).parents[2]

READ = """
import sys
from typing import get_args

BLOCKED = set(sys.argv[3].split(","))

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())

import torch
from torch.utils.data import DataLoader

from latentcache import BucketBatchSampler, LatentCache, LatentDataset, LatentLoader
from latentcache import Phases, audit, guard, repair_optimizer
from latentcache.families import FamilyName, family_named
from latentcache.store.upkeep import rebuild, verify

for name in get_args(FamilyName):
    family_named(name)
assert all(map(callable, (audit, guard, repair_optimizer, Phases)))
path, holds_moments = sys.argv[1], sys.argv[2] == "moments"
with LatentCache(path, manifest="photos") as cache:
    ids = ["a.png", "b.png"]
    assert cache.batch(ids, device="cpu", scaled=True)["latents"].shape == (2, 4, 8, 16)
    if holds_moments:
        assert cache.batch(ids, device="cpu", output="moments")["moments"].shape == (2, 8, 8, 16)
        assert cache.batch(ids, device="cpu", generator=torch.Generator().manual_seed(0))["latents"].shape[1] == 4
with LatentCache(path) as cache:
    key = next(iter(cache.store.keys()))
    assert cache.get(key).record.key == key
    assert cache.prompt("a validation prompt", device="cpu")["prompt_embeds"].shape[1] == 77
assert rebuild(path).num_packs and verify(path).ok
dataset = LatentDataset(path, "photos", flips=True, caption="random")
sampler = BucketBatchSampler(dataset, 2, seed=0)
assert sum(len(batch["sample_id"]) for batch in LatentLoader(sampler, device="cpu")) == 10
for batch in DataLoader(dataset, batch_sampler=sampler, collate_fn=dataset.collate):
    draw = torch.Generator().manual_seed(0) if holds_moments else None
    assert dataset.place(batch, device="cpu", generator=draw)["latents"].shape[1] == 4
try:
    from latentcache import run_precache
except ImportError as error:
    assert str(error).endswith("Run: pip install 'latentcache[encode]'"), error
else:
    raise AssertionError("nothing was blocked")
"""
COMMANDS = """
import sys
from latentcache.__main__ import main

blocked = sys.argv.pop(1)

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
sys.exit(main())
"""


def modules_beyond_core() -> set[str]:
    """The modules of all installed packages but those that `pip install latentcache` alone brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted, names = [*project["dependencies"]], set[str]()
    while wanted:
        requirement = Requirement(wanted.pop())
        name = canonicalize_name(requirement.name)
        if name not in names and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            names.add(name)
            wanted += metadata.requires(name) or []
    homes = metadata.packages_distributions()
    return {module for module in homes if not names & {*map(canonicalize_name, homes[module])}} - {"latentcache"}


def run_python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("output", ["moments", "mean", "sample"])
def test_batches_and_prompts_need_none_of_the_encoders_packages(
    make_config: Callable[..., Config], output: str
) -> None:
    config = make_config(**{"encode.image_output": output, "datasets.0.flip": True})
    run_precache(config)
    done = run_python(READ, str(config.cache.path), output, ",".join(modules_beyond_core()))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "arguments", "extra"),
    [
        ("cyclopts", ["status", "cache"], "cli"),
        ("diffusers", ["precache", "config.yaml"], "encode"),
        ("fastapi", ["serve", "cache"], "service"),
        ("urllib3", ["status", "http://127.0.0.1:9"], "remote"),
        ("obstore", ["status", "s3://bucket/cache"], "remote"),
    ],
)
def test_a_command_without_its_packages_says_what_to_install(
    tmp_path: Path, module: str, arguments: list[str], extra: str
) -> None:
    (tmp_path / "cache").mkdir()
    write_photo(tmp_path / "photos" / "a.png", 0, (300, 300))
    dataset = {"name": "photos", "source": {"kind": "folder", "path": str(tmp_path / "photos")}}
    config = {"cache": {"path": str(tmp_path / "cache")}, "datasets": [dataset], "model": {"path": "tiny"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    arguments = [str(tmp_path / each) if each in ("cache", "config.yaml") else each for each in arguments]
    done = run_python(COMMANDS, module, *arguments)
    assert done.returncode == 2 and f"pip install 'latentcache[{extra}]'" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_each_extra_is_one_of_the_project_and_has_the_packages() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    homes = metadata.packages_distributions() | {"peft": ["peft"], "ray": ["ray"], "av": ["av"]}
    for extra, modules in EXTRAS.items():
        declared = {canonicalize_name(Requirement(line).name) for line in extras[extra]}
        for module in modules:
            assert declared & {*map(canonicalize_name, homes[module])}, f"{module} is not in the extra {extra}"
