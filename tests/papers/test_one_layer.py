"""One layer: what is frozen costs nothing, what is trained is what was asked for, and what a contribution may claim."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from builders import rollout
from copy_run import quiet
from postrl.batch import Batch
from postrl.errors import UserError
from postrl.papers.grpo import grpo
from postrl.papers.one_layer import (
    boosted,
    compute_share,
    contribution,
    matrix_sizes,
    middle,
    only,
    random_subset,
    top,
)
from postrl.policies.base import layers_of
from postrl.policies.decoder import Decoder
from postrl.policies.hf import HuggingFacePolicy
from postrl.policies.lora import LoRA, LoRADecoder
from postrl.ranks import Ranks
from postrl.rollout import collate
from postrl.settings import Settings
from postrl.source import Dataset
from postrl.train import train
from tiny import tiny_decoder
from tiny_models import tiny_model


def six(seed: int = 0) -> Decoder:
    return tiny_decoder(vocab=96, seed=seed, layers=6)


def some_rows() -> Batch:
    """Three rows without a shared prefix: 11 positions each that are read, 10 of which predict a sampled token."""
    return collate([rollout(g, prompt=[1, 2 + g], completion=range(3, 13)) for g in range(3)])


def in_layer(name: str, k: int) -> bool:
    return f"layers.{k}." in name


# ---------------------------------------------------------------- what is trained


@pytest.mark.parametrize("layers", [[0], [3], [5], [1, 4]])
def test_frozen_weights_get_no_gradient_and_layers_below_none_either(layers):
    """Autograd begins at the lowest layer trained: nothing below it is kept for a backward pass."""
    policy, needs = six(), {}
    only(layers)(policy)

    def look(block, inputs, out):
        needs[len(needs)] = out.requires_grad

    for block in layers_of(policy):
        block.register_forward_hook(look)
    policy(some_rows()).logp.sum().backward()
    for name, parameter in policy.named_parameters():
        trained = any(in_layer(name, k) for k in layers)
        assert parameter.requires_grad == trained and (parameter.grad is not None) == trained, name
    assert needs == {k: k >= min(layers) for k in range(6)}


def test_the_gradient_of_a_layer_is_that_of_full_training():
    whole, part = six(), six()
    only([2])(part)
    for policy in (whole, part):
        policy(some_rows()).logp.sum().backward()
    wanted = dict(whole.named_parameters())
    for name, parameter in part.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-6, atol=1e-7)


def product(a, b, c, **_) -> int:
    """Operations of total.addmm_(b, c), by the shapes; torch's counter does not know this form."""
    return 2 * b[0] * b[1] * c[1]


def counted(policy: Decoder) -> int:
    """Operations in matrix products of one forward and backward pass (attention's kernel is not one)."""
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: product}) as counter:
        policy(some_rows()).logp.sum().backward()
    return sum(number for name, number in counter.get_flop_counts()["Global"].items() if "mm" in str(name))


@pytest.mark.parametrize("layers", [[0], [3], [5], [1, 4]])
def test_compute_share_is_what_is_counted(layers):
    full, some = six(), six()
    only(layers)(some)
    share = compute_share(matrix_sizes(full), full.head_weight.numel(), layers, predicted=10 / 11)
    assert counted(some) / counted(full) == pytest.approx(share, rel=1e-12)


def test_compute_share_of_a_deep_model():
    """The shapes of Qwen3-1.7B: a middle layer costs .52 to .55 of full training, not 1/28, the last one .4."""
    layer = 2048 * (2048 + 1024 + 1024 + 2048) + 3 * 2048 * 6144
    share = [compute_share([layer] * 28, 151936 * 2048, [k], kept_logits=True) for k in range(28)]
    assert all(0.52 < share[k] < 0.55 for k in (13, 14, 15)) and 0.36 < share[27] < 0.42 and share[0] < 0.7
    assert compute_share([layer] * 28, 0, range(28)) == 1.0


