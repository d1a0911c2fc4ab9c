"""The command line: `latentcache`, or `python -m latentcache`."""

import sys

from latentcache.errors import ExtraMissingError
from latentcache.utils.extras import naming_extras


def main() -> int:
    """Run a command and return its exit code: 2 if the command line's own packages are not installed."""
    try:
        with naming_extras():
            from latentcache.cli.app import main as run
    except ExtraMissingError as error:
        print(f"latentcache: {error}", file=sys.stderr)
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
