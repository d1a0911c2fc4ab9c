"""What README, docs and examples show works as it is shown."""

from __future__ import annotations

import json
import math
import re
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from helpers.pipeline_host import host
from helpers.serving import serving

from latentcache import load_config, run_precache
from latentcache.cli.app import app
from latentcache.config_file import parse_config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = r"```python\n(.*?)```"
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "docs").rglob("*.md")
    if re.search(BLOCKS, path.read_text(encoding="utf-8"), flags=re.DOTALL)
)
SERVICE_PAGE = "docs/guide/service.md"
RECIPES_PAGE = "docs/howto/import-export.md"
"""Its Python needs other people's libraries: tests/interop/test_recipes.py runs it."""


@pytest.fixture(scope="module")
def quickstart_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a user has it after the quickstart: photos, configs, and a cache of all photos."""
    folder = tmp_path_factory.mktemp("quickstart")
    (folder / "configs").symlink_to(ROOT / "configs")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        patch.chdir(folder)
        import quickstart

        config = load_config("configs/quickstart.yaml")
        quickstart.copy_photos(config.datasets[0].source.path)
        assert run_precache(config).num_samples >= 10
    sys.modules.pop("quickstart")
    return folder


@pytest.fixture
def in_quickstart(quickstart_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(quickstart_folder)
    return quickstart_folder


def run_blocks(page: str, replaced: Mapping[str, str] = MappingProxyType({})) -> None:
    """Run the Python of a page, with some texts in it replaced."""
    names = {"__name__": "docs"}
    for block in re.findall(BLOCKS, (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL):
        for shown, real in replaced.items():
            assert shown in block
            block = block.replace(shown, real)
        exec(compile(block, page, "exec"), names)


@pytest.mark.usefixtures("in_quickstart")
@pytest.mark.parametrize("page", ["README.md", *(page for page in PAGES if page not in (SERVICE_PAGE, RECIPES_PAGE))])
def test_python_in_docs_runs(page: str) -> None:
    run_blocks(page)


RECIPES = (ROOT / "docs/guide/recipes.md").read_text(encoding="utf-8")
YAMLS = re.findall(r"```yaml\n(.*?)```", RECIPES, flags=re.DOTALL)


@pytest.mark.parametrize("text", YAMLS, ids=lambda text: text.split()[-1])
def test_the_configs_of_recipes_are_valid(text: str) -> None:
    photos = {"name": "photos", "source": {"kind": "folder", "path": "photos"}}
    whole = {"cache": {"path": "cache"}, "datasets": [photos], "model": {"path": "tiny"}}
    parse_config(whole | yaml.safe_load(text))


def test_the_loss_of_preferences_prefers_the_winner() -> None:
    [code] = [block for block in re.findall(BLOCKS, RECIPES, flags=re.DOTALL) if "def preference_loss" in block]
    names: dict[str, Any] = {"torch": torch}
    exec(compile(code, "recipes", "exec"), names)
    batch = {"latents": torch.ones(2, 4, 8, 8), "control_latents_1": torch.zeros(2, 4, 8, 8)}
    share = torch.tensor(0.0, requires_grad=True)  # how much the model is better at the winner, which is all ones

    def errors(model: str, noisy: torch.Tensor) -> torch.Tensor:
        means = noisy.mean((1, 2, 3))
        return 1 - share * means if model == "unet" else torch.ones(len(means))

    loss = names["preference_loss"]("unet", "reference", batch, lambda latents: latents, errors, beta=1.0)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2)) and share.grad is not None and share.grad < 0


def test_sums_of_recipes_are_right() -> None:
    sums = re.findall(r"((?:[\d.,]+ x )+[\d,]+) =\s+([\d,]+)", RECIPES)
    assert len(sums) >= 4
    for factors, result in sums:
        assert math.prod(int(each.replace(",", "")) for each in factors.split(" x ")) == int(result.replace(",", ""))


def test_python_in_the_guide_of_the_service_runs(in_quickstart: Path) -> None:
    cache, config = in_quickstart / "cache" / "quickstart", "configs/quickstart.yaml"
    with serving(cache, "--encode", config, writes=False) as server:
        run_blocks(SERVICE_PAGE, {"http://encoders:8765": server.url, 'token="..."': f"token={server.token!r}"})


@pytest.mark.parametrize("name", ["own_trainer", "diffusers_sdxl", "train_one_encoder", "validate_in_loop"])
def test_examples_run(name: str, in_quickstart: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    out = capsys.readouterr().out
    if name == "own_trainer":
        assert "0 were encoded" in out and "resumed after step 6: next are" in out
    elif name == "diffusers_sdxl":
        assert (in_quickstart / "cache" / "diffusers_sdxl.png").exists() and "(4, 4, 32, 32)" in out
    elif name == "train_one_encoder":
        first, *steps = out.splitlines()
        assert float(first.rpartition(" ")[2]) < 1e-3, "untrained, the encoder gives what is cached"
        assert len(steps) == 4 and len({line.split()[3] for line in steps}) == 4, out
    else:
        assert out.count("images, plot and metrics.json:") == 2


@pytest.fixture
def onetrainer(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Modules of OneTrainer and mgds as the example imports them; `calls` lists what its trainer was called for."""
    calls: list[Any] = []
    own = host("own")
    loaders = (
        "modules.dataLoader.mixin.DataLoaderText2ImageMixin",
        "modules.dataLoader.StableDiffusionFineTuneVaeDataLoader",
    )
    loader = {"DiskCache": "mgds' own"}

    class TrainConfig(dict[str, Any]):
        default_values = classmethod(lambda cls: cls())
        from_dict = dict.update

    def create_trainer(config: TrainConfig, callbacks: Any, commands: Any) -> SimpleNamespace:
        def start() -> None:
            calls.append(("start", dict(config), sys.modules[loaders[0]].DiskCache))

        return SimpleNamespace(
            model=SimpleNamespace(), start=start, train=lambda: calls.append("train"), end=lambda: calls.append("end")
        )

    single = "SingleVariationRandomAccessPipelineModule"
    modules = {
        "modules.util": {"create": SimpleNamespace(create_trainer=create_trainer)},
        "modules.util.callbacks.TrainCallbacks": {"TrainCallbacks": SimpleNamespace},
        "modules.util.commands.TrainCommands": {
            "TrainCommands": lambda: SimpleNamespace(get_stop_command=lambda: False)
        },
        "modules.util.config.TrainConfig": {"TrainConfig": TrainConfig},
        "mgds.PipelineModule": {"PipelineModule": own.PipelineModule},
        f"mgds.pipelineModuleTypes.{single}": {single: getattr(own, single)},
        **{name: dict(loader) for name in loaders},
    }
    for name, attributes in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts)):
            if ".".join(parts[:end]) not in {*sys.modules, *modules}:
                monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(calls=calls, loaders=loaders, own=own)


