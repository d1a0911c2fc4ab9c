"""The edits of diffusers' scripts fit the lines that the real scripts have, and bind what the rest of them uses.

The scripts are not ours to ship: `diffusers_scripts.json` records, of one commit, the lines that the edits look for and
the names that the removed lines bind for others.
"""

from __future__ import annotations

import ast
import json
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
RECORD = json.loads(Path(__file__).with_name("diffusers_scripts.json").read_text(encoding="utf-8"))
EACH = pytest.mark.parametrize("name", sorted(RECORD["scripts"]))


@pytest.fixture
def editing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import edit_diffusers_script

    return edit_diffusers_script


def script_of(lines: list[str]) -> str:
    """The recorded lines in their order, each with a line of its own below it."""
    return "".join(f"{line}\nbelow {number}\n" for number, line in enumerate(lines))


@EACH
def test_the_edits_find_the_lines_of_the_real_script_and_bind_its_names(editing: ModuleType, name: str) -> None:
    recorded, edits = RECORD["scripts"][name], editing.EDITS[name]
    assert [line for edit in edits for line in (edit.first, edit.end)] == recorded["lines"]
    assert recorded["line_numbers"] == sorted(recorded["line_numbers"]), "an end may be the next edit's first line"
    text = editing.edited(script_of(recorded["lines"]), name, "the/cache", "photos")
    for number, edit in enumerate(edits):
        assert edit.first not in text.splitlines() and f"below {2 * number}\n" not in text
        assert edit.end in text.splitlines() and f"below {2 * number + 1}\n" in text
    assert "LatentDataset('the/cache', 'photos'" in text
    nodes = [node for edit in edits for node in ast.walk(ast.parse(textwrap.dedent(edit.text)))]
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    assert set(recorded["needed"]) <= bound


@EACH
def test_a_script_with_other_lines_is_refused_by_the_line(
    editing: ModuleType, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded, path = RECORD["scripts"][name], tmp_path / name
    for lines, met in ((recorded["lines"][1:], "no line"), ([recorded["lines"][0], *recorded["lines"]], "2 lines")):
        path.write_text(script_of(lines), encoding="utf-8")
        assert editing.main([str(path), "cache", "photos"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and met in err and recorded["lines"][0].strip() in err and "by hand" in err
