"""The main job through its public API: what is encoded, what is refused, and what is left after a failure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from helpers.photo_files import write_photo
from PIL import Image

from latentcache import LatentCache
from latentcache.config import Config
from latentcache.errors import ConfigError, DatasetError, DeviceError, SampleError, StoreError, TrainableEncoderError
from latentcache.loading.status import status
from latentcache.models.model_loader import LoadedModels
from latentcache.models.tiny import tiny_parts
from latentcache.precache import encodings
from latentcache.precache import run as precache_run
from latentcache.precache.run import run_precache
from latentcache.precache.tasks import Plan, Shard
from latentcache.precache.workspace import Workspace
from latentcache.utils.progress import Progress

Make = Callable[..., Config]


def test_a_run_encodes_each_thing_once_and_a_second_run_nothing(make_config: Make, photos: Path) -> None:
    config = make_config(**{"datasets.0.flip": True})
    dry = run_precache(config, dry_run=True)
    assert not config.cache.path.exists(), "a dry run writes nothing"
    config.cache.path.mkdir()
    assert run_precache(config, dry_run=True).num_misses == dry.num_misses
    assert not list(config.cache.path.iterdir()) and dry.dry_run and dry.num_encoded == 0

    first = run_precache(config)
    # 5 images, mirrored too; 4 captions and the empty one (also a prompt); 2 prompts.
    assert (first.num_samples, first.num_hits, first.num_misses) == (5, 0, 17)
    assert first.num_encoded == 17 and first.misses_by_reason == {"new": 17}
    assert first.num_missing_captions == 1 and first.num_refused == 0 and first.refused == []
    assert first.bytes_written > first.miss_bytes > 0
    assert first.cache["payload_bytes"] == dry.miss_bytes, "the estimate is the payload"
    assert first.cache["path"] == str(config.cache.path)
    assert {"load", "plan", "text", "decode", "encode", "write", "total"} <= set(first.seconds)

    second = run_precache(config)
    assert (second.num_hits, second.num_misses, second.num_encoded, second.bytes_written) == (17, 0, 0, 0)

    with LatentCache(config.cache.path) as cache:
        _, row = cache.row("a.png")
        record = cache.get(row.images[1].key).record
        assert record.identity["source"] == row.source
        assert record.identity["preparation"]["flip"] is True
        assert record.identity["preparation"]["original_size"] == [80, 144]
        assert record.identity["encoding"]["scaling_factor"] == 0.13025
        assert set(record.identity["encoding"]["vae"]) == {"class_name", "weights", "config"}
        made = record.provenance
        assert made["source_path"] == str(photos / "a.png") and made["models"] == {"vae": "tiny"}
        assert made["device"] == "cpu" and made["computed_dtype"] == "float32"
        assert made["float32_precision"] == {"matmul": "ieee", "convolution": "ieee"}
        assert {"latentcache", "torch", "diffusers", "transformers"} <= set(made["software"])
        assert made["created"].endswith("+00:00") and made["host"]
        text = cache.get(row.captions[0].key).record
        assert text.provenance["num_tokens"] == len("aredhouse") + 2


def damage_pixels(path: Path) -> None:
    """A flipped bit that decoding alone finds: there is a checksum."""
    whole = path.read_bytes()
    at = whole.index(b"IDAT") + 40
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])


def test_one_bad_file_never_stops_the_run(make_config: Make, photos: Path) -> None:
    """Of the refused files, those are named that a run tries in vain: the misses among them."""
    whole = (photos / "a.png").read_bytes()
    (photos / "cut.png").write_bytes(whole[: len(whole) // 2])
    (photos / "empty.png").write_bytes(b"")
    (photos / "text.jpg").write_text("hello")
    Image.new("RGB", (30, 400)).save(photos / "thin.png")
    damage_pixels(write_photo(photos / "damaged.png", 5))
    config = make_config()
    first, second = run_precache(config), run_precache(config)
    for report in (first, second):
        assert {refusal.sample_id: refusal.reason for refusal in report.refused} == {
            "cut.png": "truncated",
            "damaged.png": "corrupt",
            "empty.png": "empty",
            "text.jpg": "not-an-image",
            "thin.png": "extreme-aspect",
        }
        assert report.num_refused == 5 and report.num_samples == 10
        assert report.num_missing_captions == 1, "a refused sample is not trained on the empty caption"
        assert report.failed == [str(photos / f"{name}.png") for name in ("cut", "damaged")]
        assert report.num_misses == report.num_encoded + len(report.failed)
    assert first.num_encoded == 12
    assert second.misses_by_reason == {f"refused before ({why})": 1 for why in ("truncated", "corrupt")}
    assert "failed    2 of the refused" in second.to_text()
    with LatentCache(config.cache.path) as cache:
        assert len(cache.sample_ids()) == 5
        with pytest.raises(SampleError, match=r"'cut\.png'.*refused \(truncated\).*cut\.png.*latentcache precache"):
            cache.batch(["cut.png"], device="cpu")
    (photos / "cut.png").unlink()
    write_photo(photos / "damaged.png", 5)
    third = run_precache(config)
    assert third.failed == [] and third.num_encoded == 1


def test_a_file_that_changes_during_the_run_is_refused_and_encoded_by_the_next(make_config: Make, photos: Path) -> None:
    class ChangesAFile(Progress):
        def start(self, stage: str, total: int | None) -> None:
            if stage == "encode captions":
                write_photo(photos / "a.png", 1234)

    report = run_precache(make_config(), progress=ChangesAFile())
    assert [(refusal.sample_id, refusal.reason) for refusal in report.refused] == [("a.png", "changed")]
    report = run_precache(make_config())
    assert report.num_refused == 0 and report.misses_by_reason == {"image changed": 1} and report.num_encoded == 1


def test_samples_of_one_name_and_captions_that_are_no_text_are_refused(make_config: Make, tmp_path: Path) -> None:
    folder, odd = tmp_path / "listed", "line\u2028separator \x00 and \u202e odd ones"
    lines = list[str]()
    no_text = "\udcff.png", "of a file whose name is no text"
    for name, text in (("x.png", "half \ud800 of a pair"), no_text, ("y.png", odd), ("y.png", "another")):
        write_photo(folder / name, len(lines))
        lines.append(json.dumps({"file_name": name, "text": text}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    config = make_config(**{"datasets.0.source": {"kind": "imagefolder", "path": folder}})
    refused = [(refusal.sample_id, refusal.reason) for refusal in run_precache(config).refused]
    assert refused == [("x.png", "bad-caption"), ("y.png", "duplicate")]
    with LatentCache(config.cache.path) as cache:
        assert cache.batch(["y.png"], device="cpu")["caption"] == [odd]


KOHYA = {"rule": "kohya", "resolution": 96, "step": 32, "min_side": 32}


def test_a_rule_and_its_settings_count_only_where_they_change_the_pixels(make_config: Make, photos: Path) -> None:
    write_photo(photos / "same.png", 9, (96, 96))  # a bucket of every rule: nothing is resized
    assert run_precache(make_config()).num_encoded > 0
    report = run_precache(make_config(**{"datasets.0.buckets": KOHYA}))
    assert report.misses_by_reason == {"resample policy changed (lanczos -> opencv-area and lanczos)": 5}
    # Other settings, the same buckets.
    more = {**KOHYA, "max_side": 512}
    assert run_precache(make_config(**{"datasets.0.buckets": more})).num_encoded == 0
    assert run_precache(make_config()).num_encoded == 0


def test_an_image_without_a_bucket_is_refused_by_name(make_config: Make, photos: Path) -> None:
    write_photo(photos / "long.png", 9, (20, 140))
    config = make_config(**{"datasets.0.buckets": {**KOHYA, "upscale": False}})
    [refusal] = run_precache(config).refused
    assert (refusal.sample_id, refusal.reason) == ("long.png", "no-bucket")
    assert "kohya" in refusal.detail and "has no bucket for an image of 20x140" in refusal.detail
    with LatentCache(config.cache.path) as cache:
        assert sorted(cache.sample_ids()) == ["a.png", "b.png", "c.png", "d.png", "sub/e.png"]


class Doctored(AutoencoderKL):
    """A VAE that damages its outputs: `damage` gets the moments and the dtype."""

    damage: Callable[[torch.Tensor, torch.Tensor], None]

    def encode(self, x: torch.Tensor, return_dict: bool = True) -> Any:
        output = super().encode(x, return_dict)
        Doctored.damage(output.latent_dist.parameters, x)
        return output


@pytest.fixture
def doctored() -> LoadedModels:
    parts = tiny_parts()
    parts["vae"].__class__ = Doctored
    return LoadedModels(**parts)


def test_bad_numbers_are_encoded_again_in_float32_or_refused(
    make_config: Make, photos: Path, doctored: LoadedModels
) -> None:
    nan, inf = float("nan"), float("inf")
    damages = {"nan": (250, nan), "inf": (200, inf), "zeros": (150, 0.0), "hopeless": (100, nan)}
    for name, (grey, _) in damages.items():
        Image.new("L", (128, 96), grey).save(photos / f"{name}.png")

    def damage(moments: torch.Tensor, images: torch.Tensor) -> None:
        for moment, image in zip(moments, images, strict=True):
            for name, (grey, value) in damages.items():
                is_it = bool((image - (grey / 127.5 - 1)).abs().max() < 0.02)
                if is_it and (image.dtype == torch.bfloat16 or name == "hopeless"):
                    moment[0, 0, 0] = value
                    moment *= float(value != 0)

    Doctored.damage = staticmethod(damage)
    config = make_config(**{"encode.vae_dtype": "bfloat16"})
    report = run_precache(config, models=doctored)
    assert (report.num_retried_in_float32, report.num_encoded) == (3, 12 + 3)
    assert [(each.sample_id, each.reason) for each in report.refused] == [("hopeless.png", "bad-output")]
    assert "nan" in report.refused[0].detail
    with LatentCache(config.cache.path) as cache:
        for name in ("nan", "inf", "zeros", "a"):
            made = cache.get(cache.row(f"{name}.png")[1].images[0].key).record.provenance
            assert made["computed_dtype"] == ("bfloat16" if name == "a" else "float32")
            assert ("encoded again" in made.get("note", "")) == (name != "a")


def test_numbers_too_large_for_the_stored_dtype_are_not_stored(make_config: Make, doctored: LoadedModels) -> None:
    Doctored.damage = staticmethod(lambda moments, images: moments.fill_(1e6))
    report = run_precache(make_config(**{"encode.store_dtype": "float16"}), models=doctored)
    assert [refusal.reason for refusal in report.refused] == ["bad-output"] * 5
    assert "stored as float16" in report.refused[0].detail


BAD = "a blue car"


def test_a_vae_that_does_not_fit_in_float32_costs_its_images_alone(
    make_config: Make, doctored: LoadedModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the run, when it was placed for the retry."""
    genuine = doctored.vae

    def vae(dtype: torch.dtype) -> Any:
        if dtype == torch.float32:
            raise DeviceError("the VAE does not fit")
        return genuine(dtype)

    Doctored.damage = staticmethod(lambda moments, images: moments.fill_(torch.nan))
    monkeypatch.setattr(doctored, "vae", vae)
    report = run_precache(make_config(**{"encode.vae_dtype": "bfloat16"}), models=doctored)
    assert [refusal.reason for refusal in report.refused] == ["out-of-memory"] * 5
    assert report.num_encoded == 7 and "encoded again in float32, but the VAE" in report.refused[0].detail


