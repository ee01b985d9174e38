"""The report opens by itself, runs its own scripts only, and shows what others wrote as text."""

import html.parser
import json
import math
import re

import pytest

from postrl.study.answer import Answer, Level, results_json, summary
from postrl.study.definition import Contrast, Curve, Figures, Measured
from postrl.study.page import spread, write_page
from postrl.study.pictures import write_pictures
from postrl.study.records import Crashed, Done
from postrl.study.registration import Registration
from postrl.study.statistics import Estimate, Finding

EVIL = "</script><script>alert(1)</script>\u202e $x$"


def done(arm: str, seed: int, value: float) -> Done:
    figures = Figures((Measured("score", (value,)),), (Curve(EVIL, (0.0, 1.0), (value, math.nan), EVIL),))
    return Done(arm, seed, "key", figures, 1.0, 1.0, "0", None)


@pytest.fixture
def found() -> Answer:
    nan = math.nan
    estimate = Estimate(0.2, 0.1, 0.3, 0.01, 5, 12, 1)
    empty = Estimate(nan, nan, nan, nan, 0, 0, 0)
    contrast = Contrast("new", "old", "score", "higher", 0.1)
    return Answer(
        name="evil",
        variant="full",
        summary=EVIL,
        question=EVIL,
        hypothesis=EVIL,
        verdict="supported",
        sentence=EVIL,
        broken=False,
        contrasts=(Finding(contrast, estimate, 0.01, "supported"),),
        must_fail=(Finding(contrast, empty, nan, "too noisy to say"),),
        exploratory=(Finding(contrast, empty, nan, "too noisy to say"),),
        levels=(
            Level("new", "score", estimate, False),
            Level("old", "score", empty, True),
            Level(EVIL, "score", estimate, False),
        ),
        metrics=(("score", EVIL),),
        notes=(EVIL,),
        crashed=(Crashed("new", 1, EVIL, EVIL),),
        absent=(("new", 2),),
        registrations=(
            Registration("2026-01-01", None, {"hypothesis": EVIL, "contrasts": [EVIL]}, "0", 0, "first"),
            Registration("2026-01-02", EVIL, {"hypothesis": EVIL, "contrasts": [EVIL]}, "0", 3, "changed"),
        ),
        runs=(done("new", 0, 1.0), done("old", 0, nan), done(EVIL, 0, 1.0)),
        cpu_minutes=1.5,
    )


class Scripts(html.parser.HTMLParser):
    """Counts scripts, and everything that would be fetched."""

    def __init__(self):
        super().__init__()
        self.scripts, self.fetched = 0, []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]):
        self.scripts += tag == "script"
        self.fetched += [value for name, value in attrs if name in ("src", "href") and not str(value).startswith("#")]


def test_what_others_wrote_stays_text(found: Answer, tmp_path):
    write_page(found, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Scripts()
    page.feed(text)
    assert page.scripts == 3 and not page.fetched  # data, plotly, our own
    assert "alert(1)</script>" not in text and "\u202e" not in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL).group(1))
    assert [figure["title"] for figure in data] == ["score", EVIL]
    assert "<script" not in json.dumps([(figure["traces"], figure["layout"]) for figure in data])
    assert text.count("sha256-") == 2


def test_pictures_hold_any_caption_and_missing_numbers(found: Answer, tmp_path):
    paths = write_pictures(found, tmp_path)
    assert [path.name for path in paths] == ["effects.png", "score.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_results_are_plain_json_and_stay_small(found: Answer, monkeypatch: pytest.MonkeyPatch):
    whole = json.loads(results_json(found), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert whole["values_per_problem"] is True and whole["runs"][1]["measured"][0]["values"] == [None]
    monkeypatch.setattr("postrl.study.answer.LARGEST", 10)
    small = json.loads(results_json(found))
    assert small["values_per_problem"] is False and small["runs"][0]["measured"][0]["values"] == [1.0]


def test_summary_is_a_table(found: Answer, tmp_path):
    text = summary(found, [tmp_path / "effects.png"])
    assert "| new − old | score | +0.2 | +0.1 … +0.3 | 0.010 | supported |" in text
    assert "![effects](effects.png)" in text and "old (exploratory)" in text


def test_a_curve_is_averaged_where_all_seeds_have_it():
    one, other = Curve("c", (0.0, 1.0, 2.0), (1.0, 2.0, 3.0)), Curve("c", (1.0, 2.0, 3.0), (4.0, math.nan, 5.0))
    assert spread([one, other]) == ([1.0], [2.0], [3.0], [4.0])
