"""Builds the wheel and the source distribution, and uses the wheel outside the repository.

The wheel's environment finds the dependencies in the environment that runs this. tests/golden/read_with_core.py and
tests/test_package.py show that they are declared.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[2]
PROGRAM = "latentcache/train_lora.py"
"""The name of scripts/train_lora.py in the wheel."""
READ = """
import latentcache
from latentcache import BucketBatchSampler, LatentDataset, LatentLoader
assert latentcache.__file__.startswith({prefix!r}), latentcache.__file__
dataset = LatentDataset("cache/sdxl", "photos")
with LatentLoader(BucketBatchSampler(dataset, 2, seed=0), device="cpu", scaled=True) as loader:
    batch = next(iter(loader))
assert batch["latents"].shape[:2] == (2, 4) and batch["prompt_embeds"].shape[0] == 2
"""


def run(*command: str, cwd: Path) -> str:
    """Run a command without this repository in its environment, and return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def contents(wheel: Path) -> dict[str, bytes]:
    """The files in a wheel."""
    with zipfile.ZipFile(wheel) as file:
        return {name: file.read(name) for name in file.namelist()}


def check_contents(built: dict[str, bytes], rebuilt: dict[str, bytes]) -> None:
    """The wheel contains the whole package, and the source distribution builds the same wheel."""
    files = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "latentcache").rglob("*") if path.is_file()}
    expected = {name: path for name, path in files.items() if "__pycache__" not in name}
    expected[PROGRAM] = ROOT / "scripts" / "train_lora.py"
    packed = {name: data for name, data in built.items() if name.startswith("latentcache/")}
    assert packed == {name: path.read_bytes() for name, path in expected.items()}
    other = sorted(name for name, _ in built.items() ^ rebuilt.items())
    assert not other, f"the source distribution builds another wheel: {other}"


def use(python: Path, folder: Path) -> None:
    """In another folder: write a config, precache, read a batch, run the doctor and a short training."""
    pixels = np.random.default_rng(0).integers(0, 255, (3, 300, 400, 3), dtype=np.uint8)
    (folder / "photos").mkdir(parents=True)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(folder / "photos" / f"{number}.png")
        (folder / "photos" / f"{number}.txt").write_text(f"noise, number {number}", encoding="utf-8")
    command = str(python.with_name("latentcache"))
    assert "wrote photos.yaml" in run(command, "init", "photos", cwd=folder)
    tiny = ("photos.yaml", "--model.path", "tiny-photos")
    said = run(command, "precache", *tiny, cwd=folder)
    assert "3 of 3" in said, said
    run(str(python), "-c", READ.format(prefix=str(python.parents[1])), cwd=folder)
    run(str(python), "-m", "latentcache.doctor", cwd=folder)
    config = folder / "photos.yaml"
    lines = [line for line in config.read_text(encoding="utf-8").splitlines() if not line.startswith("model:")]
    config.write_text("\n".join([*lines, "model: {path: tiny-photos}", ""]), encoding="utf-8")
    options = ("--steps", "2", "--batch_size", "1", "--device", "cpu")
    assert "step 2, loss" in run(str(python), "-m", "latentcache.train_lora", "photos.yaml", *options, cwd=folder)
    assert (folder / "lora").is_dir()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="latentcache-wheel-") as temporary:
        folder = Path(temporary)
        venv.create(folder / ".venv-wheel", with_pip=False)
        scripts = "Scripts" if os.name == "nt" else "bin"
        python = folder / ".venv-wheel" / scripts / Path(sys.executable).name
        pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet")
        run(*pip, "hatchling", cwd=folder)
        run(str(python), "-m", "hatchling", "build", "-d", str(folder / "dist"), cwd=ROOT)
        [sdist], [wheel] = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
        with tarfile.open(sdist) as archive:
            archive.extractall(folder / "source", filter="data")
        [source] = (folder / "source").iterdir()
        run(str(python), "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "again"), cwd=source)
        check_contents(contents(wheel), contents(folder / "again" / wheel.name))

        site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / ".venv-wheel")}))
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
        run(*pip, "--no-index", f"{wheel}[encode,lora,service]", cwd=folder)
        use(python, folder / "elsewhere")
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {len(contents(wheel))} files; installed and used")


if __name__ == "__main__":
    main()
