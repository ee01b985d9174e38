"""Critics: what they see, where they start from, how they are fitted, trained beside a policy, saved and resumed."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from builders import ragged_batch
from copy_run import Copying, assert_same_run, figures, letters_policy, run
from postrl import checkpoint
from postrl.batch import Batch, spread
from postrl.checkpoint import Progress
from postrl.errors import UserError
from postrl.export import export, load_run
from postrl.papers.ppo import ppo
from postrl.policies.base import Completion, Policy, Sampler, Sampling
from postrl.policies.critic import ActorCritic, DecoderCritic, TabularCritic, Values, parameter_groups
from postrl.policies.decoder import Decoder
from postrl.policies.loading import load_policy
from postrl.policies.lora import LoRA, LoRADecoder
from postrl.policies.tabular import Tabular, contexts
from postrl.rollout import collate
from postrl.values import explained_variance, regress, with_values
from tiny import TINY, tiny_decoder
from tiny_models import save_model

HIDDEN = frozenset({"hidden"})


def decoder_batch(seed: int = 0) -> Batch:
    return ragged_batch(seed, groups=3, dtype=torch.float32)


# ---------------------------------------------------------------- what a critic is


def test_values_are_the_head_on_what_predicts_each_token():
    policy, batch = tiny_decoder(), decoder_batch()
    critic = DecoderCritic.copied(policy, head_seed=1)
    with torch.no_grad():
        got, hidden = critic(batch), policy(batch, HIDDEN).hidden
        wanted = torch.where(batch.mask, hidden @ critic.head.weight[0] + critic.head.bias, 0)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)
    assert float(got[batch.mask].std()) > 0.01


def test_a_value_does_not_see_its_own_token_or_later_ones():
    critic, batch = DecoderCritic.random(TINY, seed=0), decoder_batch()
    b = int(batch.mask.sum(1).argmax())
    t = int(batch.mask[b].nonzero()[1])
    tokens = batch.tokens.clone()
    tokens[b, t:] = (tokens[b, t:] + 1) % 7
    other = replace(batch, tokens=tokens)
    with torch.no_grad():
        before, after = critic(batch)[b], critic(other)[b]
    torch.testing.assert_close(before[: t + 1], after[: t + 1], rtol=0, atol=1e-6)
    later = batch.mask[b].clone()
    later[: t + 1] = False
    assert bool(later.any()) and not torch.allclose(before[later], after[later], atol=1e-5)


def test_starting_points():
    policy, batch = tiny_decoder(tied=False), decoder_batch()
    zero, seeded = DecoderCritic.copied(policy), DecoderCritic.copied(policy, head_seed=3)
    first, again, other = (DecoderCritic.random(TINY, seed) for seed in (0, 0, 1))
    with torch.no_grad():
        values = [critic(batch) for critic in (zero, seeded, first, again, other)]
    assert not values[0].any() and torch.equal(values[2], values[3])
    assert all(float(v[batch.mask].abs().max()) > 1e-3 for v in values[1:])
    assert not torch.allclose(values[2], values[4], atol=1e-3)
    shared = {p.data_ptr() for p in policy.parameters()} & {p.data_ptr() for p in zero.parameters()}
    assert not shared, "the critic has weights of its own"
    assert "lm_head" not in " ".join(name for name, _ in zero.named_parameters()), "a head that nothing trains"


def test_a_copy_of_an_adapted_policy_is_of_its_merged_weights():
    policy = LoRADecoder(tiny_decoder(), LoRA(rank=2), base="tiny")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.tensors().values():
            parameter.normal_(std=0.3, generator=generator)
        batch = decoder_batch()
        critic = DecoderCritic.copied(policy, head_seed=0)
        hidden = policy(batch, HIDDEN).hidden
        wanted = torch.where(batch.mask, hidden @ critic.head.weight[0], 0)
        torch.testing.assert_close(critic(batch), wanted, rtol=0, atol=1e-5)
    assert all(p.requires_grad for p in critic.parameters())
    with pytest.raises(UserError, match="not of a Tabular"):
        DecoderCritic.copied(letters_policy())


def test_save_and_load(tmp_path: Path):
    critic, batch = DecoderCritic.random(replace(TINY, tied=False), seed=2), decoder_batch()
    critic.save(tmp_path / "critic")
    with torch.no_grad():
        assert torch.equal(DecoderCritic.load(tmp_path / "critic")(batch), critic(batch))
    (tmp_path / "critic" / "value_head.safetensors").write_bytes(b"no tensors")
    with pytest.raises(UserError, match=r"value_head\.safetensors is damaged"):
        DecoderCritic.load(tmp_path / "critic")


# ---------------------------------------------------------------- regression


def first_letter(prompt: list[int], answer: list[int]) -> dict[str, float | None]:
    return {"first": float(answer[0] == 0)}


def world(groups: int = 60, seed: int = 0) -> Batch:
    """Rollouts of a uniform table; the reward is decided by the first token, so that only later states know it."""
    return collate(Copying(letters_policy(), groups=groups, score=first_letter, seed=seed)(0))


def worth(critic: nn.Module, batch: Batch) -> float:
    return explained_variance(with_values(critic, batch, 4096))


def shuffled(batch: Batch) -> Batch:
    order = torch.from_numpy(np.random.default_rng(5).permutation(batch.size))
    return replace(batch, rewards=batch.rewards[order])


@pytest.mark.parametrize(("kind", "least"), [("table", 0.4), pytest.param("decoder", 0.2, marks=pytest.mark.slow)])
def test_regression_explains_new_rollouts_and_not_those_of_shuffled_rewards(kind: str, least: float):
    """From 0 to much of the variance, on rollouts it was not fitted to; the control learns nothing true."""
    fresh = world(seed=1)

    def fitted(batch: Batch) -> float:
        table = kind == "table"
        critic = TabularCritic.zeros(letters_policy()) if table else DecoderCritic.copied(tiny_decoder(vocab=4))
        assert worth(critic, fresh) == pytest.approx(0, abs=1e-9)
        errors = regress(critic, batch, steps=40 if table else 100, learning_rate=0.1 if table else 0.01, units=60)
        assert errors[-1] < errors[0]
        return worth(critic, fresh)

    good, control = fitted(world()), fitted(shuffled(world()))
    print(f"explained variance of new rollouts by a {kind}: {good:.3f}, after shuffled rewards {control:.3f}")
    assert good > least and control < 0.1


@pytest.mark.parametrize("lam", [1.0, 0.5])
def test_regression_finds_the_mean_return_of_every_state(lam: float):
    """The least squares of a table are means; λ < 1 leads to the same values where the critic can be exact."""
    batch, critic = world(6), TabularCritic.zeros(letters_policy())
    regress(critic, batch, steps=100, learning_rate=0.05, units=batch.size, lam=lam)
    states = contexts(batch, critic.vocabulary, critic.memory)[batch.mask].tolist()
    returns = spread(batch.rewards[:, 0], batch)[batch.mask].tolist()
    for state in set(states):
        reached = [r for s, r in zip(states, returns, strict=True) if s == state]
        assert float(critic.table[state].detach()) == pytest.approx(sum(reached) / len(reached), abs=5e-3)


def test_regression_follows_from_its_seed_and_not_from_the_token_budget():
    tables = []
    for seed, budget in ((0, 4096), (0, 20), (1, 4096)):
        critic = TabularCritic.zeros(letters_policy(dtype=torch.float64))
        regress(critic, world(10).to(dtype=torch.float64), steps=7, units=9, seed=seed, token_budget=budget)
        tables.append(critic.table.detach())
    torch.testing.assert_close(tables[0], tables[1], rtol=0, atol=1e-9)
    assert not torch.allclose(tables[0], tables[2], atol=1e-6)


def test_units_without_a_reward_are_not_fitted():
    batch = world(10)
    gone = torch.arange(batch.size) % 2 == 0
    rewards = torch.where(gone[:, None], torch.nan, batch.rewards)
    got, wanted = TabularCritic.zeros(letters_policy()), TabularCritic.zeros(letters_policy())
    regress(got, replace(batch, rewards=rewards), steps=5, units=batch.size)
    regress(wanted, batch.select(~gone), steps=5, units=batch.size)
    torch.testing.assert_close(got.table, wanted.table, rtol=0, atol=1e-6)
    with pytest.raises(UserError, match="nothing to fit a critic to"):
        regress(got, replace(batch, rewards=torch.full_like(rewards, torch.nan)), steps=1)
    with pytest.raises(UserError, match="option steps=0"):
        regress(got, batch, steps=0)


# ---------------------------------------------------------------- beside a policy


def both(seed: int = 0) -> ActorCritic:
    policy = letters_policy()
    return ActorCritic(policy, TabularCritic.zeros(policy))


def test_to_everyone_else_it_is_the_policy(tmp_path: Path):
    policy = tiny_decoder()
    model = ActorCritic(policy, DecoderCritic.copied(policy, head_seed=0))
    assert isinstance(model, Policy) and model.context_length == policy.context_length
    batch = decoder_batch()
    with torch.no_grad():
        alone, plain, whole = policy(batch), model(batch), model(batch, frozenset({"values", "entropy"}))
    assert torch.equal(plain.logp, alone.logp) and plain.values is None
    assert torch.equal(whole.logp, alone.logp) and whole.entropy is not None
    torch.testing.assert_close(whole.values, with_values(model.critic, batch, 4096).values, rtol=0, atol=1e-6)
    drawn = []
    for one in (policy, model):
        sampler = one.sampler()
        sampler.submit([1, 2], (0, 1), Sampling(max_tokens=5))
        drawn.append(sampler.poll()[0].tokens)
    assert drawn[0] == drawn[1]
    model.save(tmp_path / "saved")
    loaded = Decoder.load(tmp_path / "saved")
    assert {n for n, _ in loaded.named_parameters()} == {n for n, _ in policy.named_parameters()}


def test_a_critics_gradient_does_not_shrink_the_policys(tmp_path: Path):
    """Each group is clipped by its own norm. In one group (the control) a large value loss takes all of it."""

    def moved(folder: Path, coef: float, parameters) -> torch.Tensor:
        model = both()
        rest = {"enrich": [Values(model)], "parameters": parameters}
        options = {"steps": 1, "updates": 4, "max_gradient_norm": 1e-6}  # near AdamW's ε, so that scale matters
        run(folder, ppo(value_coef=coef), model, Copying(model.policy), rest=rest, **options)
        return model.policy.table.detach()

    small, large = (moved(tmp_path / f"two{c}", c, parameter_groups()) for c in (1e-3, 1e5))
    assert torch.equal(small, large) and bool(small.any())
    small, large = (moved(tmp_path / f"one{c}", c, None) for c in (1e-3, 1e5))
    assert float(large.abs().max()) < 0.1 * float(small.abs().max())


def test_the_critics_learning_rate_is_scaled(tmp_path: Path):
    moved = []
    for scale in (1.0, 3.0):
        model = both()
        rest = {"enrich": [Values(model)], "parameters": parameter_groups(scale)}
        run(tmp_path / str(scale), ppo(), model, Copying(model.policy), rest=rest, steps=1, updates=1)
        moved.append([float(part.table.detach().abs().max()) for part in (model.policy, model.critic)])
    assert moved[0] == pytest.approx([0.1, 0.1], rel=1e-3) and moved[1] == pytest.approx([0.1, 0.3], rel=1e-3)
    with pytest.raises(UserError, match="critic_scale=0"):
        parameter_groups(0.0)
    with pytest.raises(UserError, match="need an ActorCritic"):
        parameter_groups()(letters_policy())


def test_warm_up_trains_the_critic_alone(tmp_path: Path):
    """The policy stays, and its moments do not even begin; the control moves."""
    for warmup in (3, 0):
        model = both()
        rest = {"enrich": [Values(model, warmup=warmup)], "parameters": parameter_groups()}
        run(tmp_path / str(warmup), ppo(), model, Copying(model.policy), rest=rest, steps=3)
        assert bool(model.critic.table.any()) and bool(model.policy.table.any()) == (warmup == 0)
        saved = checkpoint.checkpoints(tmp_path / str(warmup) / "checkpoints")[-1] / "optimizer.safetensors"
        assert ("0.exp_avg" in load_file(saved)) == (warmup == 0) and "1.exp_avg" in load_file(saved)


def test_the_first_step_after_a_warm_up(tmp_path: Path):
    """It moves no weight by more than the learning rate, as Adam's first does. Gradients of zero instead of none would
    have let the moments' age run, and the step be several times that."""
    largest = []
    for warmup in (0, 20):
        model = both()
        rest = {"enrich": [Values(model, warmup=warmup)], "parameters": parameter_groups()}
        run(tmp_path / str(warmup), ppo(), model, Copying(model.policy), rest=rest, steps=warmup + 1, updates=1)
        largest.append(float(model.policy.table.detach().abs().max()))
    assert largest == pytest.approx([0.1, 0.1], rel=1e-2)


