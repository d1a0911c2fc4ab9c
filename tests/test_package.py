"""The package as a whole: its public names, its imports, and the layers that the design draws."""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import latentcache

PACKAGE = Path(latentcache.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))

LAYERS = [
    {"errors", "types", "__init__"},
    {"utils"},
    {"config", "identity", "provenance", "families"},
    {"dataset", "store", "devices"},
    {"checkpoints"},
    {"models"},
    {"precache", "loading", "phases"},
    {"validation"},
    {"doctor"},
    {"interop"},
    {"integrations"},
    {"cli"},
]
"""Design 3: imports go down only. A package of a layer may import itself and lower layers. Validation is above
loading and precache: it reads cached batches, and fills a validation set that is not cached yet."""

MAY_MEET = {("provenance", "__init__"), ("cli", "__init__")}
"""`latentcache/__init__.py` holds the version."""

OWNERS = {
    "diskcache": ("store/index.py",),
    # diffusion-pipe's cache is a SQLite database, ai-toolkit's is safetensors files.
    "sqlite3": ("store/index.py", "store/connection.py", "interop/formats/diffusion_pipe.py"),
    "safetensors": ("store/pack.py", "checkpoints/folder.py", "interop/formats/ai_toolkit.py"),
    "PIL": ("dataset/images.py", "models/tiny.py", "validation/", "service/"),
    "pyarrow": ("dataset/tables.py",),
    "diffusers": ("models/", "validation/", "integrations/diffusers.py"),
    "transformers": ("models/", "integrations/diffusers.py"),
    "matplotlib": ("validation/",),
    "cyclopts": ("cli/app.py", "cli/interop_commands.py", "cli/options.py"),
}
FORBIDDEN = {"pickle", "dill", "joblib", "cloudpickle", "torchvision", "datasets"}


def imports_of(module: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that a module imports."""
    for node in ast.walk(ast.parse((PACKAGE / module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import"
            yield node.lineno, str(node.module)


def layer_of(name: str) -> int:
    found = [number for number, layer in enumerate(LAYERS) if name in layer]
    assert found, f"{name} is in no layer of the design"
    return found[0]


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_go_down_only(module: Path) -> None:
    own = module.parts[0].removesuffix(".py")
    for line, name in imports_of(module):
        parts = name.split(".")
        if parts[0] != "latentcache":
            continue
        other = parts[1] if len(parts) > 1 else "__init__"
        if other == own or (own, other) in MAY_MEET:
            continue
        if layer_of(own) == layer_of(other) == 2:
            continue  # config, identity and provenance are single modules that do not form a cycle
        assert layer_of(other) < layer_of(own), f"{module}:{line} imports {name}, which is not below {own}"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_heavy_packages_have_one_owner(module: Path) -> None:
    for line, name in imports_of(module):
        root = name.split(".")[0]
        assert root not in FORBIDDEN, f"{module}:{line} imports {name}"
        if root in OWNERS:
            assert str(module).startswith(OWNERS[root]), f"{module}:{line}: {root} belongs to {OWNERS[root]}"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_nothing_unpickles_or_evaluates_and_nothing_names_cuda(module: Path) -> None:
    for node in ast.walk(ast.parse((PACKAGE / module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            assert not dotted.startswith("torch.cuda"), f"{module}:{node.lineno}: {dotted}"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"eval", "exec"}, f"{module}:{node.lineno}: {called}"
            if called == "torch.load":
                # Other people's checkpoints and caches are pickles: one module reads each, with torch's own limits.
                restricted = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                readers = {"checkpoints/checkpoint_import.py", "interop/torch_files.py"}
                assert str(module) in readers, f"{module}:{node.lineno}: {called}"
                assert restricted.get("weights_only") == "True", f"{module}:{node.lineno}: {called}"


def test_public_names_are_alphabetical_and_resolve() -> None:
    names = [name for name in latentcache.__all__ if name != "__version__"]
    assert names == sorted(names)
    for name in latentcache.__all__:
        assert getattr(latentcache, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = latentcache.nonsense  # type: ignore[attr-defined]


def test_import_is_fast_and_imports_no_torch() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import latentcache; "
        "print(time.perf_counter() - start, 'torch' in sys.modules, 'diffusers' in sys.modules)"
    )
    seconds = []
    for _ in range(5):
        output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        taken, torch_in, diffusers_in = output.split()
        assert (torch_in, diffusers_in) == ("False", "False")
        seconds.append(float(taken))
    assert statistics.median(seconds) < 0.150
