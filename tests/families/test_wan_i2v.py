"""Wan, image to video: the condition of a clip, from the run that caches it to the step that trains on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.family_references import SCALED_LATENTS, generator
from helpers.family_runs import NUM_FRAMES, SIDE, TEXTS, FamilyRun, family_config, family_run, loaded_models, recorded
from helpers.photo_files import write_clip, write_photo
from helpers.serving import serving_here
from helpers.tiny_models import tiny_folder, tiny_model
from safetensors import safe_open
from safetensors.torch import save_file

from latentcache import BucketBatchSampler, LatentCache, LatentDataset, LatentLoader
from latentcache.config import Config, ModelConfig
from latentcache.config_file import parse_config
from latentcache.errors import ConfigError, ModelError
from latentcache.families import family_named
from latentcache.interop.formats import musubi, webdataset
from latentcache.models.denoiser import load_denoiser
from latentcache.models.vae import first_frames
from latentcache.precache.run import run_precache
from latentcache.precache.workspace import Workspace

pytestmark = pytest.mark.families

FAMILY = family_named("wan-i2v")
TEXT = TEXTS[1]
BOUNDARY = 0.9


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FamilyRun]:
    made = family_run(tmp_path_factory.mktemp("wan-i2v"), FAMILY.name)
    yield made
    made.cache.close()


@pytest.mark.parametrize("text", TEXTS)
def test_the_condition_is_that_of_the_pipeline(run: FamilyRun, text: str) -> None:
    cached, live = run.batch([text])["condition"], run.live_pictures(text)["condition"]
    assert cached.shape == (1, 16, 2, SIDE // 8, SIDE // 8) and torch.equal(cached, live)
    stored = run.cache.get(run.rows[text].images[0].key).tensors
    assert stored.keys() == {"latents", "condition"}
    assert torch.equal(run.scaling.apply(stored["condition"][None]), live), "unscaled in the store"
    # The first latent frames of both are those of one picture; the later ones of the condition are of no grey clip.
    assert torch.equal(stored["condition"][:, 0], stored["latents"][:, 0])
    grey = run.parts["vae"].encode(torch.zeros(1, 3, NUM_FRAMES, SIDE, SIDE)).latent_dist.mode()
    assert (stored["condition"][:, 1] - grey[0, :, 1]).abs().max() > 0.1


def test_the_condition_of_a_clip_is_the_beginning_of_that_of_a_longer_one(run: FamilyRun) -> None:
    clips = torch.from_numpy(np.random.default_rng(3).integers(0, 256, (2, 9, 32, 48, 3), dtype=np.uint8))
    longer, shorter = (first_frames(run.parts["vae"], clips[:, :frames], FAMILY) for frames in (9, 5))
    assert longer.shape == (2, 16, 3, 4, 6) and torch.equal(longer[:, :, :2], shorter)
    other = clips.clone()
    other[:, 1:] = 0
    assert torch.equal(first_frames(run.parts["vae"], other, FAMILY), longer), "the other frames do not count"


@pytest.mark.parametrize("expert", ["transformer", "transformer_2"])
def test_a_step_of_each_denoiser_is_that_of_live_encoding(run: FamilyRun, expert: str) -> None:
    """The pipeline's own call of it at one of its timesteps, and the loss and all gradients of a training step."""
    second = tiny_model(FAMILY.name, seed=4)["transformer"]
    pipeline = FAMILY.pipeline(**run.parts, transformer_2=second, boundary_ratio=BOUNDARY)
    denoiser = getattr(pipeline, expert)
    with recorded(denoiser) as calls:
        run.generate(pipeline, **run.prompts([TEXT]), **FAMILY.guidance_kwargs(1.0), num_inference_steps=6)
    call, batch = calls[0].arguments, run.batch([TEXT])
    assert (call["timestep"].item() >= 1000 * BOUNDARY) == (expert == "transformer")
    with torch.no_grad():
        own = FAMILY.predict(denoiser, call["hidden_states"][:, :16], call["timestep"].float(), batch)
    assert torch.equal(own, calls[0].output[0])

    def step(latents: torch.Tensor, given: dict[str, Any]) -> list[torch.Tensor]:
        noise, share = torch.randn(latents.shape, generator=generator()), call["timestep"].item() / 1000
        noisy = (1 - share) * latents + share * noise
        denoiser.requires_grad_(True).zero_grad()
        loss = (FAMILY.predict(denoiser, noisy, call["timestep"].float(), given) - (noise - latents)).square().mean()
        loss.backward()
        found = [each.grad.clone() for each in denoiser.parameters() if each.grad is not None]
        denoiser.requires_grad_(False)
        assert loss > 0 and len(found) > 30
        return [loss.detach(), *found]

    live = SCALED_LATENTS[FAMILY.name](run.pipeline, run.pixels(TEXT))
    pairs = zip(step(run.latents(TEXT), batch), step(live, batch | run.live_pictures(TEXT)), strict=True)
    assert all(torch.equal(cached, wanted) for cached, wanted in pairs)


