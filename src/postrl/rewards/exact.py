"""Right or wrong: take the answer out of a text, then compare it with the truth.

An extraction is a function `text -> answer or None`; None means that there is no answer, which is wrong, not missing.
All of them take time linear in the text.
"""

import importlib.util
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

from postrl.errors import UserError

Extract = Callable[[str], str | None]

LONGEST = 1000  # characters of an answer; a longer one is wrong
_DIGITS = r"(?:[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?|\.[0-9]+)"  # ASCII only: ٣ and ³ are no numbers here
_IN_TEXT = re.compile(rf"(?:(?<![\w.)\]])-)?{_DIGITS}")  # a minus after a digit or bracket is an operator
_ALONE = re.compile(rf"([+-]?)\s*\$?\s*({_DIGITS})\.?")


def whole_text(text: str) -> str | None:
    """All of it, without white space at the ends."""
    return text.strip() or None


def last_number(text: str) -> str | None:
    """The last number that stands in the text, as in "4 + 3 = 7." -> "7"; commas between thousands are taken out."""
    found = _IN_TEXT.findall(text.replace("−", "-"))
    return found[-1].replace(",", "") if found else None


def tagged(text: str) -> str | None:
    """What the last `<answer>…</answer>` holds."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else text[start + len("<answer>") : end].strip() or None


def after_answer(text: str) -> str | None:
    """The rest of the line after the last "answer:" (in any case), without emphasis and full stop at the ends."""
    start = text.lower().rfind("answer:")
    if start < 0 or len(text.lower()) != len(text):  # a letter that changes length in lower case would move the place
        start = text.rfind("Answer:")
    if start < 0:
        return None
    line = text[start + len("answer:") :].lstrip().split("\n", 1)[0]
    return line.strip("* \t\r").rstrip(".").strip("* \t") or None


def boxed(text: str) -> str | None:
    """What the last complete `\\boxed{…}` holds, with braces inside it balanced."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place].strip() or None
    return None


EXTRACTIONS = {f.__name__: f for f in (last_number, tagged, boxed, after_answer, whole_text)}  # for options


def number(text: str) -> Fraction | None:
    """The exact value of a text that is one plain number ("-1,234.50", "$7", "3."); None if it is anything else."""
    match = _ALONE.fullmatch(text.strip().replace("−", "-")) if len(text) <= LONGEST else None
    if match is None:
        return None
    return Fraction(match.group(1) + match.group(2).replace(",", ""))


def same_answer(answer: str | None, truth: str) -> bool:
    """Whether an extracted answer equals the truth: the same text, the same plain number, or equal for math-verify.

    Never raises and never hangs on any answer: a comparison that takes more processor time or memory than it may
    (2 s, 2 GiB) counts as wrong, as does an answer of more than LONGEST characters. May be called from any thread.
    """
    if answer is None or len(answer) > LONGEST:
        return False
    if answer.strip() == truth.strip():
        return True
    mine, right = number(answer), number(truth)
    if mine is not None and right is not None:
        return mine == right
    answer, truth = (text.strip().strip("$").strip() for text in (answer, truth))
    if {"$", "\n"} & set(answer):
        return False  # several expressions: math-verify would pick the one that fits
    return _verifier.same(answer, truth)


class _MathVerifier:
    """One worker process, started when first needed and again when an answer has ended it."""

    def __init__(self, cpu_seconds: float = 2.0, memory_bytes: int = 2 << 30, wall_seconds: float = 60.0) -> None:
        self._limits, self._wall = (str(cpu_seconds), str(memory_bytes)), wall_seconds
        self._lock, self._process = threading.Lock(), None

    def same(self, answer: str, truth: str) -> bool:
        with self._lock:
            process = self._running()
            reply = self._exchange(process, json.dumps([answer, truth]) + "\n")
            if not reply:
                process.kill()
                process.wait()
                self._process = None
            return reply == "true"

    def _running(self) -> "subprocess.Popen[str]":
        if self._process is None:
            if importlib.util.find_spec("math_verify") is None:
                raise UserError("math-verify is not installed; run: pip install 'postrl[reasoning]'")
            worker = Path(__file__).with_name("math_worker.py")
            command = [sys.executable, "-P", str(worker), *self._limits]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            if self._exchange(process, "") != '"ready"':
                process.kill()
                raise UserError(f"math-verify does not start; its error stands above (command: {' '.join(command)})")
            self._process = process
        return self._process

    def _exchange(self, process: "subprocess.Popen[str]", line: str) -> str:
        """The worker's next line, or "" if it has ended; a worker that stays silent for too long is ended."""
        assert process.stdin is not None and process.stdout is not None
        alarm = threading.Timer(self._wall, process.kill)
        alarm.start()
        try:
            process.stdin.write(line)
            process.stdin.flush()
            return process.stdout.readline().strip()
        except BrokenPipeError:
            return ""
        finally:
            alarm.cancel()


_verifier = _MathVerifier()
