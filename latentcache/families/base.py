"""What a model family declares: its parts, its latent space, how it reads text, and what its denoiser expects.

Each family is one file. Precaching, loading, validation, imports and exports go through this interface and name no
family. Reading a cache imports these files, so they import diffusers and transformers lazily.

Legend: B items, C latent channels, F latent frames, h and w latent rows and columns, L text rows, D features.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

from latentcache.errors import ConfigError, ModelError
from latentcache.families.hidden_states import HiddenStates
from latentcache.families.parts import Part, Role, TrainerFiles, class_named
from latentcache.families.scaling import Scaling
from latentcache.types import Geometry, Padding

MASK = "_mask"
"""Suffix of the name of a field's mask: bool [B, L], True for rows that are not padding."""


@dataclass(frozen=True, slots=True)
class Caption:
    """A text as the pipeline takes it, and its number of tokens before truncation."""

    text: str
    num_tokens: int


Encoded = dict[str, torch.Tensor]
"""Field -> [B, ...] on the encoders' device. `<field>_mask` (bool [B, L]) selects the rows of a field to store."""


def padded(texts: Sequence[torch.Tensor], field: str = "prompt_embeds") -> Encoded:
    """Texts [n, D] of unequal length as one field, zero-padded to the longest, and its mask."""
    embeds = torch.nn.utils.rnn.pad_sequence([*texts], batch_first=True)
    lengths = torch.tensor([[len(text)] for text in texts])
    mask = torch.arange(embeds.shape[1]) < lengths
    return {field: embeds, field + MASK: mask.to(embeds.device)}


def user_turn(tokenizer: Any, content: Any, **options: Any) -> str:
    """A user turn in the tokenizer's chat template, followed by the generation prompt."""
    message = [{"role": "user", "content": content}]
    return str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True, **options))


def unpadded(batch: Mapping[str, Any]) -> list[torch.Tensor]:
    """The texts of a batch, each [n, D]: the inverse of `padded`."""
    pairs = zip(batch["prompt_embeds"], batch[f"prompt_embeds{MASK}"], strict=True)
    return [embeds[mask] for embeds, mask in pairs]


CONDITION = "condition"
"""Name of the tensor that `Family.clip_condition` describes, in entries (unscaled) and batches."""
PICTURE = "image_embeds"
"""Name of the output of `Family.encode_pictures`, in entries of clips and batches."""


@dataclass(frozen=True, slots=True)
class Preview:
    """A linear approximation of a VAE's decoder, for latents scaled by `scaling_factor`.

    `weights` are RGB values (0 to 255) per unit of each latent channel. `biases` is the colour of an all-zero latent.
    """

    weights: Sequence[Sequence[float]]
    biases: Sequence[float]
    scaling_factor: float


@dataclass(frozen=True, slots=True)
class LatentSpace:
    """The shape of a family's latents and how it trains on them. Scaling is read from the VAE: `models.vae.vae_facts`.

    `is_video`: latents are [C, F, h, w], with one latent frame for the first frame and one per further few.
    `draws`: the model is trained on posterior samples; otherwise on the mean, as the family's pipelines encode images.
    `others` maps the channels of VAEs that some of its models have to their downscale factors. `published` is the
    scaling of the published VAE, which trainers hard-code; None if it is stored only in the VAE's weights.
    """

    channels: int
    downscale: int = 8
    is_video: bool = False
    draws: bool = True
    preview: Preview | None = None
    others: Mapping[int, int] = field(default_factory=dict)
    published: Scaling | None = None


@dataclass(frozen=True, slots=True)
class TextField:
    """A field of a text entry.

    `width` names the setting of the denoiser's config that states its last dimension, or two, as in `one * other`.
    With `padding`, entries store only their own rows and batches are padded this way. `features` are the dimensions
    of one row (or of a field without rows) in published models, for the documentation. A field without rows, such as a
    pooled output, affects the whole image, so it is never stored in float8. `encoder` is the text encoder that makes
    it. A field that `may_be_zero` is all zeros for a text without tokens; in other fields zeros are an encoder fault.
    """

    width: str | None = None
    padding: Padding | None = None
    features: tuple[int, ...] = ()
    has_rows: bool = True
    encoder: str = "text_encoder"
    may_be_zero: bool = False

    def width_in(self, config: Mapping[str, Any]) -> int:
        """The last dimension of a field that has a `width`, according to a denoiser's config."""
        return math.prod(config[setting] for setting in str(self.width).split(" * "))


