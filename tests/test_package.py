"""The package as a whole: public names, imports and layers."""

from __future__ import annotations

import ast
import importlib
import pickle
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import latentcache
from latentcache import errors
from latentcache.errors import LatentCacheError

PACKAGE = Path(latentcache.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
PROJECT = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]

LAYERS = [
    {"errors", "types", "__init__"},
    {"utils"},
    {"devices"},
    {"config", "config_file", "location", "identity", "provenance", "families"},
    {"dataset", "store"},
    {"checkpoints", "remote"},
    {"models"},
    {"precache", "loading", "phases"},
    {"validation"},
    {"doctor"},
    {"interop"},
    {"integrations"},
    {"scaleout"},
    {"service"},
    {"cli"},
    {"__main__"},
]
"""A folder imports only itself and lower layers. Validation is above loading and precache, because it reads cached
batches and fills a validation set that is not cached yet."""

MAY_MEET = {("provenance", "__init__"), ("cli", "__init__")}
"""Exceptions: `latentcache/__init__.py` has the version, and imports the layers above it lazily."""

OWNERS = {
    "diskcache": ("store/index.py",),
    "sqlite3": ("store/index.py", "precache/memo.py"),
    # musubi-tuner's cache is safetensors files.
    "safetensors": ("interop/formats/musubi.py", "models/lora.py"),
    # The service writes thumbnails.
    "PIL": ("dataset/images.py", "dataset/resampling.py", "validation/", "service/page/"),
    "av": ("dataset/clips.py",),
    "pyarrow": ("dataset/parquet.py",),
    "diffusers": ("families/", "models/", "validation/", "integrations/diffusers.py"),
    "transformers": ("models/",),
    "matplotlib": ("validation/pictures.py",),
    "cyclopts": ("cli/",),
    "urllib3": ("remote/",),
    "obstore": ("remote/bucket.py",),
    "ray": ("scaleout/",),
    **dict.fromkeys(("fastapi", "jinja2", "starlette", "uvicorn", "prometheus_client"), ("service/",)),
}
FORBIDDEN = {"pickle", "dill", "joblib", "cloudpickle", "torchvision", "datasets"}


def tree_of(module: Path) -> ast.Module:
    return ast.parse((PACKAGE / module).read_text(encoding="utf-8"))


def imports_of(module: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and full name of each import of a module."""
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import"
            yield node.lineno, str(node.module)


IMPORTS = [(module, line, name) for module in MODULES for line, name in imports_of(module)]


def layer_of(name: str) -> int:
    found = [number for number, layer in enumerate(LAYERS) if name in layer]
    assert found, f"{name} is in no layer of the design"
    return found[0]


def test_imports_go_down_only():
    for module, line, name in IMPORTS:
        own, parts = module.parts[0].removesuffix(".py"), name.split(".")
        if parts[0] != "latentcache":
            continue
        other = parts[1] if len(parts) > 1 else "__init__"
        if own == "__init__" or other == own or (own, other) in MAY_MEET:
            continue
        if layer_of(own) == layer_of(other) == layer_of("config"):
            continue  # config, identity and provenance are single modules that do not form a cycle
        assert layer_of(other) < layer_of(own), f"{module}:{line} imports {name}, which is not below {own}"


def test_heavy_packages_have_one_owner():
    for module, line, name in IMPORTS:
        root = name.split(".")[0]
        assert root not in FORBIDDEN, f"{module}:{line} imports {name}"
        if root in OWNERS:
            assert str(module).startswith(OWNERS[root]), f"{module}:{line}: {root} belongs to {OWNERS[root]}"


def test_nothing_unpickles_or_evaluates_and_nothing_names_cuda():
    for module in MODULES:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.Attribute):
                dotted = ast.unparse(node)
                assert not dotted.startswith("torch.cuda"), f"{module}:{node.lineno}: {dotted}"
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {"eval", "exec"}, f"{module}:{node.lineno}: {called}"
                if called == "torch.load":
                    # Other trainers' checkpoints and caches are pickles: only these read them, with weights_only.
                    restricted = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                    readers = {"checkpoints/checkpoint.py", "interop/readers.py"}
                    assert str(module) in readers, f"{module}:{node.lineno}: {called}"
                    assert restricted.get("weights_only") == "True", f"{module}:{node.lineno}: {called}"


def test_every_package_that_is_imported_is_declared():
    lines = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]
    declared = {re.split(r"[^A-Za-z0-9_-]", line)[0].lower().replace("-", "_") for line in lines}
    roots = {name.split(".")[0] for _, _, name in IMPORTS} - {"latentcache"}
    names = {"PIL": "pillow", "yaml": "pyyaml"}
    undeclared = {names.get(root, root) for root in roots - sys.stdlib_module_names} - declared
    assert undeclared <= {"pillow_jxl", "wandb"}, undeclared


def test_it_asks_for_no_newer_python_than_it_says():
    oldest = PROJECT["requires-python"].removeprefix(">=")
    options = ("--quiet", "--no-tips", "--violations", f"--target={oldest}-")
    command = [str(Path(sys.executable).with_name("vermin")), *options, str(PACKAGE)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_public_names_are_alphabetical_and_those_that_type_checkers_see():
    tree = tree_of(Path("__init__.py"))
    checked = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {"__version__"}
    for node in checked.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            home = importlib.import_module(str(node.module))  # that of `errors` is the package itself
            assert getattr(latentcache, alias.name) is getattr(home, alias.name)
            seen.add(alias.name)
    assert latentcache.__all__ == sorted(seen)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = latentcache.nonsense  # type: ignore[attr-defined]  # the error is the point


def shown_code() -> Iterator[tuple[str, str]]:
    """Yield name and Python code of what users read: README, docs, examples and training scripts."""
    root = PACKAGE.parent
    for path in (*root.glob("examples/*.py"), *root.glob("scripts/train_lora*.py"), root / "scripts/quickstart.py"):
        yield str(path.relative_to(root)), path.read_text(encoding="utf-8")
    for path in (root / "README.md", *root.glob("docs/**/*.md")):
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)):
            yield f"{path.relative_to(root)}, block {number}", block


def test_what_users_read_imports_public_names_only():
    allowed = ("latentcache.integrations.", "latentcache.models.tiny.", "latentcache.scaleout.ray.")
    for shown_in, code in shown_code():
        for node in ast.walk(ast.parse(code)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                is_public = not name.startswith("latentcache.") or f"{name}.".startswith(allowed)
                assert is_public, f"{shown_in} imports {name}, which is not public"


def test_errors_travel_whole():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, LatentCacheError)]
    assert len(kinds) > 20
    for kind in kinds:
        assert type(pickle.loads(pickle.dumps(kind.__new__(kind, "a message")))) is kind
    for error in (
        errors.StorageFullError("cache", 1 << 30),
        errors.RemoteError("http://host", "does not answer", "Start it.", status=503),
        errors.DeviceMismatchError("no", module="unet", argument="x", found="cpu", expected="cuda:0"),
    ):
        error.add_note("of a worker")
        there = pickle.loads(pickle.dumps(error))
        assert type(there) is type(error) and str(there) == str(error) and vars(there) == vars(error)
