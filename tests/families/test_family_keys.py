"""Every family: what changes its keys, what is stored without padding, and the formats that its models come in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.family_runs import TEXTS, FamilyRun, family_config, loaded_models
from helpers.tiny_models import tiny_encoders, tiny_folder, without_torchvision

from latentcache.config import ModelConfig
from latentcache.errors import ConfigError
from latentcache.families import FAMILIES, family_named
from latentcache.families.base import MASK, Family
from latentcache.families.clip import ClipFamily
from latentcache.identity import caption_digest
from latentcache.models.files import family_of
from latentcache.models.model_loader import ModelLoader, Models
from latentcache.models.vae import encode_images
from latentcache.precache.encodings import choose_encodings
from latentcache.precache.preparation import TextKeys
from latentcache.precache.run import run_precache
from latentcache.precache.workspace import Workspace

pytestmark = pytest.mark.extended


def text_key(models: Models, folder: Path, text: str = TEXTS[1], *, negative: bool = False, **settings: Any) -> str:
    made = choose_encodings(family_config(folder, **settings), models, {})
    return TextKeys(models.family, models.tokenizers, made.negative if negative else made.text, "").key(text)


def test_entries_have_the_rows_of_their_own_text(run: FamilyRun) -> None:
    family, recipe, cached = run.family, run.encodings.text.settings, run.batch(TEXTS)
    trimmed = [name for name in family.fields if family.padding(name, recipe) is not None]
    assert bool(trimmed) == (family.can_drop_padding and not recipe.get("keeps_padding", True))
    live = family.encode_text(run.parts, run.tokenized(TEXTS), recipe)
    for name in trimmed:
        lengths = live[name + MASK].sum(1).tolist()
        if family.fields[name].has_rows:
            assert len(set(lengths)) == len(TEXTS) and max(lengths) < recipe.get("max_length", family.max_length)
        assert [run.cache.get(run.rows[text].captions[0].key).tensors[name].shape[0] for text in TEXTS] == lengths
        assert torch.equal(cached[name + MASK].sum(1), torch.tensor(lengths))


def changes_of(family: Family) -> dict[str, dict[str, Any]]:
    """Settings of `encode` that a family has, each changed."""
    changes: dict[str, Any] = {"dtype": {"text_dtype": "bfloat16"}, "stored": {"text_store_dtype": "float16"}}
    for setting, value in (("max_length", 150), ("padding", "keep"), ("clip_skip", 1)):
        try:
            changed = family.text_recipe(**{setting: value})
        except ConfigError:
            continue
        if changed != family.text_recipe():
            changes[setting] = {setting: value}
    return changes


@pytest.mark.parametrize("name", FAMILIES)
def test_each_setting_of_a_recipe_changes_the_key(name: str, tmp_path: Path) -> None:
    family = family_named(name)
    models = loaded_models(family, tiny_encoders(name))
    keys = {"as it is": text_key(models, tmp_path)}
    for change, settings in changes_of(family).items():
        keys[change] = text_key(models, tmp_path, **settings)
    keys["another text"] = text_key(models, tmp_path, TEXTS[0])
    for encoder in family.names("text_encoder"):
        parts = tiny_encoders(name)
        read = family.parts[encoder].weights
        next(weight for name, weight in parts[encoder].named_parameters() if name.startswith(read)).add_(1e-3)
        keys[f"another {encoder}"] = text_key(loaded_models(family, parts), tmp_path)
    if "clip_skip" in changes_of(family):
        # diffusers skips in positives.
        assert text_key(models, tmp_path, negative=True, clip_skip=1) == keys["as it is"]
    elif "max_length" in family.text_recipe():
        assert "max_length" in keys
    assert len(set(keys.values())) == len(keys), keys


def test_the_key_is_of_the_text_as_the_tokenizer_gets_it(run: FamilyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    family, models = run.family, run.models
    given: list[str] = []
    for name in family.names("tokenizer"):
        reader = type(getattr(run.parts[name], "tokenizer", run.parts[name]))

        def noted(self: Any, text: Any, *arguments: Any, call: Any = reader.__call__, **options: Any) -> Any:
            given.extend([text] if isinstance(text, str) else text)
            return call(self, text, *arguments, **options)

        monkeypatch.setattr(reader, "__call__", noted)
    tokens = family.tokenize(run.parts, TEXTS)
    if not isinstance(family, ClipFamily):  # which has its tokens by now
        given.clear()
        family.encode_text(run.parts, tokens, run.encodings.text.settings)
    # Krea 2 has its tokenizer read what follows the text apart.
    wholes = {first + second for first in given for second in ("", given[-1])}
    for text in TEXTS:
        assert family.rendered(run.parts, text) in wholes
        keys = TextKeys(family, models.tokenizers, run.encodings.text, "")
        assert keys.source(text) == caption_digest(family.rendered(run.parts, text))


@pytest.mark.parametrize(("name", "dtype"), [("z-image", "bfloat16"), ("flux", "float16")])
def test_loaded_encoders_give_in_half_precision_what_a_folder_gives(name: str, dtype: str, tmp_path: Path) -> None:
    """Rotary frequencies and T5's `wo` stay in float32. An encoder that was cast as a whole is another one."""
    family, cast, texts = family_named(name), tiny_encoders(name), list[dict[str, Mapping[str, torch.Tensor]]]()
    for encoder in family.names("text_encoder"):
        cast[encoder].to(getattr(torch, dtype))
    loaded = [loaded_models(family, parts) for parts in (tiny_encoders(name), cast)]
    for models in (ModelLoader(tiny_folder(name), family=family), *loaded):
        workspace = Workspace()
        run_precache(family_config(tmp_path, text_dtype=dtype), models=models, workspace=workspace)
        entries = [workspace.store.get(key) for key in workspace.store.keys()]
        texts.append({each.record.key: each.tensors for each in entries if each.record.kind == "text"})
    of_folder, of_loaded, of_cast = texts
    assert len(of_folder) > len(TEXTS) and of_loaded.keys() == of_folder.keys() and of_cast.keys().isdisjoint(of_folder)
    for key, tensors in of_folder.items():
        assert all(torch.equal(of_loaded[key][field], tensor) for field, tensor in tensors.items())


