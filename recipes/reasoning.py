"""Post-train a language model on a procedural reasoning task, by any method of the shelf.

    postrl train reasoning --method reco --task chain_sum --out runs/reco

reasoning-gym makes the problems; a tenth of them, chosen by their content, is never trained on and measures pass@k.
"""

import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from torch import nn

from postrl import papers
from postrl.cli import Options, run_recipe, use_threads
from postrl.compute import compute_dtype, name_of
from postrl.display import Display
from postrl.envs.base import Task
from postrl.envs.reasoning import ReasoningTask
from postrl.errors import UserError
from postrl.evaluate import Evaluation, evaluate
from postrl.memory import keep_memory
from postrl.papers.one_layer import only
from postrl.policies.base import Policy, Renderer, Sampler, Sampling
from postrl.policies.critic import ActorCritic, DecoderCritic, Values, parameter_groups
from postrl.policies.loading import load_policy
from postrl.policies.lora import LoRA
from postrl.policies.vllm import VllmSampler
from postrl.ranks import launched_first
from postrl.rewards.exact import EXTRACTIONS
from postrl.rewards.rubric import Reward, Rubric
from postrl.settings import Settings
from postrl.source import OnPolicy
from postrl.train import Result, train


@dataclass(frozen=True)
class Measure:
    """How the policy is evaluated on held-out problems."""

    items: int = 64
    """Problems."""
    samples: int = 16
    """Completions per problem; at least the largest k."""
    ks: tuple[int, ...] = (1, 2, 4, 8, 16)
    """pass@k is reported for these k."""


@dataclass(frozen=True)
class Config:
    """Options of one run."""

    model: str = "smollm2"
    """A Hugging Face folder, a .gguf file, a model id of the hub, or smollm2."""
    method: str = "grpo"
    """A method of the shelf: see `postrl papers`."""
    options: Options = field(default_factory=dict)
    """Arguments of the method, for example `--options cap 3`."""
    task: str = "chain_sum"
    """A task of reasoning-gym."""
    task_options: Options = field(default_factory=dict)
    """Its configuration, for example `--task-options max_terms 3`."""
    template: str = "{question}\nAnswer with the number only."
    """The user's message; {question} stands for the problem."""
    extract: Literal["last_number", "tagged", "boxed", "after_answer", "whole_text"] = "last_number"
    """Which part of a completion is the answer; see `postrl.rewards.exact`."""
    groups_per_step: int = 8
    """Problems per step."""
    group_size: int = 8
    """Completions per problem, which are compared with one another."""
    temperature: float = 1.0
    """Of sampling, in training and evaluation."""
    max_tokens: int = 16
    """Longest completion."""
    brevity: float = 0.0
    """Weight of a second reward besides a right answer: the share of `max_tokens` that an answer leaves unused."""
    critic: Literal["copied", "random"] = "copied"
    """Where the critic of a method that has one (ppo) starts: from the policy's trunk, or from nothing."""
    critic_scale: float = 5.0
    """Its learning rate over the policy's."""
    critic_warmup: int = 0
    """Steps in which only the critic trains."""
    layers: tuple[int, ...] = ()
    """Train these layers only (0 is the first); none named trains all weights. See `postrl papers one_layer`."""
    lora_rank: int = 0
    """Train a LoRA adapter of this rank instead of all weights; 0 trains all weights."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the matrix products; weights stay in float32. auto: bfloat16 where it is measured to be much faster.
    A resumed run goes on with what it began with."""
    sampler: Literal["own", "vllm"] = "own"
    """Who samples: the policy's own engine, or vLLM in its own environment (`make vllm-env`), for people with a GPU."""
    vllm: str = ".venv-vllm/bin/python"
    """The Python of vLLM's environment."""
    vllm_options: Options = field(default_factory=dict)
    """Arguments of vLLM's engine, for example `--vllm-options gpu_memory_utilization 0.4`."""
    recompute: bool = False
    """Keep fewer activations for the backward pass and compute them again: less memory, more time."""
    threads: int = 2
    """Processor threads. More than there are cores is slower, and so is sharing them with another busy program."""
    measure: Measure = field(default_factory=Measure)
    train: Settings = field(default_factory=lambda: Settings(steps=40, learning_rate=2e-5, warmup=8, refill=3))
    out: Path = Path("runs/reasoning")
    """Folder of the run."""
    resume: bool = False
    """Go on with the run in `out`."""


def make_task(config: Config) -> Task:
    task = ReasoningTask(
        config.task,
        config.task_options,
        extract=EXTRACTIONS[config.extract],
        template=config.template,
        seed=config.train.seed,
    )
    task.rubric = rubric(config, task.rubric)
    if launched_first():
        print(task.describe(), flush=True)
    return task


