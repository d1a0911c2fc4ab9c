"""musubi-tuner's cache files, written as its specification has them: not by this project's exporter."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from latentcache.families import FAMILIES
from latentcache.interop.readers import layouts_of

LAYOUTS = layouts_of("musubi")
SHORT = {family: layout.architecture for family, layout in LAYOUTS.items() if family in FAMILIES}
"""Family -> the architecture in the names of its files."""
# Published constants: unscaled latents of FLUX.1's VAE deviate by 2.8.
_STD = {"z-image": 2.8}


def latents_of(family: str, seed: int, height: int = 64, width: int = 128) -> torch.Tensor:
    """For an image of these pixels: [16, h, w], or [16, 1, h, w] with frames; scaled but for z-image."""
    frames = [1] if family in ("qwen-image", "krea2", "wan") else []
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(16, *frames, height // 8, width // 8, generator=generator) * _STD.get(family, 1.0)
    return values.to(torch.float32 if family in ("z-image", "flux") else torch.bfloat16)


def texts_of(family: str, seed: int) -> dict[str, torch.Tensor]:
    """Key without dtype -> tensor, of few features: 5 rows and more, which follow from the seed; of FLUX.1 512."""
    generator = torch.Generator().manual_seed(seed)
    names = list(LAYOUTS[family].texts)
    rows = 512 if family == "flux" else 5 + seed
    shape = (rows, 3, 8) if family == "krea2" else (rows, 8)
    found = {names[0]: torch.randn(shape, generator=generator).bfloat16()}
    return found | {name: torch.randn(6, generator=generator).bfloat16() for name in names[1:]}


def named(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with their dtypes in their names."""
    return {f"{name}_{str(tensor.dtype).removeprefix('torch.')}": tensor for name, tensor in tensors.items()}


def latents_key(latents: torch.Tensor) -> str:
    """The name without dtype."""
    frames = 1 if latents.ndim == 3 else latents.shape[1]
    return f"latents_{frames}x{latents.shape[-2]}x{latents.shape[-1]}"


def write_latents(
    folder: Path, family: str, stem: str, size: tuple[int, int], latents: torch.Tensor, **more: torch.Tensor
) -> Path:
    """The file of an image of `size` = (width, height)."""
    path = folder / f"{stem}_{size[0]:04d}x{size[1]:04d}_{SHORT[family]}.safetensors"
    metadata = {"architecture": LAYOUTS[family].title, "width": str(size[0]), "height": str(size[1])}
    return _write(path, named({latents_key(latents): latents}) | more, metadata)


def write_text(folder: Path, family: str, stem: str, caption: str, texts: dict[str, torch.Tensor]) -> Path:
    path = folder / f"{stem}_{SHORT[family]}_te.safetensors"
    return _write(path, named(texts), {"architecture": LAYOUTS[family].title, "caption1": caption})


def write_cache(folder: Path, family: str, samples: dict[str, str]) -> None:
    """Files for images of 320 x 160 pixels (width, height): `samples` are captions by the image's name."""
    for seed, (stem, caption) in enumerate(samples.items()):
        write_latents(folder, family, stem, (320, 160), latents_of(family, seed))
        write_text(folder, family, stem, caption, texts_of(family, seed))


def _write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()},
        path,
        metadata=metadata | {"format_version": "1.0.1"},
    )
    return path
