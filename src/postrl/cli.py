"""The command line: `postrl train | study | eval | papers | report | export`.

Bad input ends in one sentence on standard error and exit code 2 (tyro says in a box what it cannot parse); an interrupt
in 130. Any other exception is our bug and shows its traceback. What a subcommand alone needs is imported there, so that
`postrl --help` answers at once.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import tyro

from postrl import __version__, recipes_folder
from postrl.conformance.command import conformance
from postrl.errors import UserError

if TYPE_CHECKING:
    from postrl.envs.base import Task
    from postrl.evaluate import Evaluation

C = TypeVar("C")
BAD_INPUT, INTERRUPTED = 2, 130  # exit codes
Option = bool | int | float | str

DESCRIPTION = """Reinforcement-learning post-training of language models.

$ postrl papers: the methods there are
$ postrl conformance: what TRL and verl can do with each of them, and whether the numbers agree
$ postrl train reasoning --method reco: train a small model (put --help after the name for all options)
$ postrl study: the questions there are, and `postrl study NAME` to answer one
$ postrl report runs/reasoning: one HTML file on what happened
$ postrl eval runs/reasoning --task chain_sum: pass@k on held-out problems
$ postrl export runs/reasoning my-model: a folder that transformers loads

Bad input ends with what to do and exit code 2; an interrupt with 130."""

# Positional arguments by the names they have in the help.
RECIPES = ", ".join(sorted(recipes_folder.recipes()))
Recipe = Annotated[
    str,
    tyro.conf.Positional,
    tyro.conf.arg(
        metavar="RECIPE",
        help=f"Name of a recipe ({RECIPES}), or path of a Python file with a dataclass `Config` and `main(config)`.",
    ),
]
Model = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
Name = Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
StudyName = Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
Runs = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN …]")]
Run = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
Folder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
Which = Annotated[Literal["best", "last"] | int, tyro.conf.arg(metavar="best|last|STEP")]
Options = Annotated[dict[str, Option], tyro.conf.arg(metavar="NAME VALUE …")]
OptionsOrNone = Annotated[dict[str, Option] | None, tyro.conf.arg(metavar="NAME VALUE …")]


def run_recipe(config: type[C], main: Callable[[C], object]) -> None:
    """The last line of a recipe: read options from the command line into `config`, run, and end as the CLI does.

    Options of nested dataclasses need no prefix: `--steps` sets `config.train.steps`.
    """
    with orderly():
        _run(config, main, sys.argv[1:])


def _run(
    config: type[C],
    main: Callable[[C], object],
    options: Sequence[str],
    program: str | None = None,
    description: str | None = None,
) -> None:
    chosen = tyro.cli(config, args=options, prog=program, description=description, config=(tyro.conf.OmitArgPrefixes,))
    result = main(chosen)
    from postrl.parallel import leave
    from postrl.train import Result

    leave()
    if isinstance(result, Result) and result.status == "interrupted":
        sys.exit(INTERRUPTED)  # everything is saved, but whoever waits for the run must not go on as if it were done


@contextmanager
def orderly() -> Iterator[None]:
    """UserError -> one sentence and exit code 2; an interrupt -> 130."""
    try:
        yield
    except UserError as error:
        print(f"postrl: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    except KeyboardInterrupt:
        print("postrl: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `postrl`; arguments default to those of the process."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    with orderly():
        if arguments == ["--version"]:
            print(__version__)
        elif len(arguments) > 1 and arguments[0] == "train" and not arguments[1].startswith("-"):
            # A recipe brings its own options, known only once its file is loaded.
            run_named(arguments[1], arguments[2:])
        elif arguments and arguments[0] in COMMANDS:  # alone, so that tyro points to this subcommand's help
            name, *rest = arguments
            tyro.cli(COMMANDS[name], prog=f"postrl {name}", args=rest)
        else:
            tyro.extras.subcommand_cli_from_dict(
                COMMANDS,
                prog="postrl",
                description=DESCRIPTION,
                args=arguments or ["--help"],
            )


def run_named(name: str, options: Sequence[str]) -> None:
    """Run the recipe called `name` with command-line options."""
    found = recipes_folder.load(name)
    _run(found.config, found.main, options, f"postrl train {name}", found.summary)


def train(recipe: Recipe) -> None:
    """Train by a recipe. `postrl train RECIPE --help` shows that recipe's options."""
    run_named(recipe, [])