def rubric(config: Config, plain: Rubric) -> Rubric:
    """A task's own rewards, and brevity where it is asked for."""
    if not config.brevity:
        return plain
    brief = Reward("brevity", lambda rollout: 1 - rollout.sampled_tokens() / config.max_tokens, config.brevity)
    return Rubric((*plain.rewards, brief))


def main(config: Config, task: Task | None = None, before: Evaluation | None = None, title: str = "") -> Result:
    """One run. `before` is the evaluation of the untrained model, if it is known already."""
    config.train.check()
    use_threads(config.threads)
    keep_memory()
    method = make_method(config.method, config.options, config.max_tokens)
    task = make_task(config) if task is None else task
    lora = LoRA(rank=config.lora_rank, alpha=2.0 * config.lora_rank) if config.lora_rank else None
    compute = compute_dtype(config.compute_dtype, config.out if config.resume else None)
    policy, renderer = load_policy(
        config.model, lora=lora, compute_dtype=compute, recompute=config.recompute, seed=config.train.seed
    )
    sampler = make_sampler(policy, config, name_of(compute))
    model = with_critic(policy, config) if "values" in method.needs else policy
    critic = isinstance(model, ActorCritic)
    source = OnPolicy(
        task,
        policy,
        renderer,
        groups_per_step=config.groups_per_step,
        group_size=config.group_size,
        sampling=sampling(config),
        seed=config.train.seed,
        answer=lambda rollout: EXTRACTIONS[config.extract](rollout.completion),
        make_sampler=None if sampler is None else lambda: sampler,
    )
    compared = config.train.kl_coef > 0 or "logp_ref" in method.needs
    reference = load_policy(config.model, compute_dtype=compute)[0] if compared else None
    if config.layers and critic:
        raise UserError(f"option layers={config.layers} trains no critic, but method {method.name} needs one: drop it")
    layers = only(config.layers) if config.layers else None
    describe = {**asdict(config), "compute_dtype": name_of(compute)}
    for name in ("train", "out", "resume"):
        del describe[name]
    return train(
        method,
        model,
        source,
        config.train,
        config.out,
        enrich=[Values(model, config.train.token_budget, config.critic_warmup)] if critic else [],
        parameters=parameter_groups(config.critic_scale) if critic else layers,
        reference=reference,
        evaluate=lambda: measure(config, policy, renderer, task, sampler),
        before=before,
        describe=describe,
        resume=config.resume,
        display=Display(config.train.steps, title or method.name),
    )


def make_method(name: str, options: Mapping[str, object], max_tokens: int) -> papers.Method:
    """A method of the shelf; where it has a length of answers, that is the sampler's unless `options` name it.

    Without that, DAPO's penalty for answers near 20,480 tokens would never speak of answers of at most 24, and
    Dr. GRPO's constant of 3,000 would shrink its gradient a hundred times. Raises UserError for what is not there.
    """
    constructor = papers.methods().get(name)
    known = inspect.signature(constructor).parameters if constructor is not None else {}
    lengths = {"length": max_tokens, "max_length": max_tokens, "cache": max(1, max_tokens // 5)}
    return papers.method(name, **{k: v for k, v in lengths.items() if k in known} | dict(options))


def with_critic(policy: Policy, config: Config) -> ActorCritic:
    """The policy beside a decoder of its size that gives values. Raises UserError for engines other than ours."""
    assert isinstance(policy, nn.Module)
    critic = DecoderCritic.copied(policy)
    if config.critic == "random":
        like, critic = critic.trunk, DecoderCritic.random(critic.trunk.config, config.train.seed)
        critic.trunk.compute_dtype, critic.trunk.recompute = like.compute_dtype, like.recompute
    return ActorCritic(policy, critic)


def sampling(config: Config) -> Sampling:
    return Sampling(temperature=config.temperature, max_tokens=config.max_tokens)


def make_sampler(policy: Policy, config: Config, dtype: str) -> Sampler | None:
    """vLLM's, for training and evaluation; None: the policy's own. dtype: of the products."""
    if config.sampler == "own":
        return None
    return VllmSampler(
        policy,
        config.vllm,
        dtype="bfloat16" if dtype == "bfloat16" else "float32",
        engine=config.vllm_options,
        threads=config.threads,
    )


def measure(
    config: Config, policy: Policy, renderer: Renderer, task: Task, sampler: Sampler | None = None
) -> Evaluation:
    """pass@k on held-out problems."""
    m = config.measure
    return evaluate(
        policy,
        renderer,
        task,
        items=m.items,
        n=m.samples,
        ks=m.ks,
        sampling=sampling(config),
        seed=config.train.seed,
        answer=lambda rollout: EXTRACTIONS[config.extract](rollout.completion) or "none",
        sampler=sampler,
    )


if __name__ == "__main__":
    run_recipe(Config, main)