def test_the_remote_example_runs(
    in_quickstart: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(in_quickstart / "cache" / "quickstart", writes=False) as server:
        monkeypatch.setenv("LATENTCACHE_TOKEN", str(server.token))
        monkeypatch.setattr(sys, "argv", ["remote_trainer.py", server.url])
        runpy.run_path(str(ROOT / "examples" / "remote_trainer.py"), run_name="__main__")
    assert re.search(r"epoch 1: loss of its last batch \d", capsys.readouterr().out)
    assert list((in_quickstart / "cache" / "remote-tier").glob("*/packs/*/*.safetensors"))


def test_the_onetrainer_example_runs(
    onetrainer: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"workspace_dir": "run"}))
    monkeypatch.setattr(sys, "argv", ["onetrainer_install.py", "--config-path", str(config)])
    runpy.run_path(str(ROOT / "examples" / "onetrainer_install.py"), run_name="__main__")
    (start, given, used), *rest = onetrainer.calls
    assert (start, given, rest) == ("start", {"workspace_dir": "run"}, ["train", "end"])
    assert issubclass(used, onetrainer.own.PipelineModule)
    assert all(sys.modules[name].DiskCache == "mgds' own" for name in onetrainer.loaders), "it was undone"


def test_links_of_the_readme_lead_somewhere() -> None:
    for page in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text(encoding="utf-8")):
            assert (ROOT / target).exists(), f"{page} links to {target}"


def test_every_command_is_in_the_reference() -> None:
    commands = {name for name in app if not name.startswith("-")}
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    assert commands == set(re.findall(r"^## latentcache ([a-z]+)$", page, flags=re.MULTILINE))
