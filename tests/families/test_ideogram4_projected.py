"""Texts of Ideogram 4 behind the denoiser's projection: what it predicts is what it does with its whole texts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.family_references import generator
from helpers.family_runs import SIDE, TEXTS, FamilyRun, family_run
from helpers.tiny_models import tiny_denoiser, tiny_encoders, tiny_folder
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from latentcache.config import ModelConfig
from latentcache.errors import ModelError
from latentcache.families import family_named
from latentcache.models.denoiser import check_fits, load_denoiser
from latentcache.models.model_loader import ModelLoader

pytestmark = pytest.mark.extended

PROJECTED, WHOLE = family_named("ideogram4-projected"), family_named("ideogram4")
LAYERS = ("llm_cond_norm", "llm_cond_proj")
PAIR = TEXTS[:2]
F32, TIMESTEPS = torch.float32, torch.tensor([812.0, 455.0])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[FamilyRun]]:
    """The same photos and texts, cached behind the projection and before it."""
    made = [family_run(tmp_path_factory.mktemp(each.name), each.name) for each in (PROJECTED, WHOLE)]
    yield made
    for run in made:
        run.cache.close()


def test_training_and_sampling_are_those_with_whole_texts(runs: list[FamilyRun]) -> None:
    noisy = torch.randn(runs[0].latent_shape(2), generator=generator())
    outputs, gradients, images = [], [], []
    for run in runs:
        run.denoiser.requires_grad_(True)
        for layer in LAYERS:
            getattr(run.denoiser, layer).requires_grad_(False)
        predicted = run.family.predict(run.denoiser, noisy, TIMESTEPS, run.batch(PAIR))
        predicted.square().mean().backward()
        outputs.append(predicted.detach())
        gradients.append({name: each.grad for name, each in run.denoiser.named_parameters() if each.grad is not None})
        run.denoiser.requires_grad_(False).zero_grad()
        pipeline = run.family.pipeline(transformer=run.denoiser, scheduler=run.parts["scheduler"])
        kwargs = run.family.pipeline_kwargs(run.batch(PAIR), None) | run.family.guidance_kwargs(1.0)
        size = {"num_inference_steps": 2, "height": SIDE, "width": SIDE, "output_type": "latent"}
        images.append(pipeline(**size, **kwargs, generator=generator())[0])
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-6)
    torch.testing.assert_close(*images, rtol=0, atol=1e-6)
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 10
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=0, atol=1e-6)


def test_the_denoiser_is_as_it_was_after_it(runs: list[FamilyRun]) -> None:
    """Also after an exception, and where a library's hook has a forward of its own."""
    run, layer = runs[0], runs[0].denoiser.llm_cond_proj
    rows = torch.ones(1, layer.in_features)
    before = layer(rows)
    batch, noisy = run.batch(PAIR), torch.zeros(run.latent_shape(2))
    run.family.predict(torch.nn.ModuleDict({"module": run.denoiser})["module"], noisy, TIMESTEPS, batch)
    assert torch.equal(layer(rows), before) and "forward" not in vars(layer)
    hook = layer.forward = lambda rows: rows * 2
    with pytest.raises(RuntimeError, match="size"):
        run.family.predict(run.denoiser, noisy[:, :3], TIMESTEPS, batch)
    assert layer.forward is hook
    del layer.forward


# What is refused


def flattened(denoiser: Any) -> None:
    """As FSDP has it with use_orig_params=False: the layers have views of it, which are no parameters."""
    layer = denoiser.llm_cond_norm
    denoiser.flat, view = torch.nn.Parameter(layer.weight.detach()), layer.weight.detach()
    del layer.weight
    layer.weight = view


def trained(denoiser: Any) -> None:
    denoiser.llm_cond_proj.requires_grad_(True)


