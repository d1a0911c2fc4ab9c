"""The code in README, docs and examples works after the quickstart, and the site builds."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from helpers.serving import serving
from PIL import Image

import latentcache
from latentcache import LatentCache, load_config
from latentcache.config_file import parse_config
from latentcache.precache.run import run_precache

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = r"```python\n(.*?)```"
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "docs").rglob("*.md")
    if re.search(BLOCKS, path.read_text(encoding="utf-8"), flags=re.DOTALL)
)
SERVICE_PAGE = "docs/guide/service.md"
EXPORTS_PAGE = "docs/howto/import-export.md"
"""Its Python needs third-party libraries."""


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A user's `folder` after the quickstart, with photos, configs and cache; the `module`, and its `document`."""
    folder = tmp_path_factory.mktemp("quickstart")
    (folder / "configs").symlink_to(ROOT / "configs")
    (earlier := folder / "cache" / "quickstart-lora").mkdir(parents=True)
    (earlier / "checkpoint.pt").touch()  # an earlier run must not get in the way
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        patch.chdir(folder)
        import quickstart

        document = quickstart.run(load_config("configs/quickstart.yaml"))
    document = json.loads(json.dumps(document, allow_nan=False))
    return SimpleNamespace(folder=folder, module=quickstart, document=document)


@pytest.fixture
def in_quickstart(quickstart: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(quickstart.folder)
    return quickstart.folder


def test_what_the_quickstart_says_is_so(quickstart, in_quickstart):
    document, captions, held_out = quickstart.document, set(quickstart.module.CAPTIONS), quickstart.module.HELD_OUT
    first, second = document["passes"]
    assert (first["num_hits"], first["num_encoded"]) == (0, 37)
    assert (second["num_hits"], second["num_encoded"]) == (36, 1), "one caption was edited"
    assert list(second["misses_by_reason"]) == ["caption changed"]
    assert document["edited"]["caption"].endswith(", take 2")
    seen = {sample_id for batch in document["batches"] for sample_id in batch["sample_id"]}
    assert seen == captions and not seen & set(held_out)
    assert document["training"]["step"] == 40
    cold, warm = document["validations"]
    assert (cold["num_filled"] > 0, warm["num_filled"]) == (True, 0)
    before, after = document["untrained"]["loss_by_sample"]["held-out"], warm["loss_by_sample"]["held-out"]
    assert set(after) == set(held_out) and all(after[name] < before[name] for name in held_out)
    assert warm["loss"] < 0.99 * document["untrained"]["loss"]
    for name in ("grid", "plot"):
        with Image.open(document["files"][name]) as picture:
            assert picture.format == "PNG" and min(picture.size) >= 128
    assert all(Path(document["files"][name]).exists() for name in ("metrics", "lora", "checkpoint"))
    text = quickstart.module.to_text(document)
    assert all(path in text for path in document["files"].values())
    assert "36 entries found, 1 encoded (caption changed)" in text and "lower for 3 of 3 photos" in text


def run_blocks(page: str, replaced: Mapping[str, str] = MappingProxyType({})) -> None:
    """Run the Python code of a page, with some texts replaced."""
    names = {"__name__": "docs"}
    for block in re.findall(BLOCKS, (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL):
        for shown, real in replaced.items():
            assert shown in block
            block = block.replace(shown, real)
        exec(compile(block, page, "exec"), names)


@pytest.mark.usefixtures("in_quickstart")
@pytest.mark.parametrize("page", ["README.md", *(page for page in PAGES if page not in (SERVICE_PAGE, EXPORTS_PAGE))])
def test_python_in_docs_runs(page):
    run_blocks(page)


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore")
def test_datasets_loads_the_parquet_file(make_config, tmp_path):
    config = make_config(**{"cache.path": tmp_path / "cache/quickstart"})  # where the recipe expects it
    run_precache(config)
    parquet, *_ = re.findall(BLOCKS, (ROOT / EXPORTS_PAGE).read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "program.py").write_text(parquet)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "program.py"], cwd=tmp_path, env=environment, check=True)
    import datasets

    file, folder = str(tmp_path / "photos.parquet"), str(tmp_path / "loaded")
    rows = list(datasets.load_dataset("parquet", data_files=file, split="train", cache_dir=folder))
    with LatentCache(config.cache.path) as cache:
        assert [row["sample_id"] for row in rows] == cache.sample_ids()
        for row in rows:
            batch = cache.batch([row["sample_id"]], device="cpu", scaled=True)
            assert row["caption"] == cache.row(row["sample_id"])[1].captions[0].text
            for name in ("latents", "prompt_embeds"):
                assert torch.equal(torch.tensor(row[name]), batch[name][0].float())


