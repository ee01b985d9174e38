"""What the TRL adapter refuses, by name: versions whose seams moved, patched trainers, options and methods."""

import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from postrl.adapters.support import Full, Refused, Support, Variant
from postrl.batch import Batch
from postrl.errors import UserError
from postrl.method import Method
from postrl.papers import method as build
from postrl.papers import methods

TESTED = "1.16"

# What the adapter overrides or calls, and the arguments by which it does. Found by reading trl 1.16.
SEAMS: dict[str, tuple[str, ...]] = {
    "_prepare_inputs": ("self", "generation_batch"),
    "_generate_and_score_completions": ("self", "inputs"),
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    "_compute_loss": ("self", "model", "inputs"),
    "_get_per_token_logps_and_entropies": (
        *("self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"),
    ),
}

# Options of GRPOConfig that shape TRL's own advantage or loss, and where the same thing is said here.
REPLACED = {
    "loss_type": "the method is the loss",
    "scale_rewards": "the method says how rewards become advantages, for example dr_grpo() or grpo(eps=1e-4)",
    "multi_objective_aggregation": "choose a method that keeps rewards apart",
    "importance_sampling_level": "choose gspo() for ratios of whole answers",
    "epsilon": "give the method its own bound, for example grpo(low=0.2)",
    "epsilon_high": "give the method its own bound, for example dapo(high=0.28) or cispo(high=5.0)",
    "delta": "give the method its own, for example grpo(dual=3.0)",
    "sapo_temperature_neg": "TRL's SAPO is not used",
    "sapo_temperature_pos": "TRL's SAPO is not used",
    "vespo_k_pos": "TRL's VESPO is not used",
    "vespo_k_neg": "TRL's VESPO is not used",
    "vespo_lambda_pos": "TRL's VESPO is not used",
    "vespo_lambda_neg": "TRL's VESPO is not used",
    "entropy_coef": "add entropy_bonus(c) with method.plus(...), which does not change with accumulation",
    "use_adaptive_entropy": "add entropy_bonus(c) with method.plus(...)",
    "top_entropy_quantile": "TRL takes the quantile per micro-batch, so the update would change with accumulation",
    "off_policy_mask_threshold": "TRL's sequence mask belongs to its own loss",
}
SHAPING = {  # entries of generation_kwargs, of transformers or vLLM, that change what answers are drawn from
    *("temperature", "top_p", "top_k", "min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff", "do_sample"),
    *("repetition_penalty", "encoder_repetition_penalty", "presence_penalty", "frequency_penalty", "length_penalty"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "bad_words", "sequence_bias"),
    *("logit_bias", "allowed_token_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id"),
    *("forced_eos_token_id", "exponential_decay_length_penalty", "guidance_scale", "min_length", "min_new_tokens"),
    *("min_tokens", "num_beams", "penalty_alpha", "watermarking_config", "structured_outputs", "guided_decoding"),
}
FORWARD = ("logits", "hidden", "values")  # parts of Forward that TRL's fused head does not give
CRITIC = ("values", "returns")
GIVEN = {"prompts", "completions", "completion_ids", "environments"}  # besides the columns of the data set
GIVEN_BY_TRL = {"trainer_state", "log_extra", "log_metric"}  # these to reward functions only


def support(method: Method) -> Support:
    """What TRL can do with a method."""
    if critic := sorted(method.needs & set(CRITIC)):
        return Refused(f"it needs {critic[0]}, which a critic gives, and TRL has none")
    if parts := sorted(method.needs & {*FORWARD, "teacher_logp"}):
        return Refused(f"it needs {parts[0]}, which TRL's forward pass does not give")
    if method.keep is not None:
        return Variant("refill=0", "units that `keep` leaves out are dropped and not replaced: TRL samples no more")
    if "step_rewards" in method.needs:
        return Full("give the trainer Extras(step_rewards=...)")
    if method.atom == "group":
        return Full("per_device_train_batch_size holds whole groups")
    return Full()


def matrix() -> dict[str, Support]:
    """`support` of every method of the shelf with its defaults, by name."""
    return {name: support(build(name)) for name in sorted(methods())}


def check_method(method: object, step_rewards: bool) -> Method:
    """Raises UserError for what is no method, or one that TRL cannot carry. step_rewards: a function gives them."""
    if not isinstance(method, Method):
        example = "postrl.papers.method('reco')"
        raise UserError(f"method={method!r} is no method; build one, for example {example}: {', '.join(methods())}")
    found = support(method)
    if isinstance(found, Refused):
        raise UserError(f"method {method.name} cannot run in TRL: {found.reason}; use `postrl train`")
    if "step_rewards" in method.needs and not step_rewards:
        raise UserError(
            f"method {method.name} needs rewards of steps: give the trainer extras=Extras(step_rewards=...)"
        )
    filled = {"logp_old", "logp_ref", "entropy", "step_rewards", "step_groups", "logp_sampler"}
    if other := sorted(method.needs - filled):
        raise UserError(f"method {method.name} needs {other[0]}, which the TRL adapter cannot fill; use `postrl train`")
    return method


