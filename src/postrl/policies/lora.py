"""Low-rank adapters (LoRA, arXiv:2106.09685) on the decoder, in PEFT's files.

A target weight W [out, in] acts as W + (alpha / rank) · B A with A [rank, in] and B [out, rank]; only A and B train.
B starts at zero, so an adapted policy starts as its base.
"""

from dataclasses import dataclass

EVERY_PROJECTION = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LoRA:
    """What to adapt. `targets` are the last parts of the Hugging Face names of linear layers."""

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0  # of the adapter's input, in training only; sampling never has it
    targets: tuple[str, ...] = EVERY_PROJECTION