RECIPES = (ROOT / "docs/guide/recipes.md").read_text(encoding="utf-8")
YAMLS = re.findall(r"```yaml\n(.*?)```", RECIPES, flags=re.DOTALL)


@pytest.mark.parametrize("text", YAMLS, ids=lambda text: text.split()[-1])
def test_the_configs_of_recipes_are_valid(text):
    photos = {"name": "photos", "source": {"kind": "folder", "path": "photos"}}
    whole = {"cache": {"path": "cache"}, "datasets": [photos], "model": {"path": "tiny"}}
    parse_config(whole | yaml.safe_load(text))


def test_the_loss_of_preferences_prefers_the_winner():
    [code] = [block for block in re.findall(BLOCKS, RECIPES, flags=re.DOTALL) if "def preference_loss" in block]
    names: dict[str, Any] = {"torch": torch}
    exec(compile(code, "recipes", "exec"), names)
    batch = {"latents": torch.ones(2, 4, 8, 8), "control_latents_1": torch.zeros(2, 4, 8, 8)}
    share = torch.tensor(0.0, requires_grad=True)  # how much better the model is at the winner, which is all ones

    def errors(model: str, noisy: torch.Tensor) -> torch.Tensor:
        means = noisy.mean((1, 2, 3))
        return 1 - share * means if model == "unet" else torch.ones(len(means))

    loss = names["preference_loss"]("unet", "reference", batch, lambda latents: latents, errors, beta=1.0)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2)) and share.grad is not None and share.grad < 0


def test_what_reads_from_a_service_runs(in_quickstart, monkeypatch, capsys):
    cache, config = in_quickstart / "cache" / "quickstart", "configs/quickstart.yaml"
    with serving(cache, "--encode", config, writes=False) as server:
        run_blocks(SERVICE_PAGE, {"http://encoders:8765": server.url, 'token="..."': f"token={server.token!r}"})
        monkeypatch.setenv("LATENTCACHE_TOKEN", str(server.token))
        monkeypatch.setattr(sys, "argv", ["remote_trainer.py", server.url])
        runpy.run_path(str(ROOT / "examples" / "remote_trainer.py"), run_name="__main__")
    assert re.search(r"epoch 1: loss of the last batch \d", capsys.readouterr().out)
    assert list((in_quickstart / "cache" / "remote-tier").glob("*/packs/*/*.safetensors"))


@pytest.mark.parametrize("name", ["own_trainer", "diffusers_sdxl", "train_one_encoder", "validate_in_loop"])
def test_examples_run(name, in_quickstart, capsys):
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    out = capsys.readouterr().out
    if name == "own_trainer":
        assert "0 were encoded" in out and "resumed after step 6: next batch" in out
    elif name == "diffusers_sdxl":
        assert (in_quickstart / "cache" / "diffusers_sdxl.png").exists() and "(4, 4, 32, 32)" in out
    elif name == "train_one_encoder":
        first, *steps = out.splitlines()
        assert float(first.rpartition(" ")[2]) < 1e-3, "untrained, the encoder gives what is cached"
        assert len(steps) == 4 and len({line.split()[3] for line in steps}) == 4, out
    else:
        assert out.count("images, plot and metrics.json:") == 2


def test_links_of_the_readme_lead_somewhere():
    for page in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text(encoding="utf-8")):
            assert (ROOT / target).exists(), f"{page} links to {target}"


def test_the_site_builds(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    # Material for MkDocs would advertise its successor.
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "architecture" / "index.html").exists()


def test_the_reference_is_that_of_the_code(monkeypatch):
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    shown = re.findall(r"^::: latentcache\.(\w+)$", page, flags=re.MULTILINE)
    assert sorted(shown) == sorted(set(latentcache.__all__) - {"__version__", "errors"})

    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import make_reference

    for name, text in make_reference.pages().items():
        committed = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
        assert committed == text, f"docs/reference/{name} is not up to date: run scripts/make_reference.py"
