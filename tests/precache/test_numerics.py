"""The numeric flags of torch while entries are encoded: equal keys have equal bytes, whatever a trainer has set."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from helpers.family_runs import family_config
from helpers.tiny_models import tiny_encoders

from latentcache.config import Config
from latentcache.families import family_named
from latentcache.families.scaling import Scaling
from latentcache.models.model_loader import LoadedModels
from latentcache.models.tiny import tiny_parts
from latentcache.precache.run import run_precache
from latentcache.precache.workspace import Workspace

BACKENDS = torch.backends
PRECISIONS = (BACKENDS.cuda.matmul, BACKENDS.cudnn.conv, BACKENDS.mkldnn.matmul, BACKENDS.mkldnn.conv)
CALLERS: dict[str, list[tuple[Any, str, Any]]] = {
    "leaves them": [],
    "races and sums": [(BACKENDS.cudnn, "benchmark", True), (BACKENDS.cuda.matmul, "allow_fp16_accumulation", True)],
    "sets tf32 for all": [(BACKENDS, "fp32_precision", "tf32")],
    "mixes both": [(BACKENDS.cuda.matmul, "allow_tf32", True), (BACKENDS.cuda.matmul, "fp32_precision", "ieee")],
    "sets medium": [],
}
"""What a caller has set before."""


def seen_by_caller() -> list[Any]:
    """All that a caller can read; an older flag says that it cannot be read where both interfaces were used."""
    flags = [(BACKENDS.cuda.matmul, "allow_tf32"), (BACKENDS.cudnn, "allow_tf32"), (BACKENDS.cudnn, "benchmark")]
    flags += [(BACKENDS.cuda.matmul, "allow_fp16_accumulation"), *((each, "fp32_precision") for each in PRECISIONS)]
    readers: list[Callable[[], Any]] = [torch.get_float32_matmul_precision]
    readers += [partial(getattr, *flag) for flag in flags]
    found: list[Any] = []
    for reader in readers:
        try:
            found.append(reader())
        except RuntimeError as error:
            found.append(str(error))
    return found


def in_force() -> list[bool]:
    """What decides about numbers: lower precisions, races of kernels, and sums in float16."""
    low = [each.fp32_precision not in ("ieee", "none") for each in PRECISIONS]
    return [*low, BACKENDS.cudnn.benchmark, BACKENDS.cuda.matmul.allow_fp16_accumulation]


PINNED = [False, True, False, False, False, False]
"""torch's own defaults: convolutions on CUDA are in TF32."""


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
    for owner in (BACKENDS, BACKENDS.cudnn, *PRECISIONS):
        owner.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    BACKENDS.cudnn.allow_tf32 = True
    BACKENDS.cudnn.benchmark = False
    BACKENDS.cuda.matmul.allow_fp16_accumulation = False
    assert in_force() == PINNED


def watched(look: Callable[[str], None]) -> LoadedModels:
    """A tiny model that calls `look` whenever its encoders run."""
    parts = tiny_parts()
    for name, module in (("image", parts["vae"].encoder), ("text", parts["text_encoder_2"])):
        module.register_forward_hook(lambda *arguments, name=name: look(name))
    return LoadedModels(**parts)


@pytest.mark.parametrize("caller", CALLERS)
def test_encoders_run_with_the_same_flags_whatever_the_caller_has_set(
    make_config: Callable[..., Config], caller: str
) -> None:
    seen: dict[str, list[list[bool]]] = {"image": [], "text": []}
    for owner, name, value in CALLERS[caller]:
        setattr(owner, name, value)
    if caller == "sets medium":
        torch.set_float32_matmul_precision("medium")
    before = seen_by_caller()
    run_precache(make_config(), models=watched(lambda name: seen[name].append(in_force())), workspace=Workspace())
    assert all(len(each) > 1 and each == [PINNED] * len(each) for each in seen.values())
    assert seen_by_caller() == before

    def fail(name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_precache(make_config(), models=watched(fail), workspace=Workspace())
    assert seen_by_caller() == before


def test_the_flags_come_back_when_runs_overlap(make_config: Callable[..., Config]) -> None:
    """The run that began first ends last, and neither changes the flags of the other."""
    BACKENDS.cuda.matmul.allow_tf32 = True
    before, seen = seen_by_caller(), []
    is_inside, may_go_on = threading.Event(), threading.Event()

    def wait(name: str) -> None:
        is_inside.set()
        assert may_go_on.wait(60)
        seen.append(in_force())

    first = threading.Thread(
        target=run_precache, args=(make_config(),), kwargs={"models": watched(wait), "workspace": Workspace()}
    )
    first.start()
    assert is_inside.wait(60)
    run_precache(make_config(), workspace=Workspace())
    may_go_on.set()
    first.join()
    assert seen and seen == [PINNED] * len(seen)
    assert seen_by_caller() == before


def test_a_default_dtype_and_the_dropout_of_a_dispatched_encoder_change_no_value(tmp_path: Path) -> None:
    """T5 has dropout. accelerate has dispatched it, so it is not moved."""
    family, dispatched, entries = family_named("chroma"), tiny_encoders("chroma"), []
    dispatch_model(dispatched["text_encoder"], {"": "cpu"}, force_hooks=True).train()
    for parts in (tiny_encoders("chroma"), dispatched):
        models, workspace = LoadedModels(family=family, **parts), Workspace()
        run_precache(family_config(tmp_path, image_output="sample"), models=models, workspace=workspace)
        entries.append({key: workspace.store.get(key).tensors for key in workspace.store.keys()})
        torch.set_default_dtype(torch.bfloat16)
    expected, found = entries
    assert found.keys() == expected.keys() and dispatched["text_encoder"].training
    for key, tensors in expected.items():
        assert all(torch.equal(found[key][name], tensor) for name, tensor in tensors.items())
    scaled = Scaling(rule="divided", mean=(0.123456,), std=(1.765432,)).apply(torch.ones(1, 1, 1, 1).float())
    assert scaled.item() == pytest.approx((1 - 0.123456) / 1.765432, rel=1e-6)
