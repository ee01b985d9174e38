"""verl's own code over the answers of a case: its trainer's advantage step, dispatcher and registry, its `ppo_loss` and
`agg_loss`, per rank and micro-batch, on log-probabilities of a tiny model.

What is replaced: the queue that holds the rows between its processes is a dictionary here, and ranks take turns.

verl is imported when a test asks for it: the import takes half a minute.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conformance.cases import SIZE, Case, Done
from postrl.adapters import verl_settings, verl_trainer
from postrl.adapters.verl_settings import Data, Settings

PADDING = "pad" + 32 * "0"
LONGEST = 10  # rollout.response_length: an answer of as many tokens counts as cut
DATA = Data(rewards={"correct": 1.0, "form": 0.5}, groupings={"answer": "answer"}, step_rewards="steps")


@dataclass(frozen=True)
class Run:
    """updates: loss and gradient. minis: units of each. weights: the model's, before each. rows: what verl stored."""

    updates: list[Done]
    minis: list[list[int]]
    weights: list[dict[str, Tensor]]
    rows: Any
    metrics: dict[str, object]


class Queue:
    """The part of transfer_queue that the advantage step calls."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def kv_batch_get(self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> Any:
        return self.rows.select(*[name for name in select_fields if name in self.rows])

    def kv_batch_put(self, keys: Sequence[str], partition_id: str, fields: Any) -> Any:
        self.rows.update(fields)
        return fields


def model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def predicted(policy: Any, prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> Tensor:
    """log π of the next token at every position of [prompt, answer], ragged, the way verl's engines give it."""
    found = []
    for prompt, response in zip(prompts, responses, strict=True):
        ids = torch.cat([prompt, response])
        logits = policy(input_ids=ids[None]).logits[0]
        found.append(torch.log_softmax(logits, -1).gather(1, ids.roll(-1)[:, None])[:, 0])
    return torch.nested.as_nested_tensor(found, layout=torch.jagged)


