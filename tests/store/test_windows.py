"""What Windows lacks and refuses, as far as another system can show it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, shutil, sys
from pathlib import Path
import diskcache, numpy, torch.utils.data  # what they need of the system is their own affair
for name in ("register_at_fork", "pread", "posix_fadvise", "fork", "O_CLOEXEC", "O_NONBLOCK"):
    delattr(os, name) if hasattr(os, name) else None
from helpers.remote_samples import make_cache
from latentcache import BucketBatchSampler, LatentCache, LatentDataset, LatentLoader
from latentcache.store.upkeep import compact, rebuild, verify
path = make_cache(Path(sys.argv[1]) / "cache")
with LatentLoader(BucketBatchSampler(LatentDataset(path), 4), device="cpu") as loader:
    assert len(list(loader)) == 12
assert verify(path).ok and rebuild(path).num_entries == 54 and compact(path).num_packs_after == 1
shutil.rmtree(path / "index")
assert len(LatentCache(path, read_only=True).batch(["0.png"], device="cpu")["latents"]) == 1
"""


def test_it_needs_nothing_of_the_system_that_windows_lacks(tmp_path: Path) -> None:
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=found, check=False)
    assert done.returncode == 0, done.stderr
