"""PPO: credit by a critic that is right, wrong or absent; its value loss; truncation; missing rewards."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

import laws
import reference
from builders import ragged_batch
from copy_run import Copying, figures, letters_policy, quiet, run
from postrl import recipes_folder
from postrl.advantages import gae
from postrl.batch import Batch, Stop
from postrl.errors import UserError
from postrl.method import Method
from postrl.optimise import Seen, Trainer, update
from postrl.papers.grpo import grpo
from postrl.papers.ppo import ppo, value_error
from postrl.papers.reinforce import reinforce
from postrl.policies.critic import ActorCritic, TabularCritic, Values, parameter_groups
from postrl.policies.tabular import Tabular
from postrl.settings import Settings
from postrl.terms import entropy_bonus
from postrl.values import explained_variance, token_rewards, with_value_after, with_values
from test_learning import CHANCE, LEARNT, NOT_LEARNT, chance_of_right

OPTIONS = [
    {"gamma": 0.9, "lam": 0.8, "lam_critic": 0.5},
    {"gap": "zero", "gamma": 0.95, "lam": 0.7, "lam_critic": 0.0, "whiten": False},
    {"whiten": False, "value_clip": None, "value_coef": 0.25, "lam": 1.0, "dual": 1.5},
    {"missing": "zero", "value_clip": 0.5, "low": 0.1, "high": 0.3, "lam": 0.0},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_reference(options):
    laws.over_cases(lambda case: reference.agree(ppo(**options), case, **options), examples=15)


@pytest.mark.parametrize("law", laws.LAWS)
def test_laws(law):
    laws.hold(law, ppo(**OPTIONS[1]), examples=6)


@pytest.mark.parametrize("law", ["split", "poison", "padding", "finite"])
def test_laws_with_an_entropy_bonus(law):
    laws.hold(law, ppo().plus(entropy_bonus(0.01), needs=frozenset({"entropy"})), examples=6)


def case_of(rewards, values, masks, now=None, after=None) -> laws.Case:
    """One row per unit, all probabilities 1/2; `values` before each token, `now` the critic's present ones."""
    case = laws.by_hand(
        range(len(masks)), rewards, old=[[0.5] * len(m) for m in masks], new=[[0.5] * len(m) for m in masks]
    )
    mask = torch.tensor(masks, dtype=torch.bool)
    values = torch.tensor(values, dtype=torch.float64)
    after = None if after is None else torch.tensor(after, dtype=torch.float64)
    batch = replace(case.batch, mask=mask, valid=torch.ones_like(mask), values=values, value_after=after)
    logp = torch.where(mask, case.now["logp"], 0)
    now = values if now is None else torch.tensor(now, dtype=torch.float64)
    return laws.Case(
        replace(batch, logp_old=logp), {"logp": logp.clone(), "values": torch.where(mask, now, 0)}, case.rng
    )


def test_by_hand():
    """Two tokens, R = 1 at the end, V = 0.2, 0.6, γ = 1/2, λ = 1/2, λ_critic = 1.

    δ₂ = 1 − 0.6 = 0.4, δ₁ = 0 + 0.5·0.6 − 0.2 = 0.1, so A = 0.1 + 0.25·0.4 = 0.2 and 0.4. Returns 1/2 and 1.
    The critic now says 0.3 and 0.9. First token: (0.3 − 0.5)² = 0.04 against V_old + 0.05 = 0.25: 0.0625 is larger and
    the clip holds it, gradient 0. Second: 0.01 against (0.65 − 1)² = 0.1225, the same. Unclipped: 2·(V − R)/2.
    """
    case = case_of([1.0], [[0.2, 0.6]], [[1, 1]], now=[[0.3, 0.9]])
    options = {"gamma": 0.5, "lam": 0.5, "whiten": False}
    got = laws.update(ppo(**options, value_clip=0.05), case.batch, case.now)
    laws.equal(got.advantage, [[0.2, 0.4]])
    assert float(got.loss) == pytest.approx(-(0.2 + 0.4) / 2 + (0.0625 + 0.1225) / 2)
    laws.equal(got.gradient["values"], [[0, 0]])
    free = laws.update(ppo(**options, value_clip=None, value_coef=0.5), case.batch, case.now)
    laws.equal(free.gradient["values"], [[0.5 * (0.3 - 0.5), 0.5 * (0.9 - 1)]])
    assert float(free.loss) == pytest.approx(-(0.2 + 0.4) / 2 + 0.5 * (0.04 + 0.01) / 2)
    laws.equal(free.gradient["logp"], [[-0.1, -0.2]])


