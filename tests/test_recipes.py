"""Recipes: found by name and by path, loaded with their neighbours, and the smallest one run to its end."""

import dataclasses
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from builders import ragged_batch
from postrl import papers, recipes_folder
from postrl.errors import UserError
from postrl.report.data import read_runs
from postrl.rollout import Rollout, Turn
from postrl.settings import Settings
from tiny_models import save_model

RECIPE = '''"""A recipe for a test."""
from dataclasses import dataclass

@dataclass(frozen=True)
class Config:
    word: str = "{word}"

def main(config):
    return config.word
'''


@pytest.fixture(autouse=True)
def modules() -> Iterator[None]:
    """Recipes and folders loaded by a test are forgotten after it."""
    loaded, path = set(sys.modules), list(sys.path)
    yield
    folders = set(sys.path) - set(path)  # of recipes; what these import from elsewhere stays loaded
    for name in set(sys.modules) - loaded:
        if str(Path(vars(sys.modules[name]).get("__file__") or "").parent) in folders:
            del sys.modules[name]
    sys.path[:] = path


@pytest.mark.parametrize("name", sorted(recipes_folder.recipes()))
def test_every_recipe_loads_and_explains_its_options(name: str):
    found = recipes_folder.load(name)
    assert found.summary and found.path.stem == name
    assert vars(found.config)["__dataclass_params__"].frozen
    assert len(inspect.signature(found.main).parameters) >= 1
    source = found.path.read_text(encoding="utf-8")
    for field in dataclasses.fields(found.config):
        has_default = {field.default, field.default_factory} != {dataclasses.MISSING}
        assert has_default, f"{name}: option {field.name} has no default"
    assert source.rstrip().endswith("run_recipe(Config, main)")


def test_a_recipe_by_path_wins_nothing_by_name(tmp_path: Path):
    path = tmp_path / "mine_by_path.py"
    path.write_text(RECIPE.format(word="hello"))
    found = recipes_folder.load(str(path))
    assert found.main(found.config()) == "hello"
    with pytest.raises(UserError, match="there is no recipe 'mine_by_path'"):
        recipes_folder.find("mine_by_path")


def test_a_recipe_imports_its_neighbour(tmp_path: Path):
    (tmp_path / "neighbour_of_test.py").write_text(RECIPE.format(word="from the neighbour"))
    path = tmp_path / "recipe_with_neighbour.py"
    path.write_text("from neighbour_of_test import Config, main\n")
    found = recipes_folder.load(str(path))
    assert found.main(found.config()) == "from the neighbour"
    assert recipes_folder.load(str(tmp_path / "neighbour_of_test.py")).config is found.config


def test_a_copy_of_a_recipe_works_anywhere(tmp_path: Path):
    """gsm8k imports its neighbour `reasoning`, which does not lie beside the copy."""
    path = tmp_path / "copy_of_gsm8k.py"
    path.write_text(recipes_folder.find("gsm8k").read_text())
    assert recipes_folder.load(str(path)).config().task == "gsm8k"


def test_an_installed_recipe_stands_before_the_checkouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for folder in ("installed", "checkout"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "both.py").write_text("")
    (tmp_path / "checkout" / "_helper.py").write_text("")
    monkeypatch.setattr(recipes_folder, "FOLDERS", (tmp_path / "installed", tmp_path / "checkout"))
    assert recipes_folder.recipes() == {"both": tmp_path / "installed" / "both.py"}


@pytest.mark.parametrize("name", ["nope", "nope.py", "./nope", "copy_task.txt"])
def test_an_unknown_recipe_lists_those_there_are(name: str):
    with pytest.raises(UserError, match=r"there is no recipe .*copy_task") as raised:
        recipes_folder.load(name)
    assert repr(name) in str(raised.value)


@pytest.mark.parametrize("name", ["copy_task", "reasoning", "gsm8k"])
def test_a_negative_seed_is_named_before_anything_is_loaded(name: str, tmp_path: Path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "1 + 1 =", "answer": "#### 2"}\n')
    config = recipes_folder.load(name).config
    options = {"data": str(data)} if name == "gsm8k" else {}
    settings = dataclasses.replace(config().train, seed=-1)
    with pytest.raises(UserError, match="option seed=-1"):
        recipes_folder.load(name).main(config(train=settings, out=tmp_path / "run", **options))


def test_a_file_that_is_no_recipe_is_named(tmp_path: Path):
    path = tmp_path / "half_a_recipe.py"
    path.write_text("class Config: pass\n")
    with pytest.raises(UserError, match=r"half_a_recipe\.py is not a recipe"):
        recipes_folder.load(str(path))


