"""The models and prompts of the rows: Hugging Face folders, so that every side loads the same files."""

from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from benchmarks.work import Conditions, Job, Work
from postrl.errors import UserError
from postrl.files import whole_folder
from postrl.policies.chat import ChatTemplate, PlainText
from postrl.policies.checkpoint_io import cache
from postrl.policies.decoder import Decoder
from postrl.policies.decoder_config import DecoderConfig
from postrl.policies.loading import resolve

# 3.0 M parameters and one token per byte: an arithmetic-free model whose time is not only matrix products.
CHARACTERS = DecoderConfig(
    vocabulary=258, hidden=192, layers=5, heads=6, kv_heads=6, head_size=32, intermediate=768, context=4096
)
TRIES = 200
QUESTION = "What is {a} + {b}? Answer in one short sentence."
WORDS = (
    *("time", "people", "water", "house", "light", "number", "world", "school", "family", "music", "garden", "story"),
    *("river", "paper", "market", "window", "morning", "letter", "summer", "winter", "mother", "father", "doctor"),
    *("king", "army", "ship", "horse", "road", "city", "field", "stone", "tree", "bird", "fire", "wind", "moon"),
)


def folder(model: str) -> Path:
    """Of "smollm2", "characters" (made on first use), or whatever `postrl.policies.loading.resolve` knows."""
    if model != "characters":
        return resolve(model)
    place = cache() / "benchmarks" / "characters-3m"
    if not place.exists():
        with whole_folder(place) as beside:
            Decoder.random(CHARACTERS, seed=0).save(beside)
            _bytes_tokenizer().save_pretrained(beside)
    return place


def _bytes_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and two more: the end of a text and padding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    tokenizer = Tokenizer(tokenizer_models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<end>", "<pad>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


def job(work: Work, conditions: Conditions, scratch: Path) -> Job:
    """The job of a row: its model and its prompts, as text and as tokens."""
    if work.kind == "statistics":
        return Job(work, conditions, scratch=str(scratch))
    place = folder(work.model)
    if work.natural:
        texts = [QUESTION.format(a=3 + 2 * i, b=11 + 3 * i) for i in range(work.prompts)]
        chat = ChatTemplate.load(place)
        tokens = [chat.prompt([{"role": "user", "content": text}]) for text in texts]
    else:
        texts, tokens = exact_prompts(PlainText.load(place), work.prompts, work.prompt_tokens)
    given = _given(work) if work.kind == "agreement" else []
    return Job(work, conditions, str(place), str(scratch), texts, tokens, given)


def exact_prompts(renderer: PlainText, count: int, length: int) -> tuple[list[str], list[list[int]]]:
    """Different texts that have exactly `length` tokens. Raises UserError if this tokenizer never gives that number."""
    texts: dict[str, list[int]] = {}
    for number in range(TRIES * count):
        words = " ".join(np.random.default_rng(number).choice(WORDS, size=length + 8).tolist())
        text = str(renderer.tokenizer.decode(renderer.prompt([{"role": "user", "content": words}])[:length]))
        tokens = renderer.prompt([{"role": "user", "content": text}])
        if len(tokens) == length:
            texts[text] = tokens
        if len(texts) == count:
            return list(texts), list(texts.values())
    raise UserError(f"no {count} texts of {length} tokens were found for this tokenizer; choose another prompt_tokens")


def _given(work: Work) -> list[list[list[int]]]:
    """Completions of lengths new_tokens/2 … new_tokens, the same in every run, without the ids of special tokens."""
    rng = np.random.default_rng(7)
    lengths = rng.integers(max(1, work.new_tokens // 2), work.new_tokens + 1, size=(work.prompts, work.completions))
    return [[rng.integers(20, 250, size=n).tolist() for n in row] for row in lengths]
