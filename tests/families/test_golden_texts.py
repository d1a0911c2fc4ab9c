from __future__ import annotations

import json

import pytest
import torch
from families.golden_texts import FILE, text_numbers
from helpers.tiny_models import tiny_model

from latentcache.families import FAMILIES, family_named
from latentcache.families.base import MASK

pytestmark = pytest.mark.families

GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", FAMILIES)
def test_hidden_states_mean_what_they_meant(name: str) -> None:
    found, golden = text_numbers(name), GOLDEN[name]
    assert found.keys() == golden.keys()
    for text, expected in golden.items():
        assert found[text]["rows"] == expected["rows"], text
        # Another CPU rounds otherwise; another layer differs by 0.1 and more.
        torch.testing.assert_close(found[text]["numbers"], expected["numbers"], rtol=1e-3, atol=1e-3, msg=text)


@pytest.mark.parametrize(("name", "stack"), [("z-image", ""), ("ernie-image", "language_model")])
def test_the_output_of_the_last_layer_but_one_is_read(name: str, stack: str) -> None:
    family = family_named(name)
    parts, seen = tiny_model(family.name), []
    parts["text_encoder"].get_submodule(stack).layers[-2].register_forward_hook(
        lambda module, given, output: seen.append(output)
    )
    made = family.encode_text(parts, family.tokenize(parts, ["a red cat"]), family.text_recipe())
    assert torch.equal(made["prompt_embeds"][0], seen[0][0][: int(made[f"prompt_embeds{MASK}"].sum())])
