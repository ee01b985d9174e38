"""What a person sees, in a terminal and without one; text of models and files is never read as markup."""

import io

import pytest
from rich.console import Console

from postrl.display import Display

METRICS = {"reward": 0.5, "kl": 0.01, "kl_reference": 0.02, "time/step": 2.0, "time/tokens_per_second": 100.0}


def shown(terminal: bool, title: str = "", words: str = "") -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=160, color_system=None)
    with Display(10, title, console) as display:
        display.step(1, METRICS)
        display.say(words)
        display.evaluation(0, {"pass@1": 0.125, "pass@4": 0.25})
        display.step(10, METRICS)
    return text.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_figures(terminal: bool):
    text = shown(terminal)
    assert "reward 0.500" in text and "kl(old) 0.010 kl(ref) 0.020" in text and "100 tok/s" in text
    assert "evaluation after step 0: pass@1 0.125 pass@4 0.250" in text
    assert "10/10" in text


def test_one_line_a_step_without_a_terminal():
    lines = shown(False, words="said").splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("step 1/10 ") and lines[-1].startswith("step 10/10 ")


def test_no_control_codes_without_a_terminal():
    assert "\x1b" not in shown(False) and "\x1b" in shown(True)


@pytest.mark.parametrize("terminal", [True, False])
def test_markup_in_text_is_text(terminal: bool):
    words = "item [bold]x[/bold] of [/nothing] runs/[red]"
    text = shown(terminal, title="[red]grpo[/blue]", words=words)
    assert words in text and "[red]grpo[/blue]" in text


def test_a_missing_figure_is_left_out():
    text = io.StringIO()
    with Display(1, console=Console(file=text)) as display:
        display.step(1, {"time/step": 1.0, "time/tokens_per_second": 0.0})
    assert "reward" not in text.getvalue()