@pytest.mark.parametrize(
    ("v", "old", "target", "loss", "moves"),
    [
        (0.15, 0.0, 1.0, 0.85**2, True),  # inside the band
        (0.5, 0.0, 1.0, 0.8**2, False),  # has moved enough towards the target
        (0.5, 0.0, -1.0, 1.5**2, True),  # has moved away from it: nothing holds it back
        (1.3, 0.0, 0.1, 1.2**2, True),  # overshot: (0.2 − 0.1)² is smaller
    ],
)
def test_value_clip(v: float, old: float, target: float, loss: float, moves: bool):
    at = torch.tensor([[True]])
    value = torch.tensor([[v]], dtype=torch.float64, requires_grad=True)
    old, target = (torch.tensor([[x]], dtype=torch.float64) for x in (old, target))
    got = value_error(at, value, old, target, 0.2)
    got.sum().backward()
    assert float(got.detach()) == pytest.approx(loss) and bool(value.grad != 0) == moves


def test_observation_gap_is_the_callers_choice():
    """λ = 0.95, V = 1/2, R = 1: the first token gets 0.429 if the observation is skipped, 0.341 if it is walked."""
    case = case_of([1.0], [[0.5] * 6], [[1, 1, 0, 0, 1, 1]])
    carry, zero = (ppo(gap=gap, whiten=False).advantage(case.batch)[0, 0] for gap in ("carry", "zero"))
    assert float(carry) == pytest.approx(0.5 * 0.95**3) and float(zero) == pytest.approx(0.341, abs=5e-4)


def test_without_a_critic_and_with_lambda_1_it_is_reinforce():
    def check(case: laws.Case) -> None:
        batch = replace(case.batch, values=torch.zeros_like(case.batch.values), value_after=None)
        laws.near(ppo(lam=1.0, whiten=False).advantage(batch), reinforce().advantage(batch), "advantage")

    laws.over_cases(check, examples=15)


def test_an_answer_that_was_cut_off():
    """Two rows of one token, V = 1/4, no reward yet. Over: A = −1/4. Going on at V = 0.8, γ = 1/2: A = 0.4 − 1/4."""
    case = case_of([0.0, 0.0], [[0.25], [0.25]], [[1], [1]], after=[0.0, 0.8])
    laws.equal(ppo(gamma=0.5, whiten=False).advantage(case.batch), [[-0.25], [0.15]])
    got = laws.update(ppo(gamma=0.5, value_clip=None), case.batch, case.now)
    laws.equal(got.gradient["values"], [[0.25], [0.25 - 0.4]])


def test_a_unit_without_a_reward_teaches_neither():
    case = case_of([float("nan"), 1.0], [[0.5, 0.5], [0.5, 0.5]], [[1, 1], [1, 1]], now=[[0.4, 0.4], [0.4, 0.4]])
    got = laws.update(ppo(whiten=False, lam=1.0, value_clip=None), case.batch, case.now)
    laws.equal(got.advantage, [[0, 0], [0.5, 0.5]])
    laws.equal(got.gradient["values"], [[0, 0], [-0.6, -0.6]])  # the mean is over two tokens, not over four
    laws.equal(got.gradient["logp"], [[0, 0], [-0.125, -0.125]])


def test_every_row_of_a_unit_ends_with_its_reward():
    case = case_of([1.0, 0.0], [[0.0] * 3, [0.0] * 3], [[0, 1, 1], [1, 0, 0]])
    batch = replace(case.batch, unit=torch.zeros(2, dtype=torch.int64))
    laws.equal(token_rewards(batch), [[0, 0, 1], [1, 0, 0]])


