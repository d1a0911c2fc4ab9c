"""`latentcache init`: writes a first config for a folder of images, and reports what is in the folder."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from cyclopts import Parameter

from latentcache.cli.options import AsJson
from latentcache.cli.output import DONE
from latentcache.config import DatasetConfig
from latentcache.config_file import near_name, parse_config
from latentcache.errors import ConfigError, ImageRefused
from latentcache.families import DEFAULT, DEFAULT_REPOSITORY
from latentcache.types import Refusal
from latentcache.utils.durable_files import expanded
from latentcache.utils.wording import MAX_NAMED, counted, first_of

REPEATS = re.compile(r"([1-9][0-9]{0,5})_(.+)")
"""A folder name in kohya's style: `10_cats`."""
CAPTION_EXTENSIONS = (".txt", ".caption")
"""Extensions of caption files. The first one is assumed if no image has a caption."""
CLIP_TOKENS = 75
CLIP_PIECES = re.compile(r"[^\W\d_]+|\d|(?:[^\w\s]|_)+")
"""Pieces of text that CLIP's tokenizer never merges: each is at least one token."""
BUCKETS = {
    None: "{area: 1048576}  # maximum number of pixels: 1024 * 1024",
    "kohya": "{rule: kohya, resolution: 1024, max_side: 2048}  # resolution and max_bucket_reso of your training",
    "onetrainer": "{rule: onetrainer, resolution: 1024}  # resolution of your training",
}
HEAD = f"""# By `latentcache init`; configs/{DEFAULT}.yaml shows every setting. Paths are relative to where you run it.
cache: {{path: cache/{DEFAULT}}}  # datasets and runs can share one cache
datasets:
"""
DATASET = """  - name: '{name}'  # {num_samples} images, {num_bare} without a caption
    repeats: {repeats}  # how often an epoch visits each image
    source: {source}  # each line of cat{extension} is a caption of cat.jpg; `kind: imagefolder` for metadata.jsonl
    buckets: {buckets}
"""
TAIL = f"""model: {{path: {DEFAULT_REPOSITORY}}}  # or a diffusers folder, or a .safetensors file
encode: {{store_dtype: float16}}  # half the size of float32
"""
NOTES = {
    "buckets": "buckets, height x width",
    "without_caption": "no caption: trained with an empty one",
    "captions_alone": "caption without an image: was the image renamed?",
    "cut_captions": f"caption of more than {CLIP_TOKENS} words and signs, which CLIP truncates; precache may find more",
    "refused": "refused",
}


def init(
    photos: Path,
    config: Path | None = None,
    *,
    trainer: Annotated[Literal["kohya", "onetrainer"] | None, Parameter(name="--for")] = None,
    as_json: AsJson = False,
) -> int:
    """Write a first config for a folder of images, and report what is in the folder.

    Args:
        photos: The folder. Each subfolder named like `10_cats` becomes a dataset with that many repeats.
        config: The .yaml file to write. Existing files are never overwritten. Default: NAME.yaml in the current folder.
        trainer: Use the buckets of this trainer. Default: those of latentcache.
    """
    from latentcache.dataset.samples import is_image, walk

    photos = expanded(photos)
    config = config or Path(f"{near_name(photos.resolve().name) or 'photos'}.yaml")
    if config.exists() or config.suffix not in (".yaml", ".yml"):
        problem = "already exists" if config.exists() else "does not end in .yaml"
        raise ConfigError(f"{problem}; `latentcache init PHOTOS OTHER.yaml` writes OTHER.yaml", source=str(config))
    # The datasets report what cannot be read.
    walked = [found for found in walk(str(photos)) if not isinstance(found, Refusal)]
    files = [f"{folder}/{name}".lstrip("/") for folder, names in walked for name in names]
    tops = [top for top in dict.fromkeys(folder.partition("/")[0] for folder, _ in walked) if REPEATS.fullmatch(top)]
    text, found = HEAD, dict[str, Any]()
    for top in tops or [""]:
        folder = photos / top
        match = REPEATS.fullmatch(folder.resolve().name)
        name = near_name(match[2] if match else folder.resolve().name) or "photos"
        taken, again = set(map(str.lower, found)), (f"{name[:56]}-{number}" for number in count(len(found) + 1))
        name = next(each for each in chain([name], again) if each.lower() not in taken)
        begin = f"{top}/" if top else ""
        own = [file.removeprefix(begin) for file in files if file.startswith(begin)]
        (extension, alone), buckets = _captions_among(own), BUCKETS[trainer]
        source = {"path": folder.as_posix()} | ({} if extension == ".txt" else {"caption_extension": extension})
        settings = {"name": name, "repeats": match[1] if match else 1, "source": source}
        dataset = DatasetConfig.model_validate(settings | {"buckets": yaml.safe_load(buckets)})
        found[name] = has = _look(dataset) | {"captions_alone": alone}
        flow = yaml.safe_dump(source, default_flow_style=True, width=1 << 20, allow_unicode=True).strip()
        filled = {"name": name, "source": flow, "num_bare": len(has["without_caption"]), "buckets": buckets}
        text += DATASET.format_map(has | filled | {"extension": extension})
    parse_config(yaml.safe_load(text + TAIL), source=str(config))
    with config.open("x", encoding="utf-8") as file:
        file.write(text + TAIL)
    others = [file for file in files if tops and is_image(file) and file.partition("/")[0] not in tops]
    name = shlex.quote(str(config))
    steps = [f"latentcache precache {name} --dry-run", f"latentcache precache {name}"]
    for manifest, has in found.items() if trainer == "kohya" else ():
        steps.append(f"latentcache export kohya {shlex.quote(has['path'])} --config {name} --manifest {manifest}")
    told = {"config": str(config), "datasets": found, "left_out": others, "next": steps}
    print(json.dumps(told) if as_json else "\n".join(_sentences(told)))
    return DONE


