"""Compares answers with math-verify in a process of its own; `rewards/exact.py` starts it. Lines of JSON in and out.

sympy can be made to compute for hours or to fill the memory by a few characters, and math-verify's own time limits need
the main thread. Here the kernel ends the process instead, also in the middle of C code. This file imports nothing of
postrl, so that it starts fast.
"""

import json
import logging
import resource
import signal
import sys


def main(cpu_seconds: float, memory_bytes: int) -> None:
    """Answer `[answer, truth]` lines with `true` or `false`; the first line out is `"ready"`."""
    from math_verify import parse, verify  # slow to import: the parent waits for "ready"

    logging.disable(logging.CRITICAL)  # math-verify warns that its own time limits are off
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the default action ends the process
    print('"ready"', flush=True)
    for line in sys.stdin:
        answer, truth = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # processor time: a busy machine does not change the verdict
        try:
            right, mine = (parse(f"${text}$", parsing_timeout=None) for text in (truth, answer))  # type: ignore[arg-type]
            same = bool(right and mine and verify(right, mine, timeout_seconds=None))
        except Exception:  # noqa: BLE001 - whatever sympy raises over a model's text, it is no right answer
            same = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(same), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
