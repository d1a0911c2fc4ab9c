"""The whole workflow on real photos: install, precache, edit a caption, precache again, train, validate.

The second precache encodes only the edited caption. The first validation encodes its photos, which are not cached yet.
At the end the losses of the trained and the untrained model are compared. `--json` prints one document. The photos come
with scikit-image, and the package includes a tiny SDXL that was trained on them: nothing but packages is downloaded.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
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
EDITED = "chelsea.png"
"""The photo whose caption is edited before the second precache."""
HELD_OUT = {
    "brick.png": ["a brick wall, black and white"],
    "grass.png": ["grass, black and white"],
    "gravel.png": ["gravel, black and white"],
}
"""The photos of the validation set."""


def copy_photos(folder: Path) -> None:
    """Copy photos and captions into `folder`, laid out like a user's dataset. Existing files are kept.

    The held-out photos go into `<folder>-held-out`.
    """
    found = importlib.util.find_spec("skimage")  # only its files are needed, not its code or dependencies
    assert found is not None and found.submodule_search_locations, "bootstrap.py installs scikit-image"
    data = Path(found.submodule_search_locations[0], "data")
    for place, photos in ((folder, CAPTIONS), (folder.with_name(f"{folder.name}-held-out"), HELD_OUT)):
        place.mkdir(parents=True, exist_ok=True)
        for name, captions in photos.items():
            photo = place / name
            if not photo.exists():
                shutil.copy2(data / name, photo)
                photo.with_suffix(".txt").write_text("\n".join(captions) + "\n", encoding="utf-8")


def edit_caption(file: Path) -> str:
    """Write a caption that no earlier quickstart has cached. Returns it."""
    first, _, take = file.read_text(encoding="utf-8").strip().partition(", take ")
    caption = f"{first}, take {int(take or 1) + 1}"
    file.write_text(caption + "\n", encoding="utf-8")
    return caption


def untrained_loss(config: Config) -> dict[str, Any]:
    """Validate the untrained model, without making images."""
    from latentcache import validate

    settings = config.validation.model_copy(update={"prompts": ()})
    done = validate(config.model_copy(update={"validation": settings}))
    return done.report.to_json(done.paths.folder)


def read_back(path: Path, name: str) -> list[dict[str, Any]]:
    """Read a cached dataset once in batches, as a training loop does."""
    from latentcache import BucketBatchSampler, LatentDataset, LatentLoader

    sampler = BucketBatchSampler(LatentDataset(path, name, flips=True), batch_size=4, seed=1)
    with LatentLoader(sampler, device="cpu", scaled=True) as loader:
        return [{"latents": [*batch["latents"].shape], "sample_id": batch["sample_id"]} for batch in loader]


def run(config: Config) -> dict[str, Any]:
    """Run the workflow. Returns the results as one document."""
    from train_lora import Options, train

    from latentcache import run_precache

    photos, cache = config.datasets[0], Path(config.cache.path)
    folder = cache.with_name("quickstart-lora")
    copy_photos(photos.source.path)
    # Without the held-out set, so that the first validation has to encode it.
    training_only = config.model_copy(update={"datasets": (photos,)})
    reports = [run_precache(training_only)]
    caption = edit_caption((photos.source.path / EDITED).with_suffix(".txt"))
    reports.append(run_precache(training_only))
    batches = read_back(cache, photos.name)
    shutil.rmtree(folder, ignore_errors=True)  # left by an earlier quickstart
    training = train(config, Options(steps=40, validate_every=20, learning_rate=2e-3, out=folder))
    validations = training.pop("validations")
    last = validations[-1]
    return {
        "passes": [report.to_json() for report in reports],
        "edited": {"photo": EDITED, "caption": caption},
        "batches": batches,
        "training": training,
        "untrained": untrained_loss(config),
        "validations": validations,
        "files": {"grid": last["grid"], "plot": last["plot"], "metrics": f"{last['folder']}/metrics.json"}
        | {name: training[name] for name in ("lora", "checkpoint")},
    }


def to_text(document: dict[str, Any]) -> str:
    """The document as text."""
    first, second = document["passes"]
    edited, batches, training = document["edited"], document["batches"], document["training"]
    untrained, trained = document["untrained"], document["validations"][-1]
    before, after = (each["loss_by_sample"]["held-out"] for each in (untrained, trained))
    lower, change = sum(after[name] < before[name] for name in before), 100 * (trained["loss"] / untrained["loss"] - 1)
    command = Path(sys.executable).with_name("latentcache")
    shown = command.relative_to(bootstrap.ROOT) if command.is_relative_to(bootstrap.ROOT) else command
    files = "\n".join(f"{name}: {path}" for name, path in document["files"].items() if path)
    return f"""\
precache: {first["num_samples"]} photos, {first["num_hits"]} entries found, {first["num_encoded"]} encoded
edited the caption of {edited["photo"]}: {edited["caption"]!r}
precache: {second["num_hits"]} entries found, {second["num_encoded"]} encoded ({", ".join(second["misses_by_reason"])})
read back: {len(batches)} batches, the first with latents {batches[0]["latents"]}
trained a LoRA for {training["step"]} steps on {training["device"]}, without VAE and text encoders
validation loss, untrained {untrained["loss"]:.4f}, trained {trained["loss"]:.4f}: {change:+.1f} %
  It is lower for {lower} of {len(before)} photos that were not trained on. Noise and timesteps are equal, so the
  difference is due to the training. If the loss had risen, the LoRA would only know its own photos.
{files}
next, with photos of your own:
  {shown} init ~/photos                   # reports what it finds and writes photos.yaml
  {shown} precache photos.yaml --dry-run  # what would be encoded, and its size in bytes"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    bootstrap.inside(bootstrap.QUICKSTART)

    # Hides their notes about optional packages; errors are still shown.
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "DIFFUSERS_VERBOSITY": "error"}

    from latentcache import load_config

    os.chdir(bootstrap.ROOT)
    document = run(load_config("configs/quickstart.yaml"))
    print(json.dumps(document) if arguments.json else to_text(document))
    return 1 if any(done["num_refused"] for done in document["passes"]) else 0


if __name__ == "__main__":
    sys.exit(main())
