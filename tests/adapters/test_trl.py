"""MethodTrainer as its users meet it: what it refuses, real training of a tiny model, checkpoints, adapters, logs."""

import gc
import importlib
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FunctionType

import pandas
import pytest
import torch
from safetensors.torch import load_file

from postrl.adapters import trl as adapter
from postrl.adapters import trl_checks
from postrl.adapters.support import Full, Refused, Variant
from postrl.adapters.trl_rows import Extras
from postrl.batch import Batch
from postrl.conformance import trl_side
from postrl.conformance.cases import make_case
from postrl.errors import UserError
from postrl.method import Method
from postrl.papers import method
from postrl.papers.grpo import grpo
from postrl.papers.reco import reco
from postrl.terms import reference_kl
from tiny_models import LLAMA, save_model, tiny_model, tiny_tokenizer

pytest.importorskip("trl", reason="pip install 'postrl[trl]'")


@pytest.fixture(scope="module", autouse=True)
def trl() -> Iterator[None]:
    importlib.import_module("trl.trainer.grpo_trainer")
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def low(completion_ids, limit, **columns) -> list[float]:
    """The share of an answer's tokens below the data set's column `limit`."""
    return [sum(t < most for t in ids) / len(ids) for ids, most in zip(completion_ids, limit, strict=True)]


def options(folder: Path, **changes: object):
    """Two updates per generation, each in two passes."""
    given = {"num_iterations": 1, "max_completion_length": 6, "reward_weights": None, "learning_rate": 1e-2}
    return trl_side.options(folder, **{**given, **changes})


def trainer(model: Path, args, subject: Method | None = None, **rest):
    from datasets import Dataset

    rows = {"prompt": ["a", "b", "c", "d"], "limit": [100, 150, 100, 150]}
    given = {"reward_funcs": low, "processing_class": tiny_tokenizer(), "train_dataset": Dataset.from_dict(rows)}
    return adapter.MethodTrainer(str(model), args=args, method=subject or reco(), **{**given, **rest})


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loss_type": "grpo"}, "option loss_type='grpo'.*method reco replaces"),
        ({"scale_rewards": "none"}, "option scale_rewards='none'"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level.*gspo"),
        ({"epsilon": 0.1}, r"option epsilon=0\.1.*grpo\(low"),
        ({"epsilon_high": 0.28}, "option epsilon_high"),
        ({"delta": 3.0}, r"option delta.*dual"),
        ({"entropy_coef": 0.01}, "option entropy_coef.*entropy_bonus"),
        ({"top_entropy_quantile": 0.2}, "option top_entropy_quantile"),
        ({"off_policy_mask_threshold": 0.1}, "option off_policy_mask_threshold"),
        ({"top_p": 0.9}, r"option top_p=0\.9"),
        ({"top_k": 5}, "option top_k=5"),
        ({"repetition_penalty": 1.1}, "option repetition_penalty"),
        ({"generation_kwargs": {"top_p": 0.9}}, "option generation_kwargs=.*top_p.*of GRPOConfig"),
        ({"vllm_structured_outputs_regex": "[0-9]+"}, "option vllm_structured_outputs_regex"),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 6}, "steps_per_generation=6 is no multiple"),
        ({"per_device_train_batch_size": 1}, "is 2, which holds no whole groups of num_generations=4"),
    ],
)
def test_option_that_cannot_be_right_is_named(changes: dict, said: str, model: Path, tmp_path: Path):
    with pytest.raises(UserError, match=said):
        trainer(model, options(tmp_path, **changes))


def test_reference_twice_is_refused(model: Path, tmp_path: Path):
    subject = grpo().plus(reference_kl(0.1), needs=frozenset({"logp_ref"}))
    with pytest.raises(UserError, match=r"beta=0\.1"):
        trainer(model, options(tmp_path, beta=0.1), subject)


def test_methods_that_trl_cannot_carry(model: Path, tmp_path: Path):
    critic = replace(grpo(), name="ppo", needs=frozenset({"values"}))
    with pytest.raises(UserError, match="method ppo cannot run in TRL: it needs values, which a critic gives"):
        trainer(model, options(tmp_path), critic)
    with pytest.raises(UserError, match="TRL's forward pass does not give"):
        trainer(model, options(tmp_path), replace(grpo(), needs=frozenset({"logits"})))
    with pytest.raises(UserError, match="method grpo needs invented"):
        trainer(model, options(tmp_path), replace(grpo(), needs=frozenset({"invented"})))
    with pytest.raises(UserError, match=r"method='recco' is no method.*grpo.*reco"):
        trainer(model, options(tmp_path), "recco")
    with pytest.raises(UserError, match=r"needs rewards of steps: give the trainer extras=Extras\(step_rewards"):
        trainer(model, options(tmp_path), method("gigpo"))
    whole = replace(grpo(), atom="group")
    with pytest.raises(UserError, match=r"per_device_train_batch_size \(now 2\) to a multiple of num_generations=4"):
        args = options(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4, steps_per_generation=8)
        trainer(model, args, whole)


