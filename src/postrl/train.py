"""The loop: collect, credit, update, record. It knows no paper's name.

A step is one rollout batch and all its updates. What is computed once on the whole batch (advantages, group factors)
is computed here; what is computed once on a mini-batch (weights, observed statistics) in `optimise`.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedDataParallelKwargs
from rich.console import Console
from torch import Tensor, nn

from postrl import checkpoint
from postrl.batch import Batch
from postrl.checkpoint import Progress, Stateful
from postrl.display import Display
from postrl.enrich import forward_all, reference_logp
from postrl.errors import UserError
from postrl.evaluate import Evaluation
from postrl.files import read_json
from postrl.interrupt import Interrupt, memory_guard
from postrl.method import Method, check_shape
from postrl.optimise import Seen, Trainer, update
from postrl.packing import mini_batches
from postrl.parallel import Resting, copy_weights, hold_alike, spread
from postrl.ranks import Ranks, here
from postrl.record import Metrics, open_run, take_back, write_rollouts
from postrl.rollout import Rollout, collate
from postrl.settings import Settings, learning_rate
from postrl.summary import outcome_metrics, step_metrics
from postrl.terms import reference_kl

Source = Callable[[int], list[Rollout]]
Enricher = Callable[[Batch], Batch]
Evaluate = Callable[[], Evaluation]
FREE = frozenset({"parallel", "steps", "checkpoint_every", "evaluate_every", "warn_constant"})  # may change on resume


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
    The first k of its pass@k decides which checkpoint is the best; chosen on the evaluation's own problems, that one's
    score is the best of several and too high as an estimate: measure it again on other problems. states, and enrichers
    that have one, join the checkpoint. parameters(policy) gives the optimiser's parameter groups, by default everything
    that requires a gradient. describe goes into `run.json`.
    SIGINT and SIGTERM finish the step, save, and return status "interrupted".

    Raises UserError for options that cannot be right, a folder that holds another run, a damaged checkpoint, a full
    disk, exhausted memory, or a gradient that is not finite; whatever was saved stays.
    """
    settings.check()
    method = _with_reference(method, settings, reference)
    _check_trackers(trackers)
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),  # several processes then talk over gloo
        log_with=list(trackers) or None,
        project_dir=str(folder),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=isinstance(policy, Resting))],
    )
    ranks = here()
    configuration = {**(describe or {}), "method": method.name, **asdict(settings)}
    torch.manual_seed(settings.seed)
    policy.eval()  # only an update's own passes have dropout
    groups = parameters(policy) if parameters else [{"params": [p for p in policy.parameters() if p.requires_grad]}]
    ranks.once(lambda: open_run(folder, configuration, resume, FREE))
    _check_steps(folder, settings)
    trained = spread(policy, accelerator, settings.parallel)  # on its device before the optimiser's moments are
    twins = dict(zip(policy.parameters(), trained.parameters(), strict=True))
    groups = [{**group, "params": [twins[parameter] for parameter in group["params"]]} for group in groups]
    if reference is not None:
        reference = reference.to(accelerator.device)
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True)
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        # Absent and zero differ to AdamW: a run that resumes must not see absent where the first run saw zero.
        parameter.grad = torch.zeros_like(parameter)
    enrichers = {f"enrich/{number}": enricher for number, enricher in enumerate(enrich)}
    everything = {"source": source, **enrichers, **(states or {})}
    stateful = {name: value for name, value in everything.items() if isinstance(value, Stateful)}
    saved = checkpoint.checkpoints(folder / "checkpoints")
    progress = checkpoint.restore(saved[-1], policy, optimizer, stateful) if resume and saved else Progress()
    copy_weights(policy, trained)
    if trackers:
        accelerator.init_trackers("postrl", config={k: str(v) for k, v in configuration.items()})
    if display is None or not ranks.first:
        display = Display(settings.steps, console=None if ranks.first else Console(quiet=True))
    loop = Loop(
        method=method,
        policy=policy,
        trained=trained,
        source=source,
        settings=settings,
        folder=folder,
        reference=reference,
        enrich=enrich,
        accelerator=accelerator,
        ranks=ranks,
        optimizer=optimizer,
        states=stateful,
        metrics=Metrics(folder, progress.step if saved else -1, progress.evaluated, ranks.first),
        display=display,
        saved=progress,
    )
    try:
        with loop.display:
            return loop.run(progress, evaluate, before)
    except UserError:
        if ranks.first:
            take_back(folder)
        raise
    finally:
        for tracker in accelerator.trackers:  # `end_training` would also part the processes, which may go on together
            tracker.finish()