def overflowing(dtypes: tuple[torch.dtype, ...]) -> dict[str, Any]:
    """Parts whose second text encoder gives NaN for the caption BAD in these dtypes."""
    parts = tiny_parts()
    bad = parts["tokenizer_2"](BAD, padding="max_length", max_length=77, return_tensors="pt").input_ids[0]

    def spoil(module: torch.nn.Module, given: Any, options: dict[str, Any], made: torch.Tensor) -> torch.Tensor:
        ids = options.get("input_ids", given[0] if given else None)
        is_bad = (ids == bad).all(1)[:, None, None]
        return torch.where(is_bad, torch.nan, made).to(made.dtype) if made.dtype in dtypes else made

    [embeddings] = (each for name, each in parts["text_encoder_2"].named_modules() if name.endswith("embeddings"))
    embeddings.register_forward_hook(spoil, with_kwargs=True)
    return parts


def test_a_text_that_is_not_finite_is_encoded_again_in_float32_or_refused(make_config: Make, tmp_path: Path) -> None:
    settings = {"encode.text_store_dtype": "float32"}
    half = make_config(**settings, **{"encode.text_dtype": "float16"})
    single = make_config(**settings, **{"cache.path": tmp_path / "single"})
    parts = overflowing((torch.float16,))
    report = run_precache(half, models=LoadedModels(**parts))
    assert (report.num_retried_in_float32, report.num_refused) == (1, 0)
    assert "1 entry encoded again in float32" in report.to_text() and not parts["text_encoder_2"].training
    run_precache(single)
    with LatentCache(half.cache) as cache, LatentCache(single.cache) as other:
        for name in ("a.png", "b.png", "sub/e.png"):
            for ref, same in zip(cache.row(name)[1].captions, other.row(name)[1].captions, strict=True):
                found, expected, is_bad = cache.get(ref.key), other.get(same.key).tensors, ref.text == BAD
                assert found.record.provenance["computed_dtype"] == ("float32" if is_bad else "float16")
                assert ("encoded again in float32" in found.record.provenance.get("note", "")) == is_bad
                assert all(torch.equal(value, expected[name]) for name, value in found.tensors.items()) == is_bad
    assert run_precache(half, models=LoadedModels(**parts)).num_misses == 0
    hopeless = make_config(**{"encode.text_dtype": "float16", "cache.path": tmp_path / "hopeless"})
    report = run_precache(hopeless, models=LoadedModels(**overflowing((torch.float16, torch.float32))))
    assert report.num_retried_in_float32 == 0 and {each.reason for each in report.refused} == {"bad-output"}
    assert all("nan" in each.detail and "computed in float32" in each.detail for each in report.refused)


