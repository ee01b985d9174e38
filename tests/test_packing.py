import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from builders import ragged_batch, rollout
from postrl.batch import Batch
from postrl.packing import micro_batches, mini_batches
from postrl.rollout import collate

Atom = Literal["row", "unit", "group"]
ATOMS: list[Atom] = ["row", "unit", "group"]
seeds, sizes = st.integers(0, 19), st.integers(1, 8)  # of `some`, a ragged batch
some = cache(ragged_batch)


def cost(batch: Batch, rows: list[int]) -> int:
    """Tokens that a forward pass of these rows computes when each distinct prefix runs once; a Python loop."""
    prefixes = {int(batch.prefix_id[b]): int(batch.prefix_length[b]) for b in rows}
    return sum(prefixes.values()) + sum(int(batch.valid[b].sum()) - int(batch.prefix_length[b]) for b in rows)


def atoms(batch: Batch, atom: Atom) -> list[int]:
    """The atom of each row."""
    unit = batch.unit.tolist()
    return {"row": list(range(len(unit))), "unit": unit, "group": [int(batch.groups[n, 0]) for n in unit]}[atom]


class TestMiniBatches:
    @given(seeds, sizes, st.integers(1, 12), st.integers(0, 99))
    def test_whole_groups_each_once_none_empty(self, seed: int, groups: int, count: int, key: int):
        batch = some(seed, groups)
        parts = mini_batches(batch, count, [key])
        names = set(batch.group().tolist())
        assert len(parts) == min(count, len(names))
        assert all(part.any() for part in parts)
        assert (torch.stack(parts).sum(0) == 1).all()
        homes = [set(batch.group()[part].tolist()) for part in parts]
        assert sum(len(home) for home in homes) == len(names)

    @given(seeds, sizes, st.integers(1, 6), st.integers(0, 99))
    def test_near_equal_in_units(self, seed: int, groups: int, count: int, key: int):
        """No mini-batch exceeds another by more than the largest group: moving one group could not do better."""
        batch = some(seed, groups)
        sizes = [int(part.sum()) for part in mini_batches(batch, count, [key])]
        assert max(sizes) - min(sizes) <= max(Counter(batch.group().tolist()).values())

    def regular(self, groups: int = 12, size: int = 4) -> Batch:
        return collate([rollout(group, sample) for sample in range(size) for group in range(groups)])

    def test_equal_groups_make_equal_mini_batches(self):
        assert [int(part.sum()) for part in mini_batches(self.regular(), 4, [0])] == [12] * 4
        assert sorted(int(part.sum()) for part in mini_batches(self.regular(), 5, [0])) == [8, 8, 8, 12, 12]

    @pytest.mark.parametrize("key", range(20))
    def test_large_groups_first(self, key: int):
        """A group of 4 and four of 1 are 4 and 4, wherever the shuffle puts the large one."""
        batch = collate([rollout(group, n) for group, size in enumerate([1, 1, 4, 1, 1]) for n in range(size)])
        assert [int(part.sum()) for part in mini_batches(batch, 2, [key])] == [4, 4]

    def test_seeded(self):
        batch = self.regular()

        def homes(*seed: int) -> list[list[bool]]:
            return [part.tolist() for part in mini_batches(batch, 3, seed)]

        assert homes(1, 2) == homes(1, 2)
        assert len({str(homes(1, epoch)) for epoch in range(20)}) == 20

    def test_the_shuffle_is_fair(self):
        """Every group meets every mini-batch, and every other group, about equally often; ragged groups too."""
        sizes = [1, 1, 2, 3, 3, 5]
        batch = collate([rollout(group, sample) for group, size in enumerate(sizes) for sample in range(size)])
        first = [batch.group().tolist().index(group) for group in range(len(sizes))]
        times, together = torch.zeros(len(sizes)), 0
        for seed in range(400):
            part = mini_batches(batch, 2, [seed])[0]
            times += part[first]
            together += int(part[first[3]] == part[first[4]])
        assert (times > 150).all() and (times < 250).all()
        equal = self.regular(4, 1)
        pairs = sum(int(mini_batches(equal, 2, [seed])[0][[0, 1]].sum() != 1) for seed in range(600))
        assert 150 < pairs < 250  # two of four groups fall together with probability 1/3

    def test_the_first_grouping_decides(self):
        batch = self.regular(2, 4)
        other = torch.arange(8)[:, None]
        batch = replace(batch, groups=torch.cat([batch.groups, other], 1), group_names=("task", "siblings"))
        assert len(mini_batches(batch, 8, [0])) == 2

    def test_nothing_and_nonsense(self):
        batch = self.regular(2, 1)
        assert mini_batches(batch.select(torch.zeros(2, dtype=torch.bool)), 3, [0]) == []
        with pytest.raises(ValueError, match="at least 1, not 0"):
            mini_batches(batch, 0, [0])