def _with_reference(method: Method, settings: Settings, reference: nn.Module | None) -> Method:
    if reference is None and "logp_ref" in method.needs:
        raise UserError(f"method {method.name} compares with a reference, and there is none: give `train` a reference")
    if reference is None and settings.kl_coef > 0:
        raise UserError(f"option kl_coef={settings.kl_coef} needs a reference policy: give `train` one, or set it to 0")
    if settings.kl_coef == 0:
        return method
    return method.plus(reference_kl(settings.kl_coef), needs=frozenset({"logp_ref"}))


def _check_steps(folder: Path, settings: Settings) -> None:
    """Such a schedule ends at `steps`: with others, the rates of the steps already done would have been others."""
    if settings.schedule == "constant":
        return
    old = read_json(folder / "run.json", "a run")["configuration"]["steps"]
    if old != settings.steps:
        raise UserError(
            f"{folder} was run with steps={old}, not {settings.steps}, and option schedule={settings.schedule!r} ends "
            "with the last step: resume with the same steps, or start a new run (schedule='constant' can go on longer)"
        )


def _check_trackers(trackers: Sequence[str]) -> None:
    installed = [tracker.value for tracker in get_available_trackers()]
    for name in trackers:
        if name not in installed:
            there = ", ".join(installed) or "none"
            raise UserError(f"option trackers: {name!r} is not installed or not known to accelerate; usable: {there}")


@dataclass(frozen=True)
class Drawn:
    """What a step trains on. figures: of the drawing, for the metrics."""

    rollouts: list[Rollout]
    batch: Batch
    figures: dict[str, float]
    empty: bool = False  # the method keeps nothing: shown, not trained on


