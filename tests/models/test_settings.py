"""How encoders run while a cache is filled, and that everything comes back."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.encoding import encode_captions

from latentcache.errors import ModelError
from latentcache.models.model_loader import ModelLoader
from latentcache.models.running import text_settings, vae_settings
from latentcache.models.tiny import tiny_parts
from latentcache.models.vae import encode_images, memory_format_of

# Importing torch's compiler warns of its own use of torch.jit.
importing_the_compiler_warns = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is:DeprecationWarning")


@pytest.fixture
def vae() -> torch.nn.Module:
    return tiny_parts()["vae"]


def strides(module: torch.nn.Module) -> list[tuple[int, tuple[int, ...]]]:
    return [(id(parameter), parameter.stride()) for parameter in module.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_the_memory_format_stays(vae: torch.nn.Module, dtype: torch.dtype) -> None:
    vae.to(dtype)
    with vae_settings(vae):
        assert memory_format_of(vae) is torch.contiguous_format


def test_half_precision_on_an_accelerator_is_channels_last_inside(
    vae: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`meta` stands for an accelerator: its tensors have strides, and no values are needed."""
    vae.to("meta", torch.bfloat16)
    before = strides(vae)
    with pytest.raises(KeyboardInterrupt), vae_settings(vae):
        assert memory_format_of(vae) is torch.channels_last
        raise KeyboardInterrupt
    assert [stride for _, stride in strides(vae)] == [stride for _, stride in before]
    vae.to(torch.float32)
    with vae_settings(vae):
        assert memory_format_of(vae) is torch.contiguous_format


def test_the_memory_format_comes_back_when_memory_runs_out_on_the_way(
    vae: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    vae.to("meta", torch.float16)
    before, num_moved, move = strides(vae), 0, torch.Tensor.to

    def full(self: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
        nonlocal num_moved
        num_moved += 1
        if num_moved == 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return move(self, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "to", full)
    with pytest.raises(torch.OutOfMemoryError), vae_settings(vae):
        raise AssertionError("the weights did not fit")
    assert num_moved > 5 and strides(vae) == before


def test_a_vae_that_is_channels_last_stays_so(vae: torch.nn.Module) -> None:
    vae.to("meta", torch.float16).to(memory_format=torch.channels_last)
    before = strides(vae)
    with vae_settings(vae):
        assert strides(vae) == before
    assert strides(vae) == before


def test_pixels_lie_as_the_weights_do(vae: torch.nn.Module) -> None:
    seen = []
    vae.encoder.conv_in.register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0].is_contiguous(memory_format=torch.channels_last))
    )
    pixels = torch.randint(0, 256, (1, 16, 24, 3), dtype=torch.uint8)
    plain = encode_images(vae, pixels)
    last = encode_images(vae.to(memory_format=torch.channels_last), pixels)
    assert seen == [False, True]
    torch.testing.assert_close(last, plain, rtol=1e-4, atol=1e-4)


@importing_the_compiler_warns
def test_compiled_in_place_and_put_back(vae: torch.nn.Module) -> None:
    """The stance makes torch.compile run the module eagerly: what is tested is who is compiled, and for how long."""
    pixels = torch.randint(0, 256, (1, 16, 24, 3), dtype=torch.uint8)
    names, plain = list(vae.state_dict()), encode_images(vae, pixels)
    with torch.compiler.set_stance("force_eager"), vae_settings(vae, compile=True):
        assert vae.encoder._compiled_call_impl is not None and list(vae.state_dict()) == names
        assert torch.equal(encode_images(vae, pixels), plain)
    assert vae.encoder._compiled_call_impl is None
    copy.deepcopy(vae)


@importing_the_compiler_warns
def test_text_encoders_are_compiled_and_put_back() -> None:
    parts = ModelLoader("tiny").text(torch.float32)
    plain = encode_captions(parts, ["a cat"])
    with (
        torch.compiler.set_stance("force_eager"),
        text_settings([parts["text_encoder"], parts["text_encoder_2"]], compile=True),
    ):
        assert encoders_compiled(parts) == [True, True]
        inside = encode_captions(parts, ["a cat"])
    assert encoders_compiled(parts) == [False, False]
    assert all(torch.equal(inside[name], plain[name]) for name in plain)
    with text_settings([parts["text_encoder"], parts["text_encoder_2"]]):
        assert encoders_compiled(parts) == [False, False]


@importing_the_compiler_warns
def test_a_module_that_its_owner_compiled_stays_compiled(vae: torch.nn.Module) -> None:
    vae.encoder.compile(backend="eager")
    own = vae.encoder._compiled_call_impl
    with vae_settings(vae, compile=True):
        assert vae.encoder._compiled_call_impl is own
    assert vae.encoder._compiled_call_impl is own


@importing_the_compiler_warns
def test_each_of_many_buckets_is_compiled_by_any_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.6 takes no `recompile_limit`, and stops at 8 graphs unless its configuration says more."""
    graphs, compile_in_place = [], torch.nn.Module.compile

    def compile_2_6(self: torch.nn.Module, *, dynamic: bool | None = None) -> None:
        def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
            graphs.append(graph)
            return graph

        compile_in_place(self, backend=count, dynamic=dynamic)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_2_6)

    class Encoder(torch.nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs) * 2

    vae = torch.nn.Module()
    vae.encoder = Encoder(2, 2)
    limit = torch._dynamo.config.cache_size_limit
    with pytest.raises(KeyboardInterrupt), torch.no_grad(), vae_settings(vae, compile=True):
        for size in range(2, 14):
            vae.encoder(torch.zeros(size, 2))
        raise KeyboardInterrupt
    assert len(graphs) == 12 and torch._dynamo.config.cache_size_limit == limit


def test_a_compiler_that_fails_is_named_with_the_way_out(vae: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> None:
        raise OSError("no C++ compiler")

    compile_in_place = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **options: compile_in_place(self, backend=broken, **options)
    )
    with (
        pytest.raises(ModelError, match=r"no C\+\+ compiler.*Set encode\.compile to false"),
        vae_settings(vae, compile=True),
    ):
        encode_images(vae, torch.zeros(1, 16, 16, 3, dtype=torch.uint8))
    assert vae.encoder._compiled_call_impl is None


def encoders_compiled(parts) -> list[bool]:
    return [encoder._compiled_call_impl is not None for encoder in (parts["text_encoder"], parts["text_encoder_2"])]


def test_attention_is_that_of_torch() -> None:
    parts = ModelLoader("tiny").text(torch.float32)
    assert [e.config._attn_implementation for e in (parts["text_encoder"], parts["text_encoder_2"])] == ["sdpa", "sdpa"]
