"""Encoding on a miss over HTTP, by requests to a real server with the tiny SDXL."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.pack_answers import entries_in
from helpers.pack_damage import damage
from helpers.photo_files import write_photo
from helpers.serving import Answer, RunningServer, serving, serving_here
from helpers.tiny_models import save_diffusers_folder, tiny_pipeline

from latentcache import LatentCache
from latentcache.config import Config
from latentcache.config_file import load_config
from latentcache.errors import RemoteError, StoreError
from latentcache.models.tiny import tiny_parts
from latentcache.precache.run import run_precache
from latentcache.precache.workspace import Workspace
from latentcache.validation.sample_images import prompt_embeddings


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config of two photos, one of which is cached mirrored too, and the tiny model in a folder."""
    folder = tmp_path_factory.mktemp("encode")
    for number, size in enumerate([(80, 144), (144, 80)]):
        write_photo(folder / "photos" / f"{number}.png", number, size).with_suffix(".txt").write_text(f"photo {number}")
    settings = {
        "cache": {"path": str(folder / "cache")},
        "datasets": [
            {
                "name": name,
                "source": {"kind": "folder", "path": str(folder / "photos")},
                "buckets": {"area": 96 * 96, "step": 32},
                "images": {"min_side": 8},
                "flip": name == "mirrored",
            }
            for name in ("photos", "mirrored")
        ],
        "model": {"path": str(save_diffusers_folder(tiny_parts(), folder / "model"))},
        "encode": {"device": "cpu", "num_workers": 1, "clip_skip": 1},
        "validation": {"prompts": ["a validation prompt"]},
    }
    file = folder / "config.json"
    file.write_text(json.dumps(settings))
    return file


@pytest.fixture(scope="module")
def config(config_file: Path) -> Config:
    return load_config(config_file)


NEW = ("not in the cache", "nor this one")


@pytest.fixture(scope="module")
def precached(config: Config) -> Workspace:
    """What precache makes of the config, with two prompts more."""
    workspace = Workspace()
    validation = config.validation.model_copy(update={"prompts": (*config.validation.prompts, *NEW)})
    run_precache(config.model_copy(update={"validation": validation}), workspace=workspace)
    return workspace