def check_options(args: Any, method: Method) -> None:
    """Raises UserError naming the option of a GRPOConfig that our method replaces or that cannot be right with it."""
    defaults = {field.name: field.default for field in fields(args)}
    for name, instead in REPLACED.items():
        value = getattr(args, name)
        if value != defaults[name]:
            raise UserError(
                f"option {name}={value!r} of GRPOConfig is for TRL's own loss, which method {method.name} replaces: "
                f"leave it out; {instead}"
            )
    for name, fine in (
        ("top_p", args.top_p >= 1),
        ("top_k", args.top_k == 0),
        ("min_p", not args.min_p),
        ("repetition_penalty", args.repetition_penalty == 1),
        ("temperature", args.temperature > 0),
        ("vllm_structured_outputs_regex", args.vllm_structured_outputs_regex is None),
        ("generation_kwargs", not SHAPING & set(args.generation_kwargs or ())),
    ):
        if not fine:
            raise UserError(
                f"option {name}={getattr(args, name)} of GRPOConfig: training needs samples of the distribution whose "
                "log-probabilities it trains (top_p=1, top_k=0, no min_p, penalty or grammar, temperature above 0)"
            )
    if args.beta and "logp_ref" in method.needs:
        raise UserError(
            f"option beta={args.beta} of GRPOConfig adds a KL term, but method {method.name} has its own use of the "
            "reference: leave beta out"
        )
    check_split(args, method)


def check_split(args: Any, method: Method) -> None:
    """Raises UserError if the batch options cut what must stay whole."""
    accumulation, steps, size = args.gradient_accumulation_steps, args.steps_per_generation, args.num_generations
    if steps % accumulation:
        raise UserError(
            f"steps_per_generation={steps} is no multiple of gradient_accumulation_steps={accumulation}: an update "
            "would mix answers of two generations, so its weights could not be made beforehand"
        )
    rows = args.per_device_train_batch_size * accumulation
    if steps > accumulation and rows % size:
        raise UserError(
            f"per_device_train_batch_size × gradient_accumulation_steps is {rows}, which holds no whole groups of "
            f"num_generations={size}: with several updates per generation each update takes whole groups"
        )
    if method.atom == "group" and args.per_device_train_batch_size % size:
        raise UserError(
            f"method {method.name} needs whole groups in every pass: set per_device_train_batch_size "
            f"(now {args.per_device_train_batch_size}) to a multiple of num_generations={size}"
        )


def check_columns(rewards: Sequence[object], extras: Sequence[object], dataset: Any) -> None:
    """Raises UserError if a reward function, or one of `Extras`, asks for a column that the data set has not. A stream
    may not know its columns."""
    columns = getattr(dataset, "column_names", None)
    if columns is None:
        return
    for function in (f for f in (*rewards, *extras) if inspect.isfunction(f)):
        kind, given = ("reward function", {*GIVEN, *GIVEN_BY_TRL}) if function in rewards else ("function", GIVEN)
        for name, parameter in inspect.signature(function).parameters.items():
            wanted = parameter.default is parameter.empty and parameter.kind in (
                parameter.KEYWORD_ONLY,
                parameter.POSITIONAL_OR_KEYWORD,
            )
            if wanted and name not in {*given, *columns}:
                have = ", ".join(columns)
                raise UserError(f"{kind} {function.__name__} asks for column {name!r}, but the data set has: {have}")


def check_names(names: Sequence[str]) -> None:
    """Raises UserError if two reward functions have one name: they could not be told apart."""
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two reward functions are called {name!r}; give them different names (def, or __name__)")


def check_seams(trainer: type, version: str) -> None:
    """Raises UserError if TRL's trainer lacks a method this adapter overrides or calls, or its arguments changed."""
    for name, wanted in SEAMS.items():
        member: Callable[..., object] | None = vars(trainer).get(name)
        found = () if member is None else tuple(inspect.signature(member).parameters)
        same = found == wanted if "logps" not in name else set(wanted) <= set(found)
        if not same:
            now = "is gone" if member is None else f"now takes ({', '.join(found)})"
            raise UserError(
                f"trl {version} does not fit: GRPOTrainer.{name} {now}; this adapter is tested with trl {TESTED}, so "
                f"pip install 'trl=={TESTED}.*'"
            )


def check_unpatched(trainer: type) -> None:
    """Raises UserError if Unsloth has replaced TRL's trainer or one of its methods."""
    parts: list[object] = [*trainer.__mro__, *(vars(trainer).get(name) for name in SEAMS)]
    if any("unsloth" in f"{getattr(part, '__module__', '')} {part}".lower() for part in parts):
        raise UserError(
            "Unsloth has patched TRL's GRPOTrainer, and its version does not run a subclass's loss: do not import "
            "unsloth in this process, or train with TRL's own losses"
        )


def check_finite(method: Method, what: str, value: Tensor, batch: Batch) -> None:
    if not bool(torch.isfinite(value[batch.mask]).all()):
        raise UserError(
            f"the {what} of method {method.name} is not finite on some sampled token: look at the rewards, and if it "
            "reads logp_old, the method must say so in `needs`"
        )


def check_rewards(rewards: Tensor, names: Sequence[str]) -> None:
    """Raises UserError naming the reward [N, K] that is infinite somewhere; NaN is a missing one."""
    for column, name in enumerate(names):
        if torch.isinf(rewards[:, column]).any():
            raise UserError(f"reward {name!r} gave an infinite value: return a number, or None for a missing one")


def checked(function: Any, name: str) -> Any:
    """A reward function that may return None for a missing reward, but neither NaN nor infinity."""
    if isinstance(function, torch.nn.Module):
        return function

    def check(values: Sequence[float | None]) -> Sequence[float | None]:
        for place, value in enumerate(values):
            if value is not None and not math.isfinite(value):
                raise UserError(
                    f"reward {name!r} returned {value} for answer {place}: return a number, or None for a missing one"
                )
        return values

    plain = function.func if isinstance(function, functools.partial) else function
    if inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(plain.__call__):

        async def later(*values: Any, **named: Any) -> Sequence[float | None]:
            answer: Awaitable = function(*values, **named)
            return check(await answer)

        return later
    return lambda *values, **named: check(function(*values, **named))