def test_plain_clips_keep_their_keys(run: FamilyRun, tmp_path: Path) -> None:
    """The same clips by the same VAE, as `wan` and as `wan-i2v`."""
    keys: dict[str, list[str]] = {}
    for name in ("wan", FAMILY.name):
        family = family_named(name)
        config = family_config(tmp_path, with_clips=True)
        config = config.model_copy(update={"cache": config.cache.model_copy(update={"path": tmp_path / name})})
        parts = {**tiny_model(name), **{part: run.parts[part] for part in family.parts}}
        assert run_precache(config, models=loaded_models(family, parts)).num_refused == 0
        with LatentCache(config.cache.path) as cache:
            rows = [*cache.manifest("photos").rows.values()]
            keys[name] = [row.images[0].key for row in rows]
            identity = cache.get(keys[name][0]).record.identity
            assert identity["encoding"].get("condition") == (family.clip_condition or None)
            assert ("condition" in cache.batch(["0.png"], device="cpu")) == bool(family.clip_condition)
    assert not {*keys["wan"]} & {*keys[FAMILY.name]}
    assert keys[FAMILY.name] == [run.rows[text].images[0].key for text in TEXTS]


def config_of(folder: Path, **dataset: Any) -> Config:
    given = {"name": "clips", "source": {"path": folder / "clips"}, "frames": {"count": 9, "fps": None}}
    given |= {"buckets": {"area": SIDE**2, "step": 16}, "images": {"min_side": 8}, **dataset}
    settings = {"cache": {"path": folder / "cache"}, "datasets": [given]}
    return parse_config({**settings, "model": {"path": tiny_folder(FAMILY.name)}, "encode": {"device": "cpu"}})


def test_what_gives_one_frame_is_refused(tmp_path: Path) -> None:
    clips = tmp_path / "clips"
    write_clip(clips / "clip.png", 0, (SIDE, SIDE), 7)
    write_clip(clips / "short.png", 1, (SIDE, SIDE), 4)
    write_photo(clips / "still.png", 2, (SIDE, SIDE))
    report = run_precache(config_of(tmp_path))
    assert {each.sample_id: each.reason for each in report.refused} == dict.fromkeys(
        ("short.png", "still.png"), "too-short"
    )
    assert "wan-i2v trains on clips, and it gives 1 frame: give a longer video" in report.refused[0].detail
    with LatentCache(tmp_path / "cache") as cache:
        assert cache.row("clip.png")[1].images[0].geometry.num_frames == 5
    with pytest.raises(ConfigError, match=r"dataset clips has no frames, but models of wan-i2v take clips") as caught:
        run_precache(config_of(tmp_path, frames=None))
    assert caught.value.key == "datasets.frames"


