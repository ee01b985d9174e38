"""The laws of the shelf, as functions (method, case) that fail on a method that breaks one.

The policy is a stand-in: the parts of `Forward` are themselves the parameters. A gradient with respect to them that
does not change cannot change for any real policy, which only multiplies it by its own Jacobian.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from postrl.batch import ROW_FIELDS, UNIT_FIELDS, Batch
from postrl.method import Forward, Method, objective

MATRICES = ("logp_sampler", "logp_old", "logp_ref", "values", "returns", "observed")
VOCABULARY = 5


@dataclass(frozen=True)
class Case:
    """A rollout batch, the policy's present output on it, and random numbers for the law to draw from."""

    batch: Batch
    now: dict[str, Tensor]
    rng: np.random.Generator


@dataclass(frozen=True)
class Update:
    advantage: Tensor
    weights: tuple[Tensor, ...]
    loss: Tensor
    gradient: dict[str, Tensor]


# ---------------------------------------------------------------- cases


def make_case(seed: int, units: int = 6, groups: int = 2, length: int = 6, noise: float = 0.3, **options) -> Case:
    """Ragged interleaved groups, rows of any prompt and answer length with gaps, units of zero to two rows."""
    rng = np.random.default_rng(seed)
    dtype = options.get("dtype", torch.float64)
    rows = rng.permutation([u for u in range(units) for _ in range(rng.choice(3, p=[0.1, 0.5, 0.4]))])
    mask, valid = _masks(rng, len(rows), length)
    old = -rng.exponential(1.0, (len(rows), length)) - 0.02
    now = np.minimum(old + noise * rng.standard_normal(old.shape), -1e-3)
    batch = Batch(
        tokens=torch.tensor(rng.integers(0, VOCABULARY, (len(rows), length))),
        valid=torch.tensor(valid),
        mask=torch.tensor(mask),
        segment=torch.tensor(_segments(mask), dtype=torch.int32),
        prefix_id=torch.arange(len(rows)),
        prefix_length=torch.zeros(len(rows), dtype=torch.int64),
        temperature=torch.ones(len(rows)),
        logp_sampler=torch.tensor(old),
        logp_old=torch.tensor(np.where(mask, old, 0.0)),
        unit=torch.tensor(rows, dtype=torch.int64),
        groups=torch.tensor(_groups(rng, units, groups)),
        rewards=torch.tensor(_rewards(rng, units, options.get("missing", 0.15))),
        reward_weights=torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64),
        kind=torch.zeros(units, dtype=torch.int8),
        version=torch.zeros(units, dtype=torch.int64),
        stop=torch.zeros(units, dtype=torch.int8),
        group_names=("task", "answer"),
        reward_names=("correct", "style", "logged"),
        **{name: torch.tensor(-rng.exponential(1.0, old.shape)) for name in ("logp_ref", "values", "returns")},
        step_rewards=torch.tensor(rng.standard_normal((units, 3))),
        step_groups=torch.tensor(rng.integers(0, 3, (units, 3))),
        value_after=torch.tensor(_values_after(seed, len(rows))),
        teacher_logp=torch.tensor(rng.standard_normal((*old.shape, VOCABULARY))).log_softmax(-1),
    ).to(dtype=dtype)
    parts = {"logp": now, "entropy": rng.random(old.shape), "values": rng.standard_normal(old.shape)}
    output = {name: torch.tensor(np.where(mask, part, 0.0), dtype=dtype) for name, part in parts.items()}
    output["logits"] = torch.tensor(rng.standard_normal((*old.shape, VOCABULARY)), dtype=dtype)
    return Case(batch, output, rng)


def case_options(dtype: torch.dtype = torch.float64) -> st.SearchStrategy[dict]:
    """Arguments of `make_case`."""
    return st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**32 - 1),
            "units": st.sampled_from([1, 4, 6, 8, 10]),
            "groups": st.sampled_from([1, 2, 3]),
            "length": st.sampled_from([1, 3, 5, 8]),
            "noise": st.sampled_from([0.0, 3e-4, 0.1, 0.4, 1.0]),
            "missing": st.sampled_from([0.0, 0.2]),
            "dtype": st.just(dtype),
        }
    )


