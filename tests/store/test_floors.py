"""The modules of the store lie on few floors, and each imports only modules of floors below its own."""

from __future__ import annotations

import ast
from pathlib import Path

import latentcache.store

FOLDER = Path(latentcache.store.__file__).parent
MAX_FLOORS, MAX_FILES = 8, 20
FLOORS = [
    {"base", "aio", "connection"},
    {"layout", "tensor_file", "index", "stacking", "writer"},
    {"pack", "location_table", "directory", "memory"},
    {"recovery", "mapped"},
    {"catalog", "direct"},
    {"disk"},
    {"compaction", "exchange"},
    {"upkeep"},
]
"""From the lowest up."""


def imports_of(path):
    """Line and name of each module of the store that a module imports, also inside of functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [
                f"{node.module}.{alias.name}" if node.module == "latentcache.store" else str(node.module)
                for alias in node.names
            ]
        else:
            continue
        for name in names:
            if name.startswith("latentcache.store."):
                yield node.lineno, name.split(".")[2]


def test_there_are_few_files_on_few_floors():
    files = {path.stem for path in FOLDER.rglob("*.py")} - {"__init__"}
    assert set().union(*FLOORS) == files and sum(map(len, FLOORS)) == len(files) <= MAX_FILES
    assert len(FLOORS) <= MAX_FLOORS


def test_imports_go_down_only():
    number_of = {name: number for number, floor in enumerate(FLOORS) for name in floor}
    wrong = [
        f"{name}.py:{line} imports {other}"
        for name in number_of
        for line, other in imports_of(FOLDER / f"{name}.py")
        if not number_of[other] < number_of[name]
    ]
    assert not wrong
