"""Renderers: messages -> tokens and back. A turn that exists as tokens is never tokenised again.

Three of them: `ChatTemplate` (a Hugging Face tokenizer with a chat template), `PlainText` (the same tokenizer without
one, for base models) and `Characters` (one token per character, for toy models).

What a message says is data. A content that spells a control token (`<|im_end|>`) is encoded as the characters it is
made of, so an environment, a data set or the policy itself cannot close a turn or open another one.
"""

import json
import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

import jinja2
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from postrl.errors import UserError
from postrl.policies import checkpoint_io as files
from postrl.rollout import Message

_TURN = "\U000ffffd"  # a private character that stands for a sampled turn while the template is rendered
_PRIVATE = range(0xF0000, 0xFFFF0)  # where the stand-ins for control strings inside contents come from


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The fast tokenizer of a Hugging Face folder. Raises UserError naming the folder if there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise UserError(f"{folder} has no tokenizer that can be read ({_line(error)}); copy tokenizer.json and "
                        "tokenizer_config.json of the original model there") from error  # fmt: skip
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(f"the tokenizer of {folder} has no tokenizer.json (fast tokenizer); convert it with "
                        "transformers' save_pretrained first")  # fmt: skip
    return tokenizer


def end_tokens(folder: Path) -> frozenset[int]:
    """Every id that generation_config.json, else config.json, calls an end of sequence: one, several or none.

    Models with several (an end of text and an end of turn) name only one of them in the tokenizer.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.exists():
            continue
        found = files.read_json(path).get("eos_token_id")
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()


class _Text:
    """A tokenizer that never turns data into control tokens.

    `control` are ids of added tokens. They are produced from the template's own text only.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, control: Iterable[int]) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self.control = frozenset(control)
        self.ids = {added[i].content: i for i in self.control}
        strings = sorted(self.ids, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, strings)) or r"(?!)")
        # Copies: some tokenizers are saved with truncation or padding on, and transformers sets both in place.
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state["truncation"] = state["padding"] = None
        self._own = Tokenizer.from_str(json.dumps(state))
        # The same vocabulary with exactly the control strings as ordinary text.
        for token in state["added_tokens"]:
            token["special"] = token["id"] in self.control
        self._plain = Tokenizer.from_str(json.dumps(state))
        self._plain.encode_special_tokens = True

    def own(self, text: str) -> list[int]:
        """Text -> ids as the tokenizer has it, control tokens included; nothing is added."""
        return self._own.encode(text, add_special_tokens=False).ids

    def words(self, tokens: Sequence[int]) -> str:
        """Ids -> text, control tokens included."""
        return self._own.decode(list(tokens), skip_special_tokens=False)

    def plain(self, text: str) -> list[int]:
        """Data -> ids without a control token. Raises UserError if this vocabulary cannot spell it otherwise."""
        ids = self._plain.encode(text, add_special_tokens=False).ids
        if not self.control.isdisjoint(ids):
            found = self.words([i for i in ids if i in self.control])
            raise UserError(f"a message contains {found!r}, which this tokenizer can only write as a control token; "
                            "remove it from the data")  # fmt: skip
        return ids

    def hide(self, messages: Sequence[Message]) -> tuple[list[Message], dict[str, str]]:
        """Messages in which private characters stand for control strings, and what each of them stands for."""
        contents = [message["content"] for message in messages]
        for message in messages:
            if self.pattern.search(message["role"]):
                raise UserError(f"the role {message['role']!r} contains a control token; roles are user, assistant, …")
        found = sorted({s for content in contents for s in self.pattern.findall(content)})
        used = {ord(c) for content in contents for c in content if ord(c) in _PRIVATE}
        free = (chr(code) for code in _PRIVATE if code not in used)
        stand_in = dict(zip(found, free, strict=False))
        hidden = [m | {"content": self.pattern.sub(lambda s: stand_in[s[0]], m["content"])} for m in messages]
        return hidden, {character: string for string, character in stand_in.items()}

    def encode(self, rendered: str, hidden: dict[str, str]) -> list[int]:
        """What the template rendered -> ids. Equal to the tokenizer's own result unless a content would add a control
        token; then the template's control tokens are placed by hand and everything between is encoded as text."""
        if not hidden:
            ids = self.own(rendered)
            if [i for i in ids if i in self.control] == [self.ids[s] for s in self.pattern.findall(rendered)]:
                return ids
        return self.encode_pieces(rendered, hidden)

    def encode_pieces(self, rendered: str, hidden: dict[str, str]) -> list[int]:
        """The careful path of `encode`."""
        ids: list[int] = []
        end = 0
        restore = str.maketrans(hidden)
        for match in self.pattern.finditer(rendered):
            ids += [*self.plain(rendered[end : match.start()].translate(restore)), self.ids[match[0]]]
            end = match.end()
        return ids + self.plain(rendered[end:].translate(restore))

    def decode(self, tokens: Sequence[int], stop: frozenset[int]) -> str:
        """Text without the stop tokens at its end."""
        end = len(tokens)
        while end and tokens[end - 1] in stop:
            end -= 1
        return self.words(tokens[:end])


