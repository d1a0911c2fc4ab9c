"""Encoding on a miss over HTTP, by requests to a real server with the tiny SDXL."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.family_walks import assert_same_batch, assert_served
from helpers.pack_damage import damage
from helpers.photo_files import write_photo
from helpers.serving import TOKEN, RunningServer, serving_here
from helpers.tiny_configs import tiny_config

from latentcache import LatentCache
from latentcache.config import Config
from latentcache.errors import RemoteError, StoreError
from latentcache.precache.run import run_precache
from latentcache.validation.sample_images import prompt_embeddings

NEW = ("not in the cache", "nor this one", "new to all", "late")
SETTINGS = {"encode.clip_skip": 1, "encode.image_output": "sample", "encode.seed": 7, "encode.store_dtype": "float16"}
MakeConfig = Callable[..., Config]


@pytest.fixture(scope="module")
def make_config(tmp_path_factory: pytest.TempPathFactory) -> MakeConfig:
    """A config of two photos, which are cached mirrored too, with changes by dotted name."""
    folder = tmp_path_factory.mktemp("encode")
    for number, size in enumerate([(80, 144), (144, 80)]):
        write_photo(folder / "photos" / f"{number}.png", number, size).with_suffix(".txt").write_text(f"photo {number}")
    return lambda **changes: tiny_config(folder, **{"cache.salt": "s", "datasets.0.flip": True, **SETTINGS, **changes})


@pytest.fixture(scope="module")
def precached(make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LatentCache]:
    """What precache makes of the config, with more prompts."""
    path, texts = tmp_path_factory.mktemp("precached"), ["a validation prompt", *NEW]
    run_precache(make_config(**{"cache.path": path, "validation.prompts": texts, "validation.negative_prompt": NEW[2]}))
    with LatentCache(path, manifest="photos") as cache:
        yield cache


@pytest.fixture(scope="module")
def server(make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server on a cache of the photos, and of a dataset `other` that has another clip_skip. One prompt is damaged."""
    path = tmp_path_factory.mktemp("server") / "cache"
    run_precache(config := make_config(**{"cache.path": path}))
    run_precache(make_config(**{"cache.path": path, "datasets.0.name": "other", "encode.clip_skip": 0}))
    with LatentCache(path, manifest="photos") as reader:
        bytes_of = reader.prompt("a validation prompt", device="cpu")["prompt_embeds"].numpy().tobytes()
    damage(path, bytes_of[1000:1100])
    with serving_here(path, writes=False, token=TOKEN, encode=config) as running:
        yield running


def prompts(*texts: str) -> dict[str, Any]:
    return {"prompts": [{"text": text} for text in texts]}


def metrics(server: RunningServer, *names: str) -> list[float]:
    text = server.get("/v1/metrics").body.decode()
    found = [re.findall(rf"^latentcache_{re.escape(name)} (\S+)$", text, re.MULTILINE) for name in names]
    return [float(value) for [value] in found]


def test_prompts_are_those_of_precache(server: RunningServer, precached: LatentCache) -> None:
    counters = ("encoder_entries_total", "encoder_hits_total", "encoder_misses_total", "hits_total", "misses_total")
    before = metrics(server, *counters)
    body = prompts(NEW[0], "photo 0", NEW[0], "")
    body["prompts"].append({"text": "", "negative": True})
    answer = server.post("/v1/prompts:encode", body)
    found = set(assert_served(answer.entries(), precached))
    keys = answer.headers["latentcache-keys"].split(",")
    assert len(keys) == 5 and keys[0] == keys[2] and set(keys) == found and len(found) == 4
    assert metrics(server, *counters) == [sum(each) for each in zip(before, (1, 3, 1, 3, 1), strict=True)]
    again = server.post("/v1/prompts:encode", {**body, "return": "keys"}).json()
    assert again == {"entries": [{"key": key, "cached": True} for key in keys]}
    one_new = server.post("/v1/prompts:encode", {**prompts(NEW[1], NEW[0]), "return": "keys"}).json()
    assert [entry["cached"] for entry in one_new["entries"]] == [False, True]
    assert_served(server.post("/v1/prompts:encode", prompts(*NEW[:2])).entries(), precached)