def study(
    name: StudyName = None,
    quick: bool = False,
    extended: bool = False,
    seeds: tuple[int, ...] = (),
    jobs: int = 0,
    threads: int = 1,
    executor: Literal["local", "ray"] = "local",
    out: Path | None = None,
    fresh: bool = False,
) -> None:
    """Answer a question by arms × seeds, or list the questions. What is missing is run; stop and go on at will.

    Exit code 1 if a run crashed or what must fail did not (the instrument is broken), whatever the verdict else.

    Args:
        name: A study, or the path of its study.py. Without it the studies are listed.
        quick: The small variant, under 4 minutes on two cores; it answers nothing and has results of its own.
        extended: Also run what is exploratory: further arms, and seeds beyond those of the study.
        seeds: Only these seeds for now.
        jobs: Runs at a time; 0 is one for each processor.
        threads: Processor threads of each run.
        executor: Processes on this machine, or tasks of the Ray cluster in RAY_ADDRESS (else of a local one).
        out: Folder of the results; by default runs/studies/NAME/full or …/quick.
        fresh: Discard the results in `out` first. What was registered stays written down.
    """
    from postrl.study.runner import Options, print_studies, run_study

    if name is None:
        print_studies()
    elif code := run_study(name, Options(quick, extended, seeds, jobs, threads, executor, out, fresh)):
        sys.exit(code)


def measure(
    model: Model,
    task: str,
    k: str = "1,4,16",
    n: int | None = None,
    items: int = 64,
    options: OptionsOrNone = None,
    template: str | None = None,
    extract: Literal["last_number", "tagged", "boxed", "after_answer", "whole_text"] | None = None,
    split: Literal["test", "train"] = "test",
    temperature: float | None = None,
    top_p: float = 1.0,
    max_tokens: int | None = None,
    seed: int = 0,
    checkpoint: Which = "last",
    threads: int = 2,
    json: Path | None = None,
) -> None:
    """Evaluate a model, or a run's policy: pass@k with 95 % intervals over problems.

    Args:
        model: A run's folder, a Hugging Face folder, a .gguf file, smollm2, or a model id of the hub.
        task: A task of reasoning-gym (chain_sum, countdown, …), gsm8k, or copy.
        k: The k of pass@k, separated by commas.
        n: Answers per problem; by default the largest k.
        items: Problems.
        options: Options of the task, for example `--options max_terms 3 max_digits 1`.
            gsm8k has `source` (a JSONL file or a data set of the hub), copy has `length` and `alphabet`.
            By default those that a run was trained with, if it was trained on this task.
        template: The user's message, in which {question} stands for the problem.
            By default the one that a run was trained with, else the problem alone.
        extract: How the answer is taken out of a completion. By default as in the run, else last_number.
        split: Held-out problems, or those to train on.
        temperature: Of sampling; 0 is greedy. By default the run's, else 1.
        top_p: Sample from the likeliest tokens that hold this share.
        max_tokens: Longest answer. By default the run's, else 128.
        seed: Decides the sampled answers, and which problems come first.
        checkpoint: Of a run: best, last, or a step.
        threads: Processor threads.
        json: File for the whole evaluation as JSON.
    """
    from postrl.evaluate import evaluate
    from postrl.export import configuration, is_run, load_run
    from postrl.files import write_json
    from postrl.policies.base import Sampling
    from postrl.policies.loading import load_policy
    from postrl.rewards.exact import EXTRACTIONS

    ks = _numbers(k)
    if seed < 0:
        raise UserError(f"option seed={seed} must be at least 0")
    run = Path(model) if is_run(Path(model)) else None
    trained = configuration(run) if run else {}
    if options is None and trained.get("task") == task:
        options = dict(trained.get("task_options", {}))
    # What was not said is as in the run, so that the figures can be compared with its own.
    said = {"template": template, "extract": extract, "temperature": temperature, "max_tokens": max_tokens}
    unsaid = {"template": "{question}", "extract": "last_number", "temperature": 1.0, "max_tokens": 128}
    how = unsaid | {name: trained[name] for name in unsaid if name in trained}
    how |= {name: value for name, value in said.items() if value is not None}
    supply = make_task(task, options or {}, how["template"], how["extract"], seed)
    use_threads(threads)
    policy, renderer = load_run(run, checkpoint) if run else load_policy(model)
    found = evaluate(
        policy,
        renderer,
        supply,
        items=items,
        n=max(ks) if n is None else n,
        ks=ks,
        sampling=Sampling(temperature=how["temperature"], top_p=top_p, max_tokens=how["max_tokens"]),
        seed=seed,
        split=split,
        answer=lambda rollout: EXTRACTIONS[how["extract"]](rollout.completion) or "none",
    )
    _show(model, found)
    if json is not None:
        write_json(json, found.to_json())


