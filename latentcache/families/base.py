"""What a model family declares: its parts, its latent space, how it reads text, and what its denoiser expects.

A family is one file, which precaching, loading, validation, imports and exports ask: they name no family. Reading a
cache loads these files, so they import diffusers and transformers only when a model is run.

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
"""What follows a field's name in the name of its mask: bool [B, L], True for the rows that are not padding."""


@dataclass(frozen=True, slots=True)
class Caption:
    """A text, as the pipeline takes it, and how many tokens it has as the tokenizer gets it, uncut."""

    text: str
    num_tokens: int


Encoded = dict[str, torch.Tensor]
"""Field -> [B, ...] on the encoders' device. `<field>_mask` (bool [B, L]) says which rows of a field are kept."""


def padded(texts: Sequence[torch.Tensor], field: str = "prompt_embeds") -> Encoded:
    """Texts [n, D] of unequal length as one field with zeros up to the longest, and its mask."""
    embeds = torch.nn.utils.rnn.pad_sequence([*texts], batch_first=True)
    lengths = torch.tensor([[len(text)] for text in texts])
    mask = torch.arange(embeds.shape[1]) < lengths
    return {field: embeds, field + MASK: mask.to(embeds.device)}


def user_turn(tokenizer: Any, content: Any, **options: Any) -> str:
    """A turn of the user in the tokenizer's chat template, and what asks for an answer."""
    message = [{"role": "user", "content": content}]
    return str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True, **options))


def unpadded(batch: Mapping[str, Any]) -> list[torch.Tensor]:
    """The texts of a batch, each [n, D]: what `padded` was given."""
    pairs = zip(batch["prompt_embeds"], batch[f"prompt_embeds{MASK}"], strict=True)
    return [embeds[mask] for embeds, mask in pairs]


CONDITION = "condition"
"""The name of what `Family.clip_condition` is the rule of, in entries (unscaled) and in batches."""
PICTURE = "image_embeds"
"""The name of `Family.encode_pictures`' rows, in entries of clips and in batches."""


@dataclass(frozen=True, slots=True)
class Preview:
    """A linear approximation of a VAE's decoder, for latents that are scaled by `scaling_factor`.

    `weights`: what a unit of each channel adds to red, green and blue (0 to 255). `biases`: those of a latent of zeros.
    """

    weights: Sequence[Sequence[float]]
    biases: Sequence[float]
    scaling_factor: float


@dataclass(frozen=True, slots=True)
class LatentSpace:
    """What is particular about a family's latents. Their scaling is read from the VAE: `models.vae.vae_facts`.

    `is_video`: they are [C, F, h, w], one latent frame of the first frame, and one of each `frames_factor` more.
    `draws`: the model is trained with draws from the posterior; without it with its mean, as the family's pipelines
    encode images. `preview`: where one is known. `others`: channels of the VAEs of some of its models, and their pixels
    a row. `published`: the scaling of the published VAE, whose constants trainers write into their code; None where
    the VAE's weights alone have it.
    """

    channels: int
    downscale: int = 8
    is_video: bool = False
    frames_factor: int = 4
    draws: bool = True
    preview: Preview | None = None
    others: Mapping[int, int] = field(default_factory=dict)
    published: Scaling | None = None


@dataclass(frozen=True, slots=True)
class TextField:
    """A field of a text entry.

    `width` is the setting of the denoiser's config that states its last dimension, or two of them, as `one * other`.
    With `padding` an entry has the rows of its own text only, and a batch is padded so. `features` are the dimensions
    of one row, or of a field without rows, in the published models: for the documentation. A field without rows is a
    few numbers that act on all of an image: float8 is not for it. `encoder` is the text encoder that makes it. Of a
    text without tokens a field that `may_be_zero` is all zeros. Elsewhere that is a fault of the encoder.
    """

    width: str | None = None
    padding: Padding | None = None
    features: tuple[int, ...] = ()
    has_rows: bool = True
    encoder: str = "text_encoder"
    may_be_zero: bool = False

    def width_in(self, config: Mapping[str, Any]) -> int:
        """The last dimension of a field that has a `width`, as this config of a denoiser states it."""
        return math.prod(config[setting] for setting in str(self.width).split(" * "))


@dataclass(frozen=True, slots=True)
class TimestepSampling:
    """How a training draws its timesteps, as the family's reference script does: see `NoiseSchedule.draw`.

    `shift` moves them towards noise; None leaves that to the shift in the scheduler's config. `deviation` is the
    standard deviation of the normal number of `logit_normal`.
    """

    density: Literal["uniform", "logit_normal"] = "uniform"
    shift: float | None = None
    deviation: float = 1.0


