"""The page docs/reference/families.md: what is stored of each family, from its declaration and its tiny model."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from latentcache.families.base import Family

SIDE = 1024
NUM_TOKENS = 40
BYTES = 2
"""Bytes of a value in float16 or bfloat16."""


def families_page() -> Iterator[str]:
    """One table of bytes, then a section for each family."""
    from latentcache.families import FAMILIES, family_named

    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from helpers.tiny_models import tiny_model

    families = [family_named(name) for name in FAMILIES]
    parts = {family.name: tiny_model(family.name) for family in families}
    yield from ("# Model families", "")
    yield "What is cached of each family, from its declaration in `latentcache/families/`. `model.family` names one."
    yield "Without it the pipeline in the folder's `model_index.json` says which it is. Latents are stored unscaled:"
    yield "the posterior's moments, or its mean where the family is trained with that. Texts are stored without padding"
    yield "where a batch that is padded again gives the same result to the last bit."
    yield from ("", "Bytes are those of the published models, in numbers of two bytes, for an image of")
    yield f"{SIDE}x{SIDE} pixels and a caption of {NUM_TOKENS} tokens; families of editing read it with a square image."
    yield from ("", "| family | latents | bytes | text | bytes | with padding | texts without padding |")
    yield "|---|---|---|---|---|---|---|"
    for family in families:
        latents, shapes = latent_shape(family), caption_shapes(family, parts[family.name])
        padded = padded_shapes(family, parts[family.name]) if "max_length" in family.text_recipe() else shapes
        more = " and the condition" if family.clip_condition else ""
        latent_bytes = math.prod(latents) * BYTES * (2 if more else 1)
        ratio = f" ({num_bytes(family, padded) / num_bytes(family, shapes):.0f} x)" if shapes != padded else ""
        yield (
            f"| `{family.name}` | {shape_text(latents)}{more} | {latent_bytes:,} | {shapes_text(shapes)} | "
            f"{num_bytes(family, shapes):,} | {num_bytes(family, padded):,}{ratio} | {exactness(family)} |"
        )
    for family in families:
        yield from ("", *section(family, families, parts))


def section(family: Family, families: list[Family], parts: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What the family declares."""
    yield from (f"## {family.name}", "", " ".join((inspect.getdoc(type(family)) or "").split()), "")
    yield from ("| | |", "|---|---|")
    yield f"| hub ids | {', '.join(f'`{each}`' for each in family.repositories)} |"
    names = (family.pipeline_name, *family.pipeline_names)
    yield f"| pipelines of diffusers | {', '.join(f'`{each}`' for each in names)} |"
    frozen = (
        f"`{name}` ({part.class_name}{', of some models' if part.optional else ''})"
        for name, part in family.parts.items()
    )
    yield f"| frozen parts | {', '.join(frozen)} |"
    yield f"| denoiser | `{family.denoiser}` ({family.denoiser_class}) |"
    yield f"| scaling of latents | {scaling_text(family, parts[family.name])} |"
    shared = [other.name for other in families if other is not family and shares_vae(family, other, parts)]
    names_shared = ", ".join(f"`{each}`" for each in shared)
    yield f"| latents shared with | {f'{names_shared}, where the weights of the VAE are equal' if shared else 'none'} |"
    for action, name in (("import", "imported from"), ("export", "exported to")):
        others = [] if action == "export" and family.text_reads_control else others_of(family, action)
        yield f"| {name} | {', '.join(others) or 'none'} |"
    recipe = ", ".join(f"`{name}: {value}`" for name, value in family.text_recipe().items())
    yield f"| recipe of a text, in its key | {recipe} |"
    yield f"| tokens at most | {family.text_recipe().get('max_length', 'any number')} |"
    yield f"| text encoders compute in | {family.text_dtype} on an accelerator |"
    yield f"| control images in training and validation | {'read' if family.reads_controls else 'refused'} |"
    pictured = f"captions of the validation set, with the {family.needed_picture} of their samples"
    yield f"| validation images of | {pictured if family.needed_picture else 'any prompts'} |"


def others_of(family: Family, action: str) -> list[str]:
    """The foreign formats that the command line can `import` or `export` for the family, by their names there."""
    from latentcache.interop.formats.webdataset import held_families
    from latentcache.interop.readers import layouts_of

    formats: dict[str, dict[str, Collection[str]]] = {
        "import": {name: layouts_of(name) for name in ("kohya", "simpletuner")},
        "export": {
            "kohya": layouts_of("kohya"),
            "musubi": layouts_of("musubi"),
            "webdataset": held_families(),
        },
    }
    return [f"`{name}`" for name, families in formats[action].items() if family.name in families]