def use_threads(threads: int) -> None:
    """Processor threads of torch. Raises UserError for fewer than 1."""
    import torch

    if threads < 1:
        raise UserError(f"option threads={threads} must be at least 1")
    torch.set_num_threads(threads)


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.replace(",", " ").split()
    if not parts or not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"option --k {text!r} must be whole numbers separated by commas, such as 1,4,16")
    return tuple(map(int, parts))


def make_task(name: str, options: dict[str, Option], template: str, extract: str, seed: int) -> "Task":
    """A task by its name on the command line. Raises UserError naming the task or option that is unknown."""
    from postrl.envs.copy_task import copy_task
    from postrl.envs.gsm8k import gsm8k
    from postrl.envs.reasoning import ReasoningTask
    from postrl.rewards import exact

    how = exact.EXTRACTIONS[extract]
    options = {key.replace("-", "_"): value for key, value in options.items()}
    if name == "copy":
        length = _known(name, options, ("length", "alphabet")).get("length", 2)
        if not isinstance(length, int) or length < 1:
            raise UserError(f"option length={length} of task 'copy' must be a whole number above 0")
        return copy_task(length, str(options.get("alphabet", "abcd")), seed=seed)
    if name == "gsm8k":
        source = _known(name, options, ("source",)).get("source", "openai/gsm8k")
        return gsm8k(str(source), extract=how, template=template, seed=seed)
    return ReasoningTask(name, options, extract=how, template=template, seed=seed)


def _known(task: str, options: dict[str, Option], names: Sequence[str]) -> dict[str, Option]:
    unknown = next((name for name in options if name not in names), None)
    if unknown is not None:
        raise UserError(f"task {task!r} has no option {unknown!r}; its options are: {', '.join(names)}")
    return options


def _show(model: str, found: "Evaluation") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    title = f"{model} on {found.task}: {len(found.items)} {found.split} problems, {found.samples} answers each"
    table = Table(title=Text(title), box=box.SIMPLE_HEAD)
    for column in ("", "value", "95 % interval over problems"):
        table.add_column(column)
    for k, value in found.pass_at.items():
        low, high = found.intervals[k]
        table.add_row(f"pass@{k}", f"{value:.3f}", f"{low:.3f} … {high:.3f}")
    figures = {
        "different right answers": found.distinct_correct,
        "different answers": found.distinct_answers,
        "entropy of answers (nats)": found.answer_entropy,
        "Distinct-2": found.distinct_2,
        "tokens per answer": found.mean_tokens,
    }
    for label, value in figures.items():
        table.add_row(label, f"{value:.3f}", "")
    counts = {
        "cut off at the length limit": found.truncated,
        "without a score": found.missing,
        "problems left out": found.left_out,
    }
    for label, count in counts.items():
        if count:
            table.add_row(label, str(count), "")
    Console().print(table)


def papers(name: Name = None, write: Path | None = None) -> None:
    """The shelf of papers: list it, read one, or write PAPERS.md.

    Args:
        name: Print what this paper says: its claim, its equation, its arguments.
        write: Write the generated page to this file.
    """
    from postrl import papers_page
    from postrl.files import whole_file

    if name is not None:
        print(papers_page.describe(name))
    elif write is not None:
        with whole_file(write) as beside:
            beside.write_text(papers_page.render(), encoding="utf-8")
        print(f"wrote {write}")
    else:
        papers_page.print_shelf()


def report(
    runs: Runs,
    out: Path = Path("report.html"),
    picture: Path | None = None,
) -> None:
    """One HTML file on a run, or on several side by side; it opens without a network.

    Args:
        runs: Folders of runs, or a folder of such folders.
        out: The HTML file.
        picture: Also draw pass@k before and after as this SVG file, for a README.
    """
    from postrl.report import write_picture, write_report

    print(f"wrote {write_report(runs, out)}")
    if picture is not None:
        print(f"wrote {write_picture(runs, picture)}")


def export(
    run: Run,
    folder: Folder,
    checkpoint: Which = "last",
) -> None:
    """Write a run's policy as a Hugging Face folder: weights, tokenizer, chat template.

    Args:
        run: Folder of the run.
        folder: New folder for the model.
        checkpoint: Which of the run's checkpoints.
    """
    from postrl.export import export as write

    print(f"wrote {folder} from {write(run, folder, checkpoint)}")


COMMANDS = {
    "train": train,
    "study": study,
    "eval": measure,
    "papers": papers,
    "conformance": conformance,
    "report": report,
    "export": export,
}

if __name__ == "__main__":
    main()
