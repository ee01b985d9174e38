"""What the backward pass makes again: the same numbers, bit for bit, from fewer kept ones."""

from collections.abc import Callable
from itertools import product as pairs
from typing import Any

import pytest
import torch
from torch import Tensor

from postrl.policies import decoder as module
from postrl.policies.decoder import Decoder
from postrl.policies.lora import LoRA, LoRADecoder
from postrl.policies.remade import remade
from postrl.rollout import Rollout, Turn, collate
from tiny import tiny_decoder


def batch_of(rows: int = 6, length: int = 20):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 32, (rows, length), generator=generator).tolist()
    return collate(
        [
            Rollout("x", 0, i, [[Turn([1, 2, 3], False), Turn(t, True, logp=[0.0] * length)]], rewards={"r": 0.0})
            for i, t in enumerate(tokens)
        ]
    )


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Calling it switches the remaking off."""

    def off() -> None:
        forward = module.Layer.forward

        def unchanged(self: module.Layer, *given: Any) -> Tensor:
            x, cos, sin, packed, product, _ = given
            return forward(self, x, cos, sin, packed, product, False)

        monkeypatch.setattr(module.Layer, "forward", unchanged)

    return off


def whole(dtype: torch.dtype) -> torch.nn.Module:
    return tiny_decoder(dtype=dtype, qkv_bias=True, qk_norm=True)


def adapter(dtype: torch.dtype) -> torch.nn.Module:
    policy = LoRADecoder(tiny_decoder(dtype=dtype), LoRA(rank=2, targets=("q_proj", "down_proj"), dropout=0.5), "base")
    policy.train()
    return policy


def one_layer(dtype: torch.dtype) -> torch.nn.Module:
    decoder = tiny_decoder(dtype=dtype).requires_grad_(False)
    decoder.model.layers[0].requires_grad_(True)
    return decoder


def half(dtype: torch.dtype) -> torch.nn.Module:
    decoder = tiny_decoder(dtype=dtype)
    decoder.compute_dtype = torch.bfloat16
    return decoder


CASES = [*pairs((whole, adapter, one_layer), (torch.float64, torch.float32)), (half, torch.float32)]


@pytest.mark.parametrize(("make", "dtype"), CASES)
def test_gradients_are_the_same_bit_for_bit(make: Callable, dtype: torch.dtype, kept: Callable[[], None]) -> None:
    def gradients() -> list[Tensor]:
        torch.manual_seed(0)
        policy = make(dtype)
        out = policy(batch_of(), frozenset({"entropy"}))
        (out.logp.sum() + out.entropy.square().sum()).backward()
        return [p.grad for p in policy.parameters() if p.grad is not None]

    lean = gradients()
    kept()
    usual = gradients()
    assert len(lean) == len(usual) > 3 and any(g.abs().max() > 0 for g in usual)
    assert all(torch.equal(a, b) for a, b in zip(lean, usual, strict=True))


def gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def bytes_kept(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of every storage that lives because of a graph, apart from the weights."""
    seen: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in decoder.parameters()}

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return x

    saved, entered = torch.autograd.graph.saved_tensors_hooks, []

    def nested(pack: Callable, unpack: Callable) -> torch.autograd.graph.saved_tensors_hooks:
        entered.append(pack)

        def both(x: Tensor) -> object:
            packed = pack(x)
            if isinstance(packed, Tensor):
                note(packed)
            return packed

        return saved(both, unpack)

    monkeypatch.setattr(torch.autograd.graph, "saved_tensors_hooks", nested)
    with saved(note, lambda x: x):
        out = decoder(batch_of())
    monkeypatch.setattr(torch.autograd.graph, "saved_tensors_hooks", saved)
    assert out.logp.requires_grad and entered
    return sum(seen.values())


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_two_norms_and_a_product_less_are_kept(
    compute: torch.dtype, kept: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, batch = tiny_decoder(layers=4), batch_of()
    decoder.compute_dtype = compute
    tokens = len(module.pack(batch).tokens)
    lean = bytes_kept(decoder, monkeypatch)
    kept()
    config = decoder.config
    saved = (2 * config.hidden + config.intermediate) * tokens * config.layers * compute.itemsize
    assert bytes_kept(decoder, monkeypatch) - lean == saved


def test_it_is_made_once_for_all_who_ask_and_again_for_a_second_pass() -> None:
    x, made = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), []
    weights = [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    value = x * 2

    def make() -> Tensor:
        made.append(1)
        return x.detach() * 2

    with remade(value, make):
        outs = [value @ weight for weight in weights]
    loss = torch.stack(outs).square().sum()
    loss.backward(retain_graph=True)
    first = [gradient(w).clone() for w in weights]
    assert len(made) == 1
    loss.backward()
    assert len(made) == 2
    assert all(torch.equal(gradient(w), 2 * g) for w, g in zip(weights, first, strict=True))
    expected = [2 * value.T @ out for out in outs]
    assert all(torch.allclose(a, b) for a, b in zip(first, expected, strict=True))