@pytest.mark.parametrize("output", ["mean", "moments", "sample"])
def test_every_way_to_read_a_cache_gives_the_condition(tmp_path: Path, output: str) -> None:
    """Mirrored too, in two lengths; from a disk, the memory of a process, and a service."""
    for number in range(4):
        write_clip(tmp_path / f"clips/{number}.png", number, (SIDE, SIDE), 5 if number < 2 else 9)
    config = config_of(tmp_path, flip=True)
    config = config.model_copy(update={"encode": config.encode.model_copy(update={"image_output": output})})
    workspace = Workspace()
    for place in (None, workspace):
        assert run_precache(config, workspace=place).num_refused == 0
    ids = ["2.png", "3.png"]
    with LatentCache(config.cache.path) as cache, serving_here(config.cache.path) as running:
        remote = LatentCache(running.url)
        in_memory = LatentCache(store=workspace.store, manifests=workspace.manifests)
        for flip in (False, True):
            batch = cache.batch(ids, device="cpu", scaled=True, flip=flip)
            assert batch["condition"].shape == batch["latents"].shape == (2, 16, 3, SIDE // 8, SIDE // 8)
            for other in (in_memory, remote):
                found = other.batch(ids, device="cpu", scaled=True, flip=flip)
                assert torch.equal(found["condition"], batch["condition"])
            plain = cache.batch(ids, device="cpu", flip=flip)["condition"]
            scaling = cache.scaling(cache.manifest("clips"))
            assert torch.equal(scaling.apply(plain.float()), batch["condition"])
        upright, mirrored = (cache.batch(["0.png"], device="cpu", flip=flip)["condition"] for flip in (False, True))
        assert not torch.equal(upright, mirrored)
        dataset = LatentDataset(config.cache.path, flips=True)
        with LatentLoader(BucketBatchSampler(dataset, 2, seed=1), device="cpu", scaled=True) as loader:
            seen = 0
            for made in loader:
                for name, number in zip(made["sample_id"], range(2), strict=False):
                    wanted = [cache.batch([name], device="cpu", scaled=True, flip=flip) for flip in (False, True)]
                    assert any(torch.equal(each["condition"][0], made["condition"][number]) for each in wanted)
                    seen += 1
        assert seen == 8
        item = dataset.collate([dataset[0], dataset[1]])
        placed = dataset.place(item, device="cpu", scaled=True)["condition"]
        assert torch.equal(placed, cache.batch(["0.png", "1.png"], device="cpu", scaled=True)["condition"])


@pytest.mark.parametrize("name", ["wan", FAMILY.name])
def test_musubi_tuner_s_files_have_the_clip_and_its_first_frame(name: str, run: FamilyRun, tmp_path: Path) -> None:
    """As its cache_io.py and VideoDataset have them: names, the mask before the condition, both scaled."""
    config = config_of(tmp_path, frames={"count": 5, "fps": 10})
    config = config.model_copy(update={"model": ModelConfig(path=tiny_folder(name), family=name)})
    write_clip(tmp_path / "clips/a cat.png", 3, (SIDE, SIDE)).with_suffix(".txt").write_text(TEXT)
    assert run_precache(config).num_refused == 0
    with LatentCache(config.cache.path) as cache:
        report = musubi.export(cache, "clips", tmp_path / "out", dtype=torch.bfloat16)
        batch = cache.batch(["a cat.png"], device="cpu", scaled=True)
        if name == FAMILY.name:
            with pytest.raises(ConfigError, match="wan-i2v"):
                webdataset.export(cache, "clips", tmp_path / "shards")
    assert (report.num_images, report.num_texts, report.skipped) == (1, 1, [])
    files = {path.name: path for path in (tmp_path / "out").iterdir()}
    assert files.keys() == {"a cat_00000-005_0064x0064_wan.safetensors", "a cat_wan_te.safetensors"}
    with safe_open(files["a cat_00000-005_0064x0064_wan.safetensors"], "pt") as file:
        assert file.metadata()["architecture"] == "wan" and file.metadata()["frame_count"] == "5"
        found = {key: file.get_tensor(key) for key in file.keys()}
    expected = {"latents_2x8x8_bfloat16": batch["latents"][0].bfloat16()}
    if name == FAMILY.name:
        mask = torch.stack([torch.ones(4, 8, 8), torch.zeros(4, 8, 8)], dim=1)
        expected["latents_image_2x8x8_bfloat16"] = torch.cat([mask, batch["condition"][0]]).bfloat16()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) and found[key].dtype == value.dtype for key, value in expected.items())


def test_a_batch_without_a_condition_is_refused(run: FamilyRun) -> None:
    batch = run.batch([TEXT])
    del batch["condition"]
    with pytest.raises(ModelError, match="the batch has no condition, the latents of first frames; precache clips as"):
        FAMILY.predict(run.denoiser, batch["latents"], torch.tensor([500.0]), batch)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"in_channels": 16}, "takes 16 channels, not the 36 of image to video"),
        ({"pos_embed_seq_len": 514, "image_dim": 32, "added_kv_proj_dim": 32}, "from a first and a last frame"),
    ],
)
def test_a_denoiser_of_another_kind_is_refused(
    settings: dict[str, Any], message: str, tmp_path: Path, remade: Callable[..., Any]
) -> None:
    denoiser = remade(**settings)
    denoiser.save_pretrained(tmp_path / "transformer")
    model = ModelConfig(path=tiny_folder(FAMILY.name), family=FAMILY.name)
    with pytest.raises(ModelError, match=message):
        load_denoiser(tmp_path / "transformer", dtype=torch.float32, model=model)
    if "in_channels" in settings:
        state = {name: value.contiguous() for name, value in denoiser.state_dict().items()}
        save_file(state, file := tmp_path / "wan.safetensors")
        with pytest.raises(ModelError, match=message):
            load_denoiser(file, dtype=torch.float32, model=model)


@pytest.fixture
def remade() -> Callable[..., Any]:
    """The tiny denoiser with other settings."""

    def made(**changes: Any) -> Any:
        own = tiny_model(FAMILY.name)["transformer"]
        given = {name: value for name, value in own.config.items() if not name.startswith("_")}
        return type(own)(**{**given, **changes})

    return made
