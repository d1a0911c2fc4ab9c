"""Wan, image to video: the condition of a clip, from the run that caches it to the step that trains on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.family_references import SCALED_LATENTS, generator
from helpers.family_runs import (
    NUM_FRAMES,
    SIDE,
    TEXTS,
    DenoiserCall,
    FamilyRun,
    family_config,
    family_run,
    loaded_models,
    recorded,
)
from helpers.photo_files import write_clip, write_photo
from helpers.serving import serving_here
from helpers.tiny_models import tiny_folder, tiny_model, wan_2_1_i2v
from PIL import Image
from safetensors import safe_open

from latentcache import BucketBatchSampler, LatentCache, LatentDataset, LatentLoader
from latentcache.config import Config, ModelConfig
from latentcache.config_file import parse_config
from latentcache.errors import ConfigError, ModelError
from latentcache.families import family_named
from latentcache.interop.formats import musubi, webdataset
from latentcache.models.denoiser import load_denoiser
from latentcache.models.model_loader import ModelLoader, Models
from latentcache.models.vae import first_frames
from latentcache.precache.encodings import choose_encodings
from latentcache.precache.run import run_precache
from latentcache.precache.workspace import Workspace
from latentcache.validation.runner import ValidationRunner

pytestmark = pytest.mark.families

FAMILY = family_named("wan-i2v")
TEXT = TEXTS[1]
BOUNDARY = 0.9


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FamilyRun]:
    made = family_run(tmp_path_factory.mktemp("wan-i2v"), FAMILY.name)
    yield made
    made.cache.close()


def test_the_condition_is_that_of_the_pipeline(run: FamilyRun) -> None:
    cached, live = run.batch([TEXT])["condition"], run.live_pictures(TEXT)["condition"]
    assert cached.shape == (1, 16, 2, SIDE // 8, SIDE // 8) and torch.equal(cached, live)
    stored = run.cache.get(run.rows[TEXT].images[0].key).tensors
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
    assert (calls[0].arguments["timestep"].item() >= 1000 * BOUNDARY) == (expert == "transformer")
    check_step(run, denoiser, calls[0], run.live_pictures(TEXT))


def check_step(run: FamilyRun, denoiser: Any, call: DenoiserCall, pictures: dict[str, torch.Tensor]) -> None:
    """The call of a denoiser is that of a cached batch, and a step on it is that on what `pictures` encodes live."""
    batch, timestep = run.batch([TEXT]), call.arguments["timestep"].float()
    with torch.no_grad():
        own = FAMILY.predict(denoiser, call.arguments["hidden_states"][:, :16], timestep, batch)
    assert torch.equal(own, call.output[0])

    def step(latents: torch.Tensor, given: dict[str, Any]) -> list[torch.Tensor]:
        noise, share = torch.randn(latents.shape, generator=generator()), timestep.item() / 1000
        noisy = (1 - share) * latents + share * noise
        denoiser.requires_grad_(True).zero_grad()
        loss = (FAMILY.predict(denoiser, noisy, timestep, given) - (noise - latents)).square().mean()
        loss.backward()
        found = [each.grad.clone() for each in denoiser.parameters() if each.grad is not None]
        denoiser.requires_grad_(False)
        assert loss > 0 and len(found) > 30
        return [loss.detach(), *found]

    live = SCALED_LATENTS[FAMILY.name](run.pipeline, run.pixels(TEXT))
    pairs = zip(step(run.latents(TEXT), batch), step(live, batch | pictures), strict=True)
    assert all(torch.equal(cached, wanted) for cached, wanted in pairs)


def test_plain_clips_keep_their_keys(run: FamilyRun, tmp_path: Path) -> None:
    """The same clips by the same VAE, as `wan` and as `wan-i2v`."""
    keys: dict[str, list[str]] = {}
    for name in ("wan", FAMILY.name):
        family = family_named(name)
        config = family_config(tmp_path, with_clips=True)
        config = config.model_copy(update={"cache": config.cache.model_copy(update={"path": tmp_path / name})})
        parts = {**tiny_model(name), **{part: run.parts[part] for part in run.parts if part in family.parts}}
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


@pytest.mark.parametrize("output", ["mean", "moments"])
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
        ({"in_channels": 16}, "has in_channels 16, not 36"),
        ({"pos_embed_seq_len": 514, "image_dim": 32, "added_kv_proj_dim": 32}, "has pos_embed_seq_len 514, not None"),
    ],
)
def test_a_denoiser_of_another_kind_is_refused(
    settings: dict[str, Any], message: str, tmp_path: Path, remade: Callable[..., Any]
) -> None:
    remade(**settings).save_pretrained(tmp_path / "transformer")
    model = ModelConfig(path=tiny_folder(FAMILY.name), family=FAMILY.name)
    with pytest.raises(ModelError, match=message):
        load_denoiser(tmp_path / "transformer", dtype=torch.float32, model=model)


@pytest.fixture
def remade() -> Callable[..., Any]:
    """The tiny denoiser with other settings."""

    def made(**changes: Any) -> Any:
        own = tiny_model(FAMILY.name)["transformer"]
        given = {name: value for name, value in own.config.items() if not name.startswith("_")}
        return type(own)(**{**given, **changes})

    return made


# Wan 2.1, whose denoiser also takes rows of CLIP's vision model


@pytest.fixture(scope="module")
def with_clip(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FamilyRun]:
    parts, config = wan_2_1_i2v(), family_config(tmp_path_factory.mktemp("wan-2.1"), with_clips=True)
    report = run_precache(config, models=loaded_models(FAMILY, parts))
    assert report.num_refused == 0 and report.num_encoded == 2 * len(TEXTS) + 1
    with LatentCache(config.cache.path) as cache:
        yield FamilyRun(FAMILY, parts, config, cache)


def live_rows(run: FamilyRun, text: str) -> torch.Tensor:
    """Of the first frame as a picture."""
    first = ((run.pixels(text)[0, :, 0] + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()
    with torch.no_grad():
        rows: torch.Tensor = run.pipeline.encode_image(Image.fromarray(first), "cpu")
    return rows


def test_the_rows_of_a_picture_are_those_of_the_pipeline(with_clip: FamilyRun) -> None:
    found = with_clip.batch([TEXT])
    assert torch.equal(found["image_embeds"], live_rows(with_clip, TEXT)) and found["image_embeds"].shape == (1, 5, 24)
    assert torch.equal(found["condition"], with_clip.live_pictures(TEXT)["condition"])
    entry = with_clip.cache.get(with_clip.rows[TEXT].images[0].key)
    assert entry.tensors.keys() == {"latents", "condition", "image_embeds"}
    assert entry.record.provenance["models"].keys() == {"vae", "image_encoder", "image_processor"}
    assert entry.record.identity["encoding"]["image_pixels"] == "prepared"


def test_a_step_with_rows_of_a_picture_is_that_of_live_encoding(
    with_clip: FamilyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, pipeline = live_rows(with_clip, TEXT), with_clip.pipeline
    monkeypatch.setattr(pipeline, "encode_image", lambda *_: rows)  # which is given pixels here, and no picture
    with recorded(with_clip.denoiser) as calls:
        with_clip.generate(pipeline, **with_clip.prompts([TEXT]), **FAMILY.guidance_kwargs(1.0))
    assert torch.equal(calls[0].arguments["encoder_hidden_states_image"], rows)
    pictures = with_clip.live_pictures(TEXT) | {"image_embeds": rows}
    check_step(with_clip, with_clip.denoiser, calls[0], pictures)


def test_rows_of_a_picture_and_denoisers_have_to_fit(run: FamilyRun, with_clip: FamilyRun) -> None:
    noisy, timestep = torch.randn(run.latent_shape(1), generator=generator()), torch.tensor([500.0])
    with pytest.raises(ModelError, match="takes image_embeds of first frames, and the batch has none; precache with a"):
        FAMILY.predict(with_clip.denoiser, noisy, timestep, run.batch([TEXT]))
    batch = with_clip.batch([TEXT])
    rest = {name: value for name, value in batch.items() if name != "image_embeds"}
    with torch.no_grad():
        plain, given = (FAMILY.predict(run.denoiser, noisy, timestep, each) for each in (rest, batch))
        assert torch.equal(plain, given), "one of 2.2 takes none"
        other = {**batch, "image_embeds": batch["image_embeds"] + 1}
        changed = [FAMILY.predict(with_clip.denoiser, noisy, timestep, each) for each in (batch, other)]
    assert not torch.equal(*changed)


def test_the_parts_that_make_rows_of_a_picture_are_in_the_key(with_clip: FamilyRun, tmp_path: Path) -> None:
    """A folder gives the keys of the parts that were saved in it, and any change of them gives others."""

    def keys(models: Models) -> dict[str, Any]:
        return choose_encodings(with_clip.config, models, {}).image.to_json()

    FAMILY.pipeline(**with_clip.parts).save_pretrained(tmp_path / "model")
    loader = ModelLoader(str(tmp_path / "model"), family=FAMILY)
    expected = keys(loaded_models(FAMILY, with_clip.parts))
    assert keys(loader) == expected and keys(loader)["image_encoder"]["class_name"] == "CLIPVisionModel"
    config = with_clip.config.model_copy(
        update={
            "model": ModelConfig(path=str(tmp_path / "model")),
            "cache": with_clip.config.cache.model_copy(update={"path": tmp_path / "cache"}),
        }
    )
    assert run_precache(config).num_refused == 0
    with LatentCache(tmp_path / "cache") as cache:
        for row in with_clip.rows.values():
            entry, other = cache.get(row.images[0].key), with_clip.cache.get(row.images[0].key)
            assert all(torch.equal(entry.tensors[name], other.tensors[name]) for name in other.tensors)
    different = [expected, keys(loaded_models(FAMILY, {**with_clip.parts, **wan_2_1_i2v(seed=1)}))]
    for setting, value in (("crop_size", {"height": 16, "width": 32}), ("resample", 2), ("image_mean", [0.5] * 3)):
        parts = wan_2_1_i2v()
        setattr(parts["image_processor"], setting, value)
        different.append(keys(loaded_models(FAMILY, {**with_clip.parts, **parts})))
    without = {name: part for name, part in with_clip.parts.items() if not name.startswith("image_")}
    different.append(keys(loaded_models(FAMILY, without)))
    assert all(one != other for number, one in enumerate(different) for other in different[:number])
    assert "image_encoder" not in different[-1] and "image_pixels" not in different[-1]
    older: Any = type("CLIPVisionModel", (torch.nn.Module,), {})()  # as transformers before 5.6 has it
    older.config, older.vision_model = with_clip.parts["image_encoder"].config, with_clip.parts["image_encoder"]
    assert keys(loaded_models(FAMILY, {**with_clip.parts, "image_encoder": older.requires_grad_(False)})) == expected
    with pytest.raises(ModelError, match="the model has image_encoder, but not all of image_encoder, image_processor"):
        keys(loaded_models(FAMILY, {**without, "image_encoder": with_clip.parts["image_encoder"]}))


def test_a_miss_says_what_an_entry_has_no_longer(tmp_path: Path) -> None:
    parts, config = wan_2_1_i2v(), family_config(tmp_path, with_clips=True)
    run_precache(config, models=loaded_models(FAMILY, parts))
    plain = {name: part for name, part in parts.items() if not name.startswith("image_")}
    for family, gone in ((FAMILY, "image encoder"), (family_named("wan"), "condition")):
        models = loaded_models(family, {name: plain[name] for name in plain.keys() & family.parts.keys()})
        reasons = run_precache(config, models=models, dry_run=True).misses_by_reason
        assert "entry lost" not in reasons
        [reason] = [each for each in reasons if f"{gone} changed (" in each]
        assert reasons[reason] == len(TEXTS) and "-> None)" in reason


def test_a_validation_without_the_image_encoder_leaves_its_clips_as_they_are(tmp_path: Path) -> None:
    """A trainer may not have it: then one lost clip is skipped, and the others keep their rows of a picture."""
    parts, config = wan_2_1_i2v(), family_config(tmp_path, with_clips=True)
    given: dict[str, Any] = {"prompts": (), "path": tmp_path / "results", "num_timesteps": 2}
    validation = config.validation.model_copy(update=given)
    datasets = (config.datasets[0].model_copy(update={"role": "validation"}),)
    config = config.model_copy(update={"datasets": datasets, "validation": validation})
    run_precache(config, models=loaded_models(FAMILY, parts))
    with LatentCache(config.cache.path) as cache:
        before = [*cache.manifest("photos").rows.values()]
        cache.store.remove([before[0].images[0].key])
    own = {name: part for name, part in parts.items() if not name.startswith("image_")}
    with LatentCache(config.cache.path) as cache:
        report = ValidationRunner(own, cache, config).run(1)
        assert report is not None and report.loss is not None and report.num_filled == 0
        assert [each.sample_id for each in report.loss.skipped] == [before[0].sample_id]
        cache.refresh()
        assert [*cache.manifest("photos").rows.values()] == before


def test_musubi_tuner_s_files_have_the_rows_of_a_picture(with_clip: FamilyRun, tmp_path: Path) -> None:
    report = musubi.export(with_clip.cache, "photos", tmp_path, dtype=torch.float16)
    assert report.num_images == len(TEXTS) and not report.skipped
    with safe_open(tmp_path / "1_00000-005_0064x0064_wan.safetensors", "pt") as file:
        rows = file.get_tensor("clip_float16")
        assert {*file.keys()} == {"latents_2x8x8_float16", "latents_image_2x8x8_float16", "clip_float16"}
    assert torch.equal(rows, live_rows(with_clip, TEXT)[0].half())