@pytest.mark.parametrize(("warmup", "stop"), [(0, 3), (4, 2), (2, 4)])
def test_resume_bit_for_bit(tmp_path: Path, warmup: int, stop: int):
    """Before, within and after a warm-up; the critic, its moments and the count of steps are in the checkpoint."""

    def go(folder: Path, steps: int, resume: bool = False) -> ActorCritic:
        model = both()
        rest = {"enrich": [Values(model, warmup=warmup)], "parameters": parameter_groups(3.0)}
        run(folder, ppo(), model, Copying(model.policy), resume=resume, rest=rest, steps=steps)
        return model

    whole = go(tmp_path / "whole", 6)
    go(tmp_path / "parts", stop)
    parts = go(tmp_path / "parts", 6, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(a, b) and bool(a.any())


def test_a_damaged_count_of_steps_is_named():
    with pytest.raises(UserError, match="count of a critic's steps is 'two'"):
        Values(both()).load_state_dict({"steps": "two"})
    with pytest.raises(UserError, match="warmup=-1"):
        Values(both(), warmup=-1)


@pytest.mark.parametrize("rank", [0, 2])
def test_export_gives_the_policy_alone(tmp_path: Path, rank: int):
    base = save_model(tmp_path / "base")
    lora = LoRA(rank=rank, alpha=2.0 * rank) if rank else None
    policy, _ = load_policy(base, lora=lora)
    assert isinstance(policy, nn.Module)
    model = ActorCritic(policy, DecoderCritic.copied(policy, head_seed=0))
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.01)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"configuration": {"model": str(base), "lora_rank": rank, "steps": 1}}))
    groups = parameter_groups()(model)
    checkpoint.save(folder / "checkpoints", model, torch.optim.AdamW(groups), {}, Progress(step=1))
    loaded, _ = load_run(folder)
    assert isinstance(loaded, nn.Module)
    for (name, got), (same, wanted) in zip(loaded.named_parameters(), policy.named_parameters(), strict=True):
        assert name == same and torch.equal(got, wanted)
    export(folder, tmp_path / "out")
    exported = Decoder.load(tmp_path / "out")
    assert not any("head" in name and "lm_head" not in name for name, _ in exported.named_parameters())


