"""Export: the checkpoint's weights, in a folder that transformers loads."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from postrl import checkpoint, cli, evaluate
from postrl.checkpoint import Progress
from postrl.envs.base import Task
from postrl.errors import UserError
from postrl.export import export, find_checkpoint, load_run
from postrl.policies.base import Sampling
from postrl.policies.loading import load_policy
from postrl.policies.lora import LoRA
from tiny_models import save_model, tiny_model, tiny_tokenizer

TOKENS = torch.tensor([[72, 101, 108, 108, 111]])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def make_run(
    folder: Path, model: Path, train: Callable[[nn.Module], None], best: int | None = 1, rank: int = 0
) -> Path:
    """A run of three steps; `train` changes the policy once a step."""
    lora = LoRA(rank=rank, alpha=2.0 * rank) if rank else None
    policy, _ = load_policy(model, lora=lora)
    assert isinstance(policy, nn.Module)
    optimizer = torch.optim.AdamW(policy.parameters())
    folder.mkdir()
    told = {"model": str(model), "lora_rank": rank, "steps": 3}
    (folder / "run.json").write_text(json.dumps({"configuration": told}))
    for step in (1, 2, 3):
        with torch.no_grad():
            train(policy)
        checkpoint.save(folder / "checkpoints", policy, optimizer, {}, Progress(step=step, best_step=best))
    return folder


def grow(policy: nn.Module) -> None:
    """Every trained weight grows by a hundredth; those that are 0 (LoRA's B) leave it."""
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.mul_(1.01).add_(0.01)


def logits(folder: Path) -> torch.Tensor:
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return loaded(TOKENS).logits


def grown(model: Path, times: int) -> torch.Tensor:
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for _ in range(times):
            grow(loaded)
        return loaded(TOKENS).logits


@pytest.mark.parametrize(("which", "times"), [("last", 3), ("best", 1), (2, 2)])
def test_transformers_loads_the_checkpoints_weights(tmp_path: Path, model: Path, which: str | int, times: int):
    run = make_run(tmp_path / "run", model, grow)
    path = export(run, tmp_path / "out", which)
    assert path.name == f"step_{times:06d}"
    torch.testing.assert_close(logits(tmp_path / "out"), grown(model, times), rtol=0, atol=1e-6)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    messages = [{"role": "user", "content": "3 + 4"}]
    expected = tiny_tokenizer().apply_chat_template(messages, tokenize=False)
    assert tokenizer.apply_chat_template(messages, tokenize=False) == expected
    assert tokenizer.eos_token == "<|im_end|>"


def test_an_adapter_is_merged(tmp_path: Path, model: Path):
    run = make_run(tmp_path / "run", model, grow, rank=2)
    export(run, tmp_path / "out")
    policy, _ = load_policy(model, lora=LoRA(rank=2, alpha=4.0))
    assert isinstance(policy, nn.Module)
    with torch.no_grad():
        for _ in range(3):
            grow(policy)
    policy.save(tmp_path / "adapter")
    merged, _ = load_policy(tmp_path / "adapter")
    merged.merged().save(tmp_path / "expected")
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    torch.testing.assert_close(logits(tmp_path / "out"), logits(tmp_path / "expected"), rtol=0, atol=1e-6)
    assert not torch.allclose(logits(tmp_path / "out"), logits(model), atol=1e-3)


def test_a_run_that_trained_one_layer_keeps_the_others(tmp_path: Path, model: Path):
    def last_layer(policy: nn.Module) -> None:
        for name, parameter in policy.named_parameters():
            parameter.requires_grad_("layers.1." in name)
        grow(policy)

    export(make_run(tmp_path / "run", model, last_layer), tmp_path / "out")
    new = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    old = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed == {name for name in old if "layers.1." in name}


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, model: Path):
    run = make_run(tmp_path / "run", model, grow)
    wider = {"model_type": "llama", "vocab_size": 300, "hidden_size": 48, "num_hidden_layers": 2}
    wider |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    save_model(tmp_path / "other", tiny_model(**wider))
    told = {"configuration": {"model": str(tmp_path / "other")}}
    (run / "run.json").write_text(json.dumps(told))
    with pytest.raises(UserError, match=r"step_000003/policy\.safetensors belongs to another model"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_named(tmp_path: Path, model: Path):
    run = make_run(tmp_path / "run", model, grow)
    path = run / "checkpoints" / "step_000003" / "policy.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"step_000003/policy\.safetensors is damaged"):
        export(run, tmp_path / "out")
    path.unlink()
    with pytest.raises(UserError, match=r"step_000003/policy\.safetensors is damaged or missing"):
        export(run, tmp_path / "out")


def test_checkpoints_that_are_not_there(tmp_path: Path, model: Path):
    run = make_run(tmp_path / "run", model, grow, best=None)
    with pytest.raises(UserError, match=r"checkpoint 7 .* none of step 7; there are: 2, 3"):
        find_checkpoint(run, 7)
    with pytest.raises(UserError, match="never evaluated"):
        find_checkpoint(run, "best")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty holds no run"):
        find_checkpoint(tmp_path / "empty", "last")
    (tmp_path / "empty" / "run.json").write_text("{}")
    with pytest.raises(UserError, match="no checkpoint yet"):
        find_checkpoint(tmp_path / "empty", "last")


@pytest.mark.parametrize(
    ("told", "said"),
    [({}, "names no model"), ({"model": 3}, "names no model"), ({"lora_rank": "many"}, "lora_rank is 'many'")],
)
def test_a_run_that_does_not_say_what_it_trained(tmp_path: Path, model: Path, told: dict, said: str):
    run = make_run(tmp_path / "run", model, grow)
    told = {"model": str(model), **told} if "lora_rank" in told else told
    (run / "run.json").write_text(json.dumps({"configuration": told}))
    with pytest.raises(UserError, match=said):
        load_run(run)


def test_nothing_is_overwritten(tmp_path: Path, model: Path):
    run = make_run(tmp_path / "run", model, grow)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="already holds something"):
        export(run, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_eval_of_a_run_samples_as_the_run_did(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch):
    """Otherwise its figures could not be compared with the run's own evaluation."""
    run = make_run(tmp_path / "run", model, grow)
    told = {
        "task": "copy",
        "task_options": {"length": 1},
        "temperature": 0.5,
        "max_tokens": 7,
        "template": "{question}!",
    }
    configuration = json.loads((run / "run.json").read_text())["configuration"] | told
    (run / "run.json").write_text(json.dumps({"configuration": configuration}))
    asked = []

    def instead(policy: object, renderer: object, task: Task, *, sampling: Sampling, **rest: object) -> None:
        asked.append((sampling.temperature, sampling.max_tokens, task.name))
        raise UserError("seen")

    monkeypatch.setattr(evaluate, "evaluate", instead)
    for options in ([], ["--max-tokens", "9"]):
        with pytest.raises(SystemExit):
            cli.main(["eval", str(run), "--task", "copy", "--k", "1", "--threads", "1", *options])
    assert asked == [(0.5, 7, "copy 1 of abcd"), (0.5, 9, "copy 1 of abcd")]
