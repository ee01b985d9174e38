"""The loop: collect, credit, update, record. It knows no paper's name.

A step is one rollout batch and all its updates. What is computed once on the whole batch (advantages, group factors)
is computed here; what is computed once on a mini-batch (weights, observed statistics) in `optimise`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from postrl import checkpoint
from postrl.batch import Batch
from postrl.checkpoint import Progress, Stateful
from postrl.display import Display
from postrl.enrich import forward_all, reference_logp
from postrl.errors import UserError
from postrl.evaluate import Evaluation
from postrl.interrupt import Interrupt, memory_guard
from postrl.method import Method
from postrl.optimise import Seen, Trainer, update
from postrl.packing import mini_batches
from postrl.record import Metrics, open_run, write_rollouts
from postrl.rollout import Rollout, collate
from postrl.settings import Settings, learning_rate
from postrl.summary import step_metrics
from postrl.terms import reference_kl

Source = Callable[[int], list[Rollout]]
Enricher = Callable[[Batch], Batch]
Evaluate = Callable[[], Evaluation]
FREE = frozenset({"steps", "checkpoint_every", "evaluate_every", "warn_constant"})  # may change on resume


@dataclass(frozen=True)
class Result:
    """How a run ended and where its files are."""

    folder: Path
    progress: Progress
    status: Literal["finished", "interrupted"]


def train(
    method: Method,
    policy: nn.Module,
    source: Source,
    settings: Settings,
    folder: Path,
    *,
    reference: nn.Module | None = None,
    enrich: Sequence[Enricher] = (),
    evaluate: Evaluate | None = None,
    before: Evaluation | None = None,
    states: Mapping[str, Stateful] | None = None,
    parameters: Callable[[nn.Module], list[dict]] | None = None,
    describe: Mapping[str, object] | None = None,
    trackers: Sequence[str] = (),
    resume: bool = False,
    display: Display | None = None,
) -> Result:
    """Train `policy` by `method` on the rollouts of `source`, and leave a run in `folder`.

    source(step) gives the rollouts of a step: on-policy collection or a dataset. reference is a frozen policy for
    `kl_coef`. evaluate() measures the policy; `before` is its answer for the untrained policy if that is known already.
    The first k of its pass@k decides which checkpoint is the best. states join the checkpoint. parameters(policy)
    gives the optimiser's parameter groups, by default everything that requires a gradient. describe goes into
    `run.json`.
    SIGINT and SIGTERM finish the step, save, and return status "interrupted".

    Raises UserError for options that cannot be right, a folder that holds another run, a damaged checkpoint, a full
    disk, exhausted memory, or a gradient that is not finite; whatever was saved stays.
    """
    settings.check()
    configuration = {**(describe or {}), "method": method.name, **asdict(settings)}
    open_run(folder, configuration, resume, FREE)
    torch.manual_seed(settings.seed)
    accelerator = Accelerator(log_with=list(trackers) or None, project_dir=str(folder))
    if accelerator.num_processes > 1:
        raise UserError(f"this loop runs in one process, but {accelerator.num_processes} were launched: start it alone")
    groups = parameters(policy) if parameters else [{"params": [p for p in policy.parameters() if p.requires_grad]}]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True)
    everything = {"source": source, **(states or {})}
    stateful = {name: value for name, value in everything.items() if isinstance(value, Stateful)}
    saved = checkpoint.checkpoints(folder / "checkpoints")
    progress = checkpoint.restore(saved[-1], policy, optimizer, stateful) if resume and saved else Progress()
    if trackers:
        accelerator.init_trackers("postrl", config={k: str(v) for k, v in configuration.items()})
    loop = Loop(
        method=_with_reference(method, settings, reference),
        policy=accelerator.prepare_model(policy),
        source=source,
        settings=settings,
        folder=folder,
        reference=reference,
        enrich=enrich,
        accelerator=accelerator,
        optimizer=optimizer,
        states=stateful,
        metrics=Metrics(folder, progress.step if saved else -1),
        display=display or Display(settings.steps),
    )
    with loop.display:
        result = loop.run(progress, evaluate, before)
    accelerator.end_training()
    return result


def _with_reference(method: Method, settings: Settings, reference: nn.Module | None) -> Method:
    needs_reference = settings.kl_coef > 0 or "logp_ref" in method.needs
    if needs_reference and reference is None:
        raise UserError("option kl_coef (or the method) needs reference log-probabilities: give `train` a reference")
    if settings.kl_coef == 0:
        return method
    return method.plus(reference_kl(settings.kl_coef), needs=frozenset({"logp_ref"}))


@dataclass
class Loop:
    """One run. Everything here is fixed but what it points at."""

    method: Method
    policy: nn.Module
    source: Source
    settings: Settings
    folder: Path
    reference: nn.Module | None
    enrich: Sequence[Enricher]
    accelerator: Accelerator
    optimizer: torch.optim.Optimizer
    states: Mapping[str, Stateful]
    metrics: Metrics
    display: Display

    def run(self, progress: Progress, evaluate: Evaluate | None, before: Evaluation | None) -> Result:
        if evaluate is not None and progress.step == 0:
            progress = self._record_evaluation(progress, before if before is not None else evaluate())
        with Interrupt() as interrupt:
            while progress.step < self.settings.steps and not interrupt.asked:
                progress = self._guarded_step(progress)
                last = progress.step == self.settings.steps
                every = self.settings.evaluate_every
                if evaluate is not None and (last or (every and progress.step % every == 0)):
                    progress = self._record_evaluation(progress, evaluate())
                due = progress.step in (self.settings.steps, progress.best_step)
                if due or interrupt.asked or progress.step % self.settings.checkpoint_every == 0:
                    self._save(progress)
        done = progress.step == self.settings.steps
        if not done:
            self.display.say(f"stopped after step {progress.step}; go on with the same command and --resume")
        return Result(self.folder, progress, "finished" if done else "interrupted")

    def _guarded_step(self, progress: Progress) -> Progress:
        """A step; if its collection fails, the weights are still those of a whole step, so they are saved first."""
        start = time.monotonic()
        torch.manual_seed(int(np.random.SeedSequence([self.settings.seed, progress.step]).generate_state(1)[0]))
        with memory_guard(self.settings.token_budget):
            try:
                rollouts, batch, drawn = self._draw(progress)
            except Exception:
                if progress.step > 0:
                    self._save(progress)
                raise
            sampled = time.monotonic()
            return self._train_on(progress, rollouts, batch, {**drawn, "time/sample": sampled - start}, start)

    def _draw(self, progress: Progress) -> tuple[list[Rollout], Batch, dict[str, float]]:
        """The step's rollouts: what the method keeps of the source's, refilled at most `refill` times."""
        fresh = self.source(progress.step)
        keep = self.method.keep
        if keep is None:
            return fresh, collate(fresh), {"units/dropped": 0, "refills": 0}
        wanted, refills = len(fresh), 0
        kept, dropped = _kept(keep, fresh)
        while len(kept) < wanted and refills < self.settings.refill:
            more, lost = _kept(keep, self.source(progress.step))
            kept, dropped, refills = kept + more, dropped + lost, refills + 1
        # The last refill may bring more than was asked for: whole groups leave again.
        while len(kept) - _last_group(kept) >= wanted:
            del kept[len(kept) - _last_group(kept) :]
        rollouts = kept or fresh  # nothing kept: shown, not trained on
        return rollouts, collate(rollouts), {"units/dropped": dropped, "refills": refills, "units/kept": len(kept)}

    def _train_on(
        self, progress: Progress, rollouts: list[Rollout], batch: Batch, notes: dict[str, float], start: float
    ) -> Progress:
        settings = self.settings
        batch = batch.to(self.accelerator.device)
        planned = settings.updates * settings.epochs
        free_old = planned == 1 and "logp_old" not in self.method.needs
        entropy: Tensor | None = None
        if not free_old:
            old = forward_all(self.policy, batch, settings.token_budget, frozenset({"entropy"}))
            batch, entropy = replace(batch, logp_old=old.logp), old.entropy
        if "logp_ref" in self.method.needs and self.reference is not None:
            batch = reference_logp(self.reference, batch, settings.token_budget)
        for fill in self.enrich:
            batch = fill(batch)
        _check_needs(self.method, batch)
        if progress.step == 0:
            _check_groups(self.method, batch)
        advantage = self.method.advantage(batch)
        seen = Seen(torch.ones_like(batch.logp_old), torch.zeros_like(batch.logp_old))
        trainer = Trainer(self.method, self.policy, self.optimizer, self.accelerator, settings, free_old)
        for epoch in range(settings.epochs):
            cuts = mini_batches(batch, settings.updates, (settings.seed, progress.step, epoch))
            cuts = cuts if notes.get("units/kept", 1) else []
            for number, units in enumerate(cuts):
                rows = units.to(batch.unit.device)[batch.unit].nonzero().squeeze(1)
                clock = progress.update + epoch * settings.updates + number
                rate = learning_rate(settings, clock, settings.steps * planned)
                update(trainer, batch.select(units), rows, advantage[rows], rate, seen)
        rate = learning_rate(settings, progress.update + planned - 1, settings.steps * planned)
        metrics = step_metrics(self.method, batch, advantage, seen, entropy) | notes | {"learning_rate": rate}
        return self._finish_step(progress, rollouts, batch, advantage, seen, metrics, planned, start)

    def _finish_step(
        self,
        progress: Progress,
        rollouts: list[Rollout],
        batch: Batch,
        advantage: Tensor,
        seen: Seen,
        metrics: dict[str, float],
        planned: int,
        start: float,
    ) -> Progress:
        step = progress.step + 1
        metrics["time/step"] = time.monotonic() - start
        metrics["time/train"] = metrics["time/step"] - metrics["time/sample"]
        metrics["time/tokens_per_second"] = metrics["tokens"] / metrics["time/step"]
        path = self.folder / "rollouts" / f"step_{step:06d}.parquet"
        write_rollouts(path, rollouts, batch, advantage, seen.weight, seen.ratio)
        self.metrics.write({"step": step, **metrics})
        self.accelerator.log(metrics, step=step)
        self.display.step(step, metrics)
        constant = progress.constant + 1 if metrics["groups/constant"] == 1 else 0
        if constant and constant % self.settings.warn_constant == 0:
            self.display.say(
                f"no group had any variance in reward for {constant} steps, so nothing is learnt: "
                "choose problems the policy solves sometimes, or raise group_size"
            )
        return replace(progress, step=step, update=progress.update + planned, constant=constant)

    def _record_evaluation(self, progress: Progress, evaluation: Evaluation) -> Progress:
        metrics = {f"pass@{k}": value for k, value in evaluation.pass_at.items()}
        self.metrics.write({"step": progress.step, "evaluation": evaluation.to_json()})
        self.accelerator.log({f"evaluation/{name}": value for name, value in metrics.items()}, step=progress.step)
        self.display.evaluation(progress.step, metrics)
        score = next(iter(metrics.values()))
        if progress.best is not None and not score > progress.best:
            return progress
        return replace(progress, best=score, best_step=progress.step)

    def _save(self, progress: Progress) -> None:
        model = self.accelerator.unwrap_model(self.policy)
        checkpoint.save(self.folder / "checkpoints", model, self.optimizer, self.states, progress)


def _kept(keep: Callable[[Batch], Tensor], rollouts: list[Rollout]) -> tuple[list[Rollout], int]:
    chosen = keep(collate(rollouts)).tolist()
    return [r for r, good in zip(rollouts, chosen, strict=True) if good], chosen.count(False)


def _last_group(rollouts: Sequence[Rollout]) -> int:
    return sum(r.group == rollouts[-1].group for r in rollouts) if rollouts else 1


def _check_needs(method: Method, batch: Batch) -> None:
    parts = {"entropy", "values", "logits", "hidden"}  # of Forward: the policy answers for them
    for name in sorted(method.needs - parts):
        if getattr(batch, name) is None:
            raise UserError(f"method {method.name} needs {name}: give `train` an enricher that fills it")


def _check_groups(method: Method, batch: Batch) -> None:
    sizes = torch.unique(batch.group(), return_counts=True)[1]
    if "reward_shift" not in method.exempt and bool((sizes == 1).all()):
        raise UserError(
            f"method {method.name} compares the members of a group, but group_size=1: set group_size to 2 or more"
        )
