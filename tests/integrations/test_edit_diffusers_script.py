"""The edits of diffusers' scripts fit the lines that the real scripts have, and bind what the rest of them uses.

The scripts are not ours to ship: `diffusers_scripts.json` records, of one commit, the lines that the edits look for and
the names that the removed lines bind for others. DIFFUSERS_EXAMPLES=<folder with the scripts> tests the real ones.
"""

from __future__ import annotations

import ast
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECORD = json.loads(Path(__file__).with_name("diffusers_scripts.json").read_text(encoding="utf-8"))
SCRIPTS = sorted(RECORD["scripts"])


@pytest.fixture
def editing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import edit_diffusers_script

    return edit_diffusers_script


def stored(tree: ast.AST) -> dict[str, int]:
    """Each name that the code binds, with the first line that does."""
    found: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound = [(node.id, node.lineno)]
        elif isinstance(node, ast.FunctionDef):
            bound = [(node.name, node.lineno)]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound = [((alias.asname or alias.name).split(".")[0], node.lineno) for alias in node.names]
        elif isinstance(node, ast.arg):
            bound = [(node.arg, node.lineno)]
        else:
            continue
        for name, line in bound:
            found[name] = min(line, found.get(name, line))
    return found


def inserted(editing: ModuleType, name: str) -> Iterator[ast.AST]:
    for edit in editing.EDITS[name]:
        yield ast.parse(textwrap.dedent(edit.text))


def script_of(recorded: dict[str, Any]) -> str:
    """The recorded lines in their order, each with a line of its own below it."""
    return "".join(f"{line}\nbelow {number}\n" for number, line in enumerate(recorded["lines"]))


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_edits_find_the_lines_of_the_real_script_in_their_order(editing: ModuleType, name: str) -> None:
    recorded = RECORD["scripts"][name]
    wanted = [line for edit in editing.EDITS[name] for line in (edit.first, edit.end)]
    assert wanted == recorded["lines"]
    assert recorded["line_numbers"] == sorted(recorded["line_numbers"]), "an end may be the next edit's first line"
    text = editing.edited(script_of(recorded), name, "the/cache", "photos")
    for number, edit in enumerate(editing.EDITS[name]):
        assert edit.first not in text.splitlines() and f"below {2 * number}\n" not in text
        assert edit.end in text.splitlines() and f"below {2 * number + 1}\n" in text
    assert "LatentDataset('the/cache', 'photos'" in text


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_put_in_binds_the_names_that_the_rest_uses(editing: ModuleType, name: str) -> None:
    bound = set().union(*(stored(tree) for tree in inserted(editing, name)))
    assert set(RECORD["scripts"][name]["needed"]) <= bound


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_with_other_lines_is_refused_by_the_line(
    editing: ModuleType, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded, path = RECORD["scripts"][name], tmp_path / name
    for lines, met in ((recorded["lines"][1:], "no line"), ([recorded["lines"][0], *recorded["lines"]], "2 lines")):
        path.write_text(script_of({"lines": lines}), encoding="utf-8")
        assert editing.main([str(path), "cache", "photos"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and met in err and recorded["lines"][0].strip() in err and "by hand" in err