def by_hand(groups: Sequence[int], rewards: Sequence[float], old: Sequence, new: Sequence, clusters=None) -> Case:
    """One row per unit with the given probabilities of its tokens, one reward "correct", in float64.

    `old` and `new` hold a list of probabilities per unit, as long as its answer.
    """
    units, length = len(groups), max(len(row) for row in old)
    padded = torch.ones(2, units, length, dtype=torch.float64)
    for side, rows in enumerate((old, new)):
        for b, row in enumerate(rows):
            padded[side, b, : len(row)] = torch.tensor(row, dtype=torch.float64)
    mask = torch.arange(length) < torch.tensor([len(row) for row in old])[:, None]
    case = make_case(0, units=units, length=length)
    index = torch.arange(units)
    batch = replace(
        case.batch,
        tokens=torch.zeros(units, length, dtype=torch.int64),
        **{
            n: torch.zeros(units, length, dtype=torch.float64)
            for n in ("logp_sampler", "logp_ref", "values", "returns")
        },
        valid=mask,
        mask=mask,
        segment=torch.where(mask, 0, -1).to(torch.int32),
        prefix_id=index,
        prefix_length=torch.zeros_like(index),
        temperature=torch.ones(units, dtype=torch.float64),
        logp_old=torch.where(mask, padded[0].log(), 0),
        unit=index,
        groups=torch.stack([torch.tensor(groups), torch.tensor(groups if clusters is None else clusters)], 1),
        rewards=torch.tensor(rewards, dtype=torch.float64)[:, None],
        reward_weights=torch.ones(1, dtype=torch.float64),
        reward_names=("correct",),
        teacher_logp=None,
        value_after=None,
    )
    return Case(batch, {"logp": torch.where(mask, padded[1].log(), 0)}, case.rng)


