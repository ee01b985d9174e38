"""Stands in for vllm_worker.py: it speaks its lines, but its tokens follow from the request alone and its
log-probabilities from the weights in the folder. `engine` names the accidents that a test asks for.

usage: fake_vllm.py OPTIONS
"""

import hashlib
import json
import random
import sys
import time
from pathlib import Path


def tell(answer: dict) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def mark(folder: str) -> float:
    """A number in (−1, 0) that follows from the weights."""
    digest = hashlib.sha256()
    for file in sorted(Path(folder).glob("*.safetensors")):
        digest.update(file.read_bytes())
    return -int.from_bytes(digest.digest()[:4], "big") / 2**32


def complete(request: dict, logp: float, vocabulary: int) -> dict:
    numbers, tokens = random.Random(request["seed"]), []
    while len(tokens) < request["max_tokens"] and not (tokens and tokens[-1] in request["stop"]):
        tokens.append(numbers.randrange(vocabulary))
    return {
        "id": request["id"],
        "tokens": tokens,
        "logp": [logp * request["temperature"]] * len(tokens),
        "finished": tokens[-1] in request["stop"],
    }


def main(options: dict) -> None:
    print("fake engine", file=sys.stderr)
    accidents, waiting, logp, works = options["engine"], [], mark(options["model"]), 0
    vocabulary = json.loads(Path(options["model"], "config.json").read_text())["vocab_size"]
    tell({"vocabulary": vocabulary})
    while line := sys.stdin.readline():
        request = json.loads(line)
        if request["do"] == "load":
            assert not waiting
            logp = mark(request["folder"])
            tell({})
            continue
        works += 1
        if accidents.get("die") == works:
            print("no space left in the engine", file=sys.stderr)
            sys.exit(3)
        if accidents.get("sleep"):
            time.sleep(60)
        if "says" in accidents:
            sys.stdout.write(accidents["says"])
            sys.stdout.flush()
            continue
        waiting += request["requests"]
        waiting.sort(key=lambda each: each["id"])
        latest = waiting.pop()  # is finished first
        tell({"done": [complete(latest, float("nan") if accidents.get("nan") else logp, vocabulary)]})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