class ChatTemplate:
    """A tokenizer's chat template as a `Renderer`.

    stop: the end tokens given, the tokenizer's own and the template's end of a turn.
    rewrites_history: the template drops parts of earlier assistant turns (Qwen3 drops their thinking). `extend` does
    not follow it there: what was sampled stays in the context token for token, because training scores that context.

    Raises UserError if there is no template, or if its turns have no end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stop: Iterable[int] = ()) -> None:
        if not tokenizer.chat_template:
            raise UserError(f"the tokenizer of {tokenizer.name_or_path} has no chat template; use the plain-text "
                            "renderer (renderer='plain') or a model trained for chat")  # fmt: skip
        self.tokenizer = tokenizer
        turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _TURN}]
        opening = self._render([*turn, {"role": "user", "content": "b"}], generate=True)
        added = tokenizer.added_tokens_decoder
        control = [i for i, token in added.items() if token.special or token.content in opening]
        self._text = _Text(tokenizer, control)
        ends = [*_end(tokenizer), *stop]
        last = self._render(turn, generate=False).partition(_TURN)[2]
        turn_end = self._terminator(last, opening.partition(_TURN)[2], ends)
        self._turn_end = [*turn_end, *ends][:1]  # the one an answer of the training data ended with
        self._stop = frozenset([*ends, *turn_end])
        thinking = "<think>\nc\n</think>\n\nd"
        earlier = [turn[0], {"role": "assistant", "content": thinking}, {"role": "user", "content": "b"}]
        self.rewrites_history = thinking not in self._render(earlier, generate=True)
        self._warned = False

    @classmethod
    def load(cls, folder: Path) -> Self:
        """From a Hugging Face folder. Raises UserError as the constructor does, or if the tokenizer cannot be read."""
        return cls(load_tokenizer(folder), end_tokens(folder))

    @property
    def stop(self) -> frozenset[int]:
        """Every token that ends a completion."""
        return self._stop

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The conversation and the opening of the assistant's turn."""
        hidden, stands_for = self._text.hide(messages)
        return self._text.encode(self._render(hidden, generate=True), stands_for)

    def extend(self, context: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """What follows the sampled turn at the end of `context`: the end of that turn if it was cut off, `messages`,
        and the opening of the next assistant turn.

        The template is rendered around a stand-in for the turn, so neither the turn nor what is before it is read.
        """
        if self.rewrites_history and not self._warned:
            self._warned = True
            logging.getLogger(__name__).warning(
                "the chat template removes parts of earlier assistant turns; they are kept here as they were sampled"
            )
        hidden, stands_for = self._text.hide(messages)
        turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _TURN}]
        suffix = self._render([*turn, *hidden], generate=True).partition(_TURN)[2]
        ids = self._text.encode(suffix, stands_for)
        return ids[self._ending(ids) :] if context and context[-1] in self._stop else ids

    def answer(self, text: str) -> list[int]:
        """The text and the end of the turn; a control token's name in it is spelt out."""
        return self._text.plain(text) + self._turn_end

    def text(self, tokens: Sequence[int]) -> str:
        """Readable text of a completion, without stop tokens at its end."""
        return self._text.decode(tokens, self._stop)

    def save(self, folder: Path) -> None:
        """Tokenizer and template, in Hugging Face's files. Stop ids beyond them belong to generation_config.json."""
        self.tokenizer.save_pretrained(folder)

    def _render(self, messages: Sequence[Message], generate: bool) -> str:
        try:
            rendered = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generate
            )
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            roles = ", ".join(message.get("role", "no role") for message in messages)
            raise UserError(f"the chat template of {self.tokenizer.name_or_path} refuses messages with the roles "
                            f"{roles} ({_line(error)})") from error  # fmt: skip
        return str(rendered)

    def _terminator(self, last: str, between: str, ends: Sequence[int]) -> list[int]:
        """The id that ends a turn: the first added token after it, or, where the opening of the next turn serves as
        the end (GLM), nothing beyond what is already called an end."""
        added = self.tokenizer.added_tokens_decoder
        ids = self._text.own(last)
        first = next((n for n, i in enumerate(ids) if i in added), None)
        if first is not None and not self._text.words(ids[:first]).strip():
            return [ids[first]]
        following = self._text.own(between)
        if following and following[0] in ends:
            return []
        raise UserError(f"the chat template of {self.tokenizer.name_or_path} has no token that ends an assistant turn, "
                        "so the model cannot learn to stop; add the end token to the template")  # fmt: skip

    def _ending(self, ids: Sequence[int]) -> int:
        """How many ids at the start of a suffix only end the turn before it."""
        first = next((n for n, i in enumerate(ids) if i in self._stop), None)
        return 0 if first is None or self._text.words(ids[:first]).strip() else first + 1


