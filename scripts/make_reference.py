"""Write docs/reference/: pages on the command line, config, errors and model families, from the code itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import bootstrap
from family_page import families_page

REFERENCE = bootstrap.ROOT / "docs" / "reference"
GENERATED = "<!-- Written by scripts/make_reference.py: change the code, and run it again. -->"


def pages() -> dict[str, str]:
    """File name -> text of each generated page."""
    return {
        name: "\n".join((GENERATED, "", *lines)).rstrip() + "\n"
        for name, lines in {
            "cli.md": cli_page(),
            "config.md": config_page(),
            "errors.md": errors_page(),
            "families.md": families_page(),
        }.items()
    }


def cli_page() -> Iterator[str]:
    """Every command with its arguments and options."""
    from latentcache.cli.app import app

    yield from ("# Command line", "", "Every command takes `--help`. Exit codes: 0 done; 1 done, with damage")
    yield from ("or errors found; 2 could not run; 130 and 143 stopped by Ctrl-C or SIGTERM.", "")
    yield from ("With `--json` a command prints one JSON document on stdout, and everything else on stderr.", "")
    yield "A command about a cache takes the cache's directory, a config that names it, or `--cache.path DIR`."
    yield ""
    for name in names_in(app):
        yield from command_section(app[name], f"latentcache {name}", "##")


def names_in(command: Any) -> list[str]:
    """The commands of an app, or those of a command, sorted."""
    return sorted(name for name in command if not name.startswith("-"))


def command_section(command: Any, name: str, heading: str) -> Iterator[str]:
    """A command with its arguments and options, or with the commands that it has."""
    described = inspect.getdoc(command.default_command) if command.default_command is not None else command.help
    yield from (f"{heading} {name}", "", plain((described or "").partition("\nArgs:")[0]), "")
    for each in names_in(command):
        yield from command_section(command[each], f"{name} {each}", f"{heading}#")
    if command.default_command is None:
        return
    yield from ("| argument or option | meaning |", "|---|---|")
    has_settings = False
    for argument in command.assemble_argument_collection(parse_docstring=True):
        groups: Any = argument.parameter.group  # cyclopts has made a tuple of it
        if any(group.name in ("Settings", "Everyday settings") for group in groups):
            has_settings = True
        elif argument.show:
            all_names = [*argument.names]
            if argument.index is not None and all_names[0].startswith("--"):  # it may also go without its name
                all_names.insert(0, all_names[0].lstrip("-").upper())
            names = ", ".join(f"`{each}`" for each in all_names)
            yield f"| {names} | {plain(argument.parameter.help or '')} |"
    if has_settings:
        yield "| `--SECTION.SETTING` | Any scalar [setting](config.md). A dataset goes by its name or number. |"
    yield ""


def config_page() -> Iterator[str]:
    """Every setting with its type, default and meaning."""
    from latentcache.config import Config

    yield from ("# Config", "", "A config is a YAML, TOML or JSON file. A flag beats the file, and the file the")
    yield from ("default. Unknown settings and flags are errors with a suggestion.", "")
    yield "Every scalar setting is a flag (`--encode.batch_size 2`, `--datasets.my-photos.flip true`). `null` stands"
    yield from ("for no value.", "", "Relative paths are relative to the working directory.", "")
    yield from section_tables(Config, "")


def section_tables(section: Any, prefix: str) -> Iterator[str]:
    """One table for the plain settings of a section, then its subsections."""
    from pydantic_core import PydanticUndefined

    from latentcache.config_file import is_list, section_of, type_name

    rows, below = [], []
    for name, field in section.model_fields.items():
        child = section_of(field.annotation)
        if child is not None:
            below.append((child, f"{prefix}{name}.{'N.' if is_list(field.annotation) else ''}"))
            continue
        default = "required" if field.default is PydanticUndefined else f"`{as_yaml(field.default)}`"
        kind = f"`{type_name(field.annotation)}`".replace("|", r"\|")
        rows.append(f"| `{name}` | {kind} | {default} | {plain(field.description or '')} |")
    if rows:
        yield from (f"## {prefix.removesuffix('.')}", "", "| setting | type | default | meaning |", "|---|---|---|---|")
        yield from (*rows, "")
    for child, name in below:
        yield from section_tables(child, name)


def as_yaml(value: Any) -> str:
    """A default as it is written in a config."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return value or '""'
    return str(list(value)) if isinstance(value, tuple) else str(value)


def errors_page() -> Iterator[str]:
    """The tree of errors, and what each says."""
    from latentcache import errors

    yield from ("# Errors", "", "All are in `latentcache.errors`. A message names the thing, the value met, the value")
    yield from ("allowed and the next step; the parts are attributes too.", "")
    classes = [each for each in vars(errors).values() if isinstance(each, type) and each.__module__ == errors.__name__]
    yield from ("| error | is a | raised when | attributes |", "|---|---|---|---|")
    for error in classes:
        base = error.__bases__[0].__name__
        constructor = inspect.signature(error).parameters if "__init__" in vars(error) else {}
        names = ", ".join(f"`{name}`" for name in constructor if name not in ("message", "detail", "args", "kwargs"))
        yield f"| `{error.__name__}` | `{base}` | {plain(inspect.getdoc(error) or '')} | {names} |"


def plain(text: str) -> str:
    """A docstring on one line, safe in a table."""
    return " ".join(text.split()).replace("|", r"\|")


def main() -> None:
    bootstrap.inside()
    for name, text in pages().items():
        (REFERENCE / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
