"""ReCo inside TRL: an ordinary GRPO script of TRL with two lines changed.

    python examples/trl_reco.py                          # a tiny random model, under a minute on a CPU
    python examples/trl_reco.py --model FOLDER_OR_NAME   # any causal language model with a chat template

Needs `pip install '.[trl]'` in the checkout, or `make venv` and `source .venv/bin/activate`. TRL writes to `--out`.
The task is a toy (answer with as many digits as possible), so that a reward can be seen to move with any model; replace
`digits` and `questions` by your own.
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import GRPOConfig

from postrl.adapters.trl import MethodTrainer  # instead of: from trl import GRPOTrainer
from postrl.papers.reco import reco

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def digits(completions, **columns) -> list[float]:
    """Share of digits among an answer's characters. A reward function as TRL calls it."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(character.isdigit() for character in text) / max(1, len(text)) for text in texts]


def questions() -> Dataset:
    asked = [f"Count from {n} to {n + 3}." for n in range(1, 9)]
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": question}] for question in asked]})


def tiny(folder: Path) -> str:
    """A random two-layer Llama with a tokenizer of one token per byte, as a folder."""
    set_seed(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = AutoConfig.for_model("llama", vocab_size=len(fast), num_hidden_layers=2, **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="ReCo inside TRL")
    parser.add_argument("--model", help="a Hugging Face folder or name; default: a tiny random model")
    parser.add_argument("--out", type=Path, default=Path("runs/trl_reco"), help="where TRL writes")
    parser.add_argument("--steps", type=int, default=40, help="updates")
    parser.add_argument("--learning-rate", type=float, default=1e-2, help="a real model wants about 1e-6")
    options = parser.parse_args()
    trainer = MethodTrainer(  # instead of: GRPOTrainer(
        method=reco(),
        model=options.model or tiny(options.out / "tiny_model"),
        args=GRPOConfig(
            output_dir=str(options.out),
            max_steps=options.steps,
            learning_rate=options.learning_rate,
            per_device_train_batch_size=16,  # answers of a pass
            gradient_accumulation_steps=1,  # passes of an update
            steps_per_generation=4,  # passes of a generation: four updates; ReCo's token level starts at the second
            num_generations=8,
            max_completion_length=16,
            logging_steps=4,
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),
        ),
        reward_funcs=digits,
        train_dataset=questions(),
    )
    trainer.train()
    reward = [round(entry["reward"], 3) for entry in trainer.state.log_history if "reward" in entry]
    print("share of digits, generation by generation:", *reward)


if __name__ == "__main__":
    main()
