"""The benchmark's harness: turns, ratios, refusals, resuming, the limit's arithmetic, the page. No time is asserted."""

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # benchmarks/ is a package of the checkout, not of the wheel

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import limit, machine, models, page, pairs, rows, run  # noqa: E402
from benchmarks.channel import Worker, WorkerError  # noqa: E402
from benchmarks.pairs import Mismatch  # noqa: E402
from benchmarks.results import Results  # noqa: E402
from benchmarks.rows import Goal, Row, Side  # noqa: E402
from benchmarks.work import Conditions, Job, Work  # noqa: E402

from postrl.errors import UserError  # noqa: E402
from postrl.policies.chat import PlainText  # noqa: E402
from postrl.policies.decoder import Decoder  # noqa: E402
from postrl.policies.decoder_config import DecoderConfig  # noqa: E402

SAMPLE = Work("sample", "any", prompts=2, prompt_tokens=3, new_tokens=5)

# A side of standard library alone: writes its name to a diary at each lap and reports what SAMPLE wants.
FAKE = """
import os, sys
from pathlib import Path
from benchmarks.channel import Laps
from benchmarks.work import Job
job = Job.read(Path(sys.argv[1]))
if job.variant == "broken":
    print("no such kernel", file=sys.stderr)
    sys.exit(3)
laps, facts, number = Laps(), {}, 0
print("noise on standard output")
while True:
    laps.lap(**facts)
    number += 1
    if job.variant == "late" and number == 2:
        sys.exit("ran out of luck")
    with open(os.environ["DIARY"], "a") as diary:
        diary.write((job.variant or "ours") + " ")
    facts = {"tokens": 9 if job.variant == "lazy" else 10, "lengths": [5, 5]}
"""


