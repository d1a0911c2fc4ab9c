"""Anima: two tokenizers, a conditioner behind the encoder or beside the denoiser, and a folder of modular blocks."""

from __future__ import annotations

import json
import shutil
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from helpers.family_runs import TEXTS, family_config
from helpers.tiny_models import randomised, save_diffusers_folder, tiny_encoders, tiny_folder, tiny_model

from latentcache import BucketBatchSampler, LatentCache, LatentDataset, LatentLoader
from latentcache.config import Config, ModelConfig
from latentcache.errors import ModelError
from latentcache.families import family_named
from latentcache.families.anima import Anima, conditioned
from latentcache.families.base import MASK
from latentcache.loading.choices import DropoutTo
from latentcache.models.denoiser import load_denoiser
from latentcache.models.model_loader import LoadedModels, ModelLoader
from latentcache.precache.run import run_precache

ANIMA, STATES = cast(Anima, family_named("anima")), family_named("anima-states")
F32 = torch.float32


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    return tiny_model("anima")


def encoded(parts: dict[str, Any], *texts: str) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        made = ANIMA.encode_text(parts, ANIMA.tokenize(parts, texts), ANIMA.text_recipe())
    return made["prompt_embeds"], made[f"prompt_embeds{MASK}"]


def test_an_empty_text_without_a_token_of_qwen3_has_the_rows_that_it_has_alone(parts: dict[str, Any]) -> None:
    """In a batch with others its rows of Qwen3 are all masked. Rows that are not stored are zeros."""
    embeds, mask = encoded(parts, *TEXTS, "")
    assert not embeds[~mask].any() and embeds[mask].abs().sum(-1).min() > 0
    alone, mask = encoded(parts, "")
    assert len(parts["tokenizer"]("").input_ids) == 0 and mask.sum() == 1 and torch.isfinite(alone).all()
    torch.testing.assert_close(embeds[-1:], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["tokenizer", "t5_tokenizer"])
def test_a_tokenizer_that_pads_on_the_left_is_refused(name: str, parts: dict[str, Any]) -> None:
    parts = {**parts, name: tiny_encoders("anima")[name]}
    parts[name].padding_side = "left"
    with pytest.raises(ModelError, match=f"{name}: it pads on the left.*Set its padding_side to 'right'") as caught:
        encoded(parts, *TEXTS)
    assert caught.value.part == name