# ---------------------------------------------------------------- an exact critic


PROMPT, HORIZON, END = [1], 3, frozenset({2})


def world() -> tuple[Tabular, Batch, TabularCritic]:
    """A random policy over three tokens, all its answers with a reward for each, and its exact values."""
    policy = Tabular.random(3, 4, 8, key=[3])
    batch = policy.enumerate_sequences(PROMPT, HORIZON, END)
    rewards = torch.randn(batch.size, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = replace(batch, rewards=rewards, reward_names=("score",), reward_weights=torch.ones(1, dtype=torch.float64))
    chance = policy.probability(batch).detach()
    critic = TabularCritic.zeros(policy)
    answers = [row[mask].tolist() for row, mask in zip(batch.tokens, batch.mask, strict=True)]
    for start in {tuple(answer[:k]) for answer in answers for k in range(len(answer))}:
        inside = torch.tensor([tuple(answer[: len(start)]) == start for answer in answers])
        mean = (chance * rewards[:, 0])[inside].sum() / chance[inside].sum()
        critic.table.data[policy.state([*PROMPT, *start])] = mean
    return policy, with_values(critic, batch, 10**6), critic


def expected_gradient(policy: Tabular, batch: Batch, advantage: torch.Tensor) -> torch.Tensor:
    """E[Σ_t A_t ∇log π_t] over all answers."""
    chance = policy.probability(batch).detach()[batch.unit][:, None]
    surrogate = (chance * torch.where(batch.mask, advantage * policy(batch).logp, 0)).sum()
    return torch.autograd.grad(surrogate, policy.table)[0]


def true_gradient(policy: Tabular, batch: Batch) -> torch.Tensor:
    return torch.autograd.grad(policy.expectation(batch, batch.rewards[:, 0]), policy.table)[0]


def test_with_an_exact_critic_the_one_step_error_is_the_true_advantage():
    """λ = 0: A = Q(s, a) − V(s), where Q is the value of the next state, or the reward if the answer is over."""
    policy, batch, critic = world()
    critic.requires_grad_(False)
    got = ppo(lam=0.0, whiten=False).advantage(batch)
    for b in range(batch.size):
        places = batch.mask[b].nonzero().squeeze(1).tolist()
        for k, t in enumerate(places):
            state = policy.state(batch.tokens[b, : t + 1].tolist())
            after = batch.rewards[b, 0] if k == len(places) - 1 else critic.table[state]
            before = critic.table[policy.state(batch.tokens[b, :t].tolist())]
            assert float(got[b, t]) == pytest.approx(float(after - before), abs=1e-12)


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_an_exact_critic_is_unbiased_at_every_lambda_and_a_wrong_one_only_at_1(lam: float):
    policy, batch, _ = world()
    true = true_gradient(policy, batch)
    method = ppo(lam=lam, whiten=False)
    torch.testing.assert_close(expected_gradient(policy, batch, method.advantage(batch)), true, rtol=0, atol=1e-12)
    noise = torch.randn(policy.table.shape[0], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wrong = with_values(TabularCritic(noise, 3, policy.memory), batch, 10**6)
    off = float((expected_gradient(policy, wrong, method.advantage(wrong)) - true).abs().max())
    assert off < 1e-12 if lam == 1 else off > 0.01


def test_an_exact_critic_takes_noise_away():
    """With V exact, the variance of one answer's Σ_t A_t ∇log π_t falls with λ."""
    policy, batch, _ = world()
    chance = policy.probability(batch).detach()
    second = []
    for lam in (0.0, 0.5, 1.0):
        advantage = ppo(lam=lam, whiten=False).advantage(batch)
        total = 0.0
        for b in range(batch.size):
            one = batch.select(torch.arange(batch.size) == b)
            loss = torch.where(one.mask, advantage[b] * policy(one).logp, 0).sum()
            total += float(chance[b] * torch.autograd.grad(loss, policy.table)[0].square().sum())
        second.append(total)
    assert second[0] < second[1] < second[2]


def test_explained_variance_of_an_exact_critic_is_what_the_state_decides():
    """Answers drawn uniformly: V of their mixture explains the variance between states, a constant none of it."""
    policy = Tabular.uniform(3, 4, 8, dtype=torch.float64)
    batch = policy.enumerate_sequences(PROMPT, 1)
    batch = replace(
        batch,
        rewards=torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64),
        reward_names=("score",),
        reward_weights=torch.ones(1, dtype=torch.float64),
    )
    constant = with_values(TabularCritic.zeros(policy), batch, 100)
    assert explained_variance(constant) == pytest.approx(0, abs=1e-12)
    exact = replace(batch, values=torch.where(batch.mask, batch.rewards, 0.0))
    assert explained_variance(exact) == 1 and explained_variance(replace(exact, values=exact.values + 5)) == 1
    assert explained_variance(replace(exact, values=-exact.values)) == pytest.approx(-3)
    assert math.isnan(explained_variance(replace(exact, rewards=torch.ones_like(exact.rewards))))


# ---------------------------------------------------------------- through the loop


def one_update(method: Method, batch: Batch, budget: int) -> list[torch.Tensor]:
    """Gradients of the real `update` for policy and critic, both tables."""
    policy = Tabular.random(7, 2, 64, key=(1,))
    critic = TabularCritic(torch.linspace(-1, 1, policy.table.shape[0], dtype=torch.float64), 7, 2)
    model = ActorCritic(policy, critic)
    batch = Values(model)(batch)
    batch = replace(batch, values=batch.values + 0.1 * batch.mask)  # the critic has moved since
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    settings = Settings(max_gradient_norm=float("inf"), importance_cap=None, learning_rate=0.0, token_budget=budget)
    seen = Seen(torch.ones_like(batch.logp_old), torch.zeros_like(batch.logp_old), batch.logp_old.clone())
    trainer = Trainer(method, model, optimizer, Accelerator(), settings, False)
    update(trainer, batch, torch.arange(len(batch.unit)), method.advantage(batch), 0.0, seen)
    return [policy.table.grad, critic.table.grad]


@pytest.mark.parametrize("seed", [0, 1])
def test_token_budget_does_not_change_the_gradients_of_policy_and_critic(seed: int):
    """verl #6957: the value loss averaged per micro-batch."""
    batch = ragged_batch(seed, groups=6)
    whole = one_update(ppo(), batch, 10**6)
    assert all(float(gradient.abs().max()) > 0 for gradient in whole)
    for budget in (60, 1):
        for got, wanted in zip(one_update(ppo(), batch, budget), whole, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


def test_the_comparison_of_token_budgets_can_fail():
    def averaged(batch, advantage, forward):
        return ppo().terms[1].loss(batch, advantage, forward) / batch.mask.sum().clamp(min=1)

    policy, value = ppo().terms
    wrong = replace(ppo(), terms=(policy, replace(value, loss=averaged)))
    batch = ragged_batch(0, groups=6)
    whole, cut = (one_update(wrong, batch, budget)[1] for budget in (10**6, 1))
    assert float((whole - cut).abs().max()) > 1e-3


def learn(folder: Path, shuffle: bool) -> float:
    policy = letters_policy()
    model = ActorCritic(policy, TabularCritic.zeros(policy))
    rest = {"enrich": [Values(model)], "parameters": parameter_groups(2.0)}
    source = Copying(policy, groups=16, size=1, shuffle=shuffle)
    run(folder, ppo(), model, source, steps=30, updates=4, checkpoint_every=1000, rest=rest)
    return chance_of_right(policy)


@pytest.mark.slow
def test_learns_without_groups(tmp_path: Path):
    """One answer per prompt: there is no group to compare it with. Control: rewards of other answers."""
    assert learn(tmp_path / "a", shuffle=False) > LEARNT > NOT_LEARNT > CHANCE
    assert learn(tmp_path / "b", shuffle=True) < NOT_LEARNT


def test_a_run_without_a_critic_is_told(tmp_path: Path):
    policy = letters_policy()
    with pytest.raises(UserError, match=r"no values: give `train` an ActorCritic and the enricher `Values`"):
        run(tmp_path / "a", ppo(), policy)
    model = ActorCritic(policy, TabularCritic.zeros(policy))
    with pytest.raises(UserError, match="no values"):
        run(tmp_path / "b", ppo(), model, Copying(policy))


def test_groups_without_variance_are_no_cause_for_a_warning(tmp_path: Path):
    """A lone answer has no variance in its group, and PPO learns from it; GRPO (the control) does not."""
    for method, warned in ((ppo(), False), (grpo(), True)):
        policy = letters_policy()
        model = ActorCritic(policy, TabularCritic.zeros(policy))
        source = Copying(policy, groups=2, size=2, score=lambda prompt, answer: {"correct": 1.0})
        display, text = quiet()
        rest = {"enrich": [Values(model)], "display": display}
        run(tmp_path / method.name, method, model, source, rest=rest, steps=1, warn_constant=1)
        assert ("nothing is learnt" in " ".join(text.getvalue().split())) == warned


@pytest.mark.slow
def test_the_smallest_recipe_gives_it_a_critic(tmp_path: Path):
    recipe = recipes_folder.load("copy_task")
    few = Settings(steps=2, updates=1, learning_rate=0.1)
    told = recipe.config(method="ppo", groups_per_step=2, group_size=1, alphabet="ab", train=few, out=tmp_path / "run")
    assert recipe.main(told).status == "finished"
    assert "method/explained_variance" in figures(tmp_path / "run")[-2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gamma": 1.5}, "gamma is 1.5"),
        ({"lam": -0.1}, "lam is -0.1"),
        ({"lam_critic": 2.0}, "lam_critic is 2.0"),
        ({"value_clip": 0.0}, "value_clip is 0.0"),
        ({"value_coef": float("inf")}, "value_coef is inf"),
    ],
)
def test_options_out_of_range(options, said):
    with pytest.raises(UserError, match=said):
        ppo(**options)


def test_value_after_is_that_of_a_longer_answer():
    """V after the last sampled token is what the critic says before one more, for answers that were cut off only."""
    batch = ragged_batch(3)
    policy = Tabular.random(7, 3, 64, key=(2,))
    critic = TabularCritic(policy.table.detach()[:, 0].clone(), 7, 3)
    stop = torch.where(torch.arange(batch.size) % 2 == 0, Stop.TRUNCATED, Stop.FINISHED).to(torch.int8)
    for budget in (10**6, 3):
        got = with_value_after(critic, batch, stop == Stop.TRUNCATED, budget).value_after
        for b, unit in enumerate(batch.unit.tolist()):
            sampled = batch.mask[b].nonzero().squeeze(1).tolist()
            wanted = 0.0
            if unit % 2 == 0 and sampled:
                wanted = float(critic.table[policy.state(batch.tokens[b, : sampled[-1] + 1].tolist())])
            assert float(got[b]) == wanted
    model = ActorCritic(policy, critic)
    end, on = (Values(model, truncated=how)(replace(batch, stop=stop)) for how in ("end", "bootstrap"))
    assert end.value_after is None and torch.equal(on.value_after, got)
    changed = ppo(whiten=False).advantage(on) - ppo(whiten=False).advantage(end)
    assert bool((changed != 0).any()) and not bool(changed[(stop != Stop.TRUNCATED)[batch.unit]].any())


def test_gae_is_the_kernels():
    def check(case: laws.Case) -> None:
        batch = replace(case.batch, rewards=case.batch.rewards.nan_to_num(nan=0.0))
        wanted = gae(token_rewards(batch, 0.9), batch.values, batch, 0.9, 0.8)
        laws.near(ppo(gamma=0.9, lam=0.8, whiten=False).advantage(batch), wanted, "advantage")

    laws.over_cases(check, examples=5)