def sides(*variants: str) -> tuple[Side, ...]:
    return tuple(Side(variant, "fake_side", variant=variant) for variant in variants)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[run.Bench]:
    """Rows of SAMPLE by fake sides; `bench.scratch / "diary"` says who worked when."""
    (tmp_path / "fake_side.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("DIARY", str(tmp_path / "diary"))
    monkeypatch.setattr(run, "OURS", Side("postrl", "fake_side"))
    monkeypatch.setattr(models, "job", lambda work, conditions, scratch: Job(work, conditions, scratch=str(scratch)))
    monkeypatch.setattr(machine, "commit", lambda: "abc")
    results = Results(tmp_path / "results.json", {"processor": "P"})
    yield run.Bench(Conditions(threads=1), results, tmp_path, tmp_path / "nowhere" / "python")


def diary(bench: run.Bench) -> list[str]:
    return (bench.scratch / "diary").read_text().split()


def saved(bench: run.Bench, name: str = "row") -> dict:
    return json.loads(bench.results.path.read_text())["rows"][name]


# ---------------------------------------------------------------------------------------------- pairs and ratios


def lap(seconds: float, tokens: int = 10, peak: int | None = 100) -> dict:
    return {"seconds": seconds, "tokens": tokens, "peak_bytes": peak}


def test_a_ratio_is_that_of_each_rounds_pair():
    made = [{"postrl": lap(a), "TRL": lap(b)} for a, b in [(1, 6), (2, 10), (4, 8), (1, 9)]]
    assert pairs.speed(made, "TRL") == pairs.Spread(median=5.5, low=2.0, high=9.0, pairs=4)


def test_a_ratio_is_per_token():
    made = [{"postrl": lap(2, tokens=20), "TRL": lap(2, tokens=10)}]
    assert pairs.speed(made, "TRL") == pairs.Spread(2.0, 2.0, 2.0, 1)


def test_rounds_without_the_peer_give_no_pair():
    made = [{"postrl": lap(1), "TRL": lap(3)}, {"postrl": lap(1)}]
    ratio = pairs.speed(made, "TRL")
    assert ratio is not None and ratio.pairs == 1
    assert pairs.speed(made, "vLLM") is None and pairs.memory(made, "vLLM") is None


def test_the_share_of_the_limit_is_its_time_over_ours():
    made = [{"postrl": lap(4), "limit": {"limit_seconds": 3.0, "seconds": 60.0}}]
    assert pairs.speed(made, "limit") == pairs.Spread(0.75, 0.75, 0.75, 1)


def test_memory_is_our_share_of_the_peers_and_absent_where_the_system_is_silent():
    made = [{"postrl": lap(1, peak=30), "TRL": lap(1, peak=100)}, {"postrl": lap(1, peak=None), "TRL": lap(1)}]
    assert pairs.memory(made, "TRL") == pairs.Spread(0.3, 0.3, 0.3, 1)


STEP = Work("step", prompts=2, completions=2, prompt_tokens=3, new_tokens=4)
GOOD = {"tokens": 16, "lengths": [4] * 4, "processed": 28, "updates": 1, "moved": True}


@pytest.mark.parametrize(
    "wrong",
    [{"tokens": 15}, {"lengths": [4, 4, 3, 5]}, {"processed": 27}, {"updates": 2}, {"updates": 0}, {"moved": False}],
    ids=str,
)
def test_a_lap_of_other_work_is_refused(wrong: dict):
    pairs.check(STEP, "TRL", GOOD)
    with pytest.raises(Mismatch, match="TRL"):
        pairs.check(STEP, "TRL", GOOD | wrong)


def test_natural_lengths_may_differ_but_an_update_is_made():
    natural = replace(STEP, natural=True)
    pairs.check(natural, "TRL", GOOD | {"tokens": 9, "lengths": [1, 2, 2, 4], "processed": 21})
    with pytest.raises(Mismatch):
        pairs.check(natural, "TRL", GOOD | {"updates": 0})


def test_training_of_other_rows_or_another_loss_is_refused():
    work, good = Work("train", prompts=4, prompt_tokens=8), {"tokens": 32, "updates": 1, "moved": True}
    pairs.check(work, "transformers", good)
    with pytest.raises(Mismatch):
        pairs.check(work, "transformers", good | {"tokens": 28})
    one = {"loss": 2.0, "gradient_norm": 1.0}
    pairs.check_losses(one, {"loss": 2.001, "gradient_norm": 1.0005}, "transformers", "float32")
    for other in ({"loss": 2.01, "gradient_norm": 1.0}, {"loss": 2.0, "gradient_norm": 1.01}):
        with pytest.raises(Mismatch, match="apart"):
            pairs.check_losses(one, other, "transformers", "float32")
    with pytest.raises(Mismatch):
        pairs.check_losses(one, {"loss": float("nan"), "gradient_norm": 1.0}, "transformers", "bfloat16")


# ---------------------------------------------------------------------------------------------- processes in turns


def test_sides_take_turns_and_warm_laps_are_not_counted(bench: run.Bench):
    run.run(Row("row", "a row", SAMPLE, sides("a", "b"), pairs=2, warm=1), bench)
    assert diary(bench) == ["ours", "a", "b"] * 3
    assert [sorted(made) for made in saved(bench)["rounds"]] == [["a", "b", "postrl"]] * 2
    assert all(report["seconds"] > 0 for made in saved(bench)["rounds"] for report in made.values())


def test_a_stopped_row_goes_on_and_a_complete_one_is_left(bench: run.Bench):
    row = Row("row", "a row", SAMPLE, sides("a"), pairs=3, warm=0, minutes=0.0)
    run.run(row, bench)
    assert len(saved(bench)["rounds"]) == 1  # no minutes left: one round is always made
    first = saved(bench)["rounds"][0]
    again = replace(bench, results=Results(bench.results.path, {"processor": "P"}))
    run.run(replace(row, minutes=1.0), again)
    assert len(saved(bench)["rounds"]) == 3 and saved(bench)["rounds"][0] == first
    worked = len(diary(bench))
    run.run(row, again)
    assert len(diary(bench)) == worked == 6


def test_another_work_or_source_starts_a_row_anew(bench: run.Bench, monkeypatch: pytest.MonkeyPatch):
    row, results = Row("row", "a row", SAMPLE, pairs=2), bench.results
    results.entry(row, bench.conditions)
    results.add(row, {"postrl": lap(1)})
    assert len(results.entry(row, bench.conditions)["rounds"]) == 1
    monkeypatch.setattr(machine, "commit", lambda: "def")
    assert results.entry(row, bench.conditions)["rounds"] == []  # half of it from another source
    for _ in range(2):
        results.add(row, {"postrl": lap(1)})
    monkeypatch.setattr(machine, "commit", lambda: "ghi")
    assert len(results.entry(row, bench.conditions)["rounds"]) == 2  # complete: stays, under its own commit
    assert results.entry(row, bench.conditions)["commit"] == "def"
    assert results.entry(replace(row, work=replace(SAMPLE, prompts=9)), bench.conditions)["rounds"] == []
    results.add(row, {"postrl": lap(1)})
    results.add(row, {"postrl": lap(1)})
    assert results.entry(row, replace(bench.conditions, threads=2))["rounds"] == []


def test_a_complete_row_is_measured_again_once_its_missing_peer_is_there(
    bench: run.Bench, monkeypatch: pytest.MonkeyPatch
):
    row = Row("row", "a row", SAMPLE, (Side("a", "fake_side", needs="late_package", variant="a"),), pairs=1, warm=0)
    for _ in range(2):
        run.run(row, bench)
    assert diary(bench) == ["ours"]  # still not there: nothing to do
    (bench.scratch / "late_package.py").write_text("")
    monkeypatch.syspath_prepend(bench.scratch)
    run.run(row, bench)
    assert diary(bench) == ["ours", "ours", "a"] and not saved(bench)["missing"]


def test_fresh_measures_a_complete_row_again(bench: run.Bench):
    row = Row("row", "a row", SAMPLE, pairs=1, warm=0)
    run.run(row, bench)
    run.run(row, bench, fresh=True)
    assert diary(bench) == ["ours", "ours"] and len(saved(bench)["rounds"]) == 1


def test_sides_beside_the_comparison_run_once(bench: run.Bench):
    run.run(Row("row", "a row", SAMPLE, sides("a"), once=sides("b"), pairs=2, warm=0), bench)
    assert diary(bench) == ["ours", "a", "b", "ours", "a"]
    assert ["b" in made for made in saved(bench)["rounds"]] == [True, False]


def test_what_is_not_installed_or_of_no_use_here_is_said(bench: run.Bench):
    absent = (
        Side("X", "fake_side", needs="no_such_package"),
        Side("V", "fake_side", needs="vllm", own_environment=True),
        Side("B", "fake_side", only_bfloat16=True),
    )
    run.run(Row("row", "a row", SAMPLE, absent, pairs=1), bench)
    missing = saved(bench)["missing"]
    assert missing["X"] == "no_such_package is not installed: make bench-envs"
    assert missing["V"] == "vllm is not installed: make bench-envs"
    assert "bfloat16" in missing["B"]
    assert set(saved(bench)["rounds"][0]) == {"postrl"}


def test_a_peer_that_fails_or_cheats_leaves_the_row_and_says_why(bench: run.Bench):
    run.run(Row("row", "a row", SAMPLE, sides("broken", "late", "lazy", "a"), pairs=2, warm=0), bench)
    assert [sorted(made) for made in saved(bench)["rounds"]] == [["a", "late", "postrl"], ["a", "postrl"]]
    missing = saved(bench)["missing"]
    assert "exit status 3" in missing["broken"] and "exit status 1" in missing["late"]
    assert "9 tokens instead of 10" in missing["lazy"]


def test_if_our_side_fails_nothing_is_written(bench: run.Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run, "OURS", Side("postrl", "fake_side", variant="broken"))
    with pytest.raises(WorkerError, match="no such kernel"):
        run.run(Row("row", "a row", SAMPLE, sides("a"), pairs=1), bench)
    assert not bench.results.path.exists() or not saved(bench)["rounds"]


def test_a_silent_worker_is_given_up(tmp_path: Path):
    with pytest.raises(WorkerError, match="no answer"):
        Worker([sys.executable, "-c", "import time; time.sleep(60)"], os.environ, tmp_path / "log", patience=0.3)


def test_gradients_in_another_direction_are_refused(bench: run.Bench):
    from safetensors.torch import save_file
    from torch import tensor

    row = Row("row", "a row", Work("agreement"), (rows.TRL,))
    bench.results.entry(row, bench.conditions)
    made = {"postrl": {"whole_gradient_norm": 5.0}, "TRL": {"whole_gradient_norm": 5.0}}
    for name in ("with_postrl", "with_trl"):
        (bench.scratch / name).mkdir()
        save_file({"w": tensor([3.0, 4.0])}, bench.scratch / name / "gradients.safetensors")
    job = Job(row.work, bench.conditions, scratch=str(bench.scratch))
    run._compare_first(row, bench, made, job)
    assert made["postrl"]["cosine"] == pytest.approx(1.0)
    made["TRL"]["whole_gradient_norm"] = 5.02
    with pytest.raises(Mismatch, match="norms"):
        run._compare_first(row, bench, made, job)
    save_file({"w": tensor([4.0, 3.0])}, bench.scratch / "with_trl" / "gradients.safetensors")
    with pytest.raises(Mismatch, match=r"cosine 0\.96"):
        run._compare_first(row, bench, made, job)


# ---------------------------------------------------------------------------------------------- the limit

SHAPE = DecoderConfig(vocabulary=10, hidden=4, layers=2, heads=2, kv_heads=1, head_size=3, intermediate=5)


def test_the_limit_of_sampling_by_hand():
    """2 sequences, prompts of 3, 4 new tokens: the prompts in one pass of 6, then 3 steps of 2 rows; 2 + 3·2 heads."""
    work = Work("sample", prompts=2, prompt_tokens=3, new_tokens=4)
    made = limit.sampling(work, SHAPE, parameters=0, size=2)
    layer = 4 * 12 + 6 * 4 + 4 * 10 + 5 * 4  # qkv, output, gate and up, down: 132 weights
    operations = sum(times * product.operations for product, times in made.products.items())
    assert operations == 2 * layer * 2 * (6 + 3 * 2) + 2 * 40 * (2 + 3 * 2)
    assert made.attention == 2 * (4 * 2 * 6 * 6)  # two prompts; 2 products, 2 layers, width 6, 1+2+3 keys
    token = 2 * 2 * 3 * 2  # keys and values, layers, width, bytes
    assert made.bytes == token * (2 * (4 + 5 + 6) + 2 * 3 + 2 * 3) + 2 * 2 * 4 * 10 * 4


def test_the_limit_of_training_by_hand():
    """2 rows of 4 tokens: 6 tokens run, forward and twice backward; AdamW moves 9 numbers a parameter."""
    made = limit.training(Work("train", prompts=2, prompt_tokens=4), SHAPE, parameters=100, size=4)
    operations = sum(times * product.operations for product, times in made.products.items())
    assert operations == 3 * (2 * 132 * 2 * 6 + 2 * 40 * 6)
    assert made.attention == 3 * 2 * (4 * 2 * 6 * 6)
    assert made.bytes == 9 * 4 * 100
    assert {product.which for product in made.products} == {"forward", "input", "weight"}


def test_the_limit_of_a_step_by_hand():
    """2 prompts of 3, 4 completions each, 5 new tokens: prompts once in sampling and in training; 8 rows of 4 tokens of
    their own, each of which sees the 3 of its prompt too."""
    made = limit.step(Work("step", prompts=2, completions=4, prompt_tokens=3, new_tokens=5), SHAPE, 100, size=2)
    operations = sum(times * product.operations for product, times in made.products.items())
    drawn = 2 * 132 * 2 * (6 + 4 * 8) + 2 * 40 * (2 + 4 * 8)
    assert operations == drawn + 3 * (2 * 132 * 2 * (6 + 8 * 4) + 2 * 40 * 8 * 5)
    prompts, rows = 2 * (4 * 2 * 6 * 6), 8 * (4 * 2 * 6 * (10 + 4 * 3))  # 1 + 2 + 3 and 1 + 2 + 3 + 4 keys
    assert made.attention == prompts + 3 * (prompts + rows)
    token = 2 * 2 * 3 * 2
    read = sum(2 * 3 + 8 * step for step in (1, 2, 3, 4))
    assert made.bytes == token * (read + 2 * 3 + 8 * 4) + 2 * 8 * 5 * 10 * 4 + 9 * 4 * 100


def test_long_prompts_run_in_passes_of_the_token_budget():
    made = limit.sampling(Work("sample", prompts=2, prompt_tokens=5000, new_tokens=1), SHAPE, 0, 4)
    passes = {product.rows for product in made.products if product.outer == 12 and product.rows > 2}
    assert passes == {4096, 10000 - 2 * 4096}


def test_the_limit_is_products_at_their_rates_and_bytes_at_bandwidth():
    slow, fast = limit.Product(1, 10, 5), limit.Product(2, 10, 5)
    cost = limit.Cost({slow: 3, fast: 2}, attention=400, bytes=1000)
    rates = {slow: 100.0, fast: 200.0}
    assert limit.seconds(cost, rates.__getitem__, bandwidth=500.0) == pytest.approx(3 * 1 + 2 * 1 + 400 / 200 + 2)


# ---------------------------------------------------------------------------------------------- rows, models, options


def test_rows_have_their_own_names_and_goals_of_their_own_peers():
    for table in (rows.rows(), rows.quick_rows()):
        assert len({row.name for row in table}) == len(table)
        for row in table:
            assert all(goal.peer in {side.name for side in row.peers} | {""} for goal in row.goals)
            assert all(importlib.util.find_spec(side.module) for side in (*row.peers, *row.once))
    assert {row.work.model for row in rows.quick_rows()} <= {"characters", ""}
    for (
        row
    ) in rows.rows():  # of steps of a given length, of sampling and of training the distance to the limit is known
        limited = row.work.kind in ("step", "sample", "train") and not row.work.natural
        assert (rows.LIMIT in (*row.peers, *row.once)) == limited
    timed = [row for row in rows.rows() if row.goals]
    assert len(timed) == 7 and all(row.pairs >= 5 for row in timed)


def test_the_passes_of_a_padded_side_divide_the_rows_within_the_budget():
    assert Work("step", prompts=8, completions=8, prompt_tokens=64, new_tokens=64).pass_rows == 32
    assert Work("step", prompts=8, completions=8, prompt_tokens=1024, new_tokens=64).pass_rows == 2
    assert Work("step", prompts=3, completions=5, prompt_tokens=9000, new_tokens=1).pass_rows == 1


def test_an_unknown_row_is_refused_with_the_names():
    with pytest.raises(UserError, match="step-smollm2"):
        command._chosen(command.Config(rows=("step-smolm2",)))
    (row,) = command._chosen(command.Config(rows=("statistics",), pairs=2, minutes=3.0))
    assert (row.pairs, row.minutes) == (2, 3.0)


def test_machines_get_plain_file_names():
    assert machine.slug("AMD EPYC (9B14) @ 2.6 GHz", 2) == "amd-epyc-9b14-2-6-ghz-2-cores"
    described = machine.describe()
    assert described["cores"] and described["processor"] and json.dumps(described)


@pytest.fixture(scope="module")
def characters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The character model, in a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield models.folder("characters")


def test_the_character_model_has_three_million_parameters_and_one_token_per_character(characters: Path):
    assert sum(p.numel() for p in Decoder.load(characters).parameters()) == pytest.approx(3.0e6, rel=0.02)
    texts, tokens = models.exact_prompts(PlainText.load(characters), count=5, length=17)
    assert [len(text) for text in texts] == [len(ids) for ids in tokens] == [17] * 5
    assert len(set(texts)) == 5


class Enough(Exception):
    pass


class FakeLaps:
    """Keeps the reports and ends the work after some laps."""

    def __init__(self, laps: int) -> None:
        self.reports: list[dict] = []
        self._laps = laps

    def lap(self, **facts: object) -> None:
        self.reports.append(facts)
        if len(self.reports) > self._laps:
            raise Enough


def reports(side, job: Job, laps: int = 1) -> list[dict]:
    """What a side reports of its laps."""
    fake = FakeLaps(laps)
    with pytest.raises(Enough):
        side(fake)
    return fake.reports[1:]


def test_our_step_is_the_work_that_was_asked_for(characters: Path, tmp_path: Path):
    from benchmarks.sides import with_postrl

    work = Work("step", "characters", prompts=2, completions=2, prompt_tokens=5, new_tokens=4)
    job = models.job(work, Conditions(threads=1), tmp_path)
    made = reports(lambda laps: with_postrl.step(job, with_postrl.load(job), laps), job, laps=2)
    assert len(made) == 2
    for report in made:
        pairs.check(work, "postrl", report)


def test_both_sides_of_sampling_and_training_do_the_same(characters: Path, tmp_path: Path):
    from benchmarks.sides import with_postrl, with_transformers

    conditions = Conditions(threads=1)
    work = Work("train", "characters", prompts=3, prompt_tokens=6, new_tokens=0)
    job = models.job(work, conditions, tmp_path)
    (ours,) = reports(lambda laps: with_postrl.training(job, with_postrl.load(job), laps), job)
    (theirs,) = reports(lambda laps: with_transformers.training(job, laps), job)
    for report in (ours, theirs):
        pairs.check(work, "side", report)
    pairs.check_losses(ours, theirs, "transformers", "float32")
    work = Work("sample", "characters", prompts=3, completions=2, prompt_tokens=6, new_tokens=4)
    job = models.job(work, conditions, tmp_path)
    for side in (
        lambda laps: with_postrl.sampling(job, with_postrl.load(job), laps),
        lambda laps: with_transformers.sampling(job, laps),
    ):
        pairs.check(work, "side", reports(side, job)[0])


@pytest.mark.slow
def test_trl_agrees_and_does_the_same_work(characters: Path, tmp_path: Path):
    pytest.importorskip("trl", reason="TRL is not installed: make bench-envs")
    results = Results(tmp_path / "results.json", {})
    bench = run.Bench(Conditions(threads=1), results, tmp_path, tmp_path / "nowhere")
    agreement = next(row for row in rows.quick_rows() if row.name == "agreement-characters")
    work = Work("step", "characters", prompts=2, completions=4, prompt_tokens=8, new_tokens=8)
    for row in (agreement, Row("row", "a row", work, (rows.TRL,), pairs=1)):
        run.run(row, bench)
        assert not saved(bench, row.name)["missing"] and "TRL" in saved(bench, row.name)["rounds"][0]


# ---------------------------------------------------------------------------------------------- the page


def sample_results() -> dict:
    """One machine: a row that meets one goal and misses another, a peer that is absent, a limit, a scaling row."""
    conditions = {"threads": 2, "compute": "float32", "wait_policy": "default"}
    shared = {
        "conditions": conditions,
        "versions": {"torch": "2.13.0"},
        "commit": "abc",
        "axis": None,
        "once": [],
        "missing": {},
        "goals": [],
        "pairs": 1,
    }
    step = shared | {
        "title": "a step",
        "pairs": 5,
        "work": {"kind": "step"},
        "peers": ["TRL", "vLLM"],
        "missing": {"vLLM": "vllm is not installed: make bench-envs"},
        "goals": [vars(g) for g in (Goal("speed", 6.0, "TRL"), Goal("memory", 0.5, "TRL"), Goal("speed", 2.3, "vLLM"))],
        "rounds": [
            {"postrl": lap(1.0, peak=2**30) | {"load": 0.5}, "TRL": lap(b, peak=3 * 2**30)} for b in (5.0, 4.0, 7.0)
        ],
    }
    sample = shared | {
        "title": "sampling",
        "work": {"kind": "sample"},
        "peers": ["limit"],
        "goals": [vars(Goal("share", 0.6, "limit"))],
        "rounds": [{"postrl": lap(2.0), "limit": {"limit_seconds": 1.3, "seconds": 9.0}}],
    }
    scale = step | {"title": "group size 4", "axis": ["group size", 4], "goals": [], "peers": ["TRL"], "missing": {}}
    counted = shared | {
        "title": "statistics",
        "work": {"kind": "statistics"},
        "peers": [],
        "goals": [vars(Goal("milliseconds", 50.0))],
        "rounds": [{"postrl": {"milliseconds": {"centred": 20.0, "zscored": 60.0}}}],
    }
    described = {
        "processor": "Some CPU",
        "cores": 2,
        "flags": ["avx2"],
        "memory_bytes": 8 * 2**30,
        "system": "Linux 6",
        "python": "3.11",
        "date": "today",
        "commit": "abc",
    }
    return {"machine": described, "rows": {"step": step, "sample": sample, "scale": scale, "counted": counted}}


def test_the_page_says_figures_goals_and_what_is_missing(tmp_path: Path):
    file = tmp_path / "some-cpu.json"
    file.write_text(json.dumps(sample_results()))
    page.write_page([file], tmp_path / "docs" / "benchmarks.md")
    text = (tmp_path / "docs" / "benchmarks.md").read_text()
    lines = {line.split("|")[2].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert "## Some CPU, 2 cores" in text and "8 GB, avx2" in text and "2 threads, float32 products" in text
    assert "| a step (3 of 5 rounds so far) | postrl | 1 | 10 |" in text and "| sampling | postrl |" in text
    assert "5.00 [4.00 … 7.00], 3 pairs" in text
    assert "≥ 6 ×: **not met** (5)" in text and "≤ 0.5 × its memory: met (0.333)" in text
    assert "vllm is not installed: make bench-envs" in lines["vLLM"] and "≥ 2.3 ×: not measured" in lines["vLLM"]
    assert "≥ 60% of the limit: met (65%)" in lines["limit"] and "9" not in lines["limit"].split("|")[3]
    assert "centred 20.0 ms, zscored 60.0 ms" in text and "≤ 50 ms each: **not met** (60)" in text


def test_the_page_has_a_picture_where_matplotlib_is(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: make bench-envs")
    file = tmp_path / "some-cpu.json"
    file.write_text(json.dumps(sample_results()))
    page.write_page([file], tmp_path / "benchmarks.md")
    assert "![ratios and scaling](benchmarks-some-cpu.png)" in (tmp_path / "benchmarks.md").read_text()
    assert (tmp_path / "benchmarks-some-cpu.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_needs_results(tmp_path: Path):
    with pytest.raises(UserError, match="no results"):
        page.write_page([], tmp_path / "benchmarks.md")
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(UserError, match=r"x\.json"):
        Results(tmp_path / "x.json", {})


@pytest.mark.skipif(not sorted((ROOT / "benchmarks" / "results").glob("*.json")), reason="nothing measured yet")
def test_the_page_of_the_repository_is_that_of_its_results(tmp_path: Path):
    page.write_page(sorted((ROOT / "benchmarks" / "results").glob("*.json")), tmp_path / "benchmarks.md")
    kept = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    without = [line for line in kept.splitlines() if "![" not in line]
    made = [line for line in (tmp_path / "benchmarks.md").read_text(encoding="utf-8").splitlines() if "![" not in line]
    assert [line for line in made if line] == [line for line in without if line]