def _masks(rng: np.random.Generator, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    start, end = rng.integers(0, length // 2 + 1, rows), rng.integers(0, length + 1, rows)
    column = np.arange(length)
    valid = column < np.maximum(start, end)[:, None]
    observed = rng.random((rows, length)) < 0.15
    return valid & (column >= start[:, None]) & ~observed, valid


def _segments(mask: np.ndarray) -> np.ndarray:
    starts = mask & ~np.concatenate([np.zeros_like(mask[:, :1]), mask[:, :-1]], 1)
    return np.where(mask, np.cumsum(starts, 1) - 1, -1)


def _groups(rng: np.random.Generator, units: int, groups: int) -> np.ndarray:
    labels = rng.choice(np.arange(-50, 10**6), groups, replace=False) if rng.random() < 0.7 else np.arange(groups)
    return np.stack([rng.choice(labels, units), rng.integers(0, 3, units)], 1)


def _values_after(seed: int, rows: int) -> np.ndarray:
    """About half of the rows were cut off."""
    rng = np.random.default_rng([seed, 1])
    return np.where(rng.random(rows) < 0.5, rng.standard_normal(rows), 0.0)


def _rewards(rng: np.random.Generator, units: int, missing: float) -> np.ndarray:
    correct = rng.integers(0, 2, units) * rng.choice([1.0, 0.7])
    style = rng.integers(0, 20, units) / 10 if rng.random() < 0.7 else np.zeros(units)
    rewards = np.stack([correct, style, rng.standard_normal(units)], 1)
    return np.where(rng.random(rewards.shape) < missing, np.nan, rewards)


def over_cases(check: Callable[[Case], None], examples: int = 20, dtype: torch.dtype = torch.float64) -> None:
    """`check` on many cases. No shrinking: a case is made from a seed, and a smaller seed is not a simpler case."""

    @settings(max_examples=examples, phases=[Phase.generate], report_multiple_bugs=False, print_blob=False)
    @given(options=case_options(dtype))
    def every(options: dict) -> None:
        check(make_case(**options))

    every()


# ---------------------------------------------------------------- an update and how it may be cut


def update(method: Method, batch: Batch, now: dict[str, Tensor], pieces: Sequence[Tensor] | None = None) -> Update:
    """One update's loss and gradient, accumulated over `pieces` (indices of rows; None: all rows at once)."""
    batch = with_observed(method, batch, now)
    advantage, weights = method.advantage(batch), tuple(term.weight(batch) for term in method.terms)
    return accumulate(method, batch, now, advantage, weights, pieces)


def with_observed(method: Method, batch: Batch, now: dict[str, Tensor]) -> Batch:
    return batch if method.observe is None else replace(batch, observed=method.observe(batch, now["logp"]))


def accumulate(method, batch, now, advantage, weights, pieces=None, scale: float = 1.0) -> Update:
    leaves = {name: part.clone().requires_grad_() for name, part in now.items()}
    total = torch.zeros((), dtype=batch.logp_old.dtype)
    for piece in [torch.arange(len(batch.unit))] if pieces is None else pieces:
        forward = Forward(**{name: leaf[piece] for name, leaf in leaves.items()})
        cut = tuple(weight[piece] for weight in weights)
        loss = scale * objective(method, batch.rows(piece), forward, cut, advantage[piece])
        if loss.requires_grad:
            loss.backward()
        total += loss.detach()
    gradient = {n: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for n, leaf in leaves.items()}
    return Update(advantage, weights, total, gradient)


def atoms(method: Method, batch: Batch) -> Tensor:
    """[B] number of the atom that each row belongs to: what a micro-batch may not cut."""
    if method.atom == "row":
        return torch.arange(len(batch.unit))
    names = batch.unit if method.atom == "unit" else batch.group()[batch.unit]
    return torch.unique(names, return_inverse=True)[1]


def partition(method: Method, batch: Batch, rng: np.random.Generator, parts: int) -> list[Tensor]:
    """Rows in up to `parts` shuffled pieces of whole atoms, none of them empty."""
    atom = atoms(method, batch)
    place = torch.tensor(rng.integers(0, parts, len(atom) + 1))[atom]
    pieces = [torch.tensor(rng.permutation(np.flatnonzero(place == p)), dtype=torch.int64) for p in range(parts)]
    return [piece for piece in pieces if len(piece)]


def permuted(batch: Batch, rows: Tensor, units: Tensor) -> Batch:
    """The same batch with its rows and units in another order."""
    moved = batch.rows(rows)
    new = {n: v[units] for n in UNIT_FIELDS if (v := _field(batch, n)) is not None}
    return replace(moved, **new, unit=torch.argsort(units)[moved.unit])


def _field(batch: Batch, name: str) -> Tensor | None:
    return {f.name: getattr(batch, f.name) for f in fields(batch)}[name]


def near(got: Tensor, wanted: Tensor, what: str) -> None:
    """float64: 1e-10 (relative beyond 1). float32: 1e-5 of the largest entry."""
    assert got.shape == wanted.shape, f"{what}: shape {tuple(got.shape)} instead of {tuple(wanted.shape)}"
    if not wanted.numel():
        return
    assert torch.isfinite(got).all() and torch.isfinite(wanted).all(), f"{what} is not finite"
    top = float(wanted.abs().max())
    bound = 1e-10 * max(1.0, top) if wanted.dtype == torch.float64 else 1e-5 * top
    worst = float((got - wanted).abs().max())
    assert worst <= bound, f"{what} differs by {worst:.3g}, allowed {bound:.3g}"


def equal(got: Tensor, wanted: Sequence) -> None:
    """A float64 tensor against numbers worked out by hand."""
    near(got, torch.tensor(wanted, dtype=torch.float64), "result")


def same(got: Update, wanted: Update, order: Tensor | slice = slice(None)) -> None:
    """Equal gradients; equal losses in float64 only, since in float32 a sum that cancels has no digits of its own."""
    if wanted.loss.dtype == torch.float64:
        near(got.loss, wanted.loss, "loss")
    for name, gradient in wanted.gradient.items():
        near(got.gradient[name], gradient[order], f"gradient of {name}")


# ---------------------------------------------------------------- the laws


def split(method: Method, case: Case) -> None:
    """Any cut into micro-batches gives the same gradient."""
    whole = update(method, case.batch, case.now)
    for parts in (2, 3, len(case.batch.unit) + 1):
        same(update(method, case.batch, case.now, partition(method, case.batch, case.rng, parts)), whole)


def world_size(method: Method, case: Case) -> None:
    """1, 2 or 4 processes that gather the batch in rank order, keep their rows and average gradients: the same update.

    A rank with fewer micro-batches than another repeats one at W = 0; groups may span ranks.
    """
    whole = update(method, case.batch, case.now)
    for world in (1, 2, 4):
        unit_rank = torch.tensor(case.rng.integers(0, world, case.batch.size))
        if method.atom == "group":
            unit_rank = unit_rank[torch.unique(case.batch.group(), return_inverse=True)[1]]
        units = torch.argsort(unit_rank, stable=True)
        rows = torch.argsort(unit_rank[case.batch.unit], stable=True)
        gathered = permuted(case.batch, rows, units)
        now = {name: part[rows] for name, part in case.now.items()}
        full = update(method, gathered, now)
        ranks, observed = [], with_observed(method, gathered, now)
        for rank in range(world):
            mine = torch.nonzero(unit_rank[units[gathered.unit]] == rank).squeeze(1)
            done = accumulate(method, observed, now, full.advantage, full.weights, [mine] if len(mine) else [], world)
            if len(rows) and not len(mine):
                idle = tuple(torch.zeros_like(w) for w in full.weights)
                done = accumulate(method, observed, now, full.advantage, idle, [rows.new_zeros(1)], world)
            ranks.append(done)
        mean = {n: torch.stack([r.gradient[n] for r in ranks]).mean(0) for n in now}
        same(replace(full, loss=torch.stack([r.loss for r in ranks]).mean(), gradient=mean), whole, rows)


def poison(method: Method, case: Case) -> None:
    """NaN or infinity off the mask reaches neither a value nor a gradient."""
    clean = update(method, case.batch, case.now)
    off = ~case.batch.mask

    def spoil(x: Tensor) -> Tensor:
        bad = torch.tensor(case.rng.choice([np.nan, np.inf, -np.inf], x.shape), dtype=x.dtype)
        return torch.where(off if x.dim() == 2 else off[..., None], bad, x)

    dirty = {n: spoil(v) for n in (*MATRICES, "teacher_logp") if (v := _field(case.batch, n)) is not None}
    batch = replace(case.batch, **dirty, tokens=torch.where(off, case.batch.tokens + 1, case.batch.tokens))
    now = {name: spoil(part) for name, part in case.now.items()}
    got = update(method, batch, now)
    near(torch.where(off, 0, got.advantage), torch.where(off, 0, clean.advantage), "advantage")
    same(got, clean)
    batch = with_observed(method, batch, now)
    same(accumulate(method, batch, now, spoil(got.advantage), got.weights), clean)


def padding(method: Method, case: Case) -> None:
    """Further padding, columns or a row without sampled tokens, changes nothing."""
    whole = update(method, case.batch, case.now)
    batch, extra = case.batch, int(case.rng.integers(1, 4))
    wide = {}
    for name in (*MATRICES, "tokens", "valid", "mask", "segment", "teacher_logp"):
        if (value := _field(batch, name)) is not None:
            fill = value.new_full((len(value), extra, *value.shape[2:]), -1 if name == "segment" else 0)
            wide[name] = torch.cat([value, fill], 1)
    now = {n: torch.cat([p, torch.zeros_like(p[:, :1]).repeat_interleave(extra, 1)], 1) for n, p in case.now.items()}
    got = update(method, replace(batch, **wide), now)
    width = batch.mask.shape[1]
    same(replace(got, gradient={n: g[:, :width] for n, g in got.gradient.items()}), whole)
    assert all((g[:, width:] == 0).all() for g in got.gradient.values()), "gradient on padding"

    rows = {n: v[:1] for n in ROW_FIELDS if (v := _field(batch, n)) is not None}
    if len(batch.unit):
        rows["mask"] = torch.zeros_like(batch.mask[:1])
        longer = replace(batch, **{n: torch.cat([_field(batch, n), value]) for n, value in rows.items()})
        now = {n: torch.cat([p, torch.zeros_like(p[:1])]) for n, p in case.now.items()}
        got = update(method, longer, now)
        same(replace(got, gradient={n: g[:-1] for n, g in got.gradient.items()}), whole)


def row_permutation(method: Method, case: Case) -> None:
    """Rows and units in another order: the same gradient, in that order."""
    rows = torch.tensor(case.rng.permutation(len(case.batch.unit)), dtype=torch.int64)
    units = torch.tensor(case.rng.permutation(case.batch.size), dtype=torch.int64)
    shuffled = permuted(case.batch, rows, units)
    got = update(method, shuffled, {name: part[rows] for name, part in case.now.items()})
    same(got, update(method, case.batch, case.now), rows)
    if method.keep is not None:
        assert torch.equal(method.keep(shuffled), method.keep(case.batch)[units]), "keep depends on the order"


def group_relabelling(method: Method, case: Case) -> None:
    """Group ids are names: any others that make the same partition give the same gradient."""
    columns = []
    for column in case.batch.groups.T:
        names, index = torch.unique(column, return_inverse=True)
        other = case.rng.choice(10**7, len(names), replace=False) - 10**6
        columns.append(torch.tensor(other, dtype=torch.int64)[index])
    renamed = replace(case.batch, groups=torch.stack(columns, 1))
    same(update(method, renamed, case.now), update(method, case.batch, case.now))
    if method.keep is not None:
        assert torch.equal(method.keep(renamed), method.keep(case.batch)), "keep depends on the names of groups"


def finite(method: Method, case: Case) -> None:
    """No degenerate batch gives NaN or infinity, and nobody without a reward gets credit."""
    batch, now = case.batch, case.now
    gone = torch.tensor(case.rng.random(batch.size) < 0.5)
    nothing = torch.zeros_like(batch.mask)
    narrow = {n: v[:, :0] for n in (*MATRICES, "tokens", "valid", "mask", "segment", "teacher_logp")
              if (v := _field(batch, n)) is not None}  # fmt: skip
    degenerate = {
        "groups of one": (replace(batch, groups=torch.arange(batch.size)[:, None].repeat(1, 2)), now),
        "all equal": (replace(batch, rewards=torch.full_like(batch.rewards, 0.7)), now),
        "all missing": (replace(batch, rewards=torch.full_like(batch.rewards, torch.nan)), now),
        "some of zero length": (replace(batch, mask=batch.mask & ~gone[batch.unit][:, None]), now),
        "all masked": (replace(batch, mask=nothing), now),
        "no columns": (replace(batch, **narrow), {n: p[:, :0] for n, p in now.items()}),
        "no rows": (batch.rows(batch.unit[:0]), {n: p[:0] for n, p in now.items()}),
    }
    for name, (bad, output) in degenerate.items():
        got = update(method, bad, output)
        for what, x in {"advantage": got.advantage, "loss": got.loss, **got.gradient}.items():
            assert torch.isfinite(x).all(), f"{name}: {what} is not finite"
        assert all(torch.isfinite(w).all() for w in got.weights), f"{name}: a weight is not finite"
        if method.figures is not None:
            said = method.figures(replace(bad, observed=None), output["logp"])
            assert all(isinstance(x, float) for x in said.values()), f"{name}: figures are no plain numbers"
        if name == "all missing":
            assert (got.advantage == 0).all(), "credit without a reward"
        if method.keep is not None:
            assert method.keep(bad).shape == (batch.size,), f"{name}: keep"


def total_weight(method: Method, case: Case) -> None:
    """The weights of a mini-batch sum to what the term states, or 0 if nothing was sampled; none lies off the mask."""
    for term in method.terms:
        weight = term.weight(case.batch)
        stated = term.total(case.batch) if callable(term.total) else term.total
        stated = stated if bool(case.batch.mask.any()) else 0.0
        near(weight.sum(), weight.new_tensor(stated), f"total weight of {term.name!r}")
        assert (weight[~case.batch.mask] == 0).all(), f"{term.name!r} has weight off the mask"


def reward_shift(method: Method, case: Case) -> None:
    """A constant added to the rewards of a group changes nothing."""
    names, index = torch.unique(case.batch.group(), return_inverse=True)
    shift = torch.tensor(case.rng.uniform(-5, 5, len(names)), dtype=case.batch.rewards.dtype)[index]
    column = int(torch.nonzero(case.batch.reward_weights)[0])
    rewards = case.batch.rewards.clone()
    rewards[:, column] += shift
    moved = replace(case.batch, rewards=rewards)
    near(method.advantage(moved), method.advantage(case.batch), "advantage")
    same(update(method, moved, case.now), update(method, case.batch, case.now))


def on_policy_gradient(method: Method, case: Case) -> None:
    """At the weights that sampled, the gradient of the policy term (the first) is −coef · W · A."""
    single = replace(method, terms=method.terms[:1])
    got = update(single, case.batch, {**case.now, "logp": torch.where(case.batch.mask, case.batch.logp_old, 0)})
    wanted = torch.where(case.batch.mask, -method.terms[0].coef * got.weights[0] * got.advantage, 0)
    near(got.gradient["logp"], wanted, "gradient of logp")


LAWS: dict[str, Callable[[Method, Case], None]] = {
    "split": split,
    "world size": world_size,
    "poison": poison,
    "padding": padding,
    "row permutation": row_permutation,
    "group relabelling": group_relabelling,
    "finite": finite,
    "total weight": total_weight,
    "reward shift": reward_shift,
    "on-policy gradient": on_policy_gradient,
}


def hold(law: str, method: Method, examples: int = 20, dtype: torch.dtype = torch.float64) -> None:
    """The law over many cases. A law the method declares itself exempt from must fail: no exemption without need."""
    if law not in method.exempt:
        over_cases(lambda case: LAWS[law](method, case), examples, dtype)
        return
    try:
        over_cases(lambda case: LAWS[law](method, case), examples, dtype)
    except AssertionError:
        return
    raise UnneededExemption(f"{method.name} keeps the law {law!r} that it declares itself exempt from")


class UnneededExemption(Exception):
    """An exemption that nothing needs hides the next fault."""


FLOAT32 = ("split", "world size", "padding", "on-policy gradient")  # laws that a float32 run must keep as well
