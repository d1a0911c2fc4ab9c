"""`python scripts/precache.py CONFIG` is `latentcache precache CONFIG`."""

from __future__ import annotations

import sys

from latentcache.cli.app import main

if __name__ == "__main__":
    sys.exit(main(["precache", *sys.argv[1:]]))
