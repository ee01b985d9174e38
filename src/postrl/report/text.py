"""Text that a model wrote, made fit to be shown; and the text of single tokens."""

import unicodedata
from collections.abc import Callable, Mapping, Sequence

from postrl.errors import UserError

Pieces = Callable[[Sequence[int]], list[str]]

KEPT = "\n\t"
TURNING = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")  # bidirectional classes


def visible(text: str) -> str:
    """The same text without invisible power: control characters, and those that turn the reading direction, are shown.

    Escaping for HTML is the template's; this is about what escaping does not reach (NUL, U+202E, lone surrogates).
    """
    return "".join(character if _harmless(character) else _picture(character) for character in text)


def _harmless(character: str) -> bool:
    if unicodedata.category(character) in ("Cc", "Cs"):
        return character in KEPT
    return unicodedata.bidirectional(character) not in TURNING


def _picture(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)  # the block of control pictures is in the order of the controls
    return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"


def pieces_of(configuration: Mapping[str, object]) -> Pieces:
    """The text of each token, by the run's tokenizer.

    The run's `characters` (an alphabet, see `policies.chat.Characters`) or its `model` says which. A tokenizer that
    cannot be had any more costs the report the text of its tokens only, so their numbers stand in.
    """
    alphabet, model = configuration.get("characters"), configuration.get("model")
    if isinstance(alphabet, str):
        table = ["⟨end⟩", *alphabet]
        return lambda tokens: [table[t] if 0 <= t < len(table) else numbered(t) for t in tokens]
    if isinstance(model, str):
        return _by_tokenizer(model)
    return lambda tokens: [numbered(t) for t in tokens]


def numbered(token: int) -> str:
    return f"⟨{token}⟩"


def _by_tokenizer(model: str) -> Pieces:
    from postrl.policies.chat import load_tokenizer
    from postrl.policies.loading import resolve

    try:
        tokenizer = load_tokenizer(resolve(model))
    except UserError as error:
        print(f"the report shows numbers instead of the text of tokens: {error}")
        return lambda tokens: [numbered(t) for t in tokens]
    return lambda tokens: [str(tokenizer.decode([t])) for t in tokens]