@pytest.fixture(scope="module")
def server(config: Config, config_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server on a cache of the photos, and of a dataset `other` that has another clip_skip. One prompt is damaged."""
    cache = config.cache.model_copy(update={"path": tmp_path_factory.mktemp("server") / "cache"})
    dataset = config.datasets[0]
    run_precache(config.model_copy(update={"cache": cache, "datasets": (dataset,)}))
    other, encode = dataset.model_copy(update={"name": "other"}), config.encode.model_copy(update={"clip_skip": 0})
    run_precache(config.model_copy(update={"cache": cache, "datasets": (other,), "encode": encode}))
    with LatentCache(cache.path, manifest="photos") as reader:
        bytes_of = reader.prompt("a validation prompt", device="cpu")["prompt_embeds"].numpy().tobytes()
    damage(Path(cache.path), bytes_of[1000:1100])
    with serving(Path(cache.path), "--encode", config_file, writes=False) as running:
        yield running


def prompts(*texts: str, **more: Any) -> dict[str, Any]:
    return {"prompts": [{"text": text, **more} for text in texts]}


def encoded(answer: Answer) -> dict[str, dict[str, torch.Tensor]]:
    """The entries of a pack, each compared with its digest and its key."""
    assert answer.status == 200, answer.body
    return {key: dict(entry.tensors) for key, entry in entries_in(answer.body).items()}


def assert_precached(found: dict[str, dict[str, torch.Tensor]], precached: Workspace) -> None:
    for key, tensors in found.items():
        entry = precached.store.get(key)
        assert entry.tensors.keys() == tensors.keys()
        assert all(torch.equal(tensor, entry.tensors[name]) for name, tensor in tensors.items())


def problem(answer: Answer, status: int, kind: str) -> dict[str, Any]:
    assert (answer.status, answer.headers["content-type"]) == (status, "application/problem+json"), answer.body
    document: dict[str, Any] = answer.json()
    assert document["kind"] == kind, document
    return document


def metric(server: RunningServer, name: str) -> float:
    text = server.get("/v1/metrics").body.decode()
    [value] = re.findall(rf"^latentcache_encoder_{name} (\S+)$", text, re.MULTILINE)
    return float(value)


def test_prompts_are_those_of_precache(server: RunningServer, precached: Workspace) -> None:
    before, counted = metric(server, "entries_total"), [metric(server, f"{name}_total") for name in ("hits", "misses")]
    body = prompts(NEW[0], "photo 0", NEW[0], "")
    body["prompts"].append({"text": "", "negative": True})
    answer = server.post("/v1/prompts:encode", body)
    found = encoded(answer)
    assert_precached(found, precached)
    keys = answer.headers["latentcache-keys"].split(",")
    assert len(keys) == 5 and keys[0] == keys[2] and set(keys) == found.keys() and len(found) == 4
    assert metric(server, "entries_total") - before == 1
    assert [metric(server, f"{name}_total") for name in ("hits", "misses")] == [counted[0] + 3, counted[1] + 1]

    again = server.post("/v1/prompts:encode", {**body, "return": "keys"}).json()
    assert again == {"entries": [{"key": key, "cached": True} for key in keys]}
    one_new = server.post("/v1/prompts:encode", {**prompts(NEW[1], NEW[0]), "return": "keys"}).json()
    assert [entry["cached"] for entry in one_new["entries"]] == [False, True]
    assert_precached(encoded(server.post("/v1/prompts:encode", prompts(*NEW))), precached)


def test_what_cannot_be_encoded_is_a_problem_with_its_reason(
    server: RunningServer, config_file: Path, precached: Workspace
) -> None:
    photo = (config_file.parent / "photos" / "0.png").read_bytes()
    answer, manifest = server.post("/v1/images:encode?dataset=mirrored", photo), precached.manifests.read("mirrored")
    assert_precached(encoded(answer), precached)
    assert manifest is not None and len(encoded(answer)) == 2
    images = [{"key": ref.key, **ref.geometry.to_json()} for ref in manifest.rows["0.png"].images]
    assert json.loads(answer.headers["latentcache-images"]) == images
    failures = metric(server, "failures_total")
    image = "/v1/images:encode?dataset=photos"
    assert problem(server.post(image, b""), 422, "ImageRefused")["reason"] == "empty"
    assert problem(server.post(image, b"no image"), 422, "ImageRefused")["reason"] == "not-an-image"
    assert problem(server.post(image, photo[:-100]), 422, "ImageRefused")["reason"] == "truncated"
    document = problem(server.post(f"{image}&name=holiday.jpg", photo), 422, "ImageRefused")
    assert (document["reason"], document["path"]) == ("wrong-suffix", "holiday.jpg")
    broken = bytearray(photo)
    broken[len(photo) // 2] ^= 0xFF
    assert problem(server.post(image, bytes(broken)), 422, "ImageRefused")["reason"] == "corrupt"
    assert metric(server, "failures_total") - failures == 2, "the cut and the damaged image"
    assert problem(server.post("/v1/images:encode?dataset=%00", photo), 422, "ConfigError")
    for body in (
        {"prompts": []},
        prompts(*map(str, range(33))),
        prompts("x" * 20_000),
        b'{"prompts": [{"text": "half \\ud800 of a pair"}]}',
        b"[" * 100_000,
        b"\xff",
    ):
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = server.post("/v1/prompts:encode", sent, headers={"Content-Type": "application/json"})
        assert answer.status in (400, 422) and answer.headers["content-type"] == "application/problem+json"
    odd = encoded(server.post("/v1/prompts:encode", prompts("line\u2028separator \x00 and \u202e odd ones \U0001f600")))
    assert len(odd) == 1


def test_what_is_not_cached_needs_the_writing_token(config: Config, tmp_path: Path) -> None:
    """It is stored for good: a client that may only read could fill the disk."""
    run_precache(config.model_copy(update={"cache": config.cache.model_copy(update={"path": tmp_path / "cache"})}))
    with serving_here(tmp_path / "cache", encode=config) as server:
        path, image = "/v1/prompts:encode", write_photo(tmp_path / "new.png", 9, (80, 144)).read_bytes()
        assert server.post(path, prompts("a validation prompt")).status == 200
        for answer in (server.post(path, prompts("new")), server.post("/v1/images:encode?dataset=photos", image)):
            document = problem(answer, 403, "RequestRefused")
            assert "not cached" in document["detail"] and "writing token" in document["next_step"]
        assert server.post(path, prompts("new"), token=server.write_token).status == 200
        assert server.post(path, prompts("new")).status == 200


def test_many_clients_cause_one_encode(server: RunningServer) -> None:
    before, together = metric(server, "entries_total"), threading.Barrier(16)

    def request(number: int) -> set[str]:
        together.wait()
        return set(encoded(server.post("/v1/prompts:encode", prompts("many at once", f"client {number % 4}"))))

    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(request, range(16)))
    assert len(set.intersection(*found)) == 1 and len(set.union(*found)) == 5
    assert metric(server, "entries_total") - before == 5
    assert metric(server, "queue") == 0 and metric(server, 'loaded{kind="text"}') == 1


def expected(config: Config, text: str, *, negative: bool = False) -> dict[str, torch.Tensor]:
    """What SDXL's own pipeline gives for a prompt."""
    embeds, negative_embeds, pooled, negative_pooled = tiny_pipeline(tiny_parts()).encode_prompt(
        "" if negative else text, negative_prompt=text, clip_skip=config.encode.clip_skip, device="cpu"
    )
    tensors = (negative_embeds, negative_pooled) if negative else (embeds, pooled)
    return dict(zip(("prompt_embeds", "pooled_prompt_embeds"), tensors, strict=True))


def assert_equal(found: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in found)


def test_a_damaged_entry_is_encoded_again(server: RunningServer, precached: Workspace, config: Config) -> None:
    before = metric(server, "entries_total")
    with LatentCache(server.url, token=server.token, manifest="photos") as cache:
        found = cache.prompt("a validation prompt", device="cpu")
    assert_equal(found, expected(config, "a validation prompt"))
    assert metric(server, "entries_total") - before == 1
    assert_precached(encoded(server.post("/v1/prompts:encode", prompts("a validation prompt"))), precached)


def test_a_client_needs_no_encoder_for_new_prompts(server: RunningServer, config: Config, tmp_path: Path) -> None:
    """The client's own tier on disk has them afterwards."""
    with LatentCache(server.url, token=server.token, local=tmp_path / "tier", manifest="photos") as cache:
        assert_equal(cache.prompt("new to all", device="cpu"), expected(config, "new to all"))
        negative = cache.prompt("new to all", negative=True, device="cpu")
        assert_equal(negative, expected(config, "new to all", negative=True))
        num_encoded = metric(server, "entries_total")
        images = prompt_embeddings(cache, ["one prompt", "new to all"], "ugly", device="cpu")
        assert [image.prompt for image in images] == ["one prompt", "new to all"]
        assert torch.equal(images[1].embeds["prompt_embeds"], expected(config, "new to all")["prompt_embeds"])
        assert metric(server, "entries_total") == num_encoded + 2, "one of three is known"
        with pytest.raises(RemoteError, match="as a unicode string"):
            cache.prompt("half \ud800 of a pair", device="cpu")


def test_prompts_of_other_encoders_are_refused(server: RunningServer) -> None:
    with LatentCache(server.url, token=server.token, manifest="other") as cache:
        assert cache.prompt("a validation prompt", device="cpu"), "precache made this one"
        with pytest.raises(StoreError, match=r"other text encoders, or another clip_skip.* than other was cached with"):
            cache.prompt("never seen", device="cpu")
        assert cache.prompt("never seen", negative=True, device="cpu"), "clip_skip does not count for negative ones"


def test_a_stop_finishes_the_batch_and_prompts_are_in_the_manifest(server: RunningServer, config: Config) -> None:
    """The last test of this server."""
    cache = server.get("/v1/status").json()["path"]
    with ThreadPoolExecutor(1) as threads:
        request = threads.submit(server.post, "/v1/prompts:encode", prompts(*(f"late {n}" for n in range(32))))
        while metric(server, "queue") == 0:
            assert not request.done(), request.result().body
        assert server.stop() == 143
        assert len(encoded(request.result(30))) == 32
    with LatentCache(cache, manifest="photos") as reader:
        assert_equal(reader.prompt("late 31", device="cpu"), expected(config, "late 31"))
