"""`python -m latentcache.doctor`: the checks of `latentcache doctor`, for any environment with torch 2.0 or newer.

Run it from a checkout where latentcache cannot be installed. Checks whose packages are missing are skipped with a note.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from latentcache.doctor.environment import diagnose
from latentcache.errors import LatentCacheError


def main() -> int:
    """Print the diagnosis. Exit code: 0 without errors, 1 with errors, 2 if a file cannot be read."""
    parser = argparse.ArgumentParser("python -m latentcache.doctor")
    parser.add_argument("--device", default="auto", help="the device to check: auto, cpu, cuda, cuda:1, ...")
    parser.add_argument("--cache.path", dest="cache_path", type=Path, help="a folder whose disk to check")
    parser.add_argument("--deepspeed", type=Path, help="a DeepSpeed config to check")
    parser.add_argument("--training", action="store_true", help="also train a tiny model for one step")
    parser.add_argument("--json", action="store_true", help="print one JSON document to stdout")
    given = vars(parser.parse_args())
    as_json = given.pop("json")
    try:
        diagnosis = diagnose(**given)
    except LatentCacheError as error:
        print(f"latentcache: {error}", file=sys.stderr)
        return 2
    print(json.dumps(diagnosis.to_json()) if as_json else diagnosis.to_text())
    return 0 if diagnosis.ok else 1


if __name__ == "__main__":
    sys.exit(main())
