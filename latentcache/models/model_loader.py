"""The frozen parts of an SDXL model: loaded when needed, and identified without being loaded where possible.

The identity of a part is a digest of what can change its outputs, and of nothing else.
"""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from pydantic import TypeAdapter
from typing_extensions import override

from latentcache.errors import ModelError, TrainableEncoderError
from latentcache.identity import PartIdentity, canonical_json, digest
from latentcache.models.model_files import loading
from latentcache.models.origin import ENCODERS, TEXT_ENCODERS, TOKENIZERS, ModelOrigin, find_model, find_vae
from latentcache.models.part_identity import module_identity, tokenizer_identity
from latentcache.utils.json_document import recalled

PARTS = (*ENCODERS, *TOKENIZERS)
_MEMO = "part-identity/1"
_IDENTITY = TypeAdapter(PartIdentity)


@dataclass(frozen=True, slots=True)
class TextParts:
    """SDXL's two text encoders and their tokenizers."""

    text_encoder: torch.nn.Module
    text_encoder_2: torch.nn.Module
    tokenizer: Any
    tokenizer_2: Any


class Models(ABC):
    """What the encoders need of a model. `ModelLoader` and `LoadedModels` are interchangeable."""

    def __init__(self) -> None:
        self._modules: dict[tuple[str, torch.dtype], torch.nn.Module] = {}

    @abstractmethod
    def origin(self, part: str) -> str:
        """Where one of PARTS comes from, for provenance."""

    @abstractmethod
    def identity(self, part: str, dtype: torch.dtype) -> PartIdentity:
        """The identity of one of PARTS when it computes in `dtype`."""

    @abstractmethod
    def vae_config(self) -> Mapping[str, Any]:
        """`scaling_factor`, `shift_factor`, `force_upcast`, `latent_channels` and `downscale_factor` of the VAE.

        Raises ModelError for a VAE with per-channel latent statistics.
        """

    def vae(self, dtype: torch.dtype) -> torch.nn.Module:
        """The AutoencoderKL, on the CPU unless a caller moved it."""
        return self._module("vae", dtype)

    def text(self, dtype: torch.dtype) -> TextParts:
        """The text encoders, on the CPU unless a caller moved them, and the tokenizers."""
        first, second = (self._module(part, dtype) for part in TEXT_ENCODERS)
        return TextParts(first, second, *self.tokenizers())

    @abstractmethod
    def tokenizers(self) -> tuple[Any, Any]:
        """Both tokenizers; no text encoder is loaded for them."""

    def release(self, *parts: str) -> None:
        """Forget what was loaded or copied of these parts (default: all), so that its memory is freed."""
        gone = parts or PARTS
        self._modules = {key: module for key, module in self._modules.items() if key[0] not in gone}

    @abstractmethod
    def _module(self, part: str, dtype: torch.dtype) -> torch.nn.Module:
        """One of ENCODERS in `dtype`, frozen and in eval mode."""