def test_recipes_of_two_families_differ() -> None:
    recipes = [tuple(family_named(name).text_recipe().items()) for name in FAMILIES]
    assert len(set(recipes)) == len(FAMILIES)


PAIRS = ("flux z-image", "qwen-image anima", "flux2 ernie-image", "ideogram4 flux2", "ideogram4 ideogram4-projected")


@pytest.mark.parametrize("pair", PAIRS)
def test_families_with_one_vae_share_latents(pair: str, tmp_path: Path) -> None:
    first, second = map(family_named, pair.split())
    parts, others = tiny_encoders(first.name), tiny_encoders(second.name, 1)
    models = [loaded_models(first, parts), loaded_models(second, {**others, "vae": parts["vae"]})]
    config = family_config(tmp_path, image_output="mean")  # what is stored by default differs
    encodings = [choose_encodings(config, each, {}).image for each in models]
    assert encodings[0] == encodings[1]
    assert choose_encodings(config, loaded_models(second, others), {}).image != encodings[0]


def test_a_diffusers_folder_gives_the_same(run: FamilyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    without_torchvision(monkeypatch, run.family)
    folder = tiny_folder(run.family.name)
    family, _ = family_of(ModelConfig(path=folder))
    if run.family.name not in ("qwen-image-21-edit", "anima-states"):
        assert family is run.family, "inferred from model_index.json"
    family = run.family
    models = ModelLoader(folder, family=family)
    assert choose_encodings(run.config, models, {}) == run.encodings
    recipe, parts = run.encodings.text.settings, models.text(torch.float32)
    live = family.encode_text(run.parts, family.tokenize(run.parts, TEXTS), recipe)
    loaded = family.encode_text(parts, family.tokenize(parts, TEXTS), recipe)
    assert live.keys() == loaded.keys() and all(torch.equal(live[name], loaded[name]) for name in live)
    pixels = ((run.pixels(TEXTS[0]) + 1) * 127.5).round().to(torch.uint8).movedim(1, -1)
    assert torch.equal(
        encode_images(models.vae(torch.float32), pixels, family), encode_images(run.parts["vae"], pixels, family)
    )
    for text in TEXTS:
        key = TextKeys(family, models.tokenizers, run.encodings.text, "").key(text, run.key_controls(text))
        assert key == run.rows[text].captions[0].key