def test_through_the_loop(tmp_path: Path):
    """Only the layer moves, only it has moments and a place in checkpoints, and a resumed run is the same run."""
    rollouts = [
        rollout(g, s, completion=[3 + s, 5, 6 + g], rewards={"score": float(s)}) for g in range(4) for s in range(2)
    ]
    policies = {}
    for name, parts in {"whole": [3], "cut": [1, 3]}.items():
        policies[name] = policy = six()
        for steps in parts:
            train(
                grpo(),
                policy,
                Dataset(rollouts, 2),
                Settings(steps=steps, learning_rate=1e-3),
                tmp_path / name,
                parameters=only([2]) if steps == parts[0] else again,
                resume=steps != parts[0],
                display=quiet(steps)[0],
            )
    first = dict(six().named_parameters())
    for name, parameter in policies["whole"].named_parameters():
        same = torch.equal(parameter, first[name])
        assert same != in_layer(name, 2), name
        assert torch.equal(parameter, dict(policies["cut"].named_parameters())[name]), name
    saved = tmp_path / "whole" / "checkpoints" / "step_000003"
    weights, moments = load_file(saved / "policy.safetensors"), load_file(saved / "optimizer.safetensors")
    assert weights and all(in_layer(name, 2) for name in weights)
    numbers = {name.split(".")[0] for name in moments}
    assert len(numbers) == len(weights)
    size = sum(w.numel() for w in weights.values())
    assert sum(m.numel() for m in moments.values()) == 2 * size + len(weights)  # two moments, and each one's step


def again(policy: nn.Module) -> list[dict]:
    """The same layer of a policy that is frozen already, as in a second `train` of one process."""
    policy.requires_grad_(True)
    return only([2])(policy)


def test_other_policies():
    hf = HuggingFacePolicy(tiny_model())
    only([1])(hf)
    trained = [name for name, p in hf.named_parameters() if p.requires_grad]
    assert trained and all(in_layer(name, 1) for name in trained)
    lora = LoRADecoder(tiny_decoder(), LoRA(rank=2), "base")
    adapters = [name for name, p in lora.named_parameters() if p.requires_grad]
    [group] = only([1])(lora)
    trained = [name for name, p in lora.named_parameters() if p.requires_grad]
    assert trained == [name for name in adapters if in_layer(name, 1)] and len(group["params"]) == len(trained) > 0


# ---------------------------------------------------------------- a random subset of as many weights


