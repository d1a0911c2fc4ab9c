"""Several families behind a service: its page, entries made on request, and clients."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from helpers.family_walks import WALKS, assert_same_batch, assert_served, batches_of, walk_config
from helpers.serving import RunningServer, serving_here

from latentcache import LatentCache
from latentcache.config import Config
from latentcache.dataset.samples import Sample
from latentcache.dataset.sources import open_source
from latentcache.precache.run import run_precache
from latentcache.service.page.views import url


@pytest.fixture(scope="module", params=WALKS)
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Config:
    config = walk_config(tmp_path_factory.mktemp(request.param), request.param)
    report = run_precache(config)
    assert report.num_refused == 0 < report.num_encoded
    return config


@pytest.fixture(scope="module")
def cached(config: Config) -> Iterator[LatentCache]:
    with LatentCache(config.cache.path) as cache:
        yield cache


@pytest.fixture(scope="module")
def server(config: Config) -> Iterator[RunningServer]:
    """A server on the cache, with the config. Its VAE counts as quick: it is tiny, as its folder does not say."""
    assert isinstance(config.cache.path, Path)
    quick = patch("latentcache.service.page.vae_decoder.is_quick", return_value=True)
    with quick, serving_here(config.cache.path, encode=config, config=config, show_photos=True) as running:
        yield running


def test_the_page_shows_each_sample_with_all_its_parts(server: RunningServer, cached: LatentCache) -> None:
    for name, row in cached.manifest("walk").rows.items():
        answer = server.get(url("/sample", dataset="walk", id=name, reasons=1))
        assert answer.status == 200 and b">miss<" not in answer.body
        page = html.unescape(answer.body.decode())
        assert f">hit</span> {len(list(row.keys()))} entries are cached as the config requires" in page
        pictures = re.findall(r'(?:src|href)="(/v1/thumbnails/(\w{64})[^"]*|/photo[^"]+)"', page)
        shown = [*row.images, *(part for part in row.parts if part.part == "control")]
        assert [key for _, key in pictures if key] == [ref.key for ref in shown]
        for picture, key in pictures:
            answer = server.get(picture)
            assert (answer.status, answer.headers["content-type"]) == (200, "image/webp"), (picture, answer.body)
            assert not key or answer.headers["latentcache-decoded"] == "vae"


def test_what_is_encoded_on_request_is_what_precache_makes(config: Config, cached: LatentCache, tmp_path: Path) -> None:
    """What is not cached is stored for good, so a client that may only read could fill the disk: it is refused."""
    source = open_source(config.datasets[0].source, config.datasets[0].part_files)
    samples = {each.sample_id: each for each in source.samples() if isinstance(each, Sample)}
    with serving_here(tmp_path / "empty", encode=config) as running:
        texts = {ref.text: ref.key for row in cached.manifest("walk").rows.values() for ref in row.captions}
        prompts = [{"text": text} for text in (*texts, "a validation prompt", "")]
        prompts += [{"text": "ugly", "negative": True}]
        document = running.post("/v1/prompts:encode", {"prompts": prompts}).problem(403)
        assert "not cached" in document["detail"] and "writing token" in document["next_step"]
        for token in (running.write_token, running.token):
            answer = running.post("/v1/prompts:encode", {"prompts": prompts}, token=token)
            assert set(texts.values()) <= set(assert_served(answer.entries(), cached))
        for row in cached.manifest("walk").rows.values():
            data = source.read(samples[row.sample_id])
            running.post("/v1/images:encode", data).problem(403)
            answer = running.post("/v1/images:encode", data, token=running.write_token)
            assert assert_served(answer.entries(), cached) == [ref.key for ref in row.images]
            answer = running.post("/v1/images:encode?return=keys", data)
            wanted = [{"key": ref.key, "cached": True, **ref.geometry.to_json()} for ref in row.images]
            assert answer.json()["entries"] == wanted


def test_a_client_gets_the_same_batches(server: RunningServer, cached: LatentCache, tmp_path: Path) -> None:
    for _ in range(2):
        with LatentCache(server.url, token=server.token, local=tmp_path / "local") as client:
            for found, expected in zip(batches_of(client), batches_of(cached), strict=True):
                assert_same_batch(found, expected)
