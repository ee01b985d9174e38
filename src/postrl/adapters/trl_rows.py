"""TRL's record of some answers, a dict of arrays, and rows of it."""

from typing import Any

from torch import Tensor

from postrl.adapters.arrays import Answers

Rows = dict[str, Any]  # tensors [n, ...], lists of n, or one number for all


def answers_of(found: Rows) -> Answers:
    completion = found["completion_mask"].bool()
    tools = found.get("tool_mask")
    return Answers(
        prompt_ids=found["prompt_ids"],
        prompt_mask=found["prompt_mask"].bool(),
        completion_ids=found["completion_ids"],
        completion_mask=completion,
        sampled=completion if tools is None else completion & tools.bool(),
        logp_old=found.get("old_per_token_logps"),
        logp_sampler=found.get("sampling_per_token_logps"),
        logp_ref=found.get("ref_per_token_logps"),
    )


def taken(found: Rows, index: Tensor) -> Rows:
    """The rows at `index`; what there is once for all stays."""

    def take(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[index] if value.dim() else value
        return [value[i] for i in index.tolist()] if isinstance(value, list) else value

    return {name: take(value) for name, value in found.items()}


def filled(x: Tensor, keep: Tensor) -> Tensor:
    """[kept rows, T] -> [rows, T], zero where not kept."""
    return x.new_zeros(len(keep), x.shape[1]).masked_scatter(keep[:, None].expand(-1, x.shape[1]), x)
