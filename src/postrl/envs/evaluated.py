"""Answers that a scorer of reasoning-gym hands to Python (`eval`, or sympy's `parse_expr`, which evaluates too).

What a model writes could then run as a program, or ask for 9**9**9. Only text that can be nothing but a list or
arithmetic gets there; any other is scored as an answer that cannot be read, by the scorer's own rule.
"""

import re

LISTS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
ARITHMETIC = frozenset({"countdown", "puzzle24"})
ALGEBRA = frozenset({"intermediate_integration", "polynomial_multiplication", "simple_integration"})

UNREADABLE = "?"  # a syntax error in Python
LONGEST = 1000  # characters
# No call, repetition or power, and no comprehension: `for` has no word boundary before it in "0for".
LIST = re.compile(r"(?:(?!for)[\w\s\[\],.'\"+-])*")
NUMBER = r"\d{1,20}(?:\.\d{1,20})?"
NUMBERS = re.compile(rf"(?:\s|{NUMBER}(?![\w.])|(?<!\*)\*(?!\*)|(?<!/)/(?!/)|[()+-])*", re.ASCII)
NAMES = "exp|log|ln|sqrt|sin|cos|tan|sec|csc|cot|asin|acos|atan|sinh|cosh|tanh|Abs|pi"
# A power has a name below it (a symbol: nothing is multiplied out), or, up to three times, a bracket under a digit.
POWER = r"\*\*"
TERMS = re.compile(
    rf"(?:\s|{NUMBER}(?![\w.])(?!\s*{POWER})|(?:{NAMES}|[A-Za-z])(?![\w.])(?:\s*{POWER}(?=\s*[\w(-]))?"
    rf"|\)\s*{POWER}\s*(?:\d|\(\d/\d\))(?![\w.])(?!\s*{POWER})|(?<!\*)\*(?!\*)|(?<!/)/(?!/)|[()+-])*",
    re.ASCII,
)
BRACKET_POWERS = re.compile(rf"\)\s*{POWER}")


def harmless(task: str, answer: str) -> bool:
    """Whether an answer to this task of reasoning-gym may be handed to its scorer."""
    if task not in LISTS | ARITHMETIC | ALGEBRA:
        return True
    if len(answer) > LONGEST:
        return False
    if task in LISTS:
        return LIST.fullmatch(answer) is not None
    if task in ARITHMETIC:
        return NUMBERS.fullmatch(answer) is not None
    return TERMS.fullmatch(answer) is not None and len(BRACKET_POWERS.findall(answer)) <= 3
