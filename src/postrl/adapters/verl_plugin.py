"""What verl loads through the entry point `verl.plugins`, in each of its processes: see `verl.py`.

verl swallows what a plugin raises. So nothing is raised here: what is wrong is printed, and raised again by the
estimators and losses when they are used.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from postrl.adapters import verl as ours
from postrl.adapters import verl_settings
from postrl.adapters.support import Refused
from postrl.adapters.verl_rows import Credit, Given, Known, advantages, token_losses
from postrl.adapters.verl_traits import Traits, traits
from postrl.errors import UserError
from postrl.method import Method
from postrl.papers import methods

ALGORITHMS = "verl.trainer.ppo.core_algos"
SEAMS = {  # what is registered or called there, and the arguments by which it is. Found by reading verl 0.9.1.
    "register_adv_est": ("name_or_enum",),
    "register_policy_loss": ("name",),
    "agg_loss": ("loss_mat", "loss_mask", "loss_agg_mode", "dp_size", "batch_num_tokens", "global_batch_size"),
}
_known: ContextVar[Known | None] = ContextVar("known", default=None)
_credit: ContextVar[Credit | None] = ContextVar("credit", default=None)


def chosen(name: str) -> tuple[Method, Traits]:
    """The method of a name, with this process's options. Raises UserError for what verl cannot carry."""
    return _chosen(name, verl_settings.settings())


@functools.cache  # workers ask for every micro-batch
def _chosen(name: str, settings: verl_settings.Settings) -> tuple[Method, Traits]:
    method = settings.method(name)
    found = ours.support(method)
    if isinstance(found, Refused):
        raise UserError(f"method {name} cannot run in verl: {found.reason}; use `postrl train`")
    return method, traits(method)


@contextlib.contextmanager
def knowing(known: Known) -> Iterator[Callable[[], Credit | None]]:
    """What estimators may read besides their arguments while this lasts; the yielded function tells what they found."""
    before, after = _known.set(known), _credit.set(None)
    try:
        yield _credit.get
    finally:
        _known.reset(before)
        _credit.reset(after)


def estimator(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The advantage estimator `postrl_<name>`: A', and A as what verl calls returns."""

    def estimate(
        token_level_rewards: Float[Tensor, "B C"],
        response_mask: Shaped[Tensor, "B C"],
        config: Any = None,
        index: Iterable[str] | None = None,
        **rest: Any,
    ) -> tuple[Tensor, Tensor]:
        method, found = chosen(name)
        if index is None:
            raise UserError(f"method {name} compares the answers to a prompt, but this trainer gives no uid")
        if _known.get() is None and _bypasses(config):
            raise UserError(
                "algorithm.rollout_correction.bypass_mode: verl's legacy trainer then puts its own loss in place of "
                f"{ours.PREFIX}{name}, which alone reads these advantages: set it to False, or {ours.OWN_TRAINER}"
            )
        given = Given(token_level_rewards, response_mask.bool(), [str(uid) for uid in index])
        with torch.no_grad():
            credit = advantages(method, found, given, _known.get(), verl_settings.settings().data)
        _credit.set(credit)
        return credit.scaled, credit.plain

    return estimate


def _bypasses(config: Any) -> bool:
    """Whether verl's algorithm configuration takes the sampler's log-probabilities for the old ones."""
    correction = None if config is None else config.get("rollout_correction")
    return correction is not None and bool(correction.get("bypass_mode", False))


def policy_loss(name: str, agg_loss: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, dict[str, float]]]:
    """The policy loss `postrl_<name>`, for advantages of the estimator of that name."""

    def loss(
        old_log_prob: Float[Tensor, "b C"],
        log_prob: Float[Tensor, "b C"],
        advantages: Float[Tensor, "b C"],
        response_mask: Shaped[Tensor, "b C"],
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Float[Tensor, "b C"] | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        method, found = chosen(name)
        mask = response_mask.bool()
        scaled = advantages if rollout_is_weights is None else advantages * rollout_is_weights
        losses, figures = token_losses(method, old_log_prob, log_prob, scaled, mask)
        count = "batch_num_tokens" if found.base == "tokens" else "global_batch_size"
        known = {} if config is None else config.global_batch_info
        if known.get(count) is None or known.get("dp_size") is None:
            raise UserError(
                f"policy loss {ours.PREFIX}{name} needs {count} of the whole update, which this trainer does not give"
            )
        mode = "token-mean" if found.base == "tokens" else "seq-mean-token-sum"
        counts = {"dp_size": known["dp_size"], count: known[count]}
        return agg_loss(loss_mat=losses, loss_mask=mask, loss_agg_mode=mode, **counts), figures

    return loss


def broken(error: UserError) -> Callable[..., Any]:
    """What is registered in place of a method that cannot be used."""

    def fail(*values: object, **named: object) -> Any:
        raise error

    return fail


def check_seams(module: Any, version: str) -> None:
    """Raises UserError if verl lacks what is registered or called, or its arguments changed."""
    members = vars(module)
    for name, wanted in SEAMS.items():
        found = tuple(inspect.signature(members[name]).parameters) if name in members else ()
        if found[: len(wanted)] != wanted:
            now = f"now takes ({', '.join(found)})" if found else "is gone"
            raise UserError(
                f"verl {version} does not fit: {ALGORITHMS}.{name} {now}; postrl is tested with verl {ours.TESTED}, so "
                f"pip install 'verl=={ours.TESTED}.*'"
            )


def register() -> None:
    """Estimators and losses of the whole shelf, and trainers where POSTRL_VERL is set, under names with `postrl_`."""
    algorithms = importlib.import_module(ALGORITHMS)
    error = _problem(algorithms)
    for name in methods():
        adv, loss = (broken(error),) * 2 if error else (estimator(name), policy_loss(name, algorithms.agg_loss))
        algorithms.register_adv_est(f"{ours.PREFIX}{name}")(adv)
        algorithms.register_policy_loss(f"{ours.PREFIX}{name}")(loss)
    if error is not None:
        print(f"postrl: {error}", file=sys.stderr)
        return
    if verl_settings.FORWARDED not in os.environ and verl_settings.VARIABLE in os.environ:
        environment = importlib.import_module("verl.trainer.constants_ppo").PPO_RAY_RUNTIME_ENV["env_vars"]
        verl_settings.forward(environment)
    if {verl_settings.FORWARDED, verl_settings.VARIABLE} & set(os.environ):
        try:
            importlib.import_module("postrl.adapters.verl_trainer").register()
        except ImportError as missing:  # verl would hide it
            print(
                f"postrl: no trainer_mode=postrl_* here, since verl's trainers do not load: {missing}", file=sys.stderr
            )


def _problem(algorithms: Any) -> UserError | None:
    try:
        check_seams(algorithms, importlib.import_module("importlib.metadata").version("verl"))
        verl_settings.settings()
    except UserError as error:
        return error
    return None
