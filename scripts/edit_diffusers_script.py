"""Edit a copy of diffusers' train_text_to_image_sdxl.py or train_text_to_image_lora_sdxl.py to train from a cache.

`python scripts/edit_diffusers_script.py train_text_to_image_lora_sdxl.py cache/mine photos > train_from_cache.py`
replaces the code that decodes and encodes images and captions by the samples of the manifest `photos`. It replaces
whole lines, which it finds by their text. If a release of diffusers has other lines, it writes nothing, names the line
that it cannot find, and exits with 2. The edited script takes the same arguments. It ignores those about the dataset,
but still requires one: give `--train_data_dir .`.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple


class Edit(NamedTuple):
    """Replace the lines from `first` up to, but not including, `end` with `text`. Both are whole, indented lines."""

    first: str
    end: str
    text: str = ""


DATA = "    # Get the datasets: you can either provide your own training and evaluation files (see below)"
STEPS = "    # Scheduler and math around the number of training steps."
TIME_IDS = Edit(
    "                # time ids",
    "                # Predict the noise residual",
    "                # The target size is the bucket: (args.resolution, args.resolution) only if it is square.\n"
    "                add_time_ids = time_ids(batch, device=accelerator.device)\n\n",
)
IMPORTS = """    from latentcache import LatentDataset
    from latentcache.integrations.diffusers import PrecomputedDataset, data_loader, time_ids

"""

EDITS = {
    "train_text_to_image_sdxl.py": (
        Edit("    # Load the tokenizers", "    # Load scheduler and models"),
        Edit("    text_encoder_one = text_encoder_cls_one.from_pretrained(", "    vae_path = ("),
        Edit("    vae = AutoencoderKL.from_pretrained(", "    unet = UNet2DConditionModel.from_pretrained("),
        Edit("    # Freeze vae and text encoders.", "    # Set unet as trainable."),
        Edit(
            "    # Move unet, vae and text_encoder to device and cast to weight_dtype", "    # Create EMA for the unet."
        ),
        Edit(
            DATA,
            STEPS,
            f"""{IMPORTS}    precomputed_dataset = PrecomputedDataset(
        LatentDataset(CACHE, MANIFEST, caption_dropout=args.proportion_empty_prompts)
    )
    train_dataloader = data_loader(precomputed_dataset, args.train_batch_size, seed=args.seed or 0)

""",
        ),
        TIME_IDS,
    ),
    "train_text_to_image_lora_sdxl.py": (
        Edit(
            "    if args.pretrained_vae_model_name_or_path is None:",
            "    if args.enable_npu_flash_attention:",
            """    # The VAE and the text encoders stay on the CPU: only sample images and checkpoints need them.
    if args.train_text_encoder:
        raise ValueError("the embeddings come from a cache: remove --train_text_encoder")
    if args.pretrained_vae_model_name_or_path is not None:
        vae.to(dtype=weight_dtype)
    text_encoder_one.to(dtype=weight_dtype)
    text_encoder_two.to(dtype=weight_dtype)

""",
        ),
        Edit(
            DATA,
            STEPS,
            f"""{IMPORTS}    train_dataset = PrecomputedDataset(LatentDataset(CACHE, MANIFEST), dtype=weight_dtype)
    train_dataloader = data_loader(train_dataset, args.train_batch_size, seed=args.seed or 0)

""",
        ),
        Edit(
            "                # Convert images to latent space",
            "                # Sample noise that we'll add to the latents",
            '                model_input = batch["model_input"]\n\n',
        ),
        TIME_IDS,
        Edit(
            "                prompt_embeds, pooled_prompt_embeds = encode_prompt(",
            '                unet_added_conditions.update({"text_embeds": pooled_prompt_embeds})',
            '                prompt_embeds = batch["prompt_embeds"]\n'
            '                pooled_prompt_embeds = batch["pooled_prompt_embeds"]\n',
        ),
    ),
}
"""Script -> its edits, in the order of its lines."""


def edited(source: str, name: str, cache: str, manifest: str) -> str:
    """The edited text of the script `name`. Raises ValueError, naming the line, if a line is not found once."""
    done = ""
    for edit in EDITS[name]:
        kept, source = divided(source, edit.first, name)
        _, source = divided(source, edit.end, name)
        done += kept + edit.text.replace("CACHE", repr(cache)).replace("MANIFEST", repr(manifest))
    return done + source


def divided(source: str, line: str, name: str) -> list[str]:
    """What precedes a line, which must occur exactly once, and the rest with that line."""
    parts = re.split(rf"^(?={re.escape(line)}\r?$)", source, flags=re.MULTILINE)
    if len(parts) != 2:
        met = f"{len(parts) - 1} lines" if parts[1:] else "no line"
        raise ValueError(
            f"{name}: {met} after the last edit read {line.strip()!r}, but exactly one must: this release of diffusers "
            "has another script, so edit it by hand as docs/guide/diffusers.md describes"
        )
    return parts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path, help=f"a copy of {' or '.join(EDITS)}, with that name")
    parser.add_argument("cache", help="directory of the cache")
    parser.add_argument("manifest", help="name of the dataset in the config that was precached")
    options = parser.parse_args(arguments)
    if options.script.name not in EDITS:
        parser.error(f"{options.script.name} is not supported; give {' or '.join(EDITS)}")
    try:
        source = options.script.read_text(encoding="utf-8")
        sys.stdout.write(edited(source, options.script.name, options.cache, options.manifest))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
