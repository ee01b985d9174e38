"""Packed weights: the same products, chosen by measurement, kept per machine, never on an accelerator."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from postrl.policies import products
from postrl.policies.base import Sampling
from postrl.policies.products import Packed, Plain, agree, can_pack, gain, product
from postrl.policies.sampler import sample
from tiny import tiny_decoder

FLOAT32 = can_pack(torch.device("cpu"), torch.float32)
needs_packing = pytest.mark.skipif(not FLOAT32, reason="this build of torch keeps no rearranged weights")


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Measurements of a test are its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gain.cache_clear()
    yield tmp_path / "postrl" / "products"
    gain.cache_clear()


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_products_are_the_plain_ones(rows: int, biased: bool, dtype: torch.dtype) -> None:
    """Also for other numbers of rows than they were made for; `agree` itself sees one wrong entry."""
    if not can_pack(torch.device("cpu"), dtype):
        pytest.skip(f"this machine keeps no rearranged {dtype} weights")
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(301, 96, generator=generator).to(dtype), torch.randn(301, generator=generator).to(dtype)
    x, plain = torch.randn(rows, 96, generator=generator).to(dtype), Plain(weight, bias if biased else None)
    found = Packed(weight, bias if biased else None, 64)(x)
    assert found.dtype == dtype and agree(found, x, plain)
    if dtype == torch.float32:
        torch.testing.assert_close(found, plain(x), atol=2e-5, rtol=0)
    found[rows // 2, 5] += 0.1 if dtype == torch.float32 else 100
    assert not agree(found, x, plain)


@needs_packing
def test_a_shape_is_packed_where_that_was_measured_to_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, asked = torch.ones(600, 512), []
    for found, kind in ((1.06, Packed), (1.04, Plain), (0.0, Plain)):
        monkeypatch.setattr(products, "gain", lambda *shape, found=found: asked.append(shape) or found)
        assert type(product(weight, None, 8)) is kind
    assert asked == [(600, 512, 8, torch.float32, 1)] * 3
    assert type(product(torch.ones(60, 50), None, 8)) is Plain  # too small to ask


@pytest.mark.parametrize(("device", "dtype"), [("meta", torch.float32), ("cpu", torch.float64)])
def test_what_onednn_cannot_keep_is_never_tried(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "gain", lambda *shape: pytest.fail("measured"))
    monkeypatch.setattr(products, "Packed", lambda *rest: pytest.fail("packed"))
    can_pack.cache_clear()
    assert type(product(torch.ones(600, 512, device=device, dtype=dtype), None, 8)) is Plain


def test_a_build_without_it_uses_plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (AttributeError, RuntimeError):

        def absent(*rest: object, error: type[Exception] = error) -> None:
            raise error("no such operator")

        monkeypatch.setattr(products, "Packed", absent)
        can_pack.cache_clear()
        assert type(product(torch.ones(600, 512), None, 8)) is Plain
    can_pack.cache_clear()


@needs_packing
def test_a_measurement_is_made_once_per_machine(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later process reads it, so that its numbers are the same; a damaged file is measured again."""
    assert gain(600, 512, 8, torch.float32, 1) > 0
    [path] = kept.iterdir()
    path.write_text('{"gain": 7.5}')
    gain.cache_clear()
    monkeypatch.setattr(products, "measure", lambda *shape: 3.0)
    assert gain(600, 512, 8, torch.float32, 1) == 7.5
    assert gain(600, 512, 9, torch.float32, 1) == 3.0 and len(list(kept.iterdir())) == 2
    path.write_text("{")
    gain.cache_clear()
    assert gain(600, 512, 8, torch.float32, 1) == 3.0
    gain(600, 512, 8, torch.float32, 2)
    gain(600, 512, 8, torch.bfloat16, 1)
    assert len(list(kept.iterdir())) == 4  # threads and type are part of what was measured


@needs_packing
def test_a_gain_is_what_three_of_four_pairs_exceed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only products move: packed ones take 1 second, plain ones 1, 1 + 1/16, 1 + 2/16, … in some order."""
    now, spent = [0.0], {Plain: [0, *((7 * i) % 16 for i in range(16))], Packed: []}

    def slow(kind: type[Plain] | type[Packed]) -> None:
        call = kind.__call__

        def timed(self: Any, x: torch.Tensor) -> torch.Tensor:
            now[0] += 1 + (spent[kind].pop(0) / 16 if spent[kind] else 0)
            return call(self, x)

        monkeypatch.setattr(kind, "__call__", timed)

    slow(Plain)
    slow(Packed)
    monkeypatch.setattr(products.time, "thread_time", lambda: now[0])
    monkeypatch.setattr(products.time, "perf_counter", lambda: now[0])
    assert products.measure(600, 512, 8, torch.float32) == 1.25


@needs_packing
def test_what_cannot_be_kept_is_not_used(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.parent.mkdir(parents=True)
    kept.write_text("a file where the folder should be")
    monkeypatch.setattr(products, "measure", lambda *shape: 3.0)
    assert gain(600, 512, 8, torch.float32, 1) == 0.0


@needs_packing
def test_wrong_packed_products_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Packed, "__call__", lambda self, x: Plain(torch.ones(600, 512), None)(x))
    assert products.measure(600, 512, 8, torch.float32) == 0.0


@needs_packing
def test_a_sampler_with_packed_weights_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, prompts = tiny_decoder(40, qkv_bias=True), [[1, 2, 3], [4]]
    plain = sample(decoder.sampler(4), prompts, 3, Sampling(max_tokens=10), seed=0)
    monkeypatch.setattr(products, "LEAST_BYTES", 0)
    monkeypatch.setattr(products, "gain", lambda *shape: 2.0)
    sampler = decoder.sampler(4)
    packed = sample(sampler, prompts, 3, Sampling(max_tokens=10), seed=0)
    engine = sampler._engine
    assert engine is not None and all(type(p) is Packed for p in (engine.head, engine.layers[0].qkv))
    for ours, theirs in zip(chain(*packed), chain(*plain), strict=True):
        assert ours.tokens == theirs.tokens and ours.logp == pytest.approx(theirs.logp, abs=2e-5)