class Patient:
    """A sampler whose poll waits for everything that was submitted."""

    def __init__(self, sampler: Sampler):
        self.sampler, self.submit = sampler, sampler.submit

    def poll(self) -> list[Completion]:
        done: list[Completion] = []
        while more := self.sampler.poll():
            done += more
        return sorted(done, key=lambda completion: completion.key)


def test_decoder_policy_and_critic_learn_in_the_loop(tmp_path: Path):
    """Both decoders move, and the explained variance is in the metrics."""
    policy = tiny_decoder(vocab=4)
    model = ActorCritic(policy, DecoderCritic.copied(policy))
    before = [p.detach().clone() for p in model.parameters()]
    rest = {"enrich": [Values(model, truncated="bootstrap")], "parameters": parameter_groups(3.0)}
    source = Copying(policy)
    source.sampler = Patient(source.sampler)
    run(tmp_path / "run", ppo(), model, source, rest=rest, steps=2, learning_rate=1e-3)
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    lines = [line for line in figures(tmp_path / "run") if "method/explained_variance" in line]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["method/explained_variance"] == pytest.approx(0, abs=1e-6)  # values of 0


def test_a_tabular_policy_may_be_float64():
    policy = Tabular.random(3, 2, 8, key=(0,))
    batch = policy.enumerate_sequences([0], 2)
    assert with_values(TabularCritic.zeros(policy), batch, 10).values.dtype == torch.float64
