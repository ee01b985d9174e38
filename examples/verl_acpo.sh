#!/usr/bin/env bash
# ACPO inside verl, on verl's own trainer, with GSM8K as verl prepares it.
#
#   examples/verl_acpo.sh                      # trains on the GPUs of this machine; without one, says what would run
#   MODEL=Qwen/Qwen3-1.7B examples/verl_acpo.sh trainer.total_epochs=3
#
# Needs postrl in verl's environment, which must be active (docs/verl.md), verl's own requirements (vLLM, flash attention;
# see verl's pages), and the data: `python examples/data_preprocess/gsm8k.py` in verl's repository writes ~/data/gsm8k.
# verl keeps no checkpoint unless told to: add trainer.save_freq=50, and they lie under checkpoints/. Its options are
# tested; the training itself was not run, for want of a GPU.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
DATA=${DATA:-$HOME/data/gsm8k}
GPUS=0
if LISTED=$(nvidia-smi --list-gpus 2> /dev/null); then # it may be there and fail
  GPUS=$(grep -c '^GPU' <<< "$LISTED" || true)
fi

# Options of the method: without the variable, its defaults. In verl ACPO is the released form, its widths those of a
# micro-batch. The variable also registers the trainer postrl_sync.
export POSTRL_VERL=${POSTRL_VERL:-'{"acpo": {"variant": "released"}}'}

COMMAND=(
  python -m verl.trainer.main_ppo
  trainer.v1.trainer_mode=postrl_sync
  algorithm.adv_estimator=postrl_acpo
  actor_rollout_ref.actor.policy_loss.loss_mode=postrl_acpo
  data.train_files="$DATA/train.parquet"
  data.val_files="$DATA/test.parquet"
  data.train_batch_size=128
  data.max_prompt_length=512
  data.max_response_length=1024
  actor_rollout_ref.model.path="$MODEL"
  actor_rollout_ref.actor.optim.lr=1e-6
  actor_rollout_ref.actor.ppo_mini_batch_size=32 # four updates per step: with one, ACPO is GRPO
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16
  actor_rollout_ref.rollout.name=vllm
  actor_rollout_ref.rollout.n=8
  actor_rollout_ref.rollout.tensor_model_parallel_size=1
  actor_rollout_ref.rollout.gpu_memory_utilization=0.5
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16
  trainer.n_gpus_per_node=$((GPUS > 0 ? GPUS : 1))
  trainer.nnodes=1
  trainer.total_epochs=1
  trainer.logger='["console"]'
  "$@"
)

if [ "$GPUS" -eq 0 ]; then
  echo "There is no GPU here, and verl samples and trains on GPUs. On a machine with one this would run:"
  echo
  printf 'export POSTRL_VERL=%q\n' "$POSTRL_VERL"
  printf '%q ' "${COMMAND[@]}"
  echo
  exit 0
fi
exec "${COMMAND[@]}"
