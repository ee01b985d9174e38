'''Studies: a question, arms × seeds as independent runs, a control that must fail, and a verdict chosen by the numbers.

How to write a study: one file, studies/NAME/study.py, whose docstring's first line says what it asks, and that defines
`STUDY`:

    """Does ReCo keep pass@64 where GRPO loses it?"""

    from dataclasses import dataclass
    from functools import partial

    from postrl.study import Arm, Base, BaseContext, Budget, Context, Contrast, Figures, Metric, Quick, Study
    from postrl.study import pass_at, scalar


    @dataclass(frozen=True)
    class Sizes:                      # every size that differs between the study and its quick variant
        pretraining_steps: int = 2000
        steps: int = 300


    def pretrain(context: BaseContext[int]) -> None:
        ...                           # context.options, context.seed; write the model into context.folder


    BASE = Base("grammar", pretrain, options=lambda sizes: sizes.pretraining_steps)


    def run(context: Context[Sizes], method: Callable[[], Method]) -> Figures:
        policy = load(context.base)   # train(..., folder=context.folder / "run"), then evaluate
        return Figures((*pass_at(evaluation, (1, 64)), scalar("entropy", entropy)))


    STUDY = Study(
        question="…",
        hypothesis="…",               # as written before the first run; its text is recorded with its hash
        config=Sizes(),
        arms=(Arm("grpo", partial(run, method=grpo), (BASE,)), Arm("reco", partial(run, method=reco), (BASE,)), …),
        seeds=(0, 1, 2, 3, 4),
        metrics=(Metric("pass@1", "…"), Metric("pass@64", "share of held-out problems"), Metric("entropy", "nats")),
        contrasts=(Contrast("reco", "grpo", "pass@64", "higher", worth=0.03),),
        must_fail=(Contrast("permuted", "grpo", "pass@64", "higher", worth=0.03),),
        budget=Budget(minutes=150),
        quick=Quick(Sizes(100, 10), seeds=(0, 1)),
    )

- An arm is a function of its `Context` alone: it must take all chance from `context.seed`, write only into
  `context.folder`, and use `context.threads` threads (already set). Every arm of a seed should share the seed's
  problems, start and evaluation: comparisons are paired by seed, and by problem where metrics are per problem.
- Runs are processes of their own that load study.py again and pick their arm by its name: so the file does nothing when
  loaded, and closures and partials are fine.
- What is only to look at is an exploratory arm (`Arm(..., exploratory=True)`), run by --extended on
  `exploratory_seeds`, with contrasts in `Study.exploratory`.
- Neighbouring modules in the study's folder can be imported by name.

`postrl study NAME` runs it, again and again until all is done. See `runner` for what lies where, `statistics` for what
the verdict's words mean.
'''

from postrl.study.definition import (
    Arm,
    Base,
    BaseContext,
    Budget,
    Context,
    Contrast,
    Curve,
    Figures,
    Measured,
    Metric,
    Quick,
    Study,
    against,
    pass_at,
    per_problem,
    scalar,
)

__all__ = [
    "Arm",
    "Base",
    "BaseContext",
    "Budget",
    "Context",
    "Contrast",
    "Curve",
    "Figures",
    "Measured",
    "Metric",
    "Quick",
    "Study",
    "against",
    "pass_at",
    "per_problem",
    "scalar",
]