def test_what_cannot_be_encoded_is_a_problem_with_its_reason(
    server: RunningServer, precached: LatentCache, tmp_path: Path
) -> None:
    photo = write_photo(tmp_path / "0.png", 0, (80, 144)).read_bytes()
    answer, row = server.post("/v1/images:encode?dataset=photos", photo), precached.manifest("photos").rows["0.png"]
    assert len(assert_served(answer.entries(), precached)) == 2
    images = [{"key": ref.key, **ref.geometry.to_json()} for ref in row.images]
    assert json.loads(answer.headers["latentcache-images"]) == images
    [failures] = metrics(server, "encoder_failures_total")
    broken = bytearray(photo)
    broken[len(photo) // 2] ^= 0xFF
    for data, reason in ((b"", "empty"), (photo[:-100], "truncated"), (bytes(broken), "corrupt")):
        refused = server.post("/v1/images:encode?dataset=photos", data)
        assert refused.problem(422, "ImageRefused")["reason"] == reason
    document = server.post("/v1/images:encode?dataset=photos&name=holiday.jpg", photo).problem(422, "ImageRefused")
    assert (document["reason"], document["path"]) == ("wrong-suffix", "holiday.jpg")
    assert metrics(server, "encoder_failures_total") == [failures + 4], "two images, and their mirror images"
    server.post("/v1/images:encode?dataset=%00", photo).problem(422, "ConfigError")
    wrong = (b'{"prompts": [{"text": "half \\ud800 of a pair"}]}', b"[" * 100_000, b"\xff")
    for body in (prompts(), prompts(*map(str, range(33))), prompts("x" * 20_000), *wrong):
        answer = server.post("/v1/prompts:encode", body, headers={"Content-Type": "application/json"})
        assert answer.status in (400, 422) and answer.headers["content-type"] == "application/problem+json"
    odd = server.post("/v1/prompts:encode", prompts("line\u2028separator \x00 and \u202e odd ones \U0001f600"))
    assert len(odd.entries()) == 1


def test_many_clients_cause_one_encode(server: RunningServer) -> None:
    counted = ("encoder_entries_total", "encoder_queue", 'encoder_loaded{kind="text"}')
    before, together = metrics(server, *counted)[0], threading.Barrier(16)

    def request(number: int) -> set[str]:
        together.wait()
        return set(server.post("/v1/prompts:encode", prompts("many at once", f"client {number % 4}")).entries())

    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(request, range(16)))
    assert len(set.intersection(*found)) == 1 and len(set.union(*found)) == 5
    assert metrics(server, *counted) == [before + 5, 0, 1]


def test_a_client_needs_no_encoder_for_new_and_damaged_prompts(
    server: RunningServer, precached: LatentCache, tmp_path: Path
) -> None:
    [before] = metrics(server, "encoder_entries_total")
    with LatentCache(server.url, token=server.token, local=tmp_path / "tier", manifest="photos") as client:
        for text, negative in (("a validation prompt", False), (NEW[2], False), (NEW[2], True)):
            found, expected = (each.prompt(text, negative=negative, device="cpu") for each in (client, precached))
            assert_same_batch(found, expected)
        images = prompt_embeddings(client, ["one prompt", NEW[2]], "blurred", device="cpu")
        assert [image.prompt for image in images] == ["one prompt", NEW[2]]
        assert torch.equal(images[1].embeds["prompt_embeds"], precached.prompt(NEW[2], device="cpu")["prompt_embeds"])
        assert metrics(server, "encoder_entries_total") == [before + 5], "one of three is known"
        with pytest.raises(RemoteError, match="as a unicode string"):
            client.prompt("half \ud800 of a pair", device="cpu")


def test_prompts_of_other_encoders_are_refused(server: RunningServer) -> None:
    with LatentCache(server.url, token=server.token, manifest="other") as client:
        assert client.prompt("a validation prompt", device="cpu"), "precache made this one"
        with pytest.raises(StoreError, match=r"does not encode prompts as other was cached"):
            client.prompt("never seen", device="cpu")
        assert client.prompt("never seen", negative=True, device="cpu"), "clip_skip does not count for negative ones"


def test_a_stop_finishes_the_batch_and_prompts_are_in_the_manifest(
    make_config: MakeConfig, precached: LatentCache, tmp_path: Path
) -> None:
    run_precache(config := make_config(**{"cache.path": tmp_path / "cache"}))
    texts = (*(f"late {n}" for n in range(31)), NEW[3])
    with ThreadPoolExecutor(1) as threads:
        with serving_here(tmp_path / "cache", writes=False, encode=config) as server:
            request = threads.submit(server.post, "/v1/prompts:encode", prompts(*texts))
            while metrics(server, "encoder_queue") == [0]:
                assert not request.done(), request.result().body
        assert len(request.result(30).entries()) == 32
    with LatentCache(tmp_path / "cache", manifest="photos") as reader:
        assert_same_batch(reader.prompt(NEW[3], device="cpu"), precached.prompt(NEW[3], device="cpu"))