def moved(tmp_path: Path, seed: int, count: int, **options) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(which weights of the layers a run has moved, flat; what every other weight is now)"""
    policy, first = six(), dict(six().named_parameters())
    rollouts = [rollout(g, s, completion=[3 + s, 5, 6 + g], rewards={"a": float(s)}) for g in range(4) for s in (0, 1)]
    settings = Settings(steps=3, learning_rate=1e-3, warmup=0, **options)
    subset = random_subset(count, seed)
    train(grpo(), policy, Dataset(rollouts, 2), settings, tmp_path, parameters=subset, display=quiet(3)[0])
    now = {name: p.detach() for name, p in policy.named_parameters()}
    changed = {name: (p != first[name]).flatten() for name, p in now.items()}
    assert not any(bool(x.any()) for name, x in changed.items() if "layers." not in name), "embeddings and head"
    return torch.cat([x for name, x in changed.items() if "layers." in name]), now


def test_only_a_random_subset_moves_the_rest_stays_bit_for_bit(tmp_path: Path):
    """Through the loop, with weight decay asked for, over mini-batches whose gradients differ."""
    size = sum(p.numel() for p in layers_of(six())[0].parameters())
    one, now = moved(tmp_path / "one", 0, size, weight_decay=0.1)
    assert 0.9 * size < int(one.sum()) <= size, "as many as a layer has, but for those without any gradient"
    per_layer = one.view(6, -1).sum(1) / size
    assert bool(((per_layer - 1 / 6).abs() < 0.05).all()), "of all layers alike"
    again, same = moved(tmp_path / "again", 0, size, weight_decay=0.1)
    assert torch.equal(one, again) and all(torch.equal(now[name], same[name]) for name in now)
    other, _ = moved(tmp_path / "other", 1, size)
    assert not torch.equal(one, other)


def test_every_weight_of_the_layers_is_their_full_training(tmp_path: Path):
    size = sum(p.numel() for p in layers_of(six()).parameters())
    policies = [six(), six()]
    random_subset(size)(policies[0])
    only(range(6))(policies[1])
    for policy in policies:
        policy(some_rows()).logp.sum().backward()
    for (name, a), b in zip(policies[0].named_parameters(), policies[1].parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None) == ("layers." not in name), name
        assert a.grad is None or b.grad is None or torch.equal(a.grad, b.grad), name


def test_random_subsets_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch):
    policy = six()
    size = sum(p.numel() for p in layers_of(policy).parameters())
    for count in (0, size + 1):
        with pytest.raises(UserError, match="count is"):
            random_subset(count)(policy)
    random_subset(5)(policy)
    with pytest.raises(UserError, match="nothing is frozen"):  # two masks at once would train their intersection
        random_subset(5)(policy)
    monkeypatch.setattr("postrl.papers.one_layer.here", lambda: Ranks(0, 2))
    with pytest.raises(UserError, match="one process"):
        random_subset(5)(six())


def test_boosted_layers_learn_faster_and_nothing_is_left_out():
    policy = six()
    rest, fast = boosted([1, 2], scale=3.0)(policy)
    assert "scale" not in rest and fast["scale"] == 3.0
    both = [id(p) for p in (*rest["params"], *fast["params"])]
    assert sorted(both) == sorted(id(p) for p in policy.parameters())
    assert {id(p) for p in fast["params"]} == {id(p) for k in (1, 2) for p in layers_of(policy)[k].parameters()}


@pytest.mark.parametrize(
    ("layers", "said"), [([6], "layer 6"), ([-1], "from 0"), ([1, 1], "each once"), ([], "at least")]
)
def test_layers_that_cannot_be_are_named(layers, said):
    with pytest.raises(UserError, match=said):
        only(layers)(six())
    with pytest.raises(UserError, match=said):
        compute_share([1] * 6, 1, layers)


def test_a_layer_that_is_frozen_already_is_an_error():
    """Profiling layer after layer on one policy would train nothing from the second on."""
    policy = six()
    only([1])(policy)
    with pytest.raises(UserError, match="frozen already"):
        only([2])(policy)
    with pytest.raises(UserError, match="no list of layers"):
        only([0])(nn.Linear(2, 2))
    with pytest.raises(UserError, match="scale"):
        boosted([1], scale=0.0)


# ---------------------------------------------------------------- which layers


def test_middle_and_top():
    assert middle(36, 10) == list(range(13, 23)) and middle(28, 1) == [13] and middle(6, 6) == list(range(6))
    assert middle(5, 2) == [1, 2]  # ⌊5/2 − 1⌋
    assert top([0.5, 1.0, 1.0, -0.3], 2) == [1, 2] and top([0.5, 1.0, 1.0], 1) == [1] and top([0.2, 0.1], 2) == [0, 1]
    for wrong in (0, 7):
        with pytest.raises(UserError, match="k is"):
            middle(6, wrong)
    with pytest.raises(UserError, match="layer 1 is NaN"):
        top([1.0, float("nan")], 1)


# The paper's table of C on mathematics for Qwen3-1.7B-Base, layers 0 to 27 (a transcription; the paper's numbers).
TABLE = [
    *(0.89, 0.87, 1.03, 0.75, 0.77, 0.78, 0.87, 0.80, 0.72, 1.04, 1.14, 0.92, 1.12, 1.01),
    *(0.92, 0.95, 0.85, 0.83, 0.66, 0.52, 0.32, 0.40, 0.47, 0.32, 0.28, 0.35, 0.36, 0.54),
]
BASE, FULL = [57.4, 74.4, 18.7, 26.1], [64.0, 82.0, 26.9, 30.2]  # MATH500, GSM8K, Olympiad, AMC


def test_the_papers_table_is_its_own_definition():
    """Its best single layer has a mean of 51.8: the quotient of the means is the printed C to within .02."""
    base, full = np.mean(BASE), np.mean(FULL)
    assert base == pytest.approx(44.1, abs=0.06) and full == pytest.approx(50.8, abs=0.06)
    assert (51.8 - base) / (full - base) == pytest.approx(max(TABLE), abs=0.02)
    assert top(TABLE, 1) == [10] and TABLE.index(min(TABLE)) == 24
    assert top(TABLE, 5) == [k for k, c in enumerate(TABLE) if c >= 1]
    thirds = [np.mean(TABLE[a:b]) for a, b in ((0, 9), (9, 18), (18, 28))]
    assert thirds == pytest.approx([0.83, 0.98, 0.42], abs=0.005), "on this model only the late third is weak"


# ---------------------------------------------------------------- contributions


def scores(rng: np.random.Generator, level: np.ndarray, gain: float) -> np.ndarray:
    """One sampled answer per problem: right with probability level + gain."""
    return (rng.random(len(level)) < level + gain).astype(float)[None]


def test_contribution_by_hand():
    """Four problems twice over: base 1/4, full 3/4, single 1/2: half of the gain."""
    base, full, single = ([[1, 0, 0, 0] * 8], [[1, 1, 1, 0] * 8], [[1, 1, 0, 0] * 8])
    found = contribution(*(np.array(x, dtype=float) for x in (single, full, base)))
    assert found.value == 0.5 and found.gap == 0.5 and found.low < 0.5 < found.high
    assert found.error == pytest.approx(0.5 / np.sqrt(32), rel=0.05)  # deviation of the paired differences over √n


def test_the_interval_is_paired():
    """A layer whose every answer equals full training's has C = 1 in every draw; harm in all of them has −1."""
    rng = np.random.default_rng(0)
    level = rng.random(200) * 0.5
    base, full = scores(rng, level, 0.0), scores(rng, level, 0.3)
    same = contribution(full, full, base, resamples=500)
    assert (same.value, same.low, same.high) == (1.0, 1.0, 1.0)
    mirrored = contribution(2 * base - full, full, base, resamples=500)
    assert (mirrored.low, mirrored.high) == (-1.0, -1.0)
    assert contribution(full, full, base, resamples=500) == same
    three = contribution(np.repeat(full, 3, 0), np.repeat(full, 3, 0), base, resamples=500)
    assert (three.value, three.low, three.high) == (1.0, 1.0, 1.0)