def test_parts_that_lie_elsewhere_are_read_from_there(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    shutil.copytree(tiny_folder("anima"), model)
    other.mkdir()

    def place(part: str, **where: str) -> None:
        file = model / "modular_model_index.json"
        index = json.loads(file.read_text())
        index[part][-1] |= where
        file.write_text(json.dumps(index))

    for part in ("vae", "text_encoder", "t5_tokenizer"):
        (model / part).rename(other / f"its_{part}")
        place(part, pretrained_model_name_or_path=str(other), subfolder=f"its_{part}")
    found, expected = ModelLoader(str(model), family=ANIMA), LoadedModels(family=ANIMA, **tiny_encoders("anima"))
    for part in ANIMA.parts:
        assert found.identity(part, F32) == expected.identity(part, F32), part
    assert found.vae_facts() == expected.vae_facts()
    place("text_encoder", pretrained_model_name_or_path="someone/none")
    with pytest.raises(ModelError, match="someone/none is not on this machine") as caught:
        ModelLoader(str(model), family=ANIMA).text_encoders(F32)
    assert caught.value.part == "text_encoder"


def config_of(folder: Path, model: str = "", family: str = "anima-states") -> Config:
    return family_config(folder, {"model": {"path": model or tiny_folder("anima"), "family": family}})


@pytest.mark.parametrize("dropout_to", ["empty", "zeros"])
def test_dropped_captions(dropout_to: DropoutTo, tmp_path: Path, parts: dict[str, Any]) -> None:
    """A dropped caption is the empty text, whose row is not zero, or zeros in all rows, as OneTrainer has it."""
    config = config_of(tmp_path, family="anima")
    assert run_precache(config).num_refused == 0
    dataset = LatentDataset(config.cache, "photos", caption_dropout=0.5, dropout_to=dropout_to)
    loader = LatentLoader(BucketBatchSampler(dataset, 3, seed=0), device="cpu", dtype=F32, scaled=True)
    seen: dict[str, int] = {}
    for batch in islice(loader.forever(), 8):
        rows = zip(batch["caption"], batch["prompt_embeds"], batch[f"prompt_embeds{MASK}"], strict=True)
        for text, embeds, mask in rows:
            if text or dropout_to == "empty":
                [expected], [own] = encoded(parts, text)
                # It was encoded with others, and where its file lies in memory decides how a matrix is multiplied.
                assert torch.equal(mask, own) and (embeds - expected).abs().max() <= 1e-5
            else:
                assert embeds.shape == (512, 16) and not embeds.any() and not mask.any()
            seen[text] = seen.get(text, 0) + 1
    assert 5 < seen.pop("") < 19 and len(seen) == 3, seen


# Texts before the conditioner


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A cache of them."""
    run_precache(config := config_of(tmp_path_factory.mktemp("states")))
    return config


def scaled_batch(config: Config, *numbers: int) -> dict[str, Any]:
    with LatentCache(config.cache) as cache:
        return dict(cache.batch([f"{number}.png" for number in numbers], device="cpu", dtype=F32, scaled=True))


def test_texts_are_the_same_for_every_checkpoint(states: Config, parts: dict[str, Any], tmp_path: Path) -> None:
    """As the keys say: one with a conditioner of its own encodes nothing. From behind the conditioner they differ."""
    conditioner = randomised(tiny_model("anima")["text_conditioner"], 9)
    other = str(save_diffusers_folder({"text_conditioner": conditioner}, tmp_path / "finetune", "anima"))
    assert run_precache(config_of(states.cache.path.parent, other)).num_encoded == 0
    behind = [run_precache(config_of(tmp_path, model, "anima")) for model in ("", other)]
    assert [each.num_encoded for each in behind] == [2 * len(TEXTS) + 1, len(TEXTS) + 1]

    batch, predicted = scaled_batch(states, 0, 2), []
    # A denoiser's own folder comes with its conditioner, whatever model made the cache.
    for path, model in ((None, states.model), (None, ModelConfig(path=other)), (other, states.model)):
        denoiser = load_denoiser(path, dtype=F32, model=model, family=STATES)
        assert not any(name.startswith("text_conditioner") for name in denoiser.state_dict())
        with torch.no_grad():
            predicted.append(STATES.predict(denoiser, batch["latents"], torch.tensor([812.0, 455.0]), batch))
    assert (predicted[0] - predicted[1]).abs().max() > 0.01 and torch.equal(predicted[1], predicted[2])
    with pytest.raises(ModelError, match=r"has no text_conditioner.*Set it: transformer\.__dict__"):
        STATES.predict(parts["transformer"], batch["latents"], torch.tensor([812.0, 455.0]), batch)


@pytest.mark.parametrize("numbers", [(2,), (0, 1, 2)])
def test_a_step_that_trains_the_conditioner_is_that_of_live_encoding(
    numbers: tuple[int, ...], states: Config, parts: dict[str, Any]
) -> None:
    """To the last bit where the texts were encoded in the same batch; here each was encoded alone."""
    batch, timesteps = scaled_batch(states, *numbers), torch.tensor([812.0, 455.0, 230.0])[: len(numbers)]
    denoiser = load_denoiser(dtype=F32, model=states.model)
    texts = [TEXTS[number] for number in numbers]
    with torch.no_grad():
        live = ANIMA.states(parts, ANIMA.tokenize(parts, texts), ANIMA.text_recipe())
    lengths = [live[f"{name}_attention_mask"].sum(1).tolist() for name in ("qwen", "t5")]
    assert [batch[f"{name}{MASK}"].sum(1).tolist() for name in STATES.fields] == lengths
    kept = live["t5_attention_mask"].bool()
    assert batch["t5_ids"].dtype is torch.int32
    assert torch.equal(batch["t5_ids"][kept].long(), live["t5_input_ids"][kept])

    def step(predict: Any) -> dict[str, torch.Tensor]:
        """The loss, and the gradients of the denoiser and its conditioner."""
        modules = torch.nn.ModuleDict({"denoiser": denoiser, "conditioner": denoiser.text_conditioner})
        modules.requires_grad_(True).zero_grad()
        loss = predict().square().mean()
        loss.backward()
        found = {name: each.grad.clone() for name, each in modules.named_parameters() if each.grad is not None}
        return found | {"loss": loss.detach()}

    def predict_live() -> torch.Tensor:
        embeds = {"prompt_embeds": conditioned(denoiser.text_conditioner, live)}
        return ANIMA.predict(denoiser, batch["latents"], timesteps, embeds)

    wanted = step(predict_live)
    found = step(lambda: STATES.predict(denoiser, batch["latents"], timesteps, batch))
    assert found.keys() == wanted.keys()
    assert sum(bool(each.any()) for name, each in found.items() if name.startswith("conditioner.")) > 10
    for name, gradient in wanted.items():
        difference = (found[name] - gradient).abs().max()
        assert difference <= (0 if len(numbers) == 1 else 2e-6 * max(1.0, float(gradient.abs().max()))), name


def test_a_dropped_caption_is_the_empty_text_of_the_conditioner(states: Config, parts: dict[str, Any]) -> None:
    """A row of zeros of Qwen3, which the mask shows, and the token that ends a text of T5."""
    dataset = LatentDataset(states.cache, "photos", caption_dropout=1.0)
    batch = dataset.collate([dataset[0], dataset[1]])
    assert batch["caption"] == ["", ""] and batch["t5_ids"].tolist() == [[1], [1]]
    assert batch["qwen_embeds"].shape == (2, 1, 16) and not batch["qwen_embeds"].any()
    assert batch[f"qwen_embeds{MASK}"].all() and batch[f"t5_ids{MASK}"].all()
    denoiser = load_denoiser(dtype=F32, model=states.model)
    mixed = LatentDataset(states.cache, "photos", caption_dropout=0.5)
    loader = LatentLoader(BucketBatchSampler(mixed, 3, seed=0), device="cpu", dtype=F32, scaled=True)
    for batch in islice(loader.forever(), 4):
        found = STATES.conditions(denoiser, torch.zeros(3, 16, 1, 8, 8), batch)["encoder_hidden_states"]
        for text, own in zip(batch["caption"], found, strict=True):
            torch.testing.assert_close(own, encoded(parts, text)[0][0], rtol=0, atol=1e-5)