def test_support_says_what_each_method_is():
    matrix = trl_checks.matrix()
    assert matrix["reco"] == Full()
    assert isinstance(matrix["dapo"], Variant) and matrix["dapo"].name == "refill=0"
    assert matrix["gigpo"] == Full("give the trainer Extras(step_rewards=...)")
    assert isinstance(trl_checks.support(replace(grpo(), needs=frozenset({"values"}))), Refused)


def test_missing_column_is_named_with_those_there_are(model: Path, tmp_path: Path):
    def graded(completions, solution, **columns):
        return [0.0 for _ in completions]

    with pytest.raises(UserError, match=r"reward function graded asks for column 'solution'.*prompt, limit"):
        trainer(model, options(tmp_path), reward_funcs=graded)


def test_what_only_reward_functions_are_given_is_no_column_for_the_others(model: Path, tmp_path: Path):
    def grouped(completions, log_metric, **columns):
        return [0 for _ in completions]

    with pytest.raises(UserError, match=r"^function grouped asks for column 'log_metric'"):
        trainer(model, options(tmp_path), extras=Extras(groupings={"grouped": grouped}))


def test_two_rewards_of_one_name_are_refused(model: Path, tmp_path: Path):
    with pytest.raises(UserError, match="two reward functions are called 'low'"):
        trainer(model, options(tmp_path), reward_funcs=[low, low])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("later", [False, True])
def test_reward_that_is_no_number_stops_the_run(bad: float, later: bool, model: Path, tmp_path: Path):
    def broken(completions, **columns):
        return [None, *(bad for _ in completions[1:])]

    async def broken_later(completions, **columns):
        return broken(completions)

    made = trainer(model, options(tmp_path, max_steps=1), reward_funcs=broken_later if later else broken)
    with pytest.raises(UserError, match=rf"reward 'broken.*' returned {bad} for answer 1"):
        made.train()


def test_extra_of_the_wrong_length_is_named(model: Path, tmp_path: Path):
    extras = Extras(groupings={"answer": lambda **columns: [1, 2]})
    made = trainer(model, options(tmp_path, max_steps=1), extras=extras)
    with pytest.raises(UserError, match="function 'answer' returned 2 values for 16 answers"):
        made.train()


def test_without_trl_the_install_command_is_named(monkeypatch: pytest.MonkeyPatch):
    adapter.trainer_class.cache_clear()
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(UserError, match=r"pip install 'postrl\[trl\]'"):
        _ = adapter.MethodTrainer
    adapter.trainer_class.cache_clear()


def _changed(name: str, code) -> type:
    """TRL's trainer with one method replaced by a plain copy of it, whose code is `code`."""
    from trl import GRPOTrainer

    parts = {seam: vars(GRPOTrainer)[seam] for seam in trl_checks.SEAMS}
    return type("GRPOTrainer", (), {**parts, name: code})


def test_a_trl_whose_seams_moved_is_named():
    trl_checks.check_seams(_changed("_compute_loss", lambda self, model, inputs: None), "9.9")
    with pytest.raises(UserError, match=r"trl 9\.9 does not fit: GRPOTrainer\._compute_loss now takes \(self, batch\)"):
        trl_checks.check_seams(_changed("_compute_loss", lambda self, batch: None), "9.9")
    with pytest.raises(UserError, match=r"_prepare_inputs is gone.*pip install 'trl==1\.16"):
        trl_checks.check_seams(_changed("_prepare_inputs", None), "9.9")
    with pytest.raises(UserError, match="_get_per_token_logps_and_entropies now takes"):
        trl_checks.check_seams(_changed("_get_per_token_logps_and_entropies", lambda self, model: None), "1.10")


def test_a_trainer_that_unsloth_patched_is_refused():
    from trl import GRPOTrainer

    trl_checks.check_unpatched(GRPOTrainer)
    with pytest.raises(UserError, match="Unsloth has patched"):
        trl_checks.check_unpatched(type("_UnslothGRPOTrainer", (GRPOTrainer,), {}))
    patch = FunctionType((lambda self: None).__code__, {"__name__": "unsloth_zoo.rl"})
    with pytest.raises(UserError, match="Unsloth has patched"):
        trl_checks.check_unpatched(_changed("_compute_loss", patch))


# ---------------------------------------------------------------- real training


def logged(made, name: str) -> list[float]:
    return [entry[name] for entry in made.state.log_history if name in entry]