@dataclass
class Loop:
    """One run. Everything here is fixed but what it points at, and `saved`."""

    method: Method
    policy: nn.Module  # what samples and is saved
    trained: nn.Module  # its training forward: itself, or around it or beside it what several processes need
    source: Source
    settings: Settings
    folder: Path
    reference: nn.Module | None
    enrich: Sequence[Enricher]
    accelerator: Accelerator
    ranks: Ranks
    optimizer: torch.optim.Optimizer
    states: Mapping[str, Stateful]
    metrics: Metrics
    display: Display
    saved: Progress  # of the newest checkpoint

    def run(self, progress: Progress, evaluate: Evaluate | None, before: Evaluation | None) -> Result:
        with Interrupt() as interrupt:
            while True:
                asked = self.ranks.any(interrupt.asked)
                if evaluate is not None and not asked and self._evaluation_due(progress):
                    progress = self._evaluate(progress, evaluate, before)
                due = progress.step in (self.settings.steps, progress.best_step)
                if due or asked or progress.step % self.settings.checkpoint_every == 0:
                    self._save(progress, checkpoint.snapshot(self.states))
                if asked or progress.step >= self.settings.steps:
                    break
                progress = self._guarded_step(progress)
        done = progress.step >= self.settings.steps and (evaluate is None or not self._evaluation_due(progress))
        if not done:
            self.display.say(f"stopped after step {progress.step}; go on with the same command and --resume")
        return Result(self.folder, progress, "finished" if done else "interrupted")

    def _evaluation_due(self, progress: Progress) -> bool:
        step, every = progress.step, self.settings.evaluate_every
        due = step == 0 or step >= self.settings.steps or (every > 0 and step % every == 0)
        return due and progress.evaluated < step

    def _evaluate(self, progress: Progress, evaluate: Evaluate, before: Evaluation | None) -> Progress:
        """An evaluation; if it fails, the weights are saved first, and a resumed run evaluates them again."""
        if progress.step == 0 and before is not None:
            return self._record_evaluation(progress, before)
        try:
            evaluation = evaluate()
        except Exception:
            self._save(progress, checkpoint.snapshot(self.states))
            raise
        return self._record_evaluation(progress, evaluation)

    def _guarded_step(self, progress: Progress) -> Progress:
        """A step; if its collection fails, the weights are still those of a whole step, so they are saved first."""
        start = time.monotonic()
        torch.manual_seed(int(np.random.SeedSequence([self.settings.seed, progress.step]).generate_state(1)[0]))
        states = checkpoint.snapshot(self.states)  # a source that fails may have moved on already
        with memory_guard(self.settings.token_budget):
            try:
                drawn = self._draw(progress)
            except Exception:
                self._save(progress, states)
                raise
            drawn.figures["time/sample"] = time.monotonic() - start
            return self._train_on(progress, drawn, start)

    def _draw(self, progress: Progress) -> Drawn:
        """The step's rollouts: what the method keeps of the source's, refilled at most `refill` times."""
        fresh = self.ranks.draw(self.source, progress.step)
        batch = _collated(fresh, progress)
        keep = self.method.keep
        if keep is None:
            return Drawn(fresh, batch, {"units/dropped": 0, "refills": 0})
        wanted, refills, groups = len(fresh), 0, {r.group for r in fresh}
        kept, dropped = _kept(keep, fresh, batch)
        everything = list(fresh)
        while len(kept) < wanted and refills < self.settings.refill:
            more = self.ranks.draw(self.source, progress.step)
            again = groups & {r.group for r in more}
            if again:
                raise UserError(f"the source gave group {min(again)} twice in step {progress.step + 1}: set refill=0")
            groups |= {r.group for r in more}
            good, lost = _kept(keep, more, _collated(more, progress))
            kept, dropped, refills = kept + good, dropped + lost, refills + 1
            everything += more
        # The last refill may bring more than was asked for: whole groups leave again.
        while len(fewer := [r for r in kept if r.group != kept[-1].group]) >= wanted:
            kept = fewer
        figures: dict[str, float] = {"units/dropped": dropped, "refills": refills, "units/kept": len(kept)}
        figures |= outcome_metrics(_collated(everything, progress))
        if not kept:
            return Drawn(fresh, batch, figures, empty=True)
        return Drawn(kept, _collated(kept, progress), figures)

    def _train_on(self, progress: Progress, drawn: Drawn, start: float) -> Progress:
        settings = self.settings
        batch = drawn.batch.to(self.accelerator.device)
        planned = settings.updates * settings.epochs
        free_old = planned == 1 and "logp_old" not in self.method.needs
        entropy: Tensor | None = None
        if free_old:  # unknown until the update's own forward: nothing may read it before
            batch = replace(batch, logp_old=torch.full_like(batch.logp_old, torch.nan))
        else:
            old = forward_all(self.trained, batch, settings.token_budget, frozenset({"entropy"}))
            batch, entropy = replace(batch, logp_old=old.logp), old.entropy
        if "logp_ref" in self.method.needs and self.reference is not None:
            batch = reference_logp(self.reference, batch, settings.token_budget)
        for fill in self.enrich:
            batch = fill(batch)
        hold_alike(self.policy, self.trained)
        _check_needs(self.method, batch)
        if progress.step == 0:
            _check_groups(self.method, batch)
        advantage = self.method.advantage(batch)
        check_shape(f"advantage of method {self.method.name}", advantage, batch)
        seen = Seen(torch.ones_like(batch.logp_old), torch.zeros_like(batch.logp_old), batch.logp_old.clone())
        seen.skipped = planned if drawn.empty else 0
        trainer = Trainer(self.method, self.trained, self.optimizer, self.accelerator, settings, free_old)
        for epoch in range(0 if drawn.empty else settings.epochs):
            cuts = mini_batches(batch, settings.updates, (settings.seed, progress.step, epoch))
            for number, units in enumerate(cuts):
                rows = units.to(batch.unit.device)[batch.unit].nonzero().squeeze(1)
                clock = progress.update + epoch * settings.updates + number
                rate = learning_rate(settings, clock, settings.steps * planned)
                update(trainer, batch.select(units), rows, advantage[rows], rate, seen)
        copy_weights(self.trained, self.policy)
        batch = replace(batch, logp_old=seen.logp_old)
        rate = learning_rate(settings, progress.update + planned - 1, settings.steps * planned)
        metrics = step_metrics(self.method, batch, advantage, seen, entropy) | drawn.figures | {"learning_rate": rate}
        return self._finish_step(progress, drawn.rollouts, batch, advantage, seen, metrics, planned, start)

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
        if self.ranks.first:
            write_rollouts(path, rollouts, batch, advantage, seen.weight, seen.ratio)
        self.metrics.write({"step": step, **metrics})
        self.accelerator.log(metrics, step=step)
        self.display.step(step, metrics)
        compares = "reward shift" not in self.method.exempt  # else a group without variance is nothing special
        idle = (compares and metrics.get("groups/constant") == 1) or metrics.get("units/kept") == 0
        constant = progress.constant + 1 if idle else 0
        if constant and constant % self.settings.warn_constant == 0:
            self.display.say(
                f"for {constant} steps no group had any variance in reward, or the method kept none, so nothing is "
                "learnt: choose problems the policy solves sometimes, or raise group_size or refill"
            )
        return replace(progress, step=step, update=progress.update + planned, constant=constant)

    def _record_evaluation(self, progress: Progress, evaluation: Evaluation) -> Progress:
        metrics = {f"pass@{k}": value for k, value in evaluation.pass_at.items()}
        self.metrics.write({"step": progress.step, "evaluation": evaluation.to_json()})
        self.accelerator.log({f"evaluation/{name}": value for name, value in metrics.items()}, step=progress.step)
        self.display.evaluation(progress.step, metrics)
        score = next(iter(metrics.values()))
        progress = replace(progress, evaluated=progress.step)
        if not score > (-math.inf if progress.best is None else progress.best):  # NaN is never the best
            return progress
        return replace(progress, best=score, best_step=progress.step)

    def _save(self, progress: Progress, states: Mapping[str, object]) -> None:
        if progress == self.saved or progress.step == 0:  # before the first step there is nothing to lose
            return
        checkpoint.save(self.folder / "checkpoints", self.policy, self.optimizer, states, progress, self.ranks.first)
        self.saved = progress


def _collated(rollouts: list[Rollout], progress: Progress) -> Batch:
    try:
        return collate(rollouts)
    except ValueError as error:
        raise UserError(f"step {progress.step + 1} cannot use the source's rollouts: {error}") from error


def _kept(keep: Callable[[Batch], Tensor], rollouts: list[Rollout], batch: Batch) -> tuple[list[Rollout], int]:
    chosen = keep(batch).tolist()
    return [r for r, good in zip(rollouts, chosen, strict=True) if good], chosen.count(False)


def _check_needs(method: Method, batch: Batch) -> None:
    parts = {"entropy", "values", "logits", "hidden"}  # of Forward: the policy answers for them
    for name in sorted(method.needs - parts):
        if getattr(batch, name, None) is None:
            raise UserError(
                f"method {method.name} needs {name}, which these rollouts lack: set the options with which the method "
                "does without, if it has any, or give `train` an enricher that fills it"
            )


def _check_groups(method: Method, batch: Batch) -> None:
    sizes = torch.unique(batch.group(), return_counts=True)[1]
    if "reward shift" not in method.exempt and bool((sizes == 1).all()):
        raise UserError(
            f"method {method.name} compares the members of a group, but group_size=1: set group_size to 2 or more"
        )
