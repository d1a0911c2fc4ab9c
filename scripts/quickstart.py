"""The main job on real photos, from nothing: install, precache twice, read back, train a LoRA, validate it twice.

The first validation finds its photos not cached and encodes them; the second finds them cached. `--json` prints one
document. Uses the photos that come with scikit-image and the package's tiny SDXL, which knows them: nothing but the
packages is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bootstrap

if TYPE_CHECKING:
    from latentcache import Config

CAPTIONS = {
    "astronaut.png": ["a photo of an astronaut", "portrait of a smiling woman in an orange space suit"],
    "camera.png": ["a black and white photo of a man with a camera on a tripod"],
    "chelsea.png": ["a close-up photo of a tabby cat"],
    "coffee.png": ["a cup of coffee on a wooden table"],
    "coins.png": ["old coins on a dark cloth, black and white"],
    "hubble_deep_field.jpg": ["galaxies in deep space"],
    "ihc.png": ["stained tissue under a microscope"],
    "moon.png": ["the surface of the moon, black and white"],
    "motorcycle_left.png": ["a red motorcycle in a garage"],
    "motorcycle_right.png": ["a red motorcycle in a garage"],
    "retina.jpg": ["the retina of an eye"],
    "rocket.jpg": ["a rocket on its launch pad at night"],
}
HELD_OUT = {
    "brick.png": ["a brick wall, black and white"],
    "grass.png": ["grass, black and white"],
    "gravel.png": ["gravel, black and white"],
}
"""The photos of the validation set."""


def copy_photos(folder: Path) -> None:
    """Put photos and captions into `folder`, laid out as a user's dataset, and keep what is there.

    The held-out photos go into the folder next to it, `<folder>-held-out`.
    """
    import skimage

    for place, photos in ((folder, CAPTIONS), (folder.with_name(f"{folder.name}-held-out"), HELD_OUT)):
        place.mkdir(parents=True, exist_ok=True)
        for name, captions in photos.items():
            photo = place / name
            if not photo.exists():
                shutil.copy2(Path(skimage.__file__).parent / "data" / name, photo)
                photo.with_suffix(".txt").write_text("\n".join(captions) + "\n", encoding="utf-8")


def read_back(path: Path, name: str) -> list[dict[str, Any]]:
    """One pass over a cached set in batches, as a training loop reads it."""
    from torch.utils.data import DataLoader

    from latentcache import BucketBatchSampler, LatentDataset

    dataset = LatentDataset(path, name, flips=True)
    sampler = BucketBatchSampler(dataset, batch_size=4, seed=1)
    shown = []
    for batch in DataLoader(dataset, batch_sampler=sampler):
        placed = dataset.place(batch, device="cpu", scaled=True)
        tensors = ("latents", "prompt_embeds", "pooled_prompt_embeds", "add_time_ids")
        shown.append({name: list(placed[name].shape) for name in tensors} | {"sample_id": placed["sample_id"]})
    return shown


def run(config: Config) -> dict[str, Any]:
    """The whole job, as one document."""
    from train_lora import Options, train

    from latentcache import run_precache

    photos, cache = config.datasets[0], Path(config.cache.path)
    folder = cache.with_name("quickstart-lora")
    copy_photos(photos.source.path)
    # The held-out set is left out, so that the first validation has to encode it.
    training_only = config.model_copy(update={"datasets": (photos,)})
    reports = [run_precache(training_only) for _ in range(2)]
    batches = read_back(cache, photos.name)
    shutil.rmtree(folder, ignore_errors=True)  # an earlier quickstart's
    training = train(config, Options(steps=20, validate_every=10, learning_rate=1e-3, out=folder))
    validations = training.pop("validations")
    last = validations[-1]
    return {
        "passes": [report.to_json() for report in reports],
        "batches": batches,
        "training": training,
        "validations": validations,
        "files": {"grid": last["grid"], "plot": last["plot"], "metrics": f"{last['folder']}/metrics.json"}
        | {name: training[name] for name in ("lora", "checkpoint")},
    }


def to_text(document: dict[str, Any]) -> str:
    """The document for people."""
    lines = []
    for number, done in enumerate(document["passes"], 1):
        counts = ", ".join(f"{name} {done[f'num_{name}']}" for name in ("samples", "hits", "misses", "encoded"))
        lines.append(f"precache, pass {number}: {counts}, refused {done['num_refused']}")
    lines.append(f"read back: {len(document['batches'])} batches")
    for batch in document["batches"]:
        lines.append(f"  latents {batch['latents']}, prompt_embeds {batch['prompt_embeds']}: {batch['sample_id']}")
    training = document["training"]
    first, last = (statistics.fmean(part) for part in (training["losses"][:5], training["losses"][-5:]))
    loss = f"mean loss of the first and last five {first:.4f}, {last:.4f}"  # one step's loss is mostly its timestep
    lines.append(f"trained {training['step']} steps on {training['device']}: {loss}")
    for found in document["validations"]:
        figures = f"loss {found['loss']:.4f}, {found['num_filled']} entries were not cached and encoded first"
        lines.append(f"validation at step {found['step']}: {figures}")
    return "\n".join((*lines, *(f"{name}: {path}" for name, path in document["files"].items() if path)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    bootstrap.inside()

    # Their notes on optional packages are not part of this story; errors still are.
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "DIFFUSERS_VERBOSITY": "error"}

    from latentcache import load_config

    os.chdir(bootstrap.ROOT)
    document = run(load_config("configs/quickstart.yaml"))
    print(json.dumps(document) if arguments.json else to_text(document))
    return 1 if any(done["num_refused"] for done in document["passes"]) else 0


if __name__ == "__main__":
    sys.exit(main())