def test_training_learns_and_leaves_what_trl_users_expect(model: Path, tmp_path: Path):
    args = options(
        tmp_path, max_steps=24, learning_rate=0.05, log_completions=True, save_strategy="steps", save_steps=8
    )
    made = trainer(model, args)
    assert type(made).__name__ == "MethodTrainer" and isinstance(made, importlib.import_module("trl").GRPOTrainer)
    before = {n: p.detach().clone() for n, p in made.model.named_parameters()}
    made.train()
    reward = logged(made, "reward")
    assert sum(reward[-3:]) > sum(reward[:3]) + 0.6, reward
    assert all(torch.isfinite(p).all() for p in made.model.parameters())
    assert any(not torch.equal(before[n], p) for n, p in made.model.named_parameters())
    for name in ("entropy", "policy_kl", "clip_ratio/region_mean", "completions/mean_length", "rewards/low/mean"):
        assert len(logged(made, name)) >= 8, name
    saved = tmp_path / "checkpoint-24"
    assert (saved / "model.safetensors").exists() and (saved / "trainer_state.json").exists()
    card = (tmp_path / "README.md").read_text()
    assert "ReCo" in card and "DeepSeekMath" not in card
    table = pandas.read_parquet(sorted((tmp_path / "completions").glob("*.parquet"))[0])
    rewards, credit = table["low"].to_numpy().reshape(4, 4), table["advantage"].to_numpy().reshape(4, 4)
    wanted = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
    assert (abs(credit - wanted) < 1e-3).all() and abs(credit).max() > 0.5


def test_a_run_goes_on_from_its_checkpoint(model: Path, tmp_path: Path):
    first = trainer(model, options(tmp_path, max_steps=2, save_strategy="steps", save_steps=2))
    first.train()
    again = trainer(model, options(tmp_path, max_steps=4, save_strategy="steps", save_steps=2))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.state.global_step == 4 and len(logged(again, "loss")) == 4
    old, new = (load_file(tmp_path / f"checkpoint-{n}" / "model.safetensors") for n in (2, 4))
    assert any(not torch.equal(old[name], new[name]) for name in old)