def latent_shape(family: Family) -> tuple[int, ...]:
    """Shape of the stored latents. Moments have twice the channels."""
    rows = SIDE // family.latent.downscale
    frames = (1,) if family.latent.is_video else ()
    return (family.latent.channels * (2 if family.latent.draws else 1), *frames, rows, rows)


def padded_shapes(family: Family, parts: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of each text field with padding, in the published models."""
    shapes = family.text_shapes(parts, family.text_recipe())
    sizes = {name: field.features for name, field in family.fields.items()}
    if lacking := [name for name, size in sizes.items() if not size and len(shapes[name]) > 1]:
        raise SystemExit(f"{family.name}: declare the features of {', '.join(lacking)} in its TextField")
    return {name: (*shapes[name][: len(shapes[name]) - len(sizes[name])], *sizes[name]) for name in sizes}


def caption_shapes(family: Family, parts: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of each field of a caption with NUM_TOKENS tokens without padding, measured with the tiny model."""
    from latentcache.families.base import MASK

    recipe, shapes = family.text_recipe(), padded_shapes(family, parts)
    trimmed = [name for name in shapes if family.padding(name, recipe) is not None]
    if not trimmed:
        return shapes
    text = " ".join(["a"] * NUM_TOKENS)  # each of which is a token of the tiny tokenizers
    tokens = family.tokenize(parts, [text])
    if family.text_reads_control:
        tokens = family.tokenize_with_control(parts, [text], [[np.zeros((SIDE, SIDE, 3), np.uint8)]])
    made = family.encode_text(parts, tokens, recipe)
    return {
        name: (int(made[name + MASK].sum()), *shape[1:]) if name in trimmed else shape for name, shape in shapes.items()
    }


def exactness(family: Family) -> str:
    """Whether padding is dropped, and how a batch is padded again."""
    names, recipe = [name for name, field in family.fields.items() if field.has_rows], family.text_recipe()
    rules = [rule for name in names if (rule := family.padding(name, recipe)) is not None]
    if not rules:
        return "not exact: the denoiser attends to padding"
    [rule] = dict.fromkeys(rules)
    rows = "to the longest of the batch" if rule.length is None else f"to {rule.length} rows"
    where = f" before the last {rule.num_last} rows" if rule.num_last else ""
    return f"exact: padded again with {rule.value:g}{where}, {rows}"


def scaling_text(family: Family, parts: dict[str, Any]) -> str:
    """The rule; its numbers are read from the VAE."""
    from latentcache.models.vae import vae_facts

    scaling = vae_facts(parts[family.names("vae")[0]], family).scaling
    return {
        "factor": "`z * scaling_factor`" if scaling.shift_factor is None else "`(z - shift_factor) * scaling_factor`",
        "mean_std": "`(z - mean) * (1 / std)` for each channel",
        "divided": "`(z - mean) / std` for each channel",
        "batch_norm": "patches of 2x2 become channels, then `(z - mean) / std` for each",
    }[scaling.rule]


def shares_vae(one: Family, other: Family, parts: dict[str, dict[str, Any]]) -> bool:
    """Whether two families have VAEs of one class, with latents that are scaled alike, and nothing else in an entry."""
    from latentcache.models.vae import vae_facts

    first, second = (parts[family.name][family.names("vae")[0]] for family in (one, other))
    alike = type(first) is type(second) and one.clip_condition == other.clip_condition
    return alike and vae_facts(first) == vae_facts(second)


def num_bytes(family: Family, shapes: dict[str, tuple[int, ...]]) -> int:
    """Bytes of these fields."""
    recipe = family.text_recipe()
    sizes = {name: 4 if recipe.get(f"{name}_dtype") == "int32" else BYTES for name in shapes}
    return sum(math.prod(shape) * sizes[name] for name, shape in shapes.items())


def shapes_text(shapes: dict[str, tuple[int, ...]]) -> str:
    """`prompt_embeds` [40, 4096]."""
    return ", ".join(f"`{name}` {shape_text(shape)}" for name, shape in shapes.items())


def shape_text(shape: tuple[int, ...]) -> str:
    """[32, 128, 128]."""
    return f"[{', '.join(map(str, shape))}]"