def test_out_of_memory_halves_the_batch_and_costs_what_does_not_fit_alone(
    make_config: Make, doctored: LoadedModels
) -> None:
    sizes = []

    def damage(moments: torch.Tensor, images: torch.Tensor) -> None:
        sizes.append(len(images))
        if len(images) > 1 or images.shape[2] > images.shape[3]:
            raise torch.OutOfMemoryError("injected")

    Doctored.damage = staticmethod(damage)
    report = run_precache(make_config(**{"encode.batch_size": 4}), models=doctored)
    refused = {(refusal.sample_id, refusal.reason) for refusal in report.refused}
    assert refused == {("c.png", "out-of-memory"), ("d.png", "out-of-memory")}
    assert report.num_encoded == 10 and max(sizes) > 1 and sizes.count(1) >= 5


def test_the_callers_models_come_back_as_they_were_and_trained_ones_are_refused(make_config: Make) -> None:
    parts = tiny_parts()
    parts["vae"].train()
    weights = {name: [*parts[name].parameters()] for name in ("vae", "text_encoder", "text_encoder_2")}
    config = make_config(**{"encode.vae_dtype": "bfloat16"})
    run_precache(config, models=LoadedModels(**parts))
    assert parts["vae"].training and not parts["text_encoder"].training
    for name, before in weights.items():
        after = list(parts[name].parameters())
        assert all(a is b and a.dtype == torch.float32 for a, b in zip(after, before, strict=True))
    parts["text_encoder_2"].text_projection.requires_grad_(True)
    with pytest.raises(TrainableEncoderError, match=r"text_encoder_2\.text_projection\.weight requires grad"):
        run_precache(config, models=LoadedModels(**parts))


