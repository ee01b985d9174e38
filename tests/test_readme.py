"""The README's Python is run, and its ReCo is the shelf's."""

import re
from pathlib import Path

import torch

from builders import ragged_batch
from postrl import papers
from postrl.method import Forward, objective

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)


def run(block: str) -> dict:
    names: dict = {}
    exec(compile(block, "README.md", "exec"), names)
    return names


def test_the_task_of_the_readme_has_both_splits():
    task = run(next(b for b in BLOCKS if "Problems(" in b))["task"]
    assert task.size("train") + task.size("test") == 100
    assert task.rubric.names == ("correct", "short")
    assert task.environment("test", 0).prompt()[0]["content"].endswith("=")


def test_the_method_of_the_readme_is_the_one_on_the_shelf():
    ours, shelf = run(next(b for b in BLOCKS if "def reco" in b))["reco"](), papers.method("reco")
    batch = ragged_batch(seed=3)
    batch = batch.select(batch.lengths() > 0)  # the short form leaves empty answers aside
    gradients = []
    for method in (ours, shelf):
        assert batch.logp_ref is not None
        logp = batch.logp_ref.clone().requires_grad_()  # some other log-probabilities
        weights = tuple(term.weight(batch) for term in method.terms)
        objective(method, batch, Forward(logp), weights, method.advantage(batch)).backward()
        gradients.append(logp.grad)
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[0], gradients[1])