def stored(case: Case, policy: Any, order: Sequence[int], alone: Sequence[int] = ()) -> Any:
    """The rows as verl's agent loop and its old_log_prob step leave them; the score counts a missing reward as 0.

    alone: units that have a prompt to themselves.
    """
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict
    from verl.workers.utils.padding import response_from_nested

    rows = []
    for unit in order:
        answer = case.answers[unit % len(case.answers)]  # beyond them: a row that verl adds to fill a batch
        if unit >= len(case.answers):
            answer = replace(answer, sampled=[0] * len(answer.tokens), rewards=dict.fromkeys(answer.rewards, 0.0))
        mask = torch.tensor(answer.sampled, dtype=torch.int64)
        scores = torch.zeros(len(mask))
        scores[-1] = sum(w * (answer.rewards[name] or 0.0) for name, w in (("correct", 1.0), ("form", 0.5)))
        info = {**answer.rewards, "answer": answer.tokens[0] % 3, "steps": answer.steps}
        uid = f"alone{unit}" if unit in alone else f"prompt{unit // SIZE}"
        rows.append(
            {
                "uid": uid if unit < len(case.answers) else PADDING,
                "prompts": torch.tensor(case.prompts[unit // SIZE % len(case.prompts)]),
                "responses": torch.tensor(answer.tokens),
                "response_mask": mask,
                "loss_mask": mask,
                "rm_scores": scores,
                "extra_fields": {"reward_extra_info": info},
            }
        )
    found = list_of_dict_to_tensordict(rows)
    with torch.no_grad():
        old = predicted(policy, found["prompts"].unbind(), found["responses"].unbind())
    found["old_log_probs"] = response_from_nested(old, found["response_mask"])
    return found


def configuration(name: str, mini: int, loss: str | None = None, **changes: object) -> Any:
    """verl's own configuration file with what a run needs; changes are dotted keys with __ for dots."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer")
    settings = {
        "algorithm.adv_estimator": name,
        "actor_rollout_ref.actor.policy_loss.loss_mode": loss or name,
        "actor_rollout_ref.actor.ppo_mini_batch_size": mini,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
        "actor_rollout_ref.rollout.n": 1,  # verl's size of an update in rows is the product of both
        "actor_rollout_ref.rollout.response_length": LONGEST,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    for key, value in settings.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


def trainer(config: Any, ranks: int) -> Any:
    """verl's synchronous trainer, ours joined in, without its workers."""
    from verl.trainer.ppo.v1 import get_trainer_cls

    made = object.__new__(get_trainer_cls(config.trainer.v1.trainer_mode))
    made.config = config
    made.actor_rollout_wg = type("Workers", (), {"_dispatch_info": {"actor": list(range(ranks))}})()
    if isinstance(made, verl_trainer.MethodCredit):
        made.method, made.traits = verl_trainer.check_config(config)
    return made


def credited(config: Any, rows: Any, ranks: int, monkeypatch: Any) -> dict[str, object]:
    """verl's advantage step on stored rows; they hold advantages afterwards."""
    import transfer_queue
    from verl.trainer.ppo.v1 import trainer_base

    queue = Queue(rows)
    for place in (transfer_queue, trainer_base.tq):
        monkeypatch.setattr(place, "kv_batch_get", queue.kv_batch_get)
        monkeypatch.setattr(place, "kv_batch_put", queue.kv_batch_put)
    keys = [f"{uid}_{place}_0" for place, uid in enumerate(rows.get("uid").tolist())]
    metrics: dict[str, object] = {}
    meta = transfer_queue.KVBatchMeta(partition_id="train", keys=keys, tags=[{} for _ in keys])
    trainer(config, ranks)._compute_advantage(meta, metrics)
    return metrics


def dispatched(config: Any, rows: Any) -> dict[str, object]:
    """verl's dispatcher with all that its old trainer keeps beside the rows."""
    import numpy as np
    from tensordict import TensorDict
    from verl.protocol import DataProto
    from verl.trainer.ppo.ray_trainer import compute_advantage
    from verl.workers.utils.padding import response_to_nested

    names = ("prompts", "responses", "response_mask", "rm_scores", "old_log_probs")
    batch = {name: rows[name].to_padded_tensor(0) for name in names}
    real = [rows[name].offsets().diff()[:, None] > torch.arange(batch[name].shape[1]) for name in names[:2]]
    batch |= {"attention_mask": torch.cat(real, 1), "token_level_rewards": batch["rm_scores"]}
    infos = [found["reward_extra_info"] for found in rows.get("extra_fields").tolist()]
    columns = {"uid": np.array(rows.get("uid").tolist(), dtype=object)}
    columns |= {name: np.array([info[name] for info in infos]) for name in ("correct", "form")}
    data = DataProto(TensorDict(batch, batch_size=len(rows)), columns)
    data = compute_advantage(
        data,
        config.algorithm.adv_estimator,
        norm_adv_by_std_in_grpo=config.algorithm.get("norm_adv_by_std_in_grpo", True),
        config=config.algorithm,
    )
    rows["advantages"] = response_to_nested(data.batch["advantages"], rows["response_mask"])
    return {}


def minis(rows: int, ranks: int, mini: int, micro: int) -> Iterator[list[list[Tensor]]]:
    """For each update, for each rank, its micro-batches, dealt by verl's own iterator."""
    from verl.utils import tensordict_utils as tu

    shares = torch.arange(rows).chunk(ranks)
    iterators = [
        tu.make_iterator(
            tu.get_tensordict({"row": share.clone()}), mini_batch_size=mini // ranks, epochs=1, seed=1 + rank
        )
        for rank, share in enumerate(shares)
    ]
    for parts in zip(*iterators, strict=True):
        yield [list(part["row"].split(micro)) for part in parts]


def prepared(
    case: Case,
    folder: Path,
    name: str,
    monkeypatch: Any,
    settings: Settings | None = None,
    mini: int = 8,
    ranks: int = 1,
    order: Sequence[int] | None = None,
    loss: str | None = None,
    legacy: bool = False,
    metrics: dict[str, object] | None = None,
    alone: Sequence[int] = (),
    **changes: object,
) -> tuple[Any, Any]:
    """Rows with advantages, and verl's configuration. order: units of the rows. legacy: advantages by the dispatcher
    alone, as in verl's old trainer. metrics: what the step would log is added to it. alone: see `stored`."""
    monkeypatch.setattr(verl_settings, "settings", lambda: settings or Settings(data=DATA))
    monkeypatch.setattr(verl_trainer, "settings", verl_settings.settings)
    rows = stored(case, model(folder), range(len(case.answers)) if order is None else order, alone)
    config = configuration(name, mini, loss, **{"trainer__v1__trainer_mode": "postrl_sync", **changes})
    found = dispatched(config, rows) if legacy else credited(config, rows, ranks, monkeypatch)
    if metrics is not None:
        metrics.update(found)
    return rows, config


def train(
    case: Case,
    folder: Path,
    name: str,
    monkeypatch: Any,
    settings: Settings | None = None,
    mini: int = 8,
    micro: int = 3,
    ranks: int = 1,
    rate: float = 1.0,
    order: Sequence[int] | None = None,
    loss: str | None = None,
    legacy: bool = False,
    **changes: object,
) -> Run:
    """One rollout batch, trained on once, by plain gradient descent. name, loss: registered in verl; the rest as in
    `prepared`."""
    from verl.utils import tensordict_utils as tu
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.utils.losses import ppo_loss

    order = range(len(case.answers)) if order is None else order
    where = {"order": order, "mini": mini, "ranks": ranks, "loss": loss, "legacy": legacy}
    metrics: dict[str, object] = {}
    rows, config = prepared(case, folder, name, monkeypatch, settings, metrics=metrics, **where, **changes)
    policy = model(folder)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    run = Run([], [], [], rows, metrics)
    for shares in minis(len(rows), ranks, mini, micro):
        everything = torch.cat([part for share in shares for part in share])
        run.minis.append(sorted(order[i] for i in everything.tolist() if order[i] < len(case.answers)))
        run.weights.append({n: p.detach().clone() for n, p in policy.named_parameters()})
        tokens = sum(int(rows["loss_mask"][i].sum()) for i in everything.tolist())
        policy.zero_grad(set_to_none=False)
        total = 0.0
        for part in (part for share in shares for part in share):
            data = tu.index_select_tensor_dict(rows, part)
            tu.assign_non_tensor(data, dp_size=ranks, batch_num_tokens=tokens, global_batch_size=mini)
            output = {"log_probs": predicted(policy, data["prompts"].unbind(), data["responses"].unbind())}
            part_loss, _ = ppo_loss(actor, output, data)
            (part_loss / ranks).backward()  # data-parallel engines average over ranks
            total += float(part_loss.detach()) / ranks
        gradient = {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
        run.updates.append(Done(total, gradient))
        with torch.no_grad():
            for parameter in policy.parameters():
                if parameter.grad is not None:
                    parameter -= rate * parameter.grad
    return run
