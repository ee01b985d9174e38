#!/usr/bin/env bash
# One run in two processes on one machine: started by accelerate, stopped half way, gone on with by torchrun; and the
# same run in one process, whose rewards are the same. A few minutes on two processor cores; it downloads nothing.
#
#   examples/accelerate_two_processes.sh                 # results under runs/two_processes
#   examples/accelerate_two_processes.sh FOLDER --method reco
#
# Start it with the environment active (`source .venv/bin/activate`). The folder must hold no runs yet.
set -euo pipefail

OUT=${1:-runs/two_processes}
shift || true
STEPS=${STEPS:-8}
export OMP_NUM_THREADS=1 # a process per core; more threads than cores would wait for one another

RECIPE=(-m postrl.cli train copy_task --groups-per-step 8 --updates 2 --learning-rate 0.2 "$@")
ACCELERATE=(accelerate launch --cpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no
  --main_process_port 0) # an accelerate configuration file (`accelerate config`) replaces all of these

"${ACCELERATE[@]}" "${RECIPE[@]}" --out "$OUT/two" --steps $((STEPS / 2))
torchrun --standalone --nproc-per-node 2 "${RECIPE[@]}" --out "$OUT/two" --steps "$STEPS" --resume
python "${RECIPE[@]}" --out "$OUT/one" --steps "$STEPS"

python - "$OUT" <<'PYTHON'
import sys
from pathlib import Path

from postrl.record import read_metrics

one, two = (
    [line["reward"] for line in read_metrics(Path(sys.argv[1], name, "metrics.jsonl")) if "reward" in line]
    for name in ("one", "two")
)
print("step  one process  two processes")
for step, (a, b) in enumerate(zip(one, two, strict=True), 1):
    print(f"{step:4}  {a:11.4f}  {b:13.4f}")
sys.exit(any(abs(a - b) > 1e-6 for a, b in zip(one, two)))
PYTHON
