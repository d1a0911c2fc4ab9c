"""Run the command line: `python -m latentcache`."""

import sys

from latentcache.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
