"""Config files in three formats, precedence of flags, and a clear message for every error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from latentcache.config import CacheConfig, location_of
from latentcache.config_file import load_config, parse_config
from latentcache.errors import ConfigError, StoreError

ROOT = Path(__file__).parent.parent
CONFIGS = [*sorted((ROOT / "configs").iterdir()), ROOT / "examples/cluster/cluster.yaml"]


def dataset(**settings: Any) -> dict[str, Any]:
    return {"datasets": [{"name": "photos", "source": {"path": "photos"}, **settings}]}


MINIMAL = dataset()


def captions(source: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return dataset(source={"path": "photos", **source}, captions=settings)


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """Load these settings from a file, with flags."""

    def load(settings: dict[str, Any], flags: dict[str, Any]) -> Any:
        (path := tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
        return load_config(path, overrides=flags)

    return load


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configs_load(path):
    config = load_config(path)
    assert config.datasets and parse_config(config.model_dump(mode="json")) == config


def test_yaml_toml_and_json_say_the_same(tmp_path):
    toml = '[[datasets]]\nname = "photos"\n[datasets.source]\npath = "photos"\n'
    for name, text in {"a.yaml": yaml.safe_dump(MINIMAL), "a.toml": toml, "a.json": json.dumps(MINIMAL)}.items():
        (tmp_path / name).write_text(text)
        assert load_config(tmp_path / name) == parse_config(MINIMAL)


def test_precedence_is_flag_file_default(load):
    written = dataset(control={"suffix": "_1"}) | {
        "cache": {"path": "from-file"},
        "encode": {"batch_size": 2, "vae_dtype": "fp16"},
    }
    assert parse_config(MINIMAL).cache.path == Path("cache/sdxl")
    assert load(written, {}).cache.path == Path("from-file")
    assert load(written, {}).encode.vae_dtype == "float16"
    flags = {
        "cache": {"path": "from-flag"},
        "encode": {"clip_skip": "1", "batch_size": "4", "text": "none"},
        "model": {"vae": "null"},
        "datasets": {"photos": {"flip": "true", "control": {"0": {"suffix": "_a"}}}, "0": {"repeats": "3"}},
    }
    config = load(written, flags)
    assert config.cache.path == Path("from-flag")
    assert (config.encode.batch_size, config.model.vae, config.encode.clip_skip) == (4, None, 1)
    assert config.encode.text == "none"
    assert config.datasets[0].flip is True and config.datasets[0].repeats == 3
    assert config.datasets[0].control[0].suffix == "_a", "also one that is no list in the file"
    with pytest.raises(ConfigError, match="alpha is the image's own channel"):
        load(dataset(mask="alpha"), {"datasets": {"photos": {"mask": {"suffix": "_m"}}}})
    with pytest.raises(ConfigError, match=r"datasets: the file has no 'cats'; it has 0, photos"):
        load(written, {"datasets": {"cats": {"flip": "true"}}})


def test_resolution_is_the_side_of_an_area(load):
    written = dataset(buckets={"resolution": 768})
    for flags, side in (({}, 768), ({"resolution": "512"}, 512)):
        assert load(written, {"datasets": {"0": {"buckets": flags}}}).datasets[0].buckets.area == side**2
    with pytest.raises(ConfigError, match="resolution is not a setting of rule latentcache"):  # which of them counts?
        load(written, {"datasets": {"0": {"buckets": {"area": "65536"}}}})


def test_resolutions_are_one_dataset_each(load):
    settings = {"mask": "alpha", "control": {"suffix": "_1"}, "repeats": 3}
    written = dataset(**settings, resolutions=[512, 768])
    written["datasets"].append({"name": "faces", "source": {"path": "faces"}})
    small, large, faces = load(written, {"datasets": {"photos": {"flip": "true"}}}).datasets
    assert [each.name for each in (small, large, faces)] == ["photos-512", "photos-768", "faces"]
    assert (small.buckets.area, large.buckets.area) == (512**2, 768**2)
    by_hand = dataset(**settings, flip=True, name="photos-512", buckets={"resolution": 512})
    assert small == parse_config(by_hand).datasets[0], "the short form and the long one are one"
    square = parse_config(dataset(resolutions=[512, 1024], buckets={"rule": "onetrainer", "square": True})).datasets
    assert [(each.buckets.resolution, each.buckets.square) for each in square] == [(512, True), (1024, True)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encode": {"batch_sise": 4}}, r"encode\.batch_sise: unknown setting; did you mean 'encode\.batch_size'\?"),
        ({"datasets": [{"path": "a"}]}, r"datasets\.0\.path: unknown .* 'datasets\.0\.source\.path'\?"),
        ({"\ud800": 1}, r"config: .* unable to parse raw data as a unicode string"),
        ({"datasets": {"name": "a", "source": {"path": "ph"}}}, r"^datasets: give a list \(got: "),
        ({"encode": {"batch_size": 0}}, r"^encode\.batch_size: give 'auto' or a whole number, 1 or more \(got: 0\)$"),
        ({"validation": {"prompts": ["\ud800"]}}, r"validation\.prompts\.0: .*surrogates"),
        ({"datasets": []}, "at least one dataset"),
        ({"datasets": MINIMAL["datasets"] * 2}, "used more than once: photos"),
        (dataset(name="Con"), r"datasets\.0\.name: .*'Con' is a reserved device name"),
        (dataset(name="my style!"), r"datasets\.0\.name: .* for example 'my-style'"),
        (dataset(name=""), "for example 'photos'"),
        (dataset(name="Validation-Prompts"), "names that start with 'validation-prompts' are reserved"),
        (dataset(buckets={"area": 1024}), r"buckets: area is 1024; one bucket of 64x64 needs 4096"),
        (dataset(buckets={"rule": "onetrainer", "resolution": 512, "step": 1024}), "it must be at least step, 1024"),
        (dataset(resolutions=[512], buckets={"resolution": 1024}), r"resolutions replaces area, resolution and si"),
        (
            dataset(resolutions=[512, 1536], buckets={"rule": "kohya"}),
            r"datasets\.0\.buckets: .* <= resolution 1536 <= max_side 1024",
        ),
        (
            captions({"kind": "webdataset", "image_column": "photo"}),
            "image_column is not a setting of kind webdataset; it has caption",
        ),
        (captions({}, shuffle=True), r"captions: variants is 1; give 2 or more together with shuffle or drop"),
        (captions({}, variants=2, shuffle=True, keep=1, keep_separator="|||"), "give keep or keep_separator, not both"),
        (captions({}, weights=[0, 0]), "weights are all 0"),
        (captions({"caption_lines": "joined"}, weights=[1, 1]), "weights has 2 values, but a sample has 1 caption"),
    ],
)
def test_faults_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(MINIMAL | change)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.yaml", b"a: [", "is not valid YAML"),
        ("run.toml", b"a = ", "is not valid TOML"),
        ("run.json", b"[" * 200_000, "is not valid JSON"),
        ("run.yaml", b"\xff\xfe", "is not valid YAML"),
        ("run.yaml", b"", "is empty"),
        ("run.ini", b"", "unknown extension '.ini'"),
        ("run.yaml", None, "cannot be read"),
    ],
)
def test_broken_files(tmp_path, name, content, message):
    if content is None:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / name)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("cache/sdxl", Path("cache/sdxl")),
        ("file:///data/my%20cache", Path("/data/my cache")),
        ("~nobody-here/cache", Path("~nobody-here/cache")),
        ("s3://bucket/sdxl/", "s3://bucket/sdxl"),
        ("abfss://container@account.dfs.core.windows.net/a", "abfss://container@account.dfs.core.windows.net/a"),
        ("https://host/cache/", "https://host/cache"),
    ],
)
def test_a_cache_is_a_path_a_bucket_or_a_service(given, expected):
    assert location_of(given) == expected
    assert CacheConfig(path=given).path == expected


WITH_SECRETS = [
    "s3://key:SECRET@bucket/cache",
    "S3://key:SECRET@bucket/cache",
    "s3://key:SEC/RET@bucket/cache",
    "az://container/cache?sv=1&sig=SECRET",
    "az://container/cache#SECRET",
    "ftp://key:SECRET@host/cache",
    "file://key:SECRET@host/cache",
]
OTHER_KINDS = ["ftp://host/x", "s3://", "s3://bucket/a?b=1", "s3://bucket/../x", "file://host/x", "C://x"]
# A push into a folder of this name would look like one into the bucket.
LACKING = ["", "s3:/bucket/x", "s3:bucket/x", "s3//bucket/x", "S3:/bucket", "http//host", "https:/host", "localhost:80"]


@pytest.mark.parametrize("given", [*WITH_SECRETS, *OTHER_KINDS, *LACKING])
def test_another_location_is_refused_and_a_secret_in_it_is_not_repeated(given):
    allowed = r"credentials of an object store come from the environment|s3://BUCKET/PREFIX|file:///PATH"
    with pytest.raises(StoreError, match=allowed) as caught:
        location_of(given)
    with pytest.raises(ValidationError, match=allowed) as invalid:
        CacheConfig(path=given)
    with pytest.raises(ConfigError, match="cache: give settings by name") as misplaced:
        parse_config(MINIMAL | {"cache": given})
    for text in (str(caught.value), str(invalid.value), str(misplaced.value)):
        assert "SEC" not in text and "RET" not in text
    if given in LACKING[1:]:
        assert location_of(f"./{given}") == Path(given)


def test_a_path_that_was_a_url_is_refused():
    for url in ("s3://bucket/x", "https://host", "file:///data", "s3://key:SECRET@bucket/cache"):
        with pytest.raises(StoreError, match="give a URL as text") as caught:
            location_of(Path(url))
        assert "SECRET" not in str(caught.value)