def test_an_error_in_the_middle_keeps_what_is_done(make_config: Make, doctored: LoadedModels) -> None:
    seen = []

    def damage(moments: torch.Tensor, images: torch.Tensor) -> None:
        seen.append(1)
        if len(seen) == 3:
            raise ZeroDivisionError("a bug")

    Doctored.damage = staticmethod(damage)
    config = make_config(**{"encode.batch_size": 1})
    with pytest.raises(ZeroDivisionError):
        run_precache(config, models=doctored)
    Doctored.damage = staticmethod(lambda moments, images: None)
    assert run_precache(config, models=doctored).num_hits == 7 + 2


def test_the_environment_names_the_shard() -> None:
    assert Shard.from_environment({}) == Shard(0, 1)
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "abc"}
    assert Shard.from_environment(torchrun) == Shard(5, 8, 1, "abc")
    assert Shard.from_environment({**torchrun, "LOCAL_WORLD_SIZE": "4"}) == Shard(5, 8, 1, "abc", 4)
    for wrong, message in (
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK: 'x' is not a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "less than WORLD_SIZE 2"),
        ({"RANK": "1"}, "less than WORLD_SIZE 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            Shard.from_environment(wrong)


def test_two_ranks_build_what_one_process_builds(
    make_config: Make, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchrun names them. Two processes at the same time, and kills of them, are in scripts/soak_crash.py."""
    for number in range(7):
        write_photo(photos / f"more{number}.png", 50 + number).with_suffix(".txt").write_text(f"photo {number}")
    damage_pixels(write_photo(photos / "damaged\udce9.png", 5))  # found when it is decoded: the other rank hears of it
    single = make_config(**{"cache.path": tmp_path / "one"})
    shared = make_config(**{"cache.path": tmp_path / "two"})
    run_precache(single)
    monkeypatch.setenv("WORLD_SIZE", "2")
    reports = []
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        reports.append(run_precache(shared))
    assert all(report.num_encoded > 0 for report in reports)
    with LatentCache(single.cache.path) as one, LatentCache(shared.cache.path) as two:
        keys = sorted(one.store.keys())
        assert keys == sorted(two.store.keys())
        assert sum(report.num_encoded for report in reports) == len(keys)
        for key in keys:
            a, b = one.get(key).tensors, two.get(key).tensors
            assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for name in one.manifests.names():
            assert one.manifest(name).rows == two.manifest(name).rows, "refusals of either rank are in the manifest"


def test_outputs_mean_and_sample(make_config: Make) -> None:
    drawn = {}
    for output, seed in (("moments", 0), ("mean", 0), ("sample", 0), ("sample", 1)):
        config = make_config(**{"encode.image_output": output, "encode.seed": seed, "encode.batch_size": 1 + seed})
        run_precache(config)
        with LatentCache(config.cache.path) as cache:
            entries = [cache.get(cache.row(name)[1].images[0].key).tensors for name in ("a.png", "b.png")]
            drawn[output, seed] = [each["moments" if output == "moments" else "latents"].float() for each in entries]
            assert all(len(each) == 1 for each in entries)
    moments, samples = drawn["moments", 0], drawn["sample", 0]
    assert all(map(torch.equal, drawn["mean", 0], (each[:4] for each in moments)))
    assert not any(map(torch.equal, samples, drawn["sample", 1]))
    noise = [(sample - each[:4]) / (0.5 * each[4:]).exp() for sample, each in zip(samples, moments, strict=True)]
    assert not torch.allclose(noise[0].flatten()[:64], noise[1].flatten()[:64], atol=0.1), "each image has its own"


def test_a_broken_manifest_costs_the_reasons_only(make_config: Make) -> None:
    config = make_config()
    run_precache(config)
    manifest = config.cache.path / "manifests" / "photos.safetensors"
    manifest.write_bytes(manifest.read_bytes()[:-50])
    with pytest.raises(DatasetError, match="is not a valid manifest"), LatentCache(config.cache.path) as cache:
        cache.batch(["a.png"], device="cpu")
    assert run_precache(config).num_hits == 12
    with LatentCache(config.cache.path) as cache:
        assert len(cache.sample_ids()) == 5


def test_samples_that_lose_something_are_named(make_config: Make, photos: Path) -> None:
    """Captions that are cut, here by a tokenizer that was saved with less than 77 tokens, and images in the crop."""
    for name in ("a", "b"):  # one caption, and two samples that have it
        (photos / f"{name}.txt").write_text("word " * 12)
    for number in range(6):
        write_photo(photos / f"long{number}.png", 7, (64, 500))
    write_photo(photos / "tall.png", 7, (500, 64))
    config, parts = make_config(), tiny_parts()
    for name in ("tokenizer", "tokenizer_2"):
        parts[name].model_max_length = 10
    for _ in range(2):  # encoded, then a hit
        report = run_precache(config, models=LoadedModels(**parts))
        assert (report.num_truncated_captions, report.truncated_captions) == (2, ["a.png", "b.png"])
        assert report.num_mostly_cut == 7 and report.mostly_cut == [f"long{number}.png" for number in range(5)]
        assert "7 images lose more than half in the crop: long0.png, long1.png" in report.to_text()
    [found] = [each for each in status(config.cache.path).manifests if each.role != "prompts"]
    assert (found.num_cut, found.cut) == (2, ("a.png", "b.png"))


def test_a_manifest_waits_for_what_is_gone_since_the_plan(
    make_config: Make, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even that of a single process: as where a bucket was pruned while it encoded."""
    config = make_config()
    run_precache(config)
    write_photo(photos / "b.png", 77)
    manifest = config.cache.path / "manifests" / "photos.safetensors"
    make_plan, before = precache_run.make_plan, manifest.read_bytes()

    def plan_then_lose(config: Config, workspace: Workspace, *arguments: Any, **options: Any) -> Plan:
        plan = make_plan(config, workspace, *arguments, **options)
        [photos] = (each for each in plan.manifests if each.name == "photos")
        workspace.store.remove([photos.rows["a.png"].images[0].key])
        return plan

    with monkeypatch.context() as patch:
        patch.setattr(precache_run, "make_plan", plan_then_lose)
        assert run_precache(config).manifests_waiting == ["photos"]
    assert manifest.read_bytes() == before
    report = run_precache(config)
    assert (report.num_misses, report.manifests_waiting) == (1, [])
    assert manifest.read_bytes() != before


def test_ranks_agree_whatever_fits_into_their_memory(
    make_config: Make, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`batch_size: auto` depends on free memory, which differs between devices: it must not decide who does what."""
    for number in range(12):
        write_photo(photos / f"more{number}.png", 100 + number, (64, 64))
    config = make_config()
    reports = []
    for rank, size in ((0, 2), (1, 3)):
        monkeypatch.setattr(encodings, "vae_batch_size", lambda *arguments, size=size: (size, "free memory"))
        reports.append(run_precache(config, shard=Shard(rank, 2)))
    assert all(report.num_encoded for report in reports)
    assert reports[1].manifests_waiting == [] and run_precache(config).num_misses == 0


def test_what_an_earlier_launch_refused_is_tried_again(make_config: Make, photos: Path) -> None:
    damage_pixels(photos / "sub/e.png")
    config = make_config(**{"encode.batch_size": 1})
    for rank in (0, 1):
        report = run_precache(config, shard=Shard(rank, 2))
    with LatentCache(config.cache.path) as cache:
        assert len(cache.sample_ids()) == 4
    assert report.manifests_waiting == []
    # Nothing changed, so the next launch tries the same bytes again, and says why there is something to do.
    assert run_precache(config, dry_run=True).misses_by_reason == {"refused before (corrupt)": 1}
    first = run_precache(config, shard=Shard(1, 2, launch="another"))
    assert first.manifests_waiting == ["photos"], "the other rank of this launch has not tried yet"


def test_a_prompt_of_other_encoders_is_never_returned(make_config: Make) -> None:
    one = make_config(**{"datasets.0.name": "one"})
    run_precache(one)
    with LatentCache(one.cache.path, manifest="one") as cache:
        before = cache.prompt("", device="cpu")["prompt_embeds"]
    other = make_config(**{"datasets.0.name": "other", "encode.clip_skip": 1, "validation.prompts": ["else"]})
    run_precache(other)
    with LatentCache(one.cache.path, manifest="one") as cache:
        assert torch.equal(cache.prompt("", device="cpu")["prompt_embeds"], before)
        assert cache.prompt("a validation prompt", device="cpu")
    with LatentCache(one.cache.path, manifest="other") as cache:
        assert not torch.equal(cache.prompt("", device="cpu")["prompt_embeds"], before)
    with (
        LatentCache(one.cache.path) as cache,
        pytest.raises(StoreError, match="one, other have different text encoders"),
    ):
        cache.prompt("", device="cpu")


def test_a_dataset_that_takes_anothers_name_is_warned_of(
    make_config: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_precache(make_config())
    write_photo(tmp_path / "others" / "x.png", 1)
    run_precache(make_config(**{"datasets.0.source": {"kind": "folder", "path": tmp_path / "others"}}))
    assert "manifest photos lists 5 images" in caplog.text
