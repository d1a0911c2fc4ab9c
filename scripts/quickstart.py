"""The main job on real photos, from nothing: install, precache twice, read back. `--json` prints one document.

Uses the photos that come with scikit-image and a tiny SDXL built in code: nothing but the packages is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import bootstrap

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


def copy_photos(folder: Path) -> None:
    """Put the photos and their captions into `folder`, as a user's dataset would be. What is there stays."""
    import skimage

    folder.mkdir(parents=True, exist_ok=True)
    for name, captions in CAPTIONS.items():
        photo = folder / name
        if not photo.exists():
            shutil.copy2(Path(skimage.__file__).parent / "data" / name, photo)
            photo.with_suffix(".txt").write_text("\n".join(captions) + "\n", encoding="utf-8")


def read_back(path: Path) -> list[dict[str, object]]:
    """One pass over the cached set in batches, as a training loop reads it."""
    from torch.utils.data import DataLoader

    from latentcache import LatentDataset
    from latentcache.retrieve.sampler import BucketBatchSampler

    dataset = LatentDataset(path, flips=True)
    sampler = BucketBatchSampler(dataset, batch_size=4, seed=1)
    shown = []
    for batch in DataLoader(dataset, batch_sampler=sampler):
        placed = dataset.place(batch, device="cpu", scaled=True)
        tensors = ("latents", "prompt_embeds", "pooled_prompt_embeds", "add_time_ids")
        shown.append({name: list(placed[name].shape) for name in tensors} | {"sample_id": placed["sample_id"]})
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    bootstrap.inside()

    # Their notes on optional packages are not part of this story; errors still are.
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "DIFFUSERS_VERBOSITY": "error"}

    from latentcache import load_config, run_precache
    from latentcache.precache.progress import default_progress

    os.chdir(bootstrap.ROOT)
    config = load_config("configs/quickstart.yaml")
    copy_photos(config.datasets[0].source.path)
    reports = [run_precache(config, progress=default_progress()) for _ in range(2)]
    batches = read_back(config.cache.path)
    if arguments.json:
        print(json.dumps({"passes": [report.to_json() for report in reports], "batches": batches}))
    else:
        for number, report in enumerate(reports, 1):
            print(f"--- precache, pass {number}\n{report.to_text()}\n")
        print(f"--- read back: {len(batches)} batches")
        for batch in batches:
            print(f"latents {batch['latents']}, prompt_embeds {batch['prompt_embeds']}: {batch['sample_id']}")
    return 1 if any(report.num_refused for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
