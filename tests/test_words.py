"""The words that the glossary retired are gone from code, messages, tests and docs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SEARCHED = ("latentcache", "tests", "scripts", "examples", "configs", "docs")
NOT_SEARCHED = ("docs/glossary.md", "tests/test_words.py")


def retired(section: str = "Words that went") -> list[str]:
    """The left column of a table of the glossary."""
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    table = text.partition(f"## {section}\n")[2].partition("\n## ")[0]
    return [
        word
        for line in table.splitlines()
        if line.startswith("| `")
        for word in re.findall(r"`(.+?)`", line[: line.index("|", 1)])
    ]


def searched() -> Iterator[tuple[str, str]]:
    """Name and text of every file that people read."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "pyproject.toml"]
    for folder in SEARCHED:
        paths += [path for suffix in (".py", ".md", ".yaml") for path in (ROOT / folder).rglob(f"*{suffix}")]
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        if name not in NOT_SEARCHED:
            yield name, path.read_text(encoding="utf-8")


def test_the_glossary_lists_what_went() -> None:
    assert len(retired()) > 20


def test_no_module_has_a_retired_name() -> None:
    modules = {path.stem for path in (ROOT / "latentcache").rglob("*.py")}
    assert modules & set(retired("Modules that have another name")) == set()


def test_the_new_names_of_modules_exist() -> None:
    table = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").partition("## Modules that have")[2]
    names = set(re.findall(r"`(\w+/\w+)`", table))
    assert names and [name for name in names if not (ROOT / "latentcache" / f"{name}.py").exists()] == []


def test_retired_words_do_not_occur() -> None:
    # A phrase may be broken over two lines, of a comment too.
    phrases = "|".join(re.escape(word).replace(r"\ ", r"[\s#]+") for word in retired())
    pattern = re.compile(rf"(?<![\w-])(?:{phrases})(?![\w-])", re.IGNORECASE)
    found = [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for name, text in searched()
        for match in pattern.finditer(text)
    ]
    if found:
        pytest.fail("docs/glossary.md retired these words:\n" + "\n".join(found), pytrace=False)