@contextmanager
def inference(device: torch.device) -> Iterator[None]:
    """Without gradients, and without a surrounding autocast: an entry's identity states the dtype of computation."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


class ModelLoader(Models):
    """Loads the parts of an SDXL model on the CPU, frozen and in eval mode; never its UNet.

    `path` is `tiny`, a hub id, a diffusers folder or one .safetensors checkpoint. `vae` names another VAE: hub id,
    folder or .safetensors file. `config` names a folder or hub id with the configs and tokenizers for a checkpoint
    (default: what diffusers infers from it). `variant` and `revision` are those of `path`. `memo` remembers
    identities from one process to the next. All failures are ModelError. Nothing is read before the first call.
    """

    def __init__(
        self,
        path: str,
        *,
        vae: str | None = None,
        config: str | None = None,
        variant: str | None = None,
        revision: str | None = None,
        memo: MutableMapping[str, str] | None = None,
    ):
        super().__init__()
        self.path, self.vae_path, self.config, self.variant, self.revision = path, vae, config, variant, revision
        self._memo: MutableMapping[str, str] = {} if memo is None else memo
        self._origins: dict[str, ModelOrigin] = {}
        self._tokenizers: tuple[Any, Any] | None = None

    @override
    def origin(self, part: str) -> str:
        return self._origin(part).name

    @override
    def identity(self, part: str, dtype: torch.dtype) -> PartIdentity:
        # A part whose files have not changed since the memo was written is not loaded.
        key = self._memo_key(part, dtype)
        known = None if key is None else recalled(self._memo, key, _IDENTITY.validate_json)
        if known is not None:
            return known
        if part in TOKENIZERS:
            found = tokenizer_identity(part, self.tokenizers()[TOKENIZERS.index(part)])
        else:
            found = module_identity(part, self._module(part, dtype), dtype)
        # A file that changed while it was read must not be remembered.
        if key is not None and key == self._memo_key(part, dtype):
            self._memo[key] = json.dumps(asdict(found))
        return found

    @override
    def vae_config(self) -> Mapping[str, Any]:
        origin = self._origin("vae")
        settings = origin.vae_config_file()
        # Without the weights; the model class fills in the defaults of keys that are not stated.
        with loading("vae", origin.name), torch.device("meta"):
            config = diffusers.AutoencoderKL.from_config(settings).config
        return _vae_config(config)

    @override
    def tokenizers(self) -> tuple[Any, Any]:
        if self._tokenizers is None:
            self._tokenizers = self._origin("tokenizer").load_tokenizers()
        return self._tokenizers

    @override
    def release(self, *parts: str) -> None:
        super().release(*parts)
        if not parts or not set(parts).isdisjoint(TOKENIZERS):
            self._tokenizers = None

    @override
    def _module(self, part: str, dtype: torch.dtype) -> torch.nn.Module:
        if (part, dtype) not in self._modules:
            for name, module in self._origin(part).load(part, dtype).items():
                self._modules[name, dtype] = module.eval().requires_grad_(False)
        return self._modules[part, dtype]

    def _origin(self, part: str) -> ModelOrigin:
        if part not in PARTS:
            raise ModelError(f"{part!r} is no part of an SDXL model: name one of {', '.join(PARTS)}", part=part)
        name = "vae" if part == "vae" and self.vae_path is not None else "model"
        if name not in self._origins:
            if name == "model":
                self._origins[name] = find_model(self.path, self.config, self.variant, self.revision)
            else:
                self._origins[name] = find_vae(str(self.vae_path), self._origin("text_encoder"))
        return self._origins[name]

    def _memo_key(self, part: str, dtype: torch.dtype) -> str | None:
        """None if the part comes from no file. Library versions count: another one may read a config otherwise."""
        files = [_signature(path) for path in self._origin(part).files(part)]
        if not files:
            return None
        versions = [diffusers.__version__, transformers.__version__]
        return f"{_MEMO} {digest(canonical_json([part, str(dtype), self.variant, versions, files]))}"


class LoadedModels(Models):
    """Parts that the caller has already, e.g. a trainer's: the same interface as `ModelLoader`.

    A part of the requested dtype is returned as it is; move it with `devices.placement.placed`, which puts it back. For
    another dtype a CPU copy is made and kept until `release()`, because a cast there and back would change the caller's
    weights. Each use checks that the part is frozen (TrainableEncoderError). Weights may change between calls, so
    identities are not kept.
    """

    def __init__(
        self,
        *,
        vae: torch.nn.Module | None = None,
        text_encoder: torch.nn.Module | None = None,
        text_encoder_2: torch.nn.Module | None = None,
        tokenizer: Any = None,
        tokenizer_2: Any = None,
    ):
        super().__init__()
        self._parts = dict(zip(PARTS, (vae, text_encoder, text_encoder_2, tokenizer, tokenizer_2), strict=True))

    @override
    def origin(self, part: str) -> str:
        name = getattr(getattr(self._part(part), "config", None), "_name_or_path", None)
        return f"loaded by the caller ({name})" if name else "loaded by the caller"

    @override
    def identity(self, part: str, dtype: torch.dtype) -> PartIdentity:
        if part in TOKENIZERS:
            return tokenizer_identity(part, self._part(part))
        module = self._part(part)
        check_frozen(part, module)
        return module_identity(part, module, dtype)

    @override
    def vae_config(self) -> Mapping[str, Any]:
        return _vae_config(self._part("vae").config)

    @override
    def tokenizers(self) -> tuple[Any, Any]:
        return self._part("tokenizer"), self._part("tokenizer_2")

    def _part(self, part: str) -> Any:
        if self._parts.get(part) is None:
            given = ", ".join(name for name, value in self._parts.items() if value is not None) or "none"
            raise ModelError(f"{part} was not given (given: {given}). Pass LoadedModels({part}=...).", part=part)
        return self._parts[part]

    @override
    def _module(self, part: str, dtype: torch.dtype) -> torch.nn.Module:
        module: torch.nn.Module = self._part(part)
        check_frozen(part, module)
        if all(tensor.dtype == dtype for tensor in module.parameters()):
            return module
        if (part, dtype) not in self._modules:  # which holds copies only: the caller's parts are not released
            self._modules[part, dtype] = copy.deepcopy(module).to("cpu", dtype).eval()
        return self._modules[part, dtype]


def _vae_config(config: Mapping[str, Any]) -> dict[str, Any]:
    for name in ("latents_mean", "latents_std"):
        if config.get(name) is not None:
            raise ModelError(
                f"vae: its config has {name}, so its latents are scaled per channel, which is not supported. "
                "Use a VAE with a single scaling_factor, such as SDXL's.",
                part="vae",
            )
    return {
        "scaling_factor": config["scaling_factor"],
        "shift_factor": config["shift_factor"],
        "force_upcast": bool(config["force_upcast"]),
        "latent_channels": config["latent_channels"],
        "downscale_factor": 2 ** (len(config["block_out_channels"]) - 1),
    }


def _signature(path: Path) -> list[Any]:
    try:
        stat = path.stat()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read any more ({error.strerror}). Name the model again.") from error
    return [str(path.absolute()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def check_frozen(part: str, module: torch.nn.Module) -> None:
    """Raise TrainableEncoderError, naming the first parameter that requires grad, if there is one."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            raise TrainableEncoderError(part, name)
