"""The report: the right numbers, honest words, and a page in which a model's text stays text."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from postrl.errors import UserError
from postrl.report import figures, gallery, tables, write_picture, write_report
from postrl.report.data import names, read_runs
from postrl.report.page import script_json
from postrl.report.text import pieces_of, visible
from run_folder import evaluation, make_run, rollouts, write_step

OWNED = "document.title='owned'"
HOSTILE = (
    f"</script><script>{OWNED}</script>",
    f'<img src=x onerror="{OWNED}">',
    f"\"><svg onload={OWNED}>'",
    "<!--<script>",
    "{{ 7 * 7 }}{% raw %}",
    "\u202eright to left\u202c\u2066 אבג \u2028\u2029",
    "NUL \0 and bell \a",
    "&lt;b&gt; &amp;",
    "x" * 10_000,
)


class Page(HTMLParser):
    """What a browser would find: elements with attributes, and the text outside scripts and styles."""

    def __init__(self, path: Path):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.inside = ""
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.inside != "style":
            self.text += data

    def data(self) -> list[dict]:
        return json.loads(self.scripts[0])


@pytest.fixture
def arms(tmp_path: Path) -> list[Path]:
    """Two runs from one start; the second one learns more."""
    before = evaluation([0, 1, 0, 1], answer="12")
    make_run(tmp_path / "grpo", before, evaluation([2, 1, 0, 1]))
    make_run(tmp_path / "reco", before, evaluation([4, 4, 2, 4]), method="reco")
    return [tmp_path / "grpo", tmp_path / "reco"]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:12]))
def test_what_a_model_wrote_stays_text(tmp_path: Path, text: str):
    hostile = evaluation([1, 0], answer=text)
    make_run(tmp_path / "run", evaluation([0, 0], answer=text), hostile, text=text, note=text)
    page = Page(write_report([tmp_path / "run"], tmp_path / "report.html"))
    assert len(page.scripts) == 3  # the data, plotly, ours
    assert not {"img", "svg", "iframe", "object", "embed", "link", "base", "form"} & {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    shown = visible(text[:2000])
    assert page.text.count(shown) >= 4  # answers before and after, the prompt, the configuration
    assert not re.search("[\0\a\u202e\u2066]", page.source)
    page.data()


def test_a_long_text_is_cut_and_counted(tmp_path: Path):
    make_run(tmp_path / "run", evaluation([0]), evaluation([1], answer="x" * 10_000))
    page = Page(write_report([tmp_path / "run"], tmp_path / "report.html"))
    assert "8000 more characters" in page.text
    assert page.text.count("x") < 3000


def test_names_of_runs_stay_text(tmp_path: Path):
    names_ = [f"<img src=x onerror={OWNED}>", "</b>&amp;"]
    for name in names_:
        make_run(tmp_path / name.replace("/", "∕"), evaluation([0]), evaluation([1]))
    page = Page(write_report([tmp_path], tmp_path / "report.html"))
    assert "img" not in {tag for tag, _ in page.tags}
    labels = [trace.get("name", "") for figure in page.data() for trace in figure["traces"]]
    assert labels and not any("<" in label for label in labels)  # plotly reads tags in names


def test_nothing_is_fetched_and_only_our_scripts_may_run(tmp_path: Path, arms: list[Path]):
    page = Page(write_report(arms, tmp_path / "report.html"))
    places = [a[name] for _, a in page.tags for name in ("src", "href", "srcset", "action", "data") if a.get(name)]
    assert places and all(place.startswith("#") for place in places)
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a)
    assert "default-src 'none'" in policy
    for script in page.scripts[1:]:
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    assert "'unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0]


def test_data_cannot_end_its_script():
    value = ["</script>", "<!--", "\u2028", "&lt;"]
    text = str(script_json(value))
    assert not re.search("[<>&\u2028]", text)
    assert json.loads(text) == value


def test_visible_shows_controls_and_keeps_writing():
    assert visible("a\0b\x7f\u202ec") == "a␀b␡⟨U+202E⟩c"
    assert visible("line\n\ttab, שלום, नमस्ते, 👩‍👩‍👧") == "line\n\ttab, שלום, नमस्ते, 👩‍👩‍👧"
    assert visible("\ud800") == "⟨U+D800⟩"


def test_pass_at_k_before_is_shared_and_after_is_each_arms(arms: list[Path]):
    (figure,) = figures.pass_at_k(read_runs(arms))
    assert [row[0] for row in figure.rows] == ["before training", "grpo, after 2 steps", "reco, after 2 steps"]
    lines = {trace["name"]: trace for trace in figure.traces if trace["mode"] == "lines+markers"}
    assert lines["reco, after 2 steps"]["y"] == [14 / 16, 1.0]
    assert lines["before training"]["x"] == [1, 4]
    bands = [trace for trace in figure.traces if trace.get("fill") == "toself"]
    np.testing.assert_allclose(bands[0]["y"], [2 / 16 + 0.1, 1.0, 0.0, 2 / 16 - 0.1])


def test_before_is_drawn_for_each_arm_that_began_elsewhere(tmp_path: Path):
    make_run(tmp_path / "a", evaluation([0, 1]), evaluation([1, 1]))
    make_run(tmp_path / "b", evaluation([1, 1]), evaluation([1, 1]))
    labels = [label for label, _, _ in figures.befores(read_runs([tmp_path]))]
    assert labels == ["a, before", "b, before"]


def test_changes_are_paired_over_problems(arms: list[Path]):
    rows = tables.changes(read_runs(arms))
    row = next(row for row in rows if row.run == "reco" and row.metric == "pass@1")
    assert (row.before, row.after) == ("0.125", "0.875")
    assert row.change.startswith("+0.750 (+0.5")  # problem by problem: 1, .75, .5, .75
    difference = next(text for run, metric, text in tables.against_first(read_runs(arms)) if metric == "pass@1")
    assert difference.startswith("+0.625 (")


def test_no_pairing_of_different_problems(tmp_path: Path):
    make_run(tmp_path / "run", evaluation([0, 1]), evaluation([1, 1], items="other"))
    assert {row.change for row in tables.changes(read_runs([tmp_path / "run"]))} == {"–"}


def test_curves_leave_out_what_is_no_number(tmp_path: Path):
    run = make_run(tmp_path / "run", steps=3)
    path = run / "metrics.jsonl"
    lines = path.read_text().replace('"entropy": 0.5', '"entropy": NaN').replace('"reward": 0.2', '"reward": Infinity')
    path.write_text(lines)
    found = {figure.key: figure for figure in figures.curves(read_runs([run]))}
    assert found["curve-entropy"].traces[0]["x"] == [1, 3]
    assert found["curve-reward"].rows[0][-1] == "2"
    write_report([run], tmp_path / "report.html")


def test_divergence_from_the_reference_is_a_curve_where_it_was_recorded(tmp_path: Path):
    run = make_run(tmp_path / "run", steps=3)
    path = run / "metrics.jsonl"
    assert "curve-kl_reference" not in {figure.key for figure in figures.curves(read_runs([run]))}
    path.write_text(path.read_text().replace('"entropy": ', '"kl_reference": 0.25, "entropy": '))
    found = {figure.key: figure for figure in figures.curves(read_runs([run]))}
    assert found["curve-kl_reference"].traces[0]["y"] == [0.25] * 3


def test_gallery_shows_credit_of_sampled_tokens(tmp_path: Path):
    run = make_run(tmp_path / "run")
    groups = gallery.gallery(read_runs([run])[0])
    assert [group.step for group in groups] == [1, 1, 2, 2]
    best, worst = groups[0].cards[0], groups[0].cards[-1]
    assert [token.text for token in best.tokens] == ["a", "b", "⟨end⟩"]  # the prompt is not among them
    assert best.tokens[1].figures == "-1.5 1 0.5 1.25"
    assert [token.shade for token in worst.tokens] == [-1.0] * 3
    assert best.rewards == [("correct", "1.000"), ("ab", "missing")]


def test_gallery_prefers_groups_with_something_to_learn(tmp_path: Path):
    run = make_run(tmp_path / "run", steps=1)
    dull = rollouts(groups=3, size=3)
    for rollout in dull[:6]:
        rollout.sample = 1  # every advantage of the first two groups is −1
    write_step(run, 1, dull)
    assert [len({card.advantage for card in g.cards}) for g in gallery.gallery(read_runs([run])[0])] == [2, 1]


def test_tokens_without_a_tokenizer_are_numbers():
    assert pieces_of({})([5, 6]) == ["⟨5⟩", "⟨6⟩"]
    assert pieces_of({"characters": "ab"})([2, 0, 9]) == ["b", "⟨end⟩", "⟨9⟩"]


def test_a_model_that_is_gone_costs_only_the_text_of_tokens(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert pieces_of({"model": str(tmp_path / "gone.gguf")})([5]) == ["⟨5⟩"]
    assert "gone.gguf" in capsys.readouterr().out


def test_notes_tell_what_the_figures_do_not_show(tmp_path: Path, arms: list[Path]):
    make_run(tmp_path / "third", steps=1)
    (tmp_path / "third" / "run.json").write_text(json.dumps({"configuration": {"steps": 9, "seed": 5}}))
    said = " ".join(tables.notes(read_runs([*arms, tmp_path / "third"])))
    assert "4 problems of task sums (the test split), 4 answers each" in said
    assert "third was never evaluated" in said
    assert "third has done 1 of its 9 steps" in said
    assert "one seed (0, 5)" in said


def test_a_folder_of_runs_stands_for_them(tmp_path: Path, arms: list[Path]):
    assert [run.name for run in read_runs([tmp_path])] == ["grpo", "reco"]
    assert names([Path("/x/a/run"), Path("/x/b/run")]) == ["a/run", "b/run"]
    assert names([Path("/x/run")]) == ["run"]


def test_a_run_killed_before_its_first_step_has_a_report(tmp_path: Path):
    run = make_run(tmp_path / "run", steps=0)
    page = Page(write_report([run], tmp_path / "report.html"))
    assert "This run has no rollouts." in page.text
    assert page.data() == []


def test_a_last_line_cut_off_by_a_kill_is_left_out(tmp_path: Path):
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    assert len(read_runs([run])[0].steps) == 2


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("run.json", None, "run.json"),
        ("run.json", b"{", "run.json"),
        ("run.json", b"[]", "run.json"),
        ("run.json", b"{}", "no configuration"),
        ("metrics.jsonl", None, "metrics.jsonl"),
        ("metrics.jsonl", b'{"step": 1}\nnonsense\n{"step": 2}\n', "line 2"),
        ("metrics.jsonl", b'{"step": 1}\n\xff\xfe\n{"step": 2}\n', "line 2"),
        ("metrics.jsonl", b'{"step": 1}\n7\n{"step": 2}\n', "line 2"),
        ("metrics.jsonl", b'{"step": 0, "evaluation": {"pass_at": 3}}\n', "line 1"),
        ("rollouts/step_000002.parquet", b"PAR1 not", "step_000002.parquet"),
    ],
)
def test_what_is_missing_or_damaged_is_named(tmp_path: Path, file: str, content: bytes | None, said: str):
    run = make_run(tmp_path / "run")
    (run / file).unlink()
    if content is not None:
        (run / file).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(said)) as raised:
        write_report([run], tmp_path / "report.html")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "report.html").exists()


def test_foreign_and_crooked_parquet_is_named(tmp_path: Path):
    run = make_run(tmp_path / "run")
    path = run / "rollouts" / "step_000002.parquet"
    table = pq.read_table(path)
    pq.write_table(table.drop_columns("ratio"), path)
    with pytest.raises(UserError, match="no column 'ratio'"):
        read_runs([run])
    short = pa.array([values[:-1] for values in table["mask"].to_pylist()], pa.list_(pa.bool_()))
    pq.write_table(table.set_column(table.column_names.index("mask"), "mask", short), path)
    with pytest.raises(UserError, match="row 0, is damaged"):
        read_runs([run])


def test_no_such_run_and_no_run_at_all(tmp_path: Path):
    with pytest.raises(UserError, match="no run folder"):
        write_report([tmp_path / "nowhere"], tmp_path / "report.html")
    with pytest.raises(UserError, match="at least one run"):
        write_report([], tmp_path / "report.html")


def test_picture_is_well_formed_and_says_its_values(tmp_path: Path):
    make_run(tmp_path / "a<b>&", evaluation([0, 1, 0, 1]), evaluation([4, 4, 2, 4]))
    path = write_picture([tmp_path / "a<b>&"], tmp_path / "picture.svg")
    root = ElementTree.parse(path).getroot()
    space = "{http://www.w3.org/2000/svg}"
    said = root.findtext(f"{space}desc")
    assert said is not None and "a<b>&, after 2 steps: pass@1 0.875" in said
    lines = root.findall(f"{space}polyline")
    heights = [[float(point.split(",")[1]) for point in line.get("points", "").split()] for line in lines]
    assert heights[1][1] < heights[1][0] < heights[0][0]  # up is less: pass@4, pass@1 after, pass@1 before


def test_picture_needs_an_evaluation(tmp_path: Path):
    make_run(tmp_path / "run")
    with pytest.raises(UserError, match="no pass@k to draw"):
        write_picture([tmp_path / "run"], tmp_path / "picture.svg")


# ------------------------------------------------------------------------------------------------ in a browser

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--virtual-time-budget=10000"),
    *("--enable-logging=stderr", "--v=0"),
)


def read_figures(report: Path) -> list[dict]:
    return json.loads(next(script for script in Page(report).scripts if script.startswith("[")))


def in_browser(page: Path, profile: Path) -> tuple[str, list[str]]:
    """(document after its scripts ran, lines of the console)."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium on this machine")
    command = [browser, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_a_browser_draws_the_figures_and_runs_nothing_else(tmp_path: Path):
    text = "".join(HOSTILE[:5])
    make_run(tmp_path / "runs" / "one", evaluation([0, 1], answer=text), evaluation([1, 1], answer=text), text=text)
    report = write_report([tmp_path / "runs"], tmp_path / "report.html")
    # One script that got into the page all the same: the content security policy stops it, and complains once.
    report.write_text(report.read_text(encoding="utf-8").replace("</h1>", f"</h1><script>{OWNED}</script>", 1))
    drawn, console = in_browser(report, tmp_path / "profile")
    assert "<title>postrl: one</title>" in drawn
    assert len(console) == 1 and "Content Security Policy" in console[0]
    assert drawn.count('class="main-svg"') >= len(read_figures(report)) > 3
