from dataclasses import replace

import pytest
import torch

from builders import ragged_batch
from postrl.batch import Batch
from postrl.enrich import forward_all, old_logp, reference_logp
from postrl.method import Forward
from postrl.policies.tabular import Tabular

BUDGETS = [1, 7, 30, 100, 10**6]
WHOLE = frozenset({"entropy", "logits"})


def policy(key: int, dtype: torch.dtype = torch.float32) -> Tabular:
    return Tabular.random(7, 2, 64, [key], dtype)


class Counting(Tabular):
    """Remembers how many rows each forward pass had, and whether gradients were on."""

    calls: list[tuple[int, bool]]

    def forward(self, batch: Batch, want: frozenset[str] = frozenset()) -> Forward:
        self.calls.append((len(batch.unit), torch.is_grad_enabled()))
        return super().forward(batch, want)


@pytest.mark.parametrize("budget", BUDGETS)
def test_results_do_not_depend_on_the_budget(budget: int):
    batch = ragged_batch(0, dtype=torch.float32)
    whole, parts = policy(0)(batch, WHOLE), forward_all(policy(0), batch, budget, WHOLE)
    for name in ("logp", "entropy", "logits"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=0, atol=1e-5)
    assert parts.hidden is None and parts.values is None
    assert not parts.logp.requires_grad


def test_the_budget_cuts_and_there_are_no_gradients():
    batch = ragged_batch(0)
    counted = Counting.random(7, 2, 64, [0])
    counted.calls = []
    forward_all(counted, batch, 30)
    assert len(counted.calls) > 3 and sum(rows for rows, _ in counted.calls) == len(batch.unit)
    assert not any(gradients for _, gradients in counted.calls)


def test_only_what_is_wanted_is_kept():
    assert forward_all(policy(0), ragged_batch(0, dtype=torch.float32), 50).entropy is None


def test_old_and_reference_logps_fill_their_field_alone():
    batch = replace(ragged_batch(0), logp_ref=None)
    old, reference = policy(0, torch.float64), policy(1, torch.float64)
    batch_old = old_logp(old, batch, 50)
    both = reference_logp(reference, batch_old, 50)
    assert both.logp_ref is not None and batch_old.logp_ref is None
    torch.testing.assert_close(both.logp_old, old(batch).logp.detach())
    torch.testing.assert_close(both.logp_ref, reference(batch).logp.detach())
    assert torch.equal(both.logp_sampler, batch.logp_sampler) and not torch.equal(both.logp_old, batch.logp_old)


def test_what_the_policy_leaves_out_is_named():
    class Bare(Tabular):
        def forward(self, batch: Batch, want: frozenset[str] = frozenset()) -> Forward:
            return super().forward(batch)

    with pytest.raises(ValueError, match="gave no 'entropy'"):
        forward_all(Bare.uniform(7, 1, 64), ragged_batch(0, dtype=torch.float32), 50, frozenset({"entropy"}))


def test_eval_mode_inside_and_the_mode_before_afterwards_also_after_an_error():
    modes = []

    class Watched(Tabular):
        def forward(self, batch: Batch, want: frozenset[str] = frozenset()) -> Forward:
            modes.append(self.training)
            return super().forward(batch)

    watched = Watched.uniform(7, 1, 64)
    batch = ragged_batch(0, dtype=torch.float32)
    for training in (True, False):
        watched.train(training)
        forward_all(watched, batch, 10**6)
        assert watched.training == training
    watched.train()
    with pytest.raises(ValueError, match="gave no 'entropy'"):
        forward_all(watched, batch, 10**6, frozenset({"entropy"}))
    assert watched.training and modes == [False] * 3


def test_what_is_no_module_has_no_mode():
    given = policy(0)
    assert (
        forward_all(lambda batch, want: given(batch, want), ragged_batch(0, dtype=torch.float32), 50).logp is not None
    )


def test_no_rows():
    batch = ragged_batch(0)
    with pytest.raises(ValueError, match="without rows"):
        forward_all(policy(0), batch.rows(torch.zeros(0, dtype=torch.int64)), 50)