def with_adapters(denoiser: Any) -> None:
    denoiser.add_adapter(LoraConfig(r=2, target_modules=["llm_cond_proj"]))
    denoiser.requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (trained, "llm_cond_proj.*Freeze.*set model.family to ideo"),
        (flattened, r"no parameters of its own.*use_orig_params=True"),
        (with_adapters, "has adapters"),
    ],
)
def test_a_projection_that_may_change_is_refused(
    runs: list[FamilyRun], change: Callable[[Any], object], message: str
) -> None:
    denoiser = tiny_denoiser(PROJECTED.name).requires_grad_(False)
    change(denoiser)
    with pytest.raises(ModelError, match=message):
        PROJECTED.predict(denoiser, torch.zeros(runs[0].latent_shape(2)), TIMESTEPS, runs[0].batch(PAIR))


def test_a_denoiser_with_another_projection_is_refused(tmp_path: Path) -> None:
    model = ModelConfig(path=tiny_folder(PROJECTED.name), family=PROJECTED.name)
    denoiser = load_denoiser(dtype=F32, model=model)
    denoiser.layers[0].attention_norm1.weight.data.add_(1)
    denoiser.save_pretrained(tmp_path / "same")
    load_denoiser(tmp_path / "same", dtype=F32, model=model)
    denoiser.llm_cond_proj.bias.data.add_(1)
    denoiser.save_pretrained(tmp_path / "other")
    load_denoiser(tmp_path / "other", dtype=F32, model=ModelConfig(path=model.path, family=WHOLE.name))
    with pytest.raises(ModelError, match=r"the projection of .*other differs from that of .*run precache"):
        load_denoiser(tmp_path / "other", dtype=F32, model=model)
    folder = shutil.copytree(tiny_folder(PROJECTED.name), tmp_path / "model")
    denoiser.save_pretrained(folder / "transformer_2")
    with pytest.raises(ModelError, match=r"the projection of .* differs from that of"):
        load_denoiser(dtype=F32, model=ModelConfig(path=str(folder), family=PROJECTED.name, denoiser="transformer_2"))
    with pytest.raises(ModelError, match="takes prompt_embeds of width 32, but the cache has 208"):
        check_fits(denoiser, PROJECTED, {"prompt_embeds": (5, 208)})


# Where the projection is read from


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_the_projection_is_read_from_shards(variant: str | None, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder(PROJECTED.name), tmp_path / "model")
    denoiser = tiny_denoiser(PROJECTED.name).requires_grad_(False)
    if variant is None:
        for file in (folder / "transformer").glob("*.safetensors"):
            file.unlink()
    else:  # of the other files, which stay, the weights are others
        for layer in LAYERS:
            getattr(denoiser, layer).weight.data += 1
        tiny_encoders(PROJECTED.name)["text_encoder"].save_pretrained(folder / "text_encoder", variant=variant)
    denoiser.save_pretrained(folder / "transformer", variant=variant, max_shard_size="60KB")
    assert len(list((folder / "transformer").glob("*-of-*"))) > 1
    found = ModelLoader(str(folder), family=PROJECTED, variant=variant).text_encoders(F32)["projection"]
    for layer in LAYERS:
        assert torch.equal(getattr(found, layer).weight, getattr(denoiser, layer).weight)
    (folder / "transformer" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelLoader(str(folder), family=PROJECTED, variant=variant).text_encoders(F32)


def test_scales_of_quantised_weights_are_refused(tmp_path: Path) -> None:
    """Without its scale a weight in float8 has the same shape and other values."""
    folder = shutil.copytree(tiny_folder(PROJECTED.name), tmp_path / "model")
    weight, file = "llm_cond_proj.weight", folder / "transformer" / "diffusion_pytorch_model.safetensors"
    state = load_file(file)
    state |= {weight: state[weight].to(torch.float8_e4m3fn), f"{weight}_scale": torch.tensor(0.5)}
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"projection.* has llm_cond_proj\.weight_scale.*quantised"):
        ModelLoader(str(folder), family=PROJECTED).text_encoders(F32)
