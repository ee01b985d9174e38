"""A script for torchrun: TRL with our method on several processes; rank 0 writes what each update was.

usage: trl_ranks.py MODEL OUT METHOD NAME=VALUE ... (options of GRPOConfig)
"""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from postrl.conformance import trl_side
from postrl.conformance.cases import make_case
from postrl.papers import method
from postrl.parallel import leave


def main(model: str, out: str, name: str, *settings: str) -> None:
    torch.set_num_threads(1)
    changes = {key: int(value) for key, value in (pair.split("=") for pair in settings)}
    args = trl_side.options(Path(out), **changes)
    run = trl_side.train(make_case(1, missing=0.15), Path(model), args, method(name))
    if os.environ["RANK"] == "0":
        for number, done in enumerate(run.updates):
            save_file(done.gradient, Path(out) / f"gradient_{number}.safetensors")
            save_file(run.weights[number], Path(out) / f"weights_{number}.safetensors")
        found = {"minis": run.minis, "losses": [done.loss for done in run.updates]}
        (Path(out) / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