def test_adapters_of_peft_are_trained_and_nothing_else(model: Path, tmp_path: Path):
    from peft import LoraConfig

    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    subject = reco().plus(reference_kl(0.1), needs=frozenset({"logp_ref"}))
    args = options(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    made = trainer(model, args, subject, peft_config=config)
    before = {n: p.detach().clone() for n, p in made.model.named_parameters()}
    made.train()
    moved = {n for n, p in made.model.named_parameters() if not torch.equal(before[n], p)}
    assert moved and all("lora_" in name for name in moved)
    assert (tmp_path / "checkpoint-2" / "adapter_model.safetensors").exists()
    assert made.ref_model is None and all(x >= 0 for x in logged(made, "kl"))
    assert made.args.beta == 0.0, "what the user wrote"


def test_evaluation_is_of_whole_groups(model: Path, tmp_path: Path):
    from datasets import Dataset

    args = options(tmp_path, max_steps=2, per_device_eval_batch_size=4, eval_strategy="steps", eval_steps=1)
    held = Dataset.from_dict({"prompt": ["e", "f"], "limit": [100, 150]})
    made = trainer(model, args, eval_dataset=held)
    made.train()
    assert len(logged(made, "eval_loss")) == 2 and all(math.isfinite(x) for x in logged(made, "eval_reward"))
    assert all(abs(x) < 1e-4 for x in logged(made, "eval_policy_kl"))


def test_rewards_of_none_and_late_ones(model: Path, tmp_path: Path):
    """Two columns, kept apart: an async one, and one that has nothing to say of every other answer."""
    seen: list[Batch] = []

    async def late(completions, **columns) -> list[float]:
        return [float(len(text)) for text in completions]

    def half(completions, **columns) -> list[float | None]:
        return [None if place % 2 else 1.0 for place, _ in enumerate(completions)]

    def credit(batch: Batch) -> torch.Tensor:
        seen.append(batch)
        return grpo().advantage(batch)

    args = options(tmp_path, max_steps=1, reward_weights=[1.0, 0.5])
    trainer(model, args, replace(grpo(), advantage=credit), reward_funcs=[late, half]).train()
    [batch] = seen
    assert batch.reward_names == ("late", "half") and batch.reward_weights.tolist() == [1.0, 0.5]
    assert torch.isnan(batch.reward("half")).tolist() == [False, True] * 8
    assert not torch.isnan(batch.reward("late")).any()
    assert torch.isnan(batch.logp_sampler[batch.mask]).all(), "TRL's generation reports none, so none is made up"


def test_rollout_function_sees_trls_prompts_and_its_columns_reach_the_rewards(model: Path, tmp_path: Path):
    case = make_case(3)
    args = trl_side.options(tmp_path, max_steps=1)
    run = trl_side.train(case, model, args, replace(grpo(), figures=lambda batch, logp: {"tokens": batch.mask.sum()}))
    assert sorted(run.minis[0]) == run.minis[0] and len(run.minis[0]) == 8
    assert logged(run.trainer, "rewards/correct/mean")


def test_a_gradient_comes_from_no_token_of_a_tool(model: Path, tmp_path: Path):
    """Tool output changes nothing but what follows it: its own log-probability is not trained."""
    seen: list[tuple[Batch, torch.Tensor]] = []

    def loss(batch: Batch, advantage: torch.Tensor, forward) -> torch.Tensor:
        seen.append((batch, forward.logp))
        forward.logp.retain_grad()
        return grpo().terms[0].loss(batch, advantage, forward)

    subject = replace(grpo(), terms=(replace(grpo().terms[0], loss=loss),))
    trl_side.train(make_case(3), model, trl_side.options(tmp_path, max_steps=2), subject)
    tools = [(batch.valid & ~batch.mask, batch.prefix_length) for batch, _ in seen]
    inside = [t & (torch.arange(t.shape[1]) >= p[:, None]) for t, p in tools]
    assert sum(int(t.sum()) for t in inside) > 0, "the case has tool output"
    for (_, logp), tool in zip(seen, inside, strict=True):
        assert logp.grad is not None and not logp[tool].any() and not logp.grad[tool].any()


class Counter:
    """An environment of TRL with one tool, which half of the scripted answers call once."""

    def reset(self, **row) -> str:
        self.calls = 0
        return " Go."

    def add(self, number: int) -> int:
        """Adds.

        Args:
            number: What to add.
        """
        self.calls += 1
        return number

    def get_reward(self) -> float:
        return self.calls + 0.5


def test_environments_and_tools_of_trl_give_turns_with_their_own_rewards(tmp_path: Path):
    """TRL's tool loop with scripted completions: a call and what follows are two steps, tool output is in neither."""
    from datasets import Dataset

    template = Path(importlib.import_module("trl").__file__ or "").parent / "chat_templates" / "qwen3.jinja"
    spoken = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    tokenizer = tiny_tokenizer(template=template.read_text(), plain=spoken)
    folder = save_model(tmp_path / "model", tiny_model(0, **{**LLAMA, "max_position_embeddings": 2048}), tokenizer)
    call = tokenizer.encode('<tool_call>\n{"name": "add", "arguments": {"number": 3}}\n</tool_call><|im_end|>')
    end, rounds, seen = tokenizer.encode("ok<|im_end|>"), [], []

    def scripted(prompt_ids, *rest, **named):
        rounds.append(len(prompt_ids))
        return [list(call if len(rounds) == 1 and not k % 2 else end) for k in range(len(prompt_ids))], None

    def credit(batch: Batch) -> torch.Tensor:
        seen.append(batch)
        return method("gigpo").advantage(batch)

    prompts = Dataset.from_dict({"prompt": [[{"role": "user", "content": c}] for c in "abcd"]})
    extras = Extras(
        groupings={"calls": lambda environments, **columns: [e.calls for e in environments]},
        step_rewards=lambda environments, **columns: [[0.25] * (e.calls + 1) for e in environments],
    )
    made = trainer(
        folder,
        options(tmp_path, max_steps=1, max_completion_length=400),
        replace(method("gigpo"), advantage=credit),
        reward_funcs=None,
        train_dataset=prompts,
        environment_factory=Counter,
        processing_class=tokenizer,
        extras=extras,
    )
    made._generate_single_turn = scripted
    made.train()
    [batch], half = seen, [True, False] * 8
    assert rounds == [16, 8] and batch.reward_names == ("Counter",)
    assert batch.rewards.flatten().tolist() == [1.5, 0.5] * 8
    assert (batch.segment.amax(1) == 1).tolist() == half and (batch.group("calls") == 0).tolist() == half
    assert batch.lengths().tolist() == [len(call) + len(end), len(end)] * 8
    assert batch.step_rewards is not None and batch.step_groups is not None
    assert torch.isnan(batch.step_rewards).tolist() == [[False, not two] for two in half]
    assert torch.equal(batch.step_groups[:4, 0], batch.step_groups[:1, 0].expand(4)), "one prompt, one observation"
    assert len(set(batch.step_groups[::2, 1].tolist())) == 1, "the tool always answers the same"
    assert (batch.step_groups[1::2, 1] == -1).all()
    assert made.state.global_step == 1 and logged(made, "grad_norm")[0] > 0
