"""IPE: members that differ, a pool that covers more than one of them, and a critic fitted to it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from copy_run import END, SAMPLING, Copying, letters_policy
from postrl.batch import Batch, Kind
from postrl.errors import UserError
from postrl.papers import ipe as module
from postrl.papers.ipe import diverse, ipe, pooled
from postrl.policies.critic import DecoderCritic, TabularCritic
from postrl.policies.tabular import Tabular
from postrl.rollout import Rollout, Turn, collate
from postrl.values import explained_variance, with_values
from tiny import tiny_decoder


def demonstrations() -> Batch:
    """Two styles of answer to each of four prompts."""
    rollouts = []
    for number in range(16):
        prompt = [number // 2 % 2, number % 2]
        answer = [[0, 0, END], [1, END]][number // 4 % 2]
        turns = [Turn(prompt, False), Turn(answer, True, logp=[0.0] * len(answer))]
        rollouts.append(Rollout(f"item{number}", number, 0, [turns], rewards={"a": 1.0}, kind=Kind.DEMONSTRATION))
    return collate(rollouts)


def roll(groups: int):
    def rollouts(member: nn.Module, number: int) -> list[Rollout]:
        assert isinstance(member, Tabular)
        return Copying(member, groups=groups, seed=number)(0)

    return rollouts


def pointed(letter: int) -> Tabular:
    """A policy that all but always writes one letter."""
    policy = letters_policy()
    with torch.no_grad():
        policy.table[:, letter] = 6.0
    return policy


def test_it_says_what_it_is_not():
    said = module.PAPER.status + str(module.ipe.__doc__)
    assert "our hypothesis" in said and "off-policy" in said and module.NO_METHOD


def test_members_follow_from_seeds_and_differ():
    start, given = letters_policy(), demonstrations()
    options = {"steps": 5, "learning_rate": 0.1, "units": 4}
    members, again = (diverse(start, given, 3, **options) for _ in range(2))
    assert not start.table.any(), "the policy itself stays"
    tables = [member.table.detach() for member in members]
    assert all(torch.equal(a, b.table) for a, b in zip(tables, again, strict=True))
    assert all(not torch.allclose(tables[i], tables[j], atol=1e-3) for i in range(3) for j in range(i))
    before, after = (float(policy(given).logp.sum().detach()) for policy in (start, members[0]))
    assert after > before, "a member is nearer to the demonstrations"
    other = diverse(start, given, 3, **options, seed=1)[0]
    assert not torch.allclose(other.table, members[0].table, atol=1e-3)


def test_token_budget_does_not_change_a_member():
    options = {"steps": 3, "learning_rate": 0.1, "units": 8}
    start = letters_policy(dtype=torch.float64)
    given = demonstrations().to(dtype=torch.float64)
    whole, cut = (diverse(start, given, 1, **options, token_budget=b)[0] for b in (10**6, 1))
    torch.testing.assert_close(whole.table, cut.table, rtol=0, atol=1e-9)


def test_a_pool_of_different_policies_knows_states_that_one_policy_never_meets():
    """Two policies that each write one letter, as many rollouts from one of them, and the critic of either asked about
    the other's answers. It is why the paper pools; that it helps training is another matter."""
    first, second = pointed(0), pointed(1)
    options = {"steps": 60, "learning_rate": 0.1, "units": 96}
    alone = ipe(TabularCritic.zeros(first), [first, first], roll(12), **options)
    both = ipe(TabularCritic.zeros(first), [first, second], roll(12), **options)
    fresh = collate(Copying(second, groups=24, seed=9)(0))
    single, pool = (explained_variance(with_values(critic, fresh, 4096)) for critic in (alone, both))
    print(f"explained variance of the second policy's answers: fitted to the first {single:.3f}, to both {pool:.3f}")
    assert pool > 0.5 and single < 0.3


def test_pool_holds_everyones_rollouts():
    members = [pointed(0), pointed(1), letters_policy()]
    batch = pooled(members, roll(2))
    assert batch.size == 3 * 2 * 4
    counts = [int((batch.tokens[i * 8 : i * 8 + 8] == 0)[batch.mask[i * 8 : i * 8 + 8]].sum()) for i in range(3)]
    assert counts[0] > counts[2] > counts[1] and SAMPLING.max_tokens == 3
    with pytest.raises(UserError, match="members has 1"):
        pooled(members[:1], roll(2))
    with pytest.raises(UserError, match="option count=0"):
        diverse(members[0], demonstrations(), 0, steps=1)


def test_a_decoder_may_be_the_start():
    start, given = tiny_decoder(vocab=4), demonstrations()
    members = diverse(start, given, 2, steps=2, learning_rate=1e-2)
    critic = ipe(
        DecoderCritic.copied(start),
        members,
        lambda member, number: [
            replace(rollout, group=number) for rollout in Copying(letters_policy(), groups=2, seed=number)(0)
        ],
        steps=2,
    )
    assert isinstance(critic, DecoderCritic) and bool(critic.head.weight.any())
    names = [dict(m.named_parameters())["model.layers.0.mlp.up_proj.weight"] for m in (start, *members)]
    assert not torch.equal(names[0], names[1]) and not torch.equal(names[1], names[2])
