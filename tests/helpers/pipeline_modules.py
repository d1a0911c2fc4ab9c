"""The modules that SDXL's pipeline in OneTrainer is made of, after mgds' module contract, over any base classes.

They have mgds' names and settings, as far as these matter here.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from helpers.pipeline_images import images, random_access


def make(base: SimpleNamespace) -> dict[str, type]:
    """The classes, by name. `base` has PipelineModule and the classes that say how a module gives its values."""
    return _collecting(base) | images(base) | _texts(base) | _sorting(base)


def _collecting(base: SimpleNamespace) -> dict[str, type]:
    Module = random_access(base)

    class ConceptPipelineModule(Module):
        def __init__(self, concepts: list[dict[str, Any]]):
            super().__init__()
            self.concepts = concepts

        def length(self) -> int:
            return len(self.concepts)

        def get_outputs(self) -> list[str]:
            return ["concept"]

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            return {"concept": self.concepts[index]}

    class SettingsPipelineModule(Module):
        def __init__(self, settings: dict[str, Any]):
            super().__init__()
            self.settings = settings

        def length(self) -> int:
            return 1

        def get_outputs(self) -> list[str]:
            return ["settings"]

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            return {"settings": self.settings}

    class CollectPaths(Module):
        def __init__(  # the signature that OneTrainer calls
            self,
            concept_in_name: str,
            path_in_name: str,
            include_subdirectories_in_name: str,
            enabled_in_name: str,
            path_out_name: str,
            concept_out_name: str,
            extensions: list[str],
            include_postfix: list[str] | None,
            exclude_postfix: list[str],
        ):
            super().__init__()
            self.first, self.concept_in_name = concept_in_name, concept_in_name
            self.path_in_name, self.enabled_in_name = path_in_name, enabled_in_name
            self.path_out_name, self.concept_out_name = path_out_name, concept_out_name
            self.extensions, self.exclude_postfix = extensions, exclude_postfix
            self.found: list[tuple[str, dict[str, Any]]] = []

        def length(self) -> int:
            return len(self.found)

        def get_outputs(self) -> list[str]:
            return [self.path_out_name, self.concept_out_name]

        def start(self, variation: int) -> None:
            for index in range(self._get_previous_length(self.concept_in_name)):
                concept = self.ask(variation, self.concept_in_name, index)
                files = sorted(Path(concept[self.path_in_name]).iterdir()) if concept[self.enabled_in_name] else []
                for file in files:
                    if file.suffix.lower() in self.extensions and not file.stem.endswith(tuple(self.exclude_postfix)):
                        self.found.append((str(file), concept))

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            path, concept = self.found[index]
            return {self.path_out_name: path, self.concept_out_name: concept}

    class ModifyPath(Module):
        def __init__(self, in_name: str, out_name: str, postfix: str, extension: str):
            super().__init__()
            self.first = self.in_name = in_name
            self.out_name, self.postfix, self.extension = out_name, postfix, extension

        def get_outputs(self) -> list[str]:
            return [self.out_name]

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            path = self.ask(variation, self.in_name, index)
            return {self.out_name: os.path.splitext(path)[0] + self.postfix + self.extension}

    return {cls.__name__: cls for cls in (ConceptPipelineModule, SettingsPipelineModule, CollectPaths, ModifyPath)}


def _texts(base: SimpleNamespace) -> dict[str, type]:
    Module = random_access(base)

    class LoadMultipleTexts(Module):
        def __init__(self, path_in_name: str, texts_out_name: str):
            super().__init__()
            self.first = self.path_in_name = path_in_name
            self.texts_out_name = texts_out_name

        def get_outputs(self) -> list[str]:
            return [self.texts_out_name]

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            path = Path(self.ask(variation, self.path_in_name, index))
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            return {self.texts_out_name: [line.strip() for line in lines if line.strip()] or [""]}

    class SelectRandomText(Module):
        def __init__(self, texts_in_name: str, text_out_name: str):
            super().__init__()
            self.first = self.texts_in_name = texts_in_name
            self.text_out_name = text_out_name

        def get_outputs(self) -> list[str]:
            return [self.text_out_name]

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            texts = self.ask(variation, self.texts_in_name, index)
            return {self.text_out_name: self._get_rand(variation, index).choice(texts)}

    class Tokenize(Module):
        def __init__(
            self,
            in_name: str,
            tokens_out_name: str,
            mask_out_name: str,
            tokenizer: Any,
            max_token_length: int,
        ):
            super().__init__()
            self.first = self.in_name = in_name
            self.tokens_out_name, self.mask_out_name = tokens_out_name, mask_out_name
            self.tokenizer, self.max_token_length = tokenizer, max_token_length

        def get_outputs(self) -> list[str]:
            return [self.tokens_out_name, self.mask_out_name]

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            text = self.ask(variation, self.in_name, index)
            settings = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
            found = self.tokenizer(text, max_length=self.max_token_length, **settings).to(self.pipeline.device)
            return {self.tokens_out_name: found.input_ids[0], self.mask_out_name: found.attention_mask[0]}

    class EncodeClipText(Module):
        def __init__(  # the signature that OneTrainer calls
            self,
            in_name: str,
            tokens_attention_mask_in_name: str | None,
            hidden_state_out_name: str,
            pooled_out_name: str | None,
            text_encoder: Any,
            add_layer_norm: bool,
            hidden_state_output_index: int | None = None,
            autocast_contexts: list[Any] | None = None,
            dtype: torch.dtype | None = None,
        ):
            super().__init__()
            self.first = self.in_name = in_name
            self.tokens_attention_mask_in_name = tokens_attention_mask_in_name
            self.hidden_state_out_name, self.pooled_out_name = hidden_state_out_name, pooled_out_name
            self.text_encoder, self.add_layer_norm = text_encoder, add_layer_norm
            self.hidden_state_output_index = hidden_state_output_index
            self.autocast_contexts, self.dtype = autocast_contexts or [nullcontext()], dtype

        def get_outputs(self) -> list[str]:
            return [name for name in (self.hidden_state_out_name, self.pooled_out_name) if name]

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            tokens = self.ask(variation, self.in_name, index)
            with self._all_contexts(self.autocast_contexts):
                found = self.text_encoder(tokens[None], output_hidden_states=True)
            item = {self.hidden_state_out_name: found.hidden_states[self.hidden_state_output_index][0]}
            if self.pooled_out_name:
                item[self.pooled_out_name] = (found.text_embeds if "text_embeds" in found else found.pooler_output)[0]
            return item

    return {cls.__name__: cls for cls in (LoadMultipleTexts, SelectRandomText, Tokenize, EncodeClipText)}


def _sorting(base: SimpleNamespace) -> dict[str, type]:
    Module = random_access(base)

    class VariationSorting(Module):
        """The balancing of a cache, for names that are not cached. Groups as in the contract: floor(n * repeats)."""

        def __init__(
            self,
            names: list[str],
            balancing_in_name: str | None = None,
            balancing_strategy_in_name: str | None = None,
            variations_group_in_name: list[str] | None = None,
            group_enabled_in_name: str | None = None,
        ):
            super().__init__()
            self.first, self.names = names[0], names
            self.balancing_in_name = balancing_in_name
            self.balancing_strategy_in_name = balancing_strategy_in_name
            self.variations_group_in_names = variations_group_in_name or []
            self.group_enabled_in_name = group_enabled_in_name
            self.groups: list[tuple[list[int], int]] | None = None

        def length(self) -> int:
            if self.groups is None:
                return self._get_previous_length(self.first)
            return sum(num_out for _, num_out in self.groups)

        def get_outputs(self) -> list[str]:
            return self.names

        def start(self, variation: int) -> None:
            members: dict[str, list[int]] = {}
            for index in range(self._get_previous_length(self.first)):
                if self.group_enabled_in_name and not self.ask(0, self.group_enabled_in_name, index):
                    continue
                key = repr([self.ask(0, name, index) for name in self.variations_group_in_names])
                members.setdefault(key, []).append(index)
            self.groups = []
            for indices in members.values():
                balancing = self.ask(0, self.balancing_in_name, indices[0])
                repeats = self.ask(0, self.balancing_strategy_in_name, indices[0]) == "REPEATS"
                self.groups.append((indices, int(len(indices) * balancing) if repeats else int(balancing)))

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            assert self.groups is not None and name is not None
            for indices, num_out in self.groups:
                if index < num_out:
                    return {name: self.ask(variation, name, indices[(index + variation * num_out) % len(indices)])}
                index -= num_out
            raise IndexError(index)

    class AspectBatchSorting(base.PipelineModule, base.SingleVariationRandomAccessPipelineModule):
        """Items of one resolution one after the other, so that a batch has one shape."""

        def __init__(self, resolution_in_name: str, names: list[str], batch_size: int):
            super().__init__()
            self.resolution_in_name, self.names, self.batch_size = resolution_in_name, names, batch_size
            self.order: list[int] = []

        def length(self) -> int:
            return len(self.order)

        def get_inputs(self) -> list[str]:
            return [self.resolution_in_name, *self.names]

        def get_outputs(self) -> list[str]:
            return self.names

        def start(self, variation: int) -> None:
            buckets: dict[tuple[int, ...], list[int]] = {}
            for index in range(self._get_previous_length(self.resolution_in_name)):
                resolution = self._get_previous_item(self.current_variation, self.resolution_in_name, index)
                buckets.setdefault(resolution, []).append(index)
            rand = self._get_rand(variation)
            for bucket in buckets.values():
                rand.shuffle(bucket)
                del bucket[len(bucket) - len(bucket) % self.batch_size :]
            self.order = [index for bucket in buckets.values() for index in bucket]

        def get_item(self, index: int, name: str | None = None) -> dict[str, Any]:
            place = self.order[index]
            return {each: self._get_previous_item(self.current_variation, each, place) for each in self.names}

    return {cls.__name__: cls for cls in (VariationSorting, AspectBatchSorting)}
