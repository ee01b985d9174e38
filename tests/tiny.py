"""Small policies for tests."""

from dataclasses import replace

import torch

from postrl.policies.decoder import Decoder
from postrl.policies.decoder_config import DecoderConfig

TINY = DecoderConfig(
    vocabulary=32, hidden=32, layers=2, heads=4, kv_heads=2, head_size=8, intermediate=64, context=256, tied=True
)


def tiny_decoder(vocab: int = 32, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object) -> Decoder:
    """A decoder of two layers and 32 hidden units with random weights; `changes` are fields of DecoderConfig."""
    return Decoder.random(replace(TINY, vocabulary=vocab, **changes), seed, dtype)