class TestMicroBatches:
    @given(seeds, sizes, st.integers(1, 120), st.sampled_from(ATOMS))
    def test_each_row_once_no_atom_cut_within_the_budget(self, seed: int, groups: int, budget: int, atom: Atom):
        batch = some(seed, groups)
        parts = [part.tolist() for part in micro_batches(batch, budget, atom)]
        assert sorted(row for part in parts for row in part) == list(range(len(batch.unit)))
        names = atoms(batch, atom)
        inside = [{names[row] for row in part} for part in parts]
        assert sum(len(part) for part in inside) == len(set(names))
        for part, held in zip(parts, inside, strict=True):
            assert part and (cost(batch, part) <= budget or len(held) == 1)

    @given(seeds, sizes, st.integers(1, 120), st.sampled_from(ATOMS))
    def test_a_prefix_is_split_only_when_it_must(self, seed: int, groups: int, budget: int, atom: Atom):
        """If everything that begins with a prefix fits into one micro-batch, it is in one (each atom here has one)."""
        batch = some(seed, groups)
        parts = [part.tolist() for part in micro_batches(batch, budget, atom)]
        of_row = batch.group()[batch.unit]
        alone = all(len(batch.prefix_id[of_row == name].unique()) == 1 for name in of_row.unique())
        for prefix in set(batch.prefix_id.tolist()):
            rows = (batch.prefix_id == prefix).nonzero().squeeze(1).tolist()
            if alone and cost(batch, rows) <= budget:
                assert sum(not set(rows).isdisjoint(part) for part in parts) == 1

    @given(seeds, sizes, st.integers(1, 120), st.sampled_from(ATOMS))
    def test_neighbours_that_fit_together_are_together(self, seed: int, groups: int, budget: int, atom: Atom):
        """Unless the second is the beginning of a split family, which starts afresh to be cut as rarely as possible."""
        batch = some(seed, groups)
        parts = [part.tolist() for part in micro_batches(batch, budget, atom)]
        for one, two, three in zip(parts, parts[1:], [*parts[2:], []], strict=False):
            split = int(batch.prefix_id[two[0]]) in batch.prefix_id[three].tolist()
            assert cost(batch, one + two) > budget or (split and atom != "group")

    @given(seeds, sizes, st.integers(1, 120), st.sampled_from(ATOMS))
    def test_the_same_every_time(self, seed: int, groups: int, budget: int, atom: Atom):
        batch = some(seed, groups)
        first, again = micro_batches(batch, budget, atom), micro_batches(batch, budget, atom)
        assert [part.tolist() for part in first] == [part.tolist() for part in again]

    def test_a_group_shares_its_prompt(self):
        """Prompt 10 tokens, 4 answers of 5: 30 tokens together, 60 apart."""
        rows = [rollout(0, sample, prompt=[1] * 10, completion=[2] * 5) for sample in range(4)]
        batch = collate(rows)
        assert [len(part) for part in micro_batches(batch, 30)] == [4]
        assert [len(part) for part in micro_batches(batch, 29)] == [3, 1]
        assert [len(part) for part in micro_batches(batch, 15)] == [1, 1, 1, 1]
        assert [len(part) for part in micro_batches(batch, 3)] == [1, 1, 1, 1]  # each above the budget: alone
        assert [len(part) for part in micro_batches(batch, 3, "group")] == [4]

    def test_like_lengths_together(self):
        """Rows shuffled over groups: padding stays below a tenth, in batch order it would be most of the work."""
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(1, 200, (300,), generator=generator).tolist()
        batch = collate([rollout(group, 0, [group], [2] * length) for group, length in enumerate(lengths)])

        def padded(parts: list[torch.Tensor]) -> int:
            return sum(len(part) * int(batch.valid[part].sum(1).max()) for part in parts)

        parts = micro_batches(batch, 1000)
        useful = int(batch.valid.sum())
        assert padded(parts) < 1.1 * useful
        assert padded(list(torch.arange(300).split(300 // len(parts)))) > 1.5 * useful
        assert len(parts) <= 1.25 * useful / 1000

    def test_a_split_family_is_cut_by_length(self):
        """Answers to one prompt, two to a micro-batch: the two long ones together, then the two short ones."""
        batch = collate([rollout(0, n, [1], [2] * length) for n, length in enumerate([9, 2, 8, 1])])
        assert [part.tolist() for part in micro_batches(batch, 18)] == [[0, 2], [1, 3]]

    def test_a_unit_with_two_contexts(self):
        batch = ragged_batch(0)
        assert len(batch.unit) > batch.size
        for part in micro_batches(batch, 1, "unit"):
            assert len(set(batch.unit[part].tolist())) == 1

    def test_work_grows_in_step_with_the_rows(self):
        def calls(rows: int) -> int:
            batch = collate([rollout(n // 8, n % 8, [n // 8], [3]) for n in range(rows)])
            count = 0

            def tally(frame, event: str, argument) -> None:
                nonlocal count
                count += 1

            sys.setprofile(tally)
            micro_batches(batch, 64)
            sys.setprofile(None)
            return count

        assert calls(400) < 2.2 * calls(200)

    def test_nothing_and_nonsense(self):
        batch = ragged_batch(0)
        assert micro_batches(batch.rows(torch.zeros(0, dtype=torch.int64)), 10) == []
        with pytest.raises(ValueError, match="at least 1, not 0"):
            micro_batches(batch, 0)
