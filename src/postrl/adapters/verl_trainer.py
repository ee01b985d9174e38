"""verl's trainers with one step widened: a method's estimator is told what the answers hold besides their score.

`trainer.v1.trainer_mode=postrl_sync` is verl's `sync` with it, and so for its other modes. All else is verl's.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from postrl.adapters import verl as ours
from postrl.adapters.arrays import Answers
from postrl.adapters.verl_plugin import chosen, knowing
from postrl.adapters.verl_rows import Known, updates
from postrl.adapters.verl_settings import settings
from postrl.errors import UserError

Base: Any = object  # verl's trainer is joined in `register`, so that this module loads without verl

FIELDS = (
    *("prompts", "responses", "response_mask", "loss_mask", "extra_fields"),
    *("old_log_probs", "ref_log_prob", "rollout_log_probs"),
)


class MethodCredit(Base):
    """The part of a PPOTrainer that is ours; joined to each of verl's trainers in `register`.

    Raises UserError, before anything is loaded, for a configuration that cannot be right.
    """

    def __init__(self, config: Any) -> None:
        mode = config.trainer.v1.trainer_mode
        self.method, self.traits = check_config(config)
        config.trainer.v1.trainer_mode = mode.removeprefix(ours.PREFIX)  # verl asks whether it is "sync"
        super().__init__(config)

    def _compute_advantage(self, batch: Any, metrics: dict) -> Any:
        queue = importlib.import_module("transfer_queue")
        data = queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(FIELDS))
        with knowing(self._known(batch.keys, data)) as found:
            batch = super()._compute_advantage(batch, metrics)
            credit = found()
        if credit is None:
            raise UserError(f"verl made no advantages with {self.config.algorithm.adv_estimator}; report this")
        if self.method.keep is not None:
            metrics["units/dropped"] = credit.dropped
        if self.method.figures is not None:
            figures = self.method.figures(credit.batch, credit.batch.logp_old)
            metrics.update({f"method/{name}": value for name, value in figures.items() if value == value})
        return batch

    def _known(self, keys: list[str], data: Any) -> Known:
        actor, rollout = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout
        longest = data["responses"].offsets().diff() >= int(rollout.response_length)
        size = int(actor.ppo_mini_batch_size) * int(rollout.n)
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        extra = [dict(found) for found in data.get("extra_fields").tolist()]
        sessions = [key.rsplit("_", 1) for key in keys]
        if len({name for name, _ in sessions}) < len(keys):
            check_rows(self.config, self.method)
        return Known(
            answers=answers_of(data),
            sessions=[(name, int(number)) for name, number in sessions],
            info=[{**found, **(found.get("reward_extra_info") or {})} for found in extra],
            truncated=longest.tolist(),
            minis=None if actor.shuffle else updates(len(keys), ranks, size),
            counted=data["loss_mask"].to_padded_tensor(0).sum(1),
        )


def check_config(config: Any) -> tuple[Any, Any]:
    """The method and its traits. Raises UserError for options of verl that contradict one another or the method."""
    name, loss = str(config.algorithm.adv_estimator), str(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    if name != loss or not name.startswith(ours.PREFIX):
        raise UserError(
            f"algorithm.adv_estimator={name} and actor.policy_loss.loss_mode={loss} must name one method of postrl, "
            "since its weights ride in its advantages"
        )
    method, traits = chosen(name.removeprefix(ours.PREFIX))
    actor, data = config.actor_rollout_ref.actor, settings().data
    if config.algorithm.use_kl_in_reward and data.rewards is not None:
        raise UserError(
            "algorithm.use_kl_in_reward changes verl's score, which data.rewards of POSTRL_VERL replaces: use "
            "actor.use_kl_loss"
        )
    if actor.shuffle and traits.base is None:
        raise UserError(f"method {method.name} weighs by what an update holds: set actor.shuffle=False")
    if "step_rewards" in method.needs and data.step_rewards is None:
        raise UserError(f"method {method.name} needs rewards of steps: name them in data.step_rewards of POSTRL_VERL")
    return method, traits


def check_rows(config: Any, method: Any) -> None:
    """Raises UserError for what cannot be right where an agent loop gave several rows for one answer."""
    if method.atom != "row":
        raise UserError(
            f"method {method.name} needs whole answers in a pass, but an agent loop gave one in several rows"
        )
    if config.algorithm.use_kl_in_reward:
        raise UserError("algorithm.use_kl_in_reward would count the last row of an answer alone: use actor.use_kl_loss")


def answers_of(data: Any) -> Answers:
    """verl's ragged rows, padded: prompts on the left, answers on the right."""
    prompts, lengths = data["prompts"].to_padded_tensor(0), data["prompts"].offsets().diff()
    flipped = torch.arange(prompts.shape[1]) >= prompts.shape[1] - lengths[:, None]  # padding goes to the left
    responses, written = data["responses"].to_padded_tensor(0), data["responses"].offsets().diff()
    left = torch.zeros_like(prompts).masked_scatter(flipped, data["prompts"].values())
    sampled = data["response_mask"].to_padded_tensor(0).bool()

    def known(name: str) -> Tensor | None:
        return data[name].to_padded_tensor(0.0) if name in data else None

    return Answers(
        prompt_ids=left,
        prompt_mask=flipped,
        completion_ids=responses,
        completion_mask=torch.arange(responses.shape[1]) < written[:, None],
        sampled=sampled,
        logp_old=known("old_log_probs"),
        logp_sampler=known("rollout_log_probs"),
        logp_ref=known("ref_log_prob"),
    )


def register() -> None:
    """`postrl_<mode>` for every trainer that verl has registered."""
    trainers = importlib.import_module("verl.trainer.ppo.v1.trainer_base")
    importlib.import_module("verl.trainer.ppo.v1")
    for mode, kind in list(trainers.TRAINER_REGISTRY.items()):
        if not mode.startswith(ours.PREFIX):
            name = f"{ours.PREFIX}{mode}"
            trainers.register_trainer(name)(type(f"Method{kind.__name__}", (MethodCredit, kind), {}))