def _sentences(told: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that say what the JSON document says."""
    for name, has in told["datasets"].items():
        yield f"{name}: {counted(has['num_samples'], 'image')} in {has['path']}; repeats: {has['repeats']}"
        for which, note in NOTES.items():
            what = has[which]
            if names := [f"{each} ({what[each]})" for each in what] if isinstance(what, dict) else what:
                yield f"  {note} ({len(names):,}): {first_of(names[:MAX_NAMED], len(names))}"
    if others := told["left_out"]:
        named = first_of(others[:MAX_NAMED], len(others))
        yield f"{counted(len(others), 'image')} left out, not in a folder with repeats: {named}. To include them,"
        yield f"  move them into a folder such as 1_rest, delete {told['config']}, and run init again"
    yield from (f"wrote {told['config']}. Check it, then run", *(f"  {step}" for step in told["next"]))


def _captions_among(files: Sequence[str]) -> tuple[str, list[str]]:
    """Return the most common caption extension, and the caption files with it that have no image."""
    from latentcache.dataset.samples import is_image

    images = {os.path.splitext(file)[0] for file in files if is_image(file)}
    found = {
        extension: {os.path.splitext(file)[0]: file for file in files if file.lower().endswith(extension)}
        for extension in CAPTION_EXTENSIONS
    }
    extension = max(found, key=lambda each: len(images & found[each].keys()))
    return extension, sorted(file for stem, file in found[extension].items() if stem not in images)


def _look(dataset: DatasetConfig) -> dict[str, Any]:
    """Return what a dataset contains, under the names in NOTES. Raises DatasetError if it has no images."""
    from latentcache.dataset.bucket_rules import BucketRule
    from latentcache.dataset.images import probe
    from latentcache.dataset.sources import open_source

    source, rule = open_source(dataset.source), BucketRule(dataset.buckets)
    sizes, refused, bare, cut = Counter[str](), dict[str, str](), list[str](), list[str]()
    samples = list(source.samples())
    for sample in samples:
        if isinstance(sample, Refusal):
            refused[sample.sample_id] = sample.reason
            continue
        bare += [] if sample.has_caption else [sample.sample_id]
        # Ignore apostrophes: the tokenizer merges some with the letters that follow.
        lengths = [len(CLIP_PIECES.findall(caption.replace("'", ""))) for caption in sample.captions]
        cut += [sample.sample_id] if max(lengths) > CLIP_TOKENS else []
        try:
            geometry = rule.geometry(probe(source.read(sample), sample.path, dataset.images))
            sizes[str(geometry.target_size if geometry else "no-bucket")] += 1
        except ImageRefused as error:
            refused[sample.sample_id] = error.reason
    where = {"path": dataset.source.path.as_posix(), "repeats": dataset.repeats, "num_samples": len(samples)}
    return where | {"buckets": dict(sizes), "without_caption": bare, "cut_captions": cut, "refused": refused}
