"""What is particular about a family is in its file: no other module of the core names one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import latentcache
from latentcache.families import DEFAULT, DEFAULT_REPOSITORY, FAMILIES, family_named

PACKAGE = Path(latentcache.__file__).parent
MAY_NAME = ("families", "integrations", "interop/formats")
"""Folders about families, and about other people's programs and files."""
SUFFIXES = {".py", ".html", ".css", ".js", ".json", ".yaml", ".txt"}
SCRIPT = re.compile(r"\btrain_\w+\.py\b")
"""Scripts of diffusers, whose rules are cited."""
NAMES = re.compile(
    # As words: digits, dashes, dots and underscores end one. `wan` and `chroma` are words of the language too.
    r"(?<![a-z])(?:sdxl|sd[ -]?(?:1\.?5|2\.?[01]|3\.?5?)|stable[ _-]?diffusion|flux|kontext|z[ _-]?image|qwen|krea"
    r"|anima|ernie|ideogram)(?![a-z])"
    # And as parts of names of classes.
    r"|(?-i:Sdxl|SDXL|StableDiffusion|Flux(?![a-z])|ZImage|Qwen|Krea|Ernie|Ideogram|Anima(?![a-z])|Wan(?![a-z])|Chroma(?![a-z]))"
    r"|(?-i:(?<![A-Za-z])wan(?![A-Za-z]))",
    re.IGNORECASE,
)


def texts() -> list[tuple[str, str]]:
    found = []
    for path in sorted(PACKAGE.rglob("*")):
        name = path.relative_to(PACKAGE)
        if path.suffix in SUFFIXES and not name.as_posix().startswith((*MAY_NAME, "models/tiny_photos")):
            found.append((name.as_posix(), SCRIPT.sub("", path.read_text(encoding="utf-8"))))
    return found


def test_no_module_names_a_family() -> None:
    assert len(texts()) > 100
    found = [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for name, text in texts()
        for match in NAMES.finditer(text)
    ]
    if found:
        pytest.fail("What these say of a family belongs into its file:\n" + "\n".join(found), pytrace=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_names_are_recognised(name: str) -> None:
    """A new family must be added to the pattern."""
    family = family_named(name)
    for text in (f'family == "{name}"', family.pipeline_name, f"the file of {family.repositories[0]}"):
        assert NAMES.search(text) or name == "chroma", text


def test_the_default_repository_is_the_default_family_s() -> None:
    assert family_named(DEFAULT).repositories[0] == DEFAULT_REPOSITORY