class PlainText:
    """No template: contents one after the other, roles unread; for base models and few-shot prompts.

    A sampled turn ends with exactly one end token: where it was cut off, `extend` adds it.
    Raises UserError if neither the tokenizer nor `stop` names an end token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stop: Iterable[int] = ()) -> None:
        self.tokenizer = tokenizer
        self._ends = [*_end(tokenizer), *stop]
        if not self._ends:
            raise UserError(f"the tokenizer of {tokenizer.name_or_path} names no end-of-sequence token, so no answer "
                            "could end; set eos_token in its tokenizer_config.json")  # fmt: skip
        self._text = _Text(tokenizer, [i for i, token in tokenizer.added_tokens_decoder.items() if token.special])
        opening = tokenizer.backend_tokenizer.encode("").ids[:1]
        self._start = opening if opening == [tokenizer.bos_token_id] else []

    @classmethod
    def load(cls, folder: Path) -> Self:
        """From a Hugging Face folder. Raises UserError as the constructor does, or if the tokenizer cannot be read."""
        return cls(load_tokenizer(folder), end_tokens(folder))

    @property
    def stop(self) -> frozenset[int]:
        """Every token that ends a completion."""
        return frozenset(self._ends)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The start token, if this tokenizer uses one, and the contents."""
        return self._start + self._text.plain("".join(message["content"] for message in messages))

    def extend(self, context: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """The missing end of a turn that was cut off, and the contents."""
        end = [] if context and context[-1] in self.stop else self._ends[:1]
        return end + self._text.plain("".join(message["content"] for message in messages))

    def answer(self, text: str) -> list[int]:
        """The text and the end of the turn; a control token's name in it is spelt out."""
        return self._text.plain(text) + self._ends[:1]

    def text(self, tokens: Sequence[int]) -> str:
        """Readable text of a completion, without stop tokens at its end."""
        return self._text.decode(tokens, self.stop)

    def save(self, folder: Path) -> None:
        """The tokenizer, in Hugging Face's files."""
        self.tokenizer.save_pretrained(folder)


class Characters:
    """One token per character of `alphabet`, from 1 on; 0 ends a turn. For toy models; no tokenizer files."""

    end = 0

    def __init__(self, alphabet: str) -> None:
        if len(set(alphabet)) != len(alphabet):
            raise UserError(f"the alphabet {alphabet!r} names a character twice")
        self.alphabet = alphabet
        self._ids = {character: number for number, character in enumerate(alphabet, 1)}

    @classmethod
    def load(cls, folder: Path) -> Self:
        """What `save` wrote. Raises UserError naming the file if it is missing or damaged."""
        path = folder / "characters.json"
        try:
            return cls(json.loads(path.read_text(encoding="utf-8"))["alphabet"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is not an alphabet of characters ({_line(error)})") from error

    @property
    def size(self) -> int:
        """Size of the vocabulary, with the end token."""
        return len(self.alphabet) + 1

    @property
    def stop(self) -> frozenset[int]:
        """The end token."""
        return frozenset([self.end])

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The contents one after the other; roles are not read. Raises UserError naming an unknown character."""
        return self._encode("".join(message["content"] for message in messages))

    def _encode(self, text: str) -> list[int]:
        unknown = next((character for character in text if character not in self._ids), None)
        if unknown is not None:
            raise UserError(f"{text!r} contains {unknown!r}, which is not in the alphabet {self.alphabet!r}")
        return [self._ids[character] for character in text]

    def extend(self, context: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """The missing end of a turn that was cut off, and the contents."""
        end = [] if context and context[-1] == self.end else [self.end]
        return end + self.prompt(messages)

    def answer(self, text: str) -> list[int]:
        """The characters and the end token. Raises UserError naming an unknown character."""
        return [*self._encode(text), self.end]

    def text(self, tokens: Sequence[int]) -> str:
        """The characters; end tokens are left out."""
        return "".join(self.alphabet[token - 1] for token in tokens if token != self.end)

    def save(self, folder: Path) -> None:
        """One JSON file, characters.json."""
        (folder / "characters.json").write_text(json.dumps({"alphabet": self.alphabet}), encoding="utf-8")


def _end(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The tokenizer's end-of-sequence token, if it has one."""
    end = tokenizer.eos_token_id
    return [end] if isinstance(end, int) else []


def _line(error: BaseException) -> str:
    """An error on one line, for the middle of a sentence."""
    return " ".join(str(error).split())[:200] or type(error).__name__
