"""The command line: parse, call, print. Results go to stdout, logs and progress to stderr.

Exit codes: 0 success; 1 finished, but found damage or errors; 2 could not run; 130 or 143 stopped by a signal.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from cyclopts import App, CycloptsError, MissingArgumentError
from pydantic import ValidationError

import latentcache
from latentcache.cli import commands
from latentcache.cli.init_command import init
from latentcache.cli.interop_commands import export_app, import_app
from latentcache.cli.output import DONE, fail
from latentcache.cli.remote_commands import REMOTE_COMMANDS, SERVICE_COMMANDS
from latentcache.config_file import as_config_error
from latentcache.errors import ConfigError, LatentCacheError
from latentcache.utils.extras import naming_extras

logger = logging.getLogger("latentcache")

app = App(
    name="latentcache",
    help="A device-aware cache of VAE latents and text embeddings for diffusion fine-tuning.",
    version=latentcache.__version__,
    result_action="return_value",
    suppress_keyboard_interrupt=False,  # `main` handles it
)
for command in (init, *commands.COMMANDS, *SERVICE_COMMANDS, *REMOTE_COMMANDS):
    app.command(command)
app.command(import_app)
app.command(export_app)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # Show the errors of these packages, but not their notes about optional features.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    if isinstance(sys.stdout, TextIOWrapper):
        # A file name may not be encodable in the terminal; printing it must not lose a report.
        sys.stdout.reconfigure(errors="backslashreplace")
    as_json = "--json" in arguments
    try:
        _refuse_section_and_setting(arguments)
        with naming_extras():
            result = app(arguments, exit_on_error=False, print_error=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else DONE
    except (LatentCacheError, CycloptsError) as raised:
        error, cause = raised, raised.__cause__
        if isinstance(raised, CycloptsError) and isinstance(cause, ValidationError):  # a flag that names a section
            error = as_config_error(cause, "flags")
        # A section is not a flag.
        text = re.sub(r"Did you mean --(cache|model)\?$", r"Did you mean --\1.path?", str(error))
        step = ""  # the parser names only the argument
        if isinstance(raised, MissingArgumentError) and raised.command_chain:
            step = f" See `latentcache {' '.join(raised.command_chain)} --help`."
        print(f"latentcache: {text}{step}", file=sys.stderr)
        return fail(error, as_json, text)
    except KeyboardInterrupt:
        print("latentcache: interrupted; entries that were sealed are safe", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader closed the pipe. Python flushes stdout once more at exit: send that to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # SIGPIPE, which Windows does not define
    except Exception as error:
        about_paths = errno.EACCES, errno.ENAMETOOLONG
        if isinstance(error, OSError) and error.errno in about_paths and error.filename is not None:
            text = f"{error.filename}: {error.strerror}"
            print(f"latentcache: {text}", file=sys.stderr)
            return fail(error, as_json, text)
        # A bug. Python's exit code 1 would mean "finished, but found damage" here.
        logger.exception("this is a bug in latentcache; please report it")
        return fail(error, as_json)


def _refuse_section_and_setting(arguments: Sequence[str]) -> None:
    """Refuse `--datasets.a.mask alpha` together with `--datasets.a.mask.path masks`, which breaks the parser."""
    flags = {argument.partition("=")[0] for argument in arguments if argument.startswith("--datasets.")}
    for flag in sorted(flags):
        for other in sorted(flags):
            if other.startswith(f"{flag}."):
                raise ConfigError(f"{flag} and {other} exclude each other: give only one", source="flags")