@dataclass(frozen=True, slots=True)
class TimestepSampling:
    """How training samples timesteps, following the family's reference script: see `NoiseSchedule.draw`.

    `shift` moves them towards noise; None uses the shift in the scheduler's config. `deviation` is the standard
    deviation of the normal variable behind `logit_normal`.
    """

    density: Literal["uniform", "logit_normal"] = "uniform"
    shift: float | None = None
    deviation: float = 1.0


@contextmanager
def inference(device: torch.device) -> Iterator[None]:
    """No gradients, and any surrounding autocast off: an entry's identity states the compute dtype."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


class Family(ABC):
    """One model family. Each has a single instance: `families.family_named`."""

    name: ClassVar[str]
    pipeline_name: ClassVar[str]
    """The diffusers class that generates with it."""
    pipeline_names: ClassVar[tuple[str, ...]] = ()
    """Other pipeline classes whose folders hold this family's frozen parts; `*` is a wildcard."""
    refused_pipelines: ClassVar[Mapping[str, str]] = {}
    """Pipeline classes whose folders look like this family's, and why they are not supported."""
    pipeline_options: ClassVar[Mapping[str, Any]] = {}
    pipeline_settings: ClassVar[tuple[str, ...]] = ()
    """Pipeline settings to read from a model's model_index.json: `models.files.pipeline_settings`."""
    parts: ClassVar[Mapping[str, Part]]
    """The frozen parts, by the names of their folders. The VAE's is `vae`."""
    whole: ClassVar[str | None] = None
    """The family whose frozen parts this one runs next to its denoiser, where `load_denoiser` attaches them."""
    denoiser: ClassVar[str] = "transformer"
    second_denoiser: ClassVar[str | None] = None
    """Name of the denoiser for timesteps below `boundary_ratio`, in models whose model_index.json has one."""
    denoiser_class: ClassVar[str]
    denoiser_needs: ClassVar[str | None] = None
    """A package that the denoiser cannot run without."""
    denoiser_settings: ClassVar[Mapping[str, Any]] = {}
    """Config settings that, where stated, tell its denoiser from other families' denoisers of the same class."""
    unused_weights: ClassVar[tuple[str, ...]] = ()
    """Name prefixes of tensors in original-layout files that have no counterpart in diffusers' denoiser."""
    latent: ClassVar[LatentSpace]
    vae_overflows: ClassVar[bool | None] = None
    """Whether a VAE overflows in float16 if its config does not say; None if unknown."""
    patch: ClassVar[int] = 1
    """Side of the latent patch that becomes one token. Latent heights and widths must be multiples of it."""
    reads_controls: ClassVar[bool] = False
    """Whether `predict` also passes a batch's scaled `control_latents_1`, ... to the denoiser."""
    takes_masked: ClassVar[bool] = False
    """Whether it has inpainting denoisers, which also take a mask and the masked image's latents."""
    has_clips: ClassVar[bool] = False
    """Whether its denoiser takes latents of several frames."""
    clip_condition: ClassVar[str] = ""
    """How the latents CONDITION of a clip's entry, another input of the denoiser, are made; empty if there are none.

    "first frame, padded": the mean for the clip's first frame, with zeros (grey) in place of the others. The rule is
    part of the key. Such a family makes clips from a picture: it takes neither still images nor a prompt alone.
    """
    fields: ClassVar[Mapping[str, TextField]]
    text_dtype: ClassVar[str] = "bfloat16"
    """Dtype in which the text encoders compute on an accelerator, and in which texts are stored."""
    max_length: ClassVar[int]
    """The pipeline's default token limit; with `uncut_texts`, the rows of a long text."""
    uncut_texts: ClassVar[bool] = False
    """Whether its pipeline never truncates, so that recipes have no `max_length`."""
    longest: ClassVar[int | None] = None
    """Upper bound of `encode.max_length`, set by the pipeline; None if unknown."""
    num_joined: ClassVar[int] = 1
    """Number of text encoder hidden states that are concatenated into a row."""
    recipe: ClassVar[Mapping[str, Any]] = {}
    """What else determines an embedding besides weights and text. It is part of the key, verbatim."""
    template_needs_tokenizer: ClassVar[bool] = False
    """Whether `rendered` needs the tokenizer, for its chat template."""
    text_reads_control: ClassVar[bool] = False
    """Whether the text encoder reads a caption together with the sample's control images: `tokenize_with_control`."""
    guidance_name: ClassVar[str] = "guidance_scale"
    """The pipeline's argument for classifier-free guidance."""
    no_guidance: ClassVar[float] = 1.0
    """Highest guidance at which its pipeline ignores the negative prompt; infinite if it always does."""
    has_zero_negative: ClassVar[bool] = False
    """Whether its pipelines use zeros without a negative prompt; otherwise they use the empty text."""
    can_drop_padding: ClassVar[bool] = True
    """Whether texts can be stored without padding: padding them again in a batch gives the same result."""
    can_keep_padding: ClassVar[bool] = True
    """Whether texts can be stored with padding: not if the denoiser masks it or the pipeline drops it."""
    reads_lengths: ClassVar[bool] = True
    """Whether the denoiser depends on the length of a text. If not, zeros in all rows are a valid text."""
    timesteps: ClassVar[TimestepSampling] = TimestepSampling("logit_normal")
    needed_of_scheduler: ClassVar[tuple[str, ...]] = ("set_timesteps", "step")
    """Scheduler attributes that its pipeline's denoising loop uses."""
    lora_targets: ClassVar[Sequence[str]] = ("to_q", "to_k", "to_v", "to_out.0")
    repositories: ClassVar[tuple[str, ...]] = ()
    """Hub ids of models of this family, for the documentation."""
    trainer_files: ClassVar[Mapping[str, TrainerFiles]] = {}
    """How other trainers store it, by format name (`interop.formats`). Subclasses declare their own."""

    # Parts

    def names(self, role: Role) -> tuple[str, ...]:
        """The names of the parts with this role, in order."""
        return tuple(name for name, part in self.parts.items() if part.role == role)

    def folder_of(self, part: str) -> str:
        """The subfolder of a diffusers folder that holds a part."""
        return self.parts[part].folder or part

    @property
    def pipeline_class(self) -> Any:
        """The class of `pipeline_name`."""
        return class_named(f"diffusers.{self.pipeline_name}")

    def pipeline(self, **parts: Any) -> Any:
        """A diffusers pipeline of only these parts, without a progress bar."""
        made_class = self.pipeline_class
        parameters = inspect.signature(made_class.__init__).parameters.values()
        needed = [each.name for each in parameters if each.default is each.empty and each.name != "self"]
        pipeline = made_class(**{**dict.fromkeys(needed), **self.pipeline_options, **parts})
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    @property
    def denoiser_word(self) -> str:
        """The denoiser's name in messages."""
        return "UNet" if self.denoiser == "unet" else self.denoiser

    # Text

    def text_recipe(self, *, negative: bool = False, **settings: Any) -> dict[str, Any]:
        """The recipe of a text for these `encode` settings: `clip_skip`, `max_length`, `padding`.

        ConfigError for a setting that this family does not support.
        """
        if settings.get("clip_skip"):
            raise ConfigError(f"{self.name} has no clip_skip; set it to 0", key="encode.clip_skip")
        length, padding = settings.get("max_length"), settings.get("padding", "auto")
        keeps = padding == "keep" or not self.can_drop_padding
        if keeps and padding == "drop":
            message = f"padding is drop, but {self.name} attends to padding; set it to auto or keep"
            raise ConfigError(message, key="encode.padding")
        if keeps and not self.can_keep_padding:
            message = f"padding is keep, but {self.name} does not read padding; set it to auto or drop"
            raise ConfigError(message, key="encode.padding")
        if length and self.longest and length > self.longest:
            message = f"max_length is {length}, but the pipeline of {self.name} takes at most {self.longest} tokens"
            raise ConfigError(message, key="encode.max_length")
        if length and self.uncut_texts:
            message = f"max_length is {length}, but the pipeline of {self.name} truncates no text; set it to null"
            raise ConfigError(message, key="encode.max_length")
        cut = {} if self.uncut_texts else {"max_length": length or self.max_length}
        return {"family": self.name, **cut, "keeps_padding": keeps, **self.recipe}

    def parts_recipe(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """What these text encoders and tokenizers add to the `text_recipe`: usually nothing."""
        return {}

    def padding(self, field: str, recipe: Mapping[str, Any]) -> Padding | None:
        """How batches pad this field of texts with this recipe; None if it is stored with its padding."""
        return None if recipe.get("keeps_padding", True) else self.fields[field].padding

    def rendered(self, parts: Mapping[str, Any], text: str) -> str:
        """The text as the tokenizer gets it: cleaned, and in the template. The key is derived from it."""
        return text

    def tokenize(self, parts: Mapping[str, Any], texts: Sequence[str]) -> Sequence[Any]:
        """Texts as `encode_text` takes them, each with the `num_tokens` of its rendered form. Not thread-safe."""
        tokenizer = parts[self.names("tokenizer")[-1]]
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor has one
        rendered = [self.rendered(parts, text) for text in texts]
        ids = tokenizer(rendered, truncation=False, padding=False, verbose=False).input_ids
        return [Caption(text, len(each)) for text, each in zip(texts, ids, strict=True)]

    def tokenize_with_control(
        self, parts: Mapping[str, Any], texts: Sequence[str], images: Sequence[Sequence[Any]]
    ) -> Sequence[Any]:
        """Like `tokenize`, but each text is read together with its control images, uint8 [H, W, 3], in order."""
        raise NotImplementedError(f"{self.name} reads texts without images")

    def token_limit(self, parts: Mapping[str, Any], recipe: Mapping[str, Any]) -> int:
        """The number of tokens, as counted by `tokenize`, above which a text is truncated.

        Without parts it is the limit of the family's usual tokenizers.
        """
        if self.uncut_texts:
            return 1 << 30
        return int(recipe.get("max_length", self.max_length)) + int(recipe.get("num_dropped", 0))

    @abstractmethod
    def encode_text(self, parts: Mapping[str, Any], texts: Sequence[Any], recipe: Mapping[str, Any]) -> Encoded:
        """Encode texts that `tokenize` returned, on the encoders' device, with the output of diffusers' own code.

        Call it inside `inference`: without gradients or autocast.
        """

    def pipeline_texts(
        self,
        parts: Mapping[str, Any],
        texts: Sequence[Caption],
        recipe: Mapping[str, Any],
        states: Mapping[int, str] | None = None,
        **options: Any,
    ) -> Sequence[Any]:
        """What `encode_prompt` of the family's pipeline returns for these texts and `options`.

        `states` maps the hidden states of `text_encoder` that the pipeline reads to modules: see `HiddenStates`.
        """
        given = {name: parts[name] for name, part in self.parts.items() if part.role != "vae"}
        encoder = given["text_encoder"]
        if states is not None:
            given["text_encoder"] = HiddenStates(encoder, states)
        options |= {"device": encoder.device, "max_sequence_length": recipe["max_length"]}
        found: Sequence[Any] = self.pipeline(**given).encode_prompt([text.text for text in texts], **options)
        return found

    def text_shapes(self, parts: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """The shape of each field of one padded text, read from the encoders' configs.

        For texts that are read with control images, which have no padding, it is that of a typical text with one.
        """
        length = recipe.get("max_length", self.max_length)
        return {"prompt_embeds": (length, self.num_joined * parts["text_encoder"].config.get_text_config().hidden_size)}

    def text_columns(self, field: str, encoders: Mapping[str, Any]) -> dict[str, slice]:
        """Which columns of a cached field each text encoder makes.

        A training that updates only one of two encoders replaces that one's columns in each step.

        Args:
            field: A field of texts in a batch, [B, L, D] or [B, D].
            encoders: Text encoders by name, including at least one that makes the field: widths are read from their
                configs.

        Returns:
            A slice of D for each encoder name.

        Raises:
            ModelError: There is no such field, or `encoders` has none of those that make it.
        """
        if field not in self.fields:
            raise ModelError(f"{self.name} has no field {field!r} of texts; it has {', '.join(self.fields)}")
        return {self.fields[field].encoder: slice(None)}

    # Images

    def encode_image(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        """The posterior's unscaled parameters [B, 2C, (F,) h, w] for pixels [B, 3, (F,) H, W] in -1..1."""
        parameters: torch.Tensor = vae.encode(pixels).latent_dist.parameters
        return parameters

    def encode_pictures(self, parts: Mapping[str, Any], pictures: Sequence[Any]) -> torch.Tensor:
        """PICTURE rows [B, n, D] for the first frames of clips (PIL images), on the image encoder's device.

        `parts` are the image encoder and the image processor.
        """
        raise NotImplementedError(f"models of {self.name} have no image encoder")

    def batch_statistics(self, vae: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Each channel's mean and standard deviation for `Scaling`, from a VAE with batch-norm statistics (bn)."""
        return vae.bn.running_mean, torch.sqrt(vae.bn.running_var + vae.config["batch_norm_eps"])

    def size_conditions(self, geometry: Geometry) -> list[int] | None:
        """Size conditioning from an image's resize and crop (`add_time_ids`); None if the denoiser takes none."""
        return None

    # The denoiser

    def conditions(self, denoiser: Any, noisy: torch.Tensor, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The denoiser's inputs besides latents and timesteps: the batch's texts, and what follows from shapes."""
        return {"encoder_hidden_states": batch["prompt_embeds"]}

    def predict(
        self, denoiser: Any, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Mapping[str, Any]
    ) -> torch.Tensor:
        """The denoiser's prediction for scaled, noised latents [B, C, (F,) h, w], in their layout.

        `timesteps` [B] are the schedule's, from 0 to 1000. Flow models predict the velocity, noise - latents.
        """
        conditions = self.conditions(denoiser, noisy, batch)
        given = self.inputs(denoiser, noisy, batch)
        prediction: torch.Tensor = denoiser(given, timesteps, **conditions, return_dict=False)[0]
        return prediction

    def inputs(self, denoiser: Any, noisy: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        """The denoiser's input channels: noised latents, and whatever it takes in further channels.

        An inpainting denoiser gets latents, mask and scaled masked latents, [B, 2C + 1, h, w], in the order of
        diffusers' pipelines. ModelError for a batch without them.
        """
        if not self.inpaints(denoiser):
            return noisy
        if "masked_latents" not in batch:
            raise ModelError(f"{self.denoiser}: {self.lacks_masked('the batch has none')}", part=self.denoiser)
        mask, masked = batch["mask"].to(noisy.dtype) / 255, batch["masked_latents"].to(noisy.dtype)
        return torch.cat([noisy, mask, masked], dim=1)

    def inpaints(self, denoiser: Any) -> bool:
        """Whether this denoiser also takes a mask and the masked image's latents, judged by its channels."""
        channels = getattr(getattr(denoiser, "config", None), "in_channels", None)
        return self.takes_masked and channels == 2 * self.latent.channels + 1

    def lacks_masked(self, what: str) -> str:
        """The error message for an inpainting denoiser without its inputs; `what` says what lacks them."""
        channels = 2 * self.latent.channels + 1
        return (
            f"this {self.denoiser_word} inpaints: its {channels} channels are latents, a mask and the masked image's "
            f"latents, but {what}. Set `inpaint` of the dataset's `mask`, and run `latentcache precache CONFIG`"
        )

    def check_settings(self, settings: Mapping[str, Any]) -> str | None:
        """Why the settings in a denoiser's config.json are not this family's; None if they are."""
        for name, needed in self.denoiser_settings.items():
            if settings.get(name, needed) != needed:
                return f"has {name} {settings[name]!r}, not {needed!r}"
        channels, own = settings.get("in_channels"), self.latent.channels
        allowed = [own * self.patch**2, *([2 * own + 1] if self.takes_masked else []), *self.latent.others]
        if channels in (None, own, *allowed) or "in_channels" in self.denoiser_settings:
            return None
        wanted = " or ".join(map(str, allowed))
        return f"takes {channels} channels, like a model for inpainting or control, not {wanted}"

    # Generation

    @property
    def needed_picture(self) -> str:
        """What generation needs besides a prompt, for messages; empty if a prompt is enough."""
        return "control images" if self.text_reads_control else "a first frame" if self.clip_condition else ""

    def sampler(self, **parts: Any) -> Any:
        """Callable that makes latents from `pipeline_kwargs`, given a denoiser and a scheduler: see `final_latents`."""
        return self.pipeline(**parts)

    def pipeline_kwargs(self, embeds: Mapping[str, Any], negative: Mapping[str, Any] | None) -> dict[str, Any]:
        """Arguments for `sampler` in place of prompts. `negative` is None without guidance."""
        texts, negatives = self.text_kwargs(embeds), {} if negative is None else self.text_kwargs(negative)
        return texts | {f"negative_{name}": value for name, value in negatives.items()}

    def text_kwargs(self, embeds: Mapping[str, Any]) -> dict[str, Any]:
        """The pipeline's arguments in place of a prompt; the negative prompt's have the prefix `negative_`."""
        return {name: embeds[name] for name in self.fields}

    def uses_negative(self, guidance_scale: float) -> bool:
        """Whether the pipeline uses the negative prompt at this guidance."""
        return guidance_scale > self.no_guidance

    def guidance_kwargs(self, guidance_scale: float) -> dict[str, Any]:
        """The pipeline's arguments for this classifier-free guidance. ConfigError if it is not supported."""
        return {self.guidance_name: guidance_scale}

    def final_latents(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Scaled latents [B, C, (F,) h, w] from the sampler's output for `output_type="latent"`."""
        return latents
