"""Several families behind a service: its page, entries made on request, clients, and caches that move."""

from __future__ import annotations

import html
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from helpers.family_walks import (
    WALKS,
    assert_same_batch,
    assert_same_batches,
    assert_same_entries,
    assert_same_entry,
    walked,
)
from helpers.pack_answers import entries_in
from helpers.serving import RunningServer, serving_here

from latentcache import LatentCache
from latentcache.config import Config
from latentcache.dataset.samples import Sample
from latentcache.dataset.sources import open_source
from latentcache.precache.encodings import load_models
from latentcache.precache.prompts import cache_prompts
from latentcache.precache.workspace import open_workspace
from latentcache.service.page.text import url
from latentcache.store import DiskStore

Run = Callable[..., Any]


@pytest.fixture(scope="module", params=WALKS)
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Config:
    return walked(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def cached(config: Config) -> Iterator[LatentCache]:
    with LatentCache(config.cache.path) as cache:
        yield cache


@pytest.fixture(scope="module")
def server(config: Config) -> Iterator[RunningServer]:
    """A server on the cache, with the config. Its VAE counts as quick: it is tiny, as its folder does not say."""
    quick = patch("latentcache.service.page.vae_decoder.is_quick", return_value=True)
    with quick, serving_here(config.cache.path, encode=config) as running:
        yield running


def page(server: RunningServer, path: str) -> str:
    answer = server.get(path)
    assert answer.status == 200, (path, answer.body.decode())
    return answer.body.decode()


def test_the_page_shows_each_sample_with_all_its_parts(server: RunningServer, cached: LatentCache) -> None:
    rows = cached.manifest("walk").rows
    for path in ("/", "/gallery", "/gallery?search=cat", "/health"):
        page(server, path)
    assert all(url("/sample", dataset="walk", id=name) in html.unescape(page(server, "/gallery")) for name in rows)
    for name, row in rows.items():
        sample = html.unescape(page(server, url("/sample", dataset="walk", id=name)))
        assert "complete" in sample and 'class="badge miss"' not in sample
        pictures = re.findall(r'(?:src|href)="(/v1/thumbnails/[^"]+|/photo[^"]+)"', sample)
        shown = [*row.images, *(part for part in row.parts if part.role == "control")]
        keys = [picture.split("/")[3][:64] for picture in pictures if "thumbnails" in picture]
        assert keys == [ref.key for ref in shown]
        for picture in pictures:
            answer = server.get(picture)
            is_photo = not picture.startswith("/v1")
            assert (answer.status, answer.headers["content-type"]) == (200, "image/webp"), (picture, answer.body)
            assert is_photo or answer.headers["latentcache-decoded"] == "vae"
        assert sample.count("decoded by the VAE") == len(shown)
        assert all(f"{ref.geometry.extent}" in sample for ref in row.images)
        reasons = page(server, url("/sample/reasons", dataset="walk", id=name))
        assert f">hit</span> {len(list(row.keys()))} entries are cached" in reasons and ">miss<" not in reasons


def test_what_is_encoded_on_request_is_what_precache_makes(config: Config, cached: LatentCache, tmp_path: Path) -> None:
    with serving_here(tmp_path / "empty", encode=config) as running:
        texts = {ref.text: ref.key for row in cached.manifest("walk").rows.values() for ref in row.captions}
        prompts = [{"text": text} for text in (*texts, "a validation prompt", "")]
        prompts += [{"text": "ugly", "negative": True}]
        answer = running.post("/v1/prompts:encode", {"prompts": prompts}, token=running.write_token)
        assert answer.status == 200, answer.body
        assert set(texts.values()) <= set(answer.headers["latentcache-keys"].split(","))
        for key, entry in entries_in(answer.body).items():
            assert_same_entry(entry, cached.get(key))
        for row in cached.manifest("walk").rows.values():
            answer = running.post("/v1/images:encode", data_of(config, row.sample_id), token=running.write_token)
            assert answer.status == 200, answer.body
            found = entries_in(answer.body)
            assert list(found) == [ref.key for ref in row.images]
            for key, entry in found.items():
                assert_same_entry(entry, cached.get(key))
            answer = running.post("/v1/images:encode?return=keys", data_of(config, row.sample_id))
            wanted = [{"key": ref.key, "cached": True, **ref.geometry.to_json()} for ref in row.images]
            assert answer.json()["entries"] == wanted


def data_of(config: Config, sample_id: str) -> bytes:
    dataset = config.datasets[0]
    source = open_source(dataset.source, dataset.part_files)
    [sample] = [each for each in source.samples() if isinstance(each, Sample) and each.sample_id == sample_id]
    return source.read(sample)


def test_a_client_gets_the_same_batches(server: RunningServer, cached: LatentCache, tmp_path: Path) -> None:
    with LatentCache(server.url, token=server.token) as client:
        assert_same_batches(client, cached)
    for _ in range(2):
        with LatentCache(server.url, token=server.token, local=tmp_path / "local") as kept:
            assert_same_batches(kept, cached)


def test_a_client_s_new_prompt_is_encoded(config: Config, tmp_path: Path) -> None:
    text, here, far = "nobody cached this", tmp_path / "here", tmp_path / "far"
    for copy in (here, far):
        shutil.copytree(config.cache.path, copy)
    with open_workspace(config.cache.model_copy(update={"path": here})) as workspace:
        models = load_models(config.model, workspace.memo)
        assert cache_prompts(config, workspace, models, [(text, False), (text, True)], device="cpu") > 0
    with (
        serving_here(far, encode=config) as running,
        LatentCache(running.url, token=running.write_token) as client,
        LatentCache(here) as cached,
    ):
        for negative in (False, True):
            assert_same_batch(*(each.prompt(text, device="cpu", negative=negative) for each in (client, cached)))


def test_a_cache_moves_to_a_service_and_back(
    config: Config, cached: LatentCache, tmp_path: Path, run_json: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, far, back = config.cache.path, tmp_path / "far", tmp_path / "back"
    DiskStore(far).close()
    with serving_here(far) as running:
        monkeypatch.setenv("LATENTCACHE_TOKEN", str(running.write_token))
        for command in (("push", here, running.url), ("sync", running.url, back), ("verify", running.url)):
            code, report = run_json(*command)
            assert code == 0, report
        code, report = run_json("pull", running.url, tmp_path / "pulled")
        assert code == 0 and report["num_packs"] > 0
    for path in (far, back, tmp_path / "pulled"):
        with LatentCache(path) as moved:
            assert_same_entries(moved.store, cached.store)
            assert all(moved.manifests.read(name) == cached.manifests.read(name) for name in cached.manifests.names())
            assert_same_batches(moved, cached)
