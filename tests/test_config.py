"""One schema for three formats; precedence; every fault named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from latentcache.config import CacheConfig, location_of
from latentcache.config_file import known_settings, load_config, parse_config
from latentcache.errors import ConfigError, StoreError

CONFIGS = sorted((Path(__file__).parent.parent / "configs").iterdir())
MINIMAL = {"datasets": [{"name": "photos", "source": {"path": "photos"}}]}


def source(kind: str, **settings: Any) -> dict[str, Any]:
    return {"datasets": [{"name": "photos", "source": {"kind": kind, "path": "photos", **settings}}]}


def each_resolution(resolutions: list[int], *, name: str = "photos", **buckets: Any) -> dict[str, Any]:
    return {"datasets": [{**MINIMAL["datasets"][0], "name": name, "resolutions": resolutions, "buckets": buckets}]}


def captions(kind: str = "folder", columns: list[str] | None = None, lines: str = "each", **settings: Any) -> dict:
    where = {"kind": kind, "path": "photos", "caption_columns": columns, "caption_lines": lines}
    return {"datasets": [{"name": "photos", "source": where, "captions": settings}]}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | {"cache": {"path": "from-file"}, "encode": {"batch_size": 2}}))
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configs_load(path: Path) -> None:
    assert load_config(path).datasets


def test_the_configs_of_sdxl_edit_pairs_and_clips_show_every_setting() -> None:
    """They are the reference that users copy: a setting that they do not show is not known to them."""
    settings, pairs, clips = (
        yaml.safe_load((CONFIGS[0].parent / f"{name}.yaml").read_text()) for name in ("sdxl", "edit_pairs", "wan_clips")
    )

    def shown(value: object, prefix: str) -> set[str]:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return {prefix} | shown(value[0], f"{prefix}.N")
        if not isinstance(value, dict):
            return {prefix}
        found = {prefix} if prefix else set()
        for name, child in value.items():
            found |= shown(child, f"{prefix}.{name}" if prefix else name)
        return found

    assert set(known_settings()) <= shown(settings, "") | shown(pairs, "") | shown(clips, "")


def test_yaml_toml_and_json_say_the_same(tmp_path: Path) -> None:
    toml = '[[datasets]]\nname = "photos"\n[datasets.source]\npath = "photos"\n'
    files = {"a.yaml": yaml.safe_dump(MINIMAL), "a.toml": toml, "a.json": json.dumps(MINIMAL)}
    loaded = []
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        loaded.append(load_config(tmp_path / name))
    assert loaded[0] == loaded[1] == loaded[2] == parse_config(MINIMAL)


def test_precedence_is_flag_file_default(config_file: Path) -> None:
    assert parse_config(MINIMAL).cache.path == Path("cache/sdxl")
    assert load_config(config_file).cache.path == Path("from-file")
    flags = {"cache": {"path": "from-flag"}}
    assert load_config(config_file, overrides=flags).cache.path == Path("from-flag")


def test_text_from_flags_becomes_numbers_and_none(config_file: Path) -> None:
    flags = {
        "encode": {"clip_skip": "1", "batch_size": "4"},
        "model": {"vae": "null"},
        "datasets": {"photos": {"flip": "true"}, "0": {"repeats": "3"}},
    }
    config = load_config(config_file, overrides=flags)
    assert (config.encode.batch_size, config.model.vae, config.encode.clip_skip) == (4, None, 1)
    assert config.datasets[0].flip is True and config.datasets[0].repeats == 3


@pytest.mark.parametrize(
    ("written", "flags", "expected"),
    [
        (
            [{"suffix": "_1"}, {"suffix": "_2"}],
            {"1": {"area": "8192"}, "0": {"suffix": "_a"}},
            [("_a", None), ("_2", 8192)],
        ),
        ({"suffix": "_1"}, {"0": {"suffix": "_a"}}, [("_a", None)]),  # one without a list
    ],
)
def test_a_flag_changes_one_of_several_control_images(
    tmp_path: Path, written: Any, flags: dict[str, Any], expected: list[Any]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"datasets": [{**MINIMAL["datasets"][0], "control": written}]}))
    config = load_config(path, overrides={"datasets": {"photos": {"control": flags}}})
    assert [(each.suffix, each.area) for each in config.datasets[0].control] == expected


@pytest.mark.parametrize(
    ("dataset", "flags", "message"),
    [
        ({"control": [{"suffix": "_1"}] * 2}, {}, "two of control and mask are the same file"),
        (
            {"control": [{"suffix": "_1"}]},
            {"control": {"1": {"suffix": "_2"}}},
            "control: there is no '1' in the file; it has 0",
        ),
        ({}, {"control": {"0": {"suffix": "_1"}}}, "control: there is no '0' in the file; it has none"),
        ({"mask": "alpha"}, {"mask": {"suffix": "_m"}}, "alpha is the image's own channel"),
    ],
)
def test_flags_that_no_control_image_or_mask_has_are_named(
    tmp_path: Path, dataset: dict[str, Any], flags: dict[str, Any], message: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"datasets": [{**MINIMAL["datasets"][0], **dataset}]}))
    with pytest.raises(ConfigError, match=message):
        load_config(path, overrides={"datasets": {"photos": flags}})


@pytest.mark.parametrize("flags", [{}, {"resolution": "512"}, {"resolution": "512", "area": "65536"}], ids=str)
def test_resolution_is_the_side_of_an_area(tmp_path: Path, flags: dict[str, str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"datasets": [{**MINIMAL["datasets"][0], "buckets": {"resolution": 768}}]}))
    if "area" in flags:  # which of them counts?
        with pytest.raises(ConfigError, match="resolution is no setting of rule latentcache"):
            load_config(path, overrides={"datasets": {"0": {"buckets": flags}}})
        return
    [found] = load_config(path, overrides={"datasets": {"0": {"buckets": flags}}}).datasets
    assert found.buckets.area == int(flags.get("resolution", 768)) ** 2


def test_resolutions_are_one_dataset_each(tmp_path: Path) -> None:
    settings = each_resolution([512, 768])
    settings["datasets"][0] |= {"mask": "alpha", "control": {"suffix": "_1"}, "repeats": 3}
    settings["datasets"].append({"name": "faces", "source": {"path": "faces"}})
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    small, large, faces = load_config(path, overrides={"datasets": {"photos": {"flip": "true"}}}).datasets
    assert [each.name for each in (small, large, faces)] == ["photos-512", "photos-768", "faces"]
    assert (small.buckets.area, large.buckets.area) == (512**2, 768**2)
    by_hand = {**MINIMAL["datasets"][0], "mask": "alpha", "control": {"suffix": "_1"}, "repeats": 3, "flip": True}
    by_hand |= {"name": "photos-512", "buckets": {"resolution": 512}}
    assert small == parse_config({"datasets": [by_hand]}).datasets[0], "the short form and the long one are one"
    square = each_resolution([512, 1024], rule="onetrainer", square=True)
    assert [each.buckets.resolution for each in parse_config(square).datasets] == [512, 1024]
    assert all(each.buckets.square for each in parse_config(square).datasets)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encode": {"batch_sise": 4}}, r"encode\.batch_sise: unknown setting; did you mean 'encode\.batch_size'\?"),
        ({"encode": {"vae_dtype": "fp8"}}, r"encode\.vae_dtype: .*'float16'.*met: 'fp8'"),
        (
            {"datasets": [{"name": "Con", "source": {"path": "x"}}]},
            r"datasets\.0\.name: .*'Con' names a device under Windows",
        ),
        ({"datasets": [{"name": "my style!", "source": {"path": "x"}}]}, r"datasets\.0\.name: .* as 'my-style'"),
        ({"encode": {"cache_latents": True}}, r"encode\.cache_latents: unknown setting; latents are always cached"),
        ({"datasets": [{"path": "a"}]}, r"datasets\.0\.path: unknown .* 'datasets\.0\.source\.path'\?"),
        (
            {"datasets": [{"name": "a", "source": "ph"}]},
            r"source: give settings .* source: \{path: ph\} \(met: 'ph'\)$",
        ),
        ({"datasets": {"name": "a", "source": {"path": "ph"}}}, r"^datasets: give a list \(met: "),
        ({"cache": {"max_bytes": "lots"}}, r"cache\.max_bytes: give a number of bytes, such as 50GB"),
        ({"images": {"min_side": 64}}, r"images: unknown setting; did you mean 'datasets\.0\.images'\?"),
        ({"encode": {"batch_size": 0}}, r"^encode\.batch_size: give 'auto' or a whole number from 1 \(met: 0\)$"),
        ({"encode": {"num_workers": "many"}}, r"^encode\.num_workers: give 'auto' or .* \(met: 'many'\)$"),
        (
            {"datasets": [MINIMAL["datasets"][0] | {"buckets": {"area": "1024x1024"}}]},
            r"datasets\.0\.buckets\.area: give a number of pixels, such as 1048576",
        ),
        (
            {"datasets": [MINIMAL["datasets"][0] | {"buckets": {"area": 1024}}]},
            r"datasets\.0\.buckets: area is 1024; one bucket of 64x64 needs 4096",
        ),
        ({"cash": {}}, r"cash: unknown setting; did you mean 'cache'\?"),
        ({"datasets": []}, "at least one dataset"),
        ({"datasets": [{"name": "a"}]}, r"datasets\.0\.source: is required"),
        ({"datasets": MINIMAL["datasets"] * 2}, "occur twice"),
        (each_resolution([512, 512]), "different names, but photos-512 occur twice"),
        (
            {"datasets": [*each_resolution([512])["datasets"], {"name": "photos-512", "source": {"path": "x"}}]},
            "different names, but photos-512 occur twice",
        ),
        (each_resolution([512], resolution=1024), r"datasets\.0: resolutions .* leave out area, resolution and sizes"),
        (each_resolution([512, 1536], rule="kohya"), r"datasets\.0\.buckets: .* <= resolution 1536 <= max_side 1024"),
        (each_resolution([512], name="n" * 62), r"datasets\.0\.name: a name has at most 64"),
        ({"datasets": [{"name": "Validation-Prompts", "source": {"path": "x"}}]}, "may not begin with"),
        (
            source("webdataset", image_column="photo"),
            "image_column is no setting of kind webdataset; it has caption",
        ),
        (captions(shuffle=True), r"datasets\.0\.captions: variants is 1; give 2 or more together with shuffle or drop"),
        (captions(keep=1), "variants is 1, the caption itself, which keep does not change"),
        (captions(variants=2, shuffle=True, keep=1, keep_separator="|||"), "give keep or keep_separator, not both"),
        (captions(weights=[0, 0]), "weights are all 0"),
        (captions("webdataset", ["a", "b"], weights=[1]), "captions.weights has 1, but a sample has 2 captions"),
        (
            captions(lines="joined", weights=[1, 1]),
            "captions.weights has 2, but a sample has 1 caption: give one for each",
        ),
        ({"encode": {"text": "latents"}}, r"encode\.text: .*'all' or 'none'"),
        (source("parquet", caption_lines="joined"), "kind parquet; it has caption_columns, image_column"),
        ({"validation": {"prompts": ["\ud800"]}}, r"validation\.prompts\.0: .*surrogates"),
        (
            {"datasets": [{"name": "a", "source": {"path": "x"}, "buckets": {"aria": 1}}]},
            r"'datasets\.0\.buckets\.area'",
        ),
    ],
)
def test_faults_are_named(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(MINIMAL | change)


def test_short_names_of_dtypes_are_understood() -> None:
    encode = parse_config(MINIMAL | {"encode": {"vae_dtype": "fp16", "text_store_dtype": "bf16"}}).encode
    assert (encode.vae_dtype, encode.text_store_dtype) == ("float16", "bfloat16")


def test_an_unknown_dataset_is_named(config_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"datasets: there is no 'cats' in the file; it has 0, photos"):
        load_config(config_file, overrides={"datasets": {"cats": {"flip": "true"}}})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.yaml", "a: [", "is not valid YAML"),
        ("run.toml", "a = ", "is not valid TOML"),
        ("run.json", "{", "is not valid JSON"),
        ("run.json", "[" * 200_000, "is not valid JSON"),
        ("run.yaml", "- 1", "holds list"),
        ("run.yaml", "", "is empty"),
        ("run.yaml", "cache:\n\tpath: c", "YAML wants spaces"),
        ("run.yaml", 'cache: {path: "C:\\Users\\me"}', "write 'C:.Users.me' in single quotes"),
        ("run.ini", "", "unknown suffix '.ini'"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / name)


@pytest.mark.parametrize("what", ["folder", "no text", "deep"])
def test_what_is_no_config_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "run.yaml"
    if what == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"\xff\xfe" if what == "no text" else b"[" * 10_000)
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        load_config(path)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("cache/sdxl", Path("cache/sdxl")),
        ("file:///data/my%20cache", Path("/data/my cache")),
        ("s3://bucket/sdxl/", "s3://bucket/sdxl"),
        ("gs://bucket", "gs://bucket"),
        ("az://container/a/b", "az://container/a/b"),
        ("abfss://container@account.dfs.core.windows.net/a", "abfss://container@account.dfs.core.windows.net/a"),
        ("https://host/cache/", "https://host/cache"),
    ],
)
def test_a_cache_is_a_path_a_bucket_or_a_service(given: str, expected: Path | str) -> None:
    assert location_of(given) == expected
    assert CacheConfig(path=given).path == expected


@pytest.mark.parametrize(
    "given",
    ["ftp://host/x", "s3://", "s3://bucket/a?b=1", "s3://bucket/../x", "file://host/x", "C://x"],
)
def test_a_location_of_another_kind_is_refused_and_what_is_allowed_is_named(given: str) -> None:
    with pytest.raises(StoreError, match=r"s3://BUCKET/PREFIX|file:///PATH"):
        location_of(given)
    with pytest.raises(ValidationError):
        CacheConfig(path=given)


@pytest.mark.parametrize(
    "given",
    [
        "s3://key:SECRET@bucket/cache",
        "S3://key:SECRET@bucket/cache",
        "s3://key:SEC/RET@bucket/cache",
        "az://container/cache?sv=1&sig=SECRET",
        "az://container/cache#SECRET",
        "ftp://key:SECRET@host/cache",
        "file://key:SECRET@host/cache",
    ],
)
def test_a_secret_in_a_location_is_not_repeated(given: str) -> None:
    with pytest.raises(StoreError, match=r"credentials of an object store come from the environment|///PATH") as caught:
        location_of(given)
    with pytest.raises(ValidationError) as invalid:
        CacheConfig(path=given)
    with pytest.raises(ConfigError, match="cache: give settings by their names") as misplaced:
        parse_config(MINIMAL | {"cache": given})
    for text in (str(caught.value), str(invalid.value), str(misplaced.value)):
        assert "SEC" not in text and "RET" not in text


@pytest.mark.parametrize(
    "given",
    ["", "s3:/bucket/x", "s3:bucket/x", "s3//bucket/x", "S3:/bucket", "http//host", "https:/host", "localhost:8765"],
)
def test_a_url_that_lacks_a_part_is_no_directory(given: str) -> None:
    """A push into a folder of this name would look like one into the bucket."""
    with pytest.raises(StoreError, match="s3://BUCKET/PREFIX"):
        location_of(given)
    with pytest.raises(ValidationError, match="s3://BUCKET/PREFIX"):
        CacheConfig(path=given)
    if given:
        assert location_of(f"./{given}") == Path(given)


def test_a_path_that_was_a_url_is_refused() -> None:
    for url in ("s3://bucket/x", "https://host", "file:///data"):
        with pytest.raises(StoreError, match="give a URL as text"):
            location_of(Path(url))
    with pytest.raises(StoreError, match="give a URL as text") as caught:
        location_of(Path("s3://key:SECRET@bucket/cache"))
    assert "SECRET" not in str(caught.value)