@contextmanager
def inference(device: torch.device) -> Iterator[None]:
    """Without gradients, and without a surrounding autocast: an entry's identity states the dtype of computation."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


class Family(ABC):
    """One model family. There is one object of each: `families.family_named`."""

    name: ClassVar[str]
    pipeline_name: ClassVar[str]
    """The class of diffusers that generates with it."""
    pipeline_names: ClassVar[tuple[str, ...]] = ()
    """Other classes whose folders hold this family's frozen parts; `*` stands for any letters."""
    refused_pipelines: ClassVar[Mapping[str, str]] = {}
    """Classes whose folders look like this family's, and what in them is not covered."""
    pipeline_options: ClassVar[Mapping[str, Any]] = {}
    pipeline_settings: ClassVar[tuple[str, ...]] = ()
    """Settings that its pipeline has of a model's model_index.json: `models.family.pipeline_settings`."""
    parts: ClassVar[Mapping[str, Part]]
    """The frozen parts, by the names of their folders."""
    whole: ClassVar[str | None] = None
    """The family that has as frozen parts what this one runs beside its denoiser: `load_denoiser` puts them there."""
    denoiser: ClassVar[str] = "transformer"
    second_denoiser: ClassVar[str | None] = None
    """In some of its models, whose model_index.json has a `boundary_ratio`: that of the timesteps below."""
    denoiser_class: ClassVar[str]
    denoiser_needs: ClassVar[str | None] = None
    """A package that the denoiser cannot run without."""
    denoiser_settings: ClassVar[Mapping[str, Any]] = {}
    """What its config states, where it does, and that of another family's denoiser of this class does not."""
    unused_weights: ClassVar[tuple[str, ...]] = ()
    """How names begin in a file of the original layout that no denoiser of diffusers has."""
    latent: ClassVar[LatentSpace]
    vae_overflows: ClassVar[bool | None] = None
    """Whether a VAE overflows in float16 whose config does not say so; None where nobody knows."""
    patch: ClassVar[int] = 1
    """Rows and columns of latents that the denoiser makes one token of: their numbers have to be multiples of it."""
    reads_controls: ClassVar[bool] = False
    """Whether `predict` gives the denoiser the control images of a batch too: `control_latents_1`, ..., scaled."""
    takes_masked: ClassVar[bool] = False
    """Whether some of its denoisers inpaint: they take a mask and the latents of the masked image too."""
    has_clips: ClassVar[bool] = False
    """Whether its denoiser takes latents of several frames."""
    clip_condition: ClassVar[str] = ""
    """By which rule a clip's entry has the latents CONDITION too, which its denoiser also takes; most have none.

    "first frame, padded": the mean of the clip's first frame, with zeros (grey) in place of the others. The rule is a
    part of the key. Such a family makes clips of a picture: it takes no still images, and no prompt alone.
    """
    fields: ClassVar[Mapping[str, TextField]]
    text_dtype: ClassVar[str] = "bfloat16"
    """In which the text encoders compute on an accelerator, and in which texts are stored."""
    max_length: ClassVar[int]
    """Tokens of a text, at most, as its pipeline has it by default; of `uncut_texts` rows of a long one."""
    uncut_texts: ClassVar[bool] = False
    """Whether its pipeline cuts no text: its recipes have no `max_length`."""
    longest: ClassVar[int | None] = None
    """What `encode.max_length` may be, at most: the pipeline cuts texts there. None where nothing is known."""
    num_joined: ClassVar[int] = 1
    """Hidden states of its text encoder that are joined to a row."""
    recipe: ClassVar[Mapping[str, Any]] = {}
    """What else than weights and the text determines an embedding: it is part of the key, as it stands here."""
    template_needs_tokenizer: ClassVar[bool] = False
    """Whether `rendered` needs the tokenizer, as a chat template does."""
    text_reads_control: ClassVar[bool] = False
    """Whether the text encoder reads a caption together with the sample's control images: `tokenize_with_control`."""
    guidance_name: ClassVar[str] = "guidance_scale"
    """What its pipeline calls classifier-free guidance."""
    no_guidance: ClassVar[float] = 1.0
    """Guidance at which its pipeline has no use for a negative prompt, at most; infinite where it never has."""
    has_zero_negative: ClassVar[bool] = False
    """Whether its pipelines take zeros where there is no negative prompt. Else they take the empty text."""
    can_drop_padding: ClassVar[bool] = True
    """Whether texts may be stored without padding: one that is padded again in a batch gives the same result."""
    can_keep_padding: ClassVar[bool] = True
    """Whether they may be stored with it: not where the denoiser masks it, or its pipeline drops it."""
    reads_lengths: ClassVar[bool] = True
    """Whether the length of a text says something to the denoiser. Else zeros in all rows are a text too."""
    timesteps: ClassVar[TimestepSampling] = TimestepSampling("logit_normal")
    needed_of_scheduler: ClassVar[tuple[str, ...]] = ("set_timesteps", "step")
    """What the denoising loop of its pipeline uses of a scheduler."""
    lora_targets: ClassVar[Sequence[str]] = ("to_q", "to_k", "to_v", "to_out.0")
    repositories: ClassVar[tuple[str, ...]] = ()
    """Hub ids of models of this family, for the documentation."""
    trainer_files: ClassVar[Mapping[str, TrainerFiles]] = {}
    """By the names of formats (`interop.formats`) that have it. A family that inherits from this one has its own."""

    # Parts

    def names(self, role: Role) -> tuple[str, ...]:
        """The names of the parts of this role, in their order."""
        return tuple(name for name, part in self.parts.items() if part.role == role)

    def folder_of(self, part: str) -> str:
        """The name of the folder that a diffusers folder has a part in."""
        return self.parts[part].folder or part

    @property
    def pipeline_class(self) -> Any:
        """The class of `pipeline_name`."""
        return class_named(f"diffusers.{self.pipeline_name}")

    def pipeline(self, **parts: Any) -> Any:
        """A pipeline of diffusers of these parts alone, without a progress bar.

        Validation gives the denoiser and the scheduler alone, and requests latents: see `final_latents`.
        """
        made_class = self.pipeline_class
        parameters = inspect.signature(made_class.__init__).parameters.values()
        needed = [each.name for each in parameters if each.default is each.empty and each.name != "self"]
        pipeline = made_class(**{**dict.fromkeys(needed), **self.pipeline_options, **parts})
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    @property
    def denoiser_word(self) -> str:
        """What messages call the denoiser."""
        return "UNet" if self.denoiser == "unet" else self.denoiser

    # Text

    def text_recipe(self, *, negative: bool = False, **settings: Any) -> dict[str, Any]:
        """The recipe of a text under these settings of `encode`: `clip_skip`, `max_length`, `padding`.

        ConfigError for a setting that this family does not have.
        """
        if settings.get("clip_skip"):
            raise ConfigError(f"{self.name} has no clip_skip; set it to 0", key="encode.clip_skip")
        length, padding = settings.get("max_length"), settings.get("padding", "auto")
        keeps = padding == "keep" or not self.can_drop_padding
        if keeps and padding == "drop":
            message = f"padding is drop, but {self.name} attends to padding: its texts are stored with it"
            raise ConfigError(message, key="encode.padding")
        if keeps and not self.can_keep_padding:
            message = f"padding is keep, but {self.name} does not read padding; set it to auto"
            raise ConfigError(message, key="encode.padding")
        if length and self.longest and length > self.longest:
            message = f"max_length is {length}, but the pipeline of {self.name} takes {self.longest} tokens at most"
            raise ConfigError(message, key="encode.max_length")
        if length and self.uncut_texts:
            message = f"max_length is {length}, but the pipeline of {self.name} cuts no text; set null"
            raise ConfigError(message, key="encode.max_length")
        cut = {} if self.uncut_texts else {"max_length": length or self.max_length}
        return {"family": self.name, **cut, "keeps_padding": keeps, **self.recipe}

    def parts_recipe(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """What a recipe has besides `text_recipe` because of these text encoders and tokenizers: mostly nothing."""
        return {}

    def padding(self, field: str, recipe: Mapping[str, Any]) -> Padding | None:
        """How a batch pads this field of texts with this recipe; None where it is stored with its padding."""
        return None if recipe.get("keeps_padding", True) else self.fields[field].padding

    def rendered(self, parts: Mapping[str, Any], text: str) -> str:
        """The text as the tokenizer gets it: cleaned, and in the template. The key is made of it."""
        return text

    def tokenize(self, parts: Mapping[str, Any], texts: Sequence[str]) -> Sequence[Any]:
        """Texts as `encode_text` takes them, each with `num_tokens` when it is rendered. One thread at a time."""
        tokenizer = parts[self.names("tokenizer")[-1]]
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor has one
        rendered = [self.rendered(parts, text) for text in texts]
        ids = tokenizer(rendered, truncation=False, padding=False, verbose=False).input_ids
        return [Caption(text, len(each)) for text, each in zip(texts, ids, strict=True)]

    def tokenize_with_control(
        self, parts: Mapping[str, Any], texts: Sequence[str], images: Sequence[Sequence[Any]]
    ) -> Sequence[Any]:
        """As `tokenize`, of texts that are each read together with control images, uint8 [H, W, 3], in their order."""
        raise NotImplementedError(f"{self.name} reads texts alone")

    def token_limit(self, parts: Mapping[str, Any], recipe: Mapping[str, Any]) -> int:
        """The number of tokens, as `tokenize` counts them, above which a text is cut.

        Without parts it is that of the family's usual tokenizers.
        """
        if self.uncut_texts:
            return 1 << 30
        return int(recipe.get("max_length", self.max_length)) + int(recipe.get("num_dropped", 0))

    @abstractmethod
    def encode_text(self, parts: Mapping[str, Any], texts: Sequence[Any], recipe: Mapping[str, Any]) -> Encoded:
        """What diffusers' own code gives for these texts, which `tokenize` returned, where the encoders are.

        Without gradients, and without a surrounding autocast.
        """

    def pipeline_texts(
        self,
        parts: Mapping[str, Any],
        texts: Sequence[Caption],
        recipe: Mapping[str, Any],
        states: Mapping[int, str] | None = None,
        **options: Any,
    ) -> Sequence[Any]:
        """What `encode_prompt` of the family's pipeline returns for these texts, with `options` of its own.

        `states` are the hidden states that the pipeline reads of `text_encoder`, and the modules: see `HiddenStates`.
        """
        given = {name: parts[name] for name, part in self.parts.items() if part.role != "vae"}
        encoder = given["text_encoder"]
        if states is not None:
            given["text_encoder"] = HiddenStates(encoder, states)
        options |= {"device": encoder.device, "max_sequence_length": recipe["max_length"]}
        found: Sequence[Any] = self.pipeline(**given).encode_prompt([text.text for text in texts], **options)
        return found

    def text_shapes(self, parts: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """The shape of each field of one text with its padding, read from the configs of the encoders.

        Where texts are read with control images, and have no padding: of a usual text with one.
        """
        length = recipe.get("max_length", self.max_length)
        return {"prompt_embeds": (length, self.num_joined * parts["text_encoder"].config.get_text_config().hidden_size)}

    def text_columns(self, field: str, encoders: Mapping[str, Any]) -> dict[str, slice]:
        """Which columns of a cached field each text encoder makes.

        Where one encoder is trained and the cache has the outputs of both, a step replaces the columns of that one.

        Args:
            field: A field of texts in a batch, [B, L, D] or [B, D].
            encoders: Text encoders by their names, at least one of those that make the field: widths are read from
                their configs.

        Returns:
            By the name of the encoder a slice of D.

        Raises:
            ModelError: There is no such field, or `encoders` has none of those that make it.
        """
        if field not in self.fields:
            raise ModelError(f"{self.name} has no field {field!r} of texts; it has {', '.join(self.fields)}")
        return {self.fields[field].encoder: slice(None)}

    # Images

    def encode_image(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        """The posterior's parameters, unscaled: [B, 2C, h, w] of pixels [B, 3, H, W] in -1..1, each with F in video."""
        parameters: torch.Tensor = vae.encode(pixels).latent_dist.parameters
        return parameters

    def encode_pictures(self, parts: Mapping[str, Any], pictures: Sequence[Any]) -> torch.Tensor:
        """Rows [B, n, D] of the first frames of clips, which are PIL images: PICTURE of models with an image encoder.

        `parts` are the image encoder, with which they are returned on its device, and the image processor.
        """
        raise NotImplementedError(f"models of {self.name} have no image encoder")

    def batch_statistics(self, vae: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and deviation of each channel, as `Scaling` has them, of a VAE that holds statistics as weights (bn)."""
        return vae.bn.running_mean, torch.sqrt(vae.bn.running_var + vae.config["batch_norm_eps"])

    def size_conditions(self, geometry: Geometry) -> list[int] | None:
        """Numbers that the denoiser takes of how an image was resized and cropped (`add_time_ids`), if it does."""
        return None

    # The denoiser

    def conditions(self, denoiser: Any, noisy: torch.Tensor, batch: Mapping[str, Any]) -> dict[str, Any]:
        """What the denoiser takes besides latents and timesteps: texts of the batch, and what follows from shapes."""
        return {"encoder_hidden_states": batch["prompt_embeds"]}

    def predict(
        self, denoiser: Any, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Mapping[str, Any]
    ) -> torch.Tensor:
        """The denoiser's prediction for scaled, noised latents [B, C, (F,) h, w], in their layout.

        `timesteps` [B] are the schedule's, 0 to 1000. For flow it is the velocity: noise - latents.
        """
        conditions = self.conditions(denoiser, noisy, batch)
        given = self.inputs(denoiser, noisy, batch)
        prediction: torch.Tensor = denoiser(given, timesteps, **conditions, return_dict=False)[0]
        return prediction

    def inputs(self, denoiser: Any, noisy: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        """The denoiser's channels: noised latents, and what else it takes in further ones.

        Of one that inpaints mask and masked latents, scaled as these are: [B, 2C + 1, h, w], as diffusers' pipelines
        have it. ModelError for a batch without these.
        """
        if not self.inpaints(denoiser):
            return noisy
        if "masked_latents" not in batch:
            raise ModelError(f"{self.denoiser}: {self.lacks_masked('the batch has none')}", part=self.denoiser)
        mask, masked = batch["mask"].to(noisy.dtype) / 255, batch["masked_latents"].to(noisy.dtype)
        return torch.cat([noisy, mask, masked], dim=1)

    def inpaints(self, denoiser: Any) -> bool:
        """Whether this denoiser also takes a mask and the latents of the masked image, by its number of channels."""
        channels = getattr(getattr(denoiser, "config", None), "in_channels", None)
        return self.takes_masked and channels == 2 * self.latent.channels + 1

    def lacks_masked(self, what: str) -> str:
        """The message that a denoiser which inpaints is not given what it takes: `what` says where that is not."""
        channels = 2 * self.latent.channels + 1
        return (
            f"this {self.denoiser_word} inpaints: its {channels} channels are latents, a mask and the masked image's "
            f"latents, but {what}. Set `inpaint` of the dataset's `mask`, and run `latentcache precache CONFIG`"
        )

    def check_settings(self, settings: Mapping[str, Any]) -> str | None:
        """What is wrong where these settings of a denoiser's config.json are not this family's; None if they are."""
        for name, needed in self.denoiser_settings.items():
            if settings.get(name, needed) != needed:
                return f"has {name} {settings[name]!r}, not {needed!r}"
        channels, own = settings.get("in_channels"), self.latent.channels
        allowed = [own * self.patch**2, *([2 * own + 1] if self.takes_masked else []), *self.latent.others]
        if channels in (None, own, *allowed) or "in_channels" in self.denoiser_settings:
            return None
        wanted = " or ".join(map(str, allowed))
        return f"takes {channels} channels, as one for inpainting or control does, not {wanted}"

    # Generation

    @property
    def needed_picture(self) -> str:
        """What its pipeline generates from besides a prompt, for messages; empty if a prompt is enough."""
        return "control images" if self.text_reads_control else "a first frame" if self.clip_condition else ""

    def sampler(self, **parts: Any) -> Any:
        """What makes latents from `pipeline_kwargs`, of the denoiser and a scheduler: its pipeline, or as this does."""
        return self.pipeline(**parts)

    def pipeline_kwargs(self, embeds: Mapping[str, Any], negative: Mapping[str, Any] | None) -> dict[str, Any]:
        """What the pipeline takes in place of texts; `negative` None: without guidance, or its own default."""
        texts, negatives = self.text_kwargs(embeds), {} if negative is None else self.text_kwargs(negative)
        return texts | {f"negative_{name}": value for name, value in negatives.items()}

    def text_kwargs(self, embeds: Mapping[str, Any]) -> dict[str, Any]:
        """What the pipeline takes in place of a text; for the negative one with `negative_` before the names."""
        return {name: embeds[name] for name in self.fields}

    def uses_negative(self, guidance_scale: float) -> bool:
        """Whether the pipeline uses the negative prompt at this guidance."""
        return guidance_scale > self.no_guidance

    def guidance_kwargs(self, guidance_scale: float) -> dict[str, Any]:
        """The pipeline's arguments for this classifier-free guidance. ConfigError where it cannot be had."""
        return {self.guidance_name: guidance_scale}

    def final_latents(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Scaled latents [B, C, (F,) h, w] of what the pipeline returns for `output_type="latent"`."""
        return latents
