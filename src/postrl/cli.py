"""The command line: `postrl train | eval | papers | report | export`.

Bad input ends in one sentence on standard error and exit code 2; an interrupt in 130. Any other exception is our bug
and shows its traceback. What a subcommand alone needs is imported there, so that `postrl --help` answers at once.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro

from postrl import recipes_folder
from postrl.errors import UserError

C = TypeVar("C")


def run_recipe(config: type[C], main: Callable[[C], object]) -> None:
    """The last line of a recipe: read options from the command line into `config`, run, and end as the CLI does."""
    with orderly():
        main(tyro.cli(config))


@contextmanager
def orderly() -> Iterator[None]:
    """UserError -> one sentence and exit code 2; an interrupt -> 130."""
    try:
        yield
    except UserError as error:
        print(f"postrl: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("postrl: interrupted", file=sys.stderr)
        sys.exit(130)


def train(recipe: Annotated[str, tyro.conf.Positional], options: Sequence[str] = ()) -> None:
    """Run a recipe: `postrl train NAME --option value`.

    Args:
        recipe: Name of a recipe, or path of a Python file that defines a dataclass `Config` and `main(config)`.
            `postrl train NAME --help` shows the options of that recipe.
    """
    found = recipes_folder.load(recipe)
    found.main(tyro.cli(found.config, args=options, prog=f"postrl train {recipe}", description=found.summary))


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `postrl`; arguments default to those of the process."""
    arguments = sys.argv[1:] if arguments is None else arguments
    with orderly():
        # A recipe brings its own options, known only once its file is loaded.
        if len(arguments) > 1 and arguments[0] == "train" and not arguments[1].startswith("-"):
            train(arguments[1], arguments[2:])
            return
        names = ", ".join(sorted(recipes_folder.recipes()))
        tyro.extras.subcommand_cli_from_dict(
            {"train": _train},
            prog="postrl",
            description=f"{__import__('postrl').__doc__}\n\nRecipes: {names}.",
            args=arguments,
        )


def _train(recipe: Annotated[str, tyro.conf.Positional]) -> None:
    train(recipe)


_train.__doc__ = train.__doc__


if __name__ == "__main__":
    main()
