"""The doctor where latentcache cannot be installed: with torch alone, an old one too, it names what is too old."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import latentcache

ROOT = Path(latentcache.__file__).parent.parent

BLOCK = """
import sys
from importlib.metadata import packages_distributions

OF_TORCH = {"torch", "torchgen", "functorch", "triton", "nvidia", "typing_extensions", "filelock", "sympy", "mpmath"}
OF_TORCH |= {"networkx", "jinja2", "markupsafe", "fsspec", "setuptools", "latentcache"}

class Blocked:
    names = {name for name in packages_distributions() if name not in OF_TORCH}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""
OLD_TORCH = """
import torch
for name in ("accelerator", "get_device_module", "OutOfMemoryError"):
    delattr(torch, name)
"""
OLD = {"torch": "2.1.2+cu121", "transformers": "4.40.0", "deepspeed": "0.14.2"}


def doctor(folder: Path, before: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    """`python -m latentcache.doctor --json` after the code `before`, among the old packages in `folder`."""
    code = f"import sys\nsys.path[:0] = {[str(folder), str(ROOT)]!r}\n{before}\n"
    code += f"sys.argv[1:] = {['--json', *arguments]!r}\n"
    code += "import runpy\nrunpy.run_module('latentcache.doctor', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_versions_are_judged(tmp_path: Path) -> None:
    for name, version in OLD.items():
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    config = tmp_path / "ds.json"
    config.write_text('{"train_batch_size": "auto"}')
    flags = ("--deepspeed", str(config), "--cache.path", str(tmp_path))
    code, found = doctor(tmp_path, BLOCK + OLD_TORCH, *flags)
    by_subject = {each["subject"]: each for each in found["findings"]}
    assert code == 1 and not found["ok"]
    assert {name: by_subject[name]["level"] for name in OLD} == dict.fromkeys(OLD, "error")
    assert by_subject["train_batch_size"]["level"] == "warning" and "cache" in by_subject
    unchecked = {each["subject"] for each in found["findings"] if each["found"].startswith("not checked: ")}
    assert unchecked == {"device"} and found["packages"].items() >= OLD.items()


def test_nothing_is_wrong_where_torch_is_alone(tmp_path: Path) -> None:
    code, found = doctor(tmp_path, BLOCK, "--training", "--device", "cpu")
    levels = {each["subject"]: each["level"] for each in found["findings"]}
    assert code == 0 and found["ok"] and (levels["torch"], levels["training check"]) == ("ok", "note")