def test_the_interval_covers_the_truth():
    """C = 0.3/0.4 over new problems and new answers; 80 intervals of 95 %."""
    hits = 0
    for seed in range(80):
        rng = np.random.default_rng([seed, 1])
        level = rng.random(150) * 0.5
        single, full, base = (scores(rng, level, gain) for gain in (0.3, 0.4, 0.0))
        found = contribution(single, full, base, resamples=200, key=(seed,))
        hits += found.low <= 0.75 <= found.high
    assert 0.88 < hits / 80 <= 1.0


def test_seeds_that_disagree_widen_the_interval():
    rng = np.random.default_rng(3)
    level = rng.random(300) * 0.5
    base = scores(rng, level, 0.0)
    full = np.concatenate([scores(rng, level, 0.4) for _ in range(4)])
    steady = np.concatenate([scores(rng, level, 0.3) for _ in range(4)])
    loose = np.concatenate([scores(rng, level, gain) for gain in (0.0, 0.1, 0.5, 0.5)])
    a, b = (contribution(x, full, base, resamples=1000) for x in (steady, loose))
    assert b.high - b.low > 2 * (a.high - a.low)


def test_a_gap_under_two_standard_errors_is_refused():
    """Where full training gains nothing, almost every run is refused; C would be anything at all."""
    refused = 0
    for seed in range(40):
        rng = np.random.default_rng([seed, 2])
        level = rng.random(100) * 0.5
        single, full, base = (scores(rng, level, gain) for gain in (0.1, 0.0, 0.0))
        try:
            contribution(single, full, base, resamples=100)
        except UserError as error:
            refused += "two standard errors" in str(error)
    assert refused >= 36
    with pytest.raises(UserError, match="two standard errors"):
        contribution(np.ones((1, 4)), np.zeros((1, 4)), np.ones((1, 4)), resamples=50)  # full training harms


@pytest.mark.parametrize("bad", ["seeds", "problems", "nan", "one"])
def test_scores_that_do_not_fit_are_refused(bad):
    single, full, base = np.ones((2, 4)), np.ones((2, 4)), np.zeros((1, 4))
    if bad == "seeds":
        base = np.zeros((3, 4))
    if bad == "problems":
        single = np.ones((1, 4))
    if bad == "nan":
        single[0, 0] = np.nan
    if bad == "one":
        single, full, base = (x[:, :1] for x in (single, full, base))
    with pytest.raises(UserError, match="one_layer"):
        contribution(single, full, base)


def test_settings_are_plain():
    assert json.dumps(matrix_sizes(six())) and len(set(matrix_sizes(six()))) == 1