def test_a_recipe_does_not_take_the_place_of_a_module(tmp_path: Path):
    path = tmp_path / "json.py"
    path.write_text(RECIPE.format(word="json"))
    with pytest.raises(UserError, match="a module called 'json' is already loaded"):
        recipes_folder.load(str(path))


def test_a_recipe_that_fails_to_load_is_not_half_there(tmp_path: Path):
    path = tmp_path / "broken_recipe.py"
    path.write_text("raise RuntimeError('on purpose')\n")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="on purpose"):
            recipes_folder.load(str(path))
    assert "broken_recipe" not in sys.modules


def test_the_copy_task_learns(tmp_path: Path):
    """From chance (.01) to most strings right, and the report can be read from what it leaves."""
    found = recipes_folder.load("copy_task")
    train = Settings(steps=12, updates=4, learning_rate=0.3)
    found.main(found.config(train=train, alphabet="ab", groups_per_step=4, out=tmp_path / "run"))
    (run,) = read_runs([tmp_path / "run"])
    assert run.before is not None and run.after is not None
    assert run.before.full.pass_at["1"] < 0.15
    assert run.after.full.pass_at["1"] > 0.8
    assert run.pieces(run.rollouts[-1].rows[0]["tokens"])[0] in "ab"


def test_methods_that_know_lengths_get_the_samplers():
    module = sys.modules[recipes_folder.load("reasoning").main.__module__]
    batch = ragged_batch(seed=1)
    for options, length in (({}, 16), ({"length": 50}, 50)):
        weight = module.make_method("dr_grpo", options, 16).terms[0].weight(batch)
        torch.testing.assert_close(weight, papers.method("dr_grpo", length=length).terms[0].weight(batch))
    shaped = module.make_method("dapo", {}, 16).advantage(batch)
    torch.testing.assert_close(shaped, papers.method("dapo", max_length=16, cache=3).advantage(batch))
    assert module.make_method("grpo", {}, 16).name == "grpo"


def sampled(tokens: list[int]) -> Rollout:
    return Rollout("a", 0, 0, [[Turn([1], False), Turn(tokens, True, logp=[0.0] * len(tokens))]])


def test_preferences_from_a_file_are_learnt_and_measured_on_pairs_held_out(tmp_path: Path):
    rows = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(40)]
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = recipes_folder.load("preferences")
    config = found.config(
        data=str(data),
        model=str(save_model(tmp_path / "model")),
        train=Settings(steps=6, updates=1, learning_rate=1e-2),
        threads=1,
        out=tmp_path / "run",
    )
    found.main(config)
    held_out = json.loads((tmp_path / "run" / "held_out.json").read_text())
    assert held_out["accuracy"] == 1.0 and held_out["margin"] > 0
    with pytest.raises(UserError, match="option data is empty"):
        found.main(dataclasses.replace(config, data=""))


def test_a_second_reward_is_trained_on_where_it_is_asked_for(tmp_path: Path):
    found = recipes_folder.load("reasoning")
    module = sys.modules[found.main.__module__]
    plain, brief = (module.make_task(found.config(brevity=weight)).rubric for weight in (0.0, 0.5))
    assert "brevity" not in plain.names
    reward = next(reward for reward in brief.rewards if reward.name == "brevity")
    assert reward.weight == 0.5 and reward.fn(sampled([1, 2, 3, 4])) == 0.75  # of at most 16 tokens


@pytest.mark.slow
def test_the_tour_of_the_shelf_leaves_a_curve_of_every_method(tmp_path: Path):
    """A random model of two layers, one step each; an interrupted tour would go on."""
    found = recipes_folder.load("shelf")
    config = found.config(
        model=str(save_model(tmp_path / "model")),
        groups_per_step=2,
        group_size=2,
        threads=1,
        train=Settings(steps=1, updates=1),
        out=tmp_path / "runs",
    )
    found.main(config)
    elsewhere = vars(sys.modules[found.main.__module__])["ELSEWHERE"]
    assert {path.stem for path in (tmp_path / "runs" / "curves").iterdir()} == set(papers.methods()) - set(elsewhere)
    for path in (tmp_path / "runs" / "curves").iterdir():
        (line,) = path.read_text().splitlines()
        assert json.loads(line)["step"] == 1 and "time/step" not in line


@pytest.mark.parametrize(("name", "said"), [("nonsense", "choose from"), ("dpo", "not for this recipe")])
def test_the_tour_refuses_a_method_before_it_runs_another(tmp_path: Path, name: str, said: str):
    found = recipes_folder.load("shelf")
    with pytest.raises(UserError, match=said):
        found.main(found.config(methods=("grpo", name), out=tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()
