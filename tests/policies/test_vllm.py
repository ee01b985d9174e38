"""Sampling through a worker process: the client's side with a stand-in for the worker, and vLLM itself where it is."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from scipy.stats import chi2

from policies.fake_vllm import mark
from postrl import recipes_folder
from postrl.batch import Stop
from postrl.envs.copy_task import copy_task
from postrl.envs.two_turn import TwoTurn
from postrl.errors import UserError
from postrl.papers import method
from postrl.policies.base import Completion, Sampler, Sampling
from postrl.policies.chat import Characters
from postrl.policies.decoder import Decoder
from postrl.policies.interventions import Intervention
from postrl.policies.lora import LoRA, LoRADecoder
from postrl.policies.sampler import sample
from postrl.policies.tabular import Tabular
from postrl.policies.vllm import VllmSampler, seed_of, write_weights
from postrl.record import read_metrics
from postrl.rollout import Rollout, Turn, collate
from postrl.settings import Settings
from postrl.source import OnPolicy
from postrl.train import train
from tiny import tiny_decoder

FAKE = Path(__file__).with_name("fake_vllm.py")
ROOT = Path(__file__).parents[2]
TEN = Sampling(max_tokens=10)


def fake(policy: Decoder, **engine: object) -> VllmSampler:
    return VllmSampler(policy, sys.executable, worker=FAKE, engine=engine, patience=20.0)


@pytest.fixture
def decoder() -> Decoder:
    return tiny_decoder(8, context=32)


def drain(sampler: Sampler) -> dict[int, list]:
    """Every completion under way, by session."""
    found: dict[int, list] = {}
    while done := sampler.poll():
        for completion in done:
            found.setdefault(completion.session, []).append(completion)
    return found


def test_it_is_a_sampler_and_answers_by_session(decoder: Decoder):
    sampler = fake(decoder)
    assert isinstance(sampler, Sampler)
    assert sampler.poll() == []
    sessions = [sampler.submit([1, 2], (0, 0, 0, number), TEN) for number in range(3)]
    first = sampler.poll()
    assert [completion.session for completion in first] == [2], "whoever is finished is not kept waiting"
    rest = drain(sampler)
    assert sorted([2, *rest]) == sessions
    assert {c.key for c in [*first, *(c for cs in rest.values() for c in cs)]} == {(0, 0, 0, n) for n in range(3)}


def test_a_completion_follows_from_its_key_alone(decoder: Decoder):
    sampler = fake(decoder)
    [[alone]] = sample(sampler, [[1]], 1, TEN, seed=3)
    several = sample(sampler, [[1], [2]], 4, TEN, seed=3)
    assert several[0][0].tokens == alone.tokens
    assert len({seed_of((0, step, group, n)) for step in range(9) for group in range(9) for n in range(9)}) == 729
    assert 0 <= seed_of((2**31, 2**31 - 1, 5)) < 2**63


def test_stop_reasons_and_lengths(decoder: Decoder):
    sampler = fake(decoder)
    stopping = sampler.submit([1], (0,), Sampling(max_tokens=1000, stop=frozenset({5})))
    full = sampler.submit([1] * 30, (1,), Sampling(max_tokens=1000))
    found = drain(sampler)
    [one], [two] = found[stopping], found[full]
    assert one.stop == Stop.FINISHED and one.tokens[-1] == 5 and 5 not in one.tokens[:-1]
    assert two.stop == Stop.TRUNCATED and len(two.tokens) == 2, "the context holds 32"
    assert len(one.logp) == len(one.tokens)


def test_weights_are_those_after_the_refresh(decoder: Decoder, tmp_path: Path):
    sampler = fake(decoder)

    def expected() -> float:
        write_weights(decoder, tmp_path)
        return mark(str(tmp_path))

    def drawn() -> float:
        [[completion]] = sample(sampler, [[1]], 1, Sampling(max_tokens=1, temperature=0.5), seed=0)
        return completion.logp[0]

    old = expected()
    assert drawn() == 0.5 * old
    with torch.no_grad():
        decoder.model.norm.weight.mul_(1.5)
    assert drawn() == 0.5 * old, "until `refresh` the weights are those of the first poll"
    sampler.refresh()
    with torch.no_grad():
        decoder.model.norm.weight.mul_(1.5)
    new = expected()
    assert drawn() == 0.5 * new != 0.5 * old


def test_a_session_goes_on_with_its_whole_context(decoder: Decoder):
    sampler = fake(decoder)
    session = sampler.submit([1, 2], (0, 0), Sampling(max_tokens=3), keep=True)
    with pytest.raises(ValueError, match="still being sampled"):
        sampler.submit([1], (0, 1), TEN, session)
    [first] = drain(sampler)[session]
    with pytest.raises(ValueError, match="1 sessions are open"):
        sampler.refresh()
    assert sampler.submit([4], (0, 1), TEN, session, keep=True) == session
    assert sampler._fresh[0].context == (1, 2, *first.tokens, 4)
    [second] = drain(sampler)[session]
    sampler.submit([0] * (32 - 2 - 3 - 1 - len(second.tokens)), (0, 2), TEN, session)
    [third] = drain(sampler)[session]
    assert (third.tokens, third.stop) == ([], Stop.TRUNCATED), "no room is left"
    sampler.refresh()
    with pytest.raises(ValueError, match="closed"):
        sampler.close(session)


def test_it_collects_rollouts_of_several_turns(decoder: Decoder):
    renderer = Characters("abcd?")
    policy = tiny_decoder(renderer.size, context=64)
    source = OnPolicy(
        TwoTurn(),
        policy,
        renderer,
        groups_per_step=2,
        group_size=2,
        sampling=Sampling(max_tokens=3),
        make_sampler=lambda: fake(policy),
    )
    rollouts = source(0)
    again = source(1)
    assert len(rollouts) == len(again) == 4
    assert all(len(turn.logp) == len(turn.tokens) for r in rollouts for turn in r.contexts[0] if turn.sampled)


def test_a_worker_that_ends_is_told_with_the_end_of_its_log(decoder: Decoder):
    sampler = fake(decoder, die=2)
    sample(sampler, [[1]], 1, TEN, seed=0)
    sampler.submit([1], (0,), TEN)
    with pytest.raises(UserError, match=r"ended with exit status 3[\s\S]*no space left in the engine"):
        sampler.poll()
    sampler.stop()
    sample(sampler, [[1]], 1, TEN, seed=0)  # another worker


def test_a_silent_worker_is_ended(decoder: Decoder):
    sampler = VllmSampler(decoder, sys.executable, worker=FAKE, engine={"sleep": True}, patience=0.5)
    sampler.patience = 0.5
    sampler.submit([1], (0,), TEN)
    with pytest.raises(UserError, match=r"was silent for 0.5 s|ended"):
        sampler.poll()


def done(**changes: object) -> str:
    good = {"id": 0, "tokens": [1, 2], "logp": [-1.0, -2.0], "finished": True}
    return json.dumps({"done": [good | changes]}) + "\n"


LIES = [
    ("INFO loading\n", "is no answer"),
    ("[1]\n", "is no answer"),
    ('{"done": [', "was silent for 2 s"),  # and hangs in the middle of the line
    ("{}\n", "finished none"),
    ('{"done": []}\n', "finished none"),
    (done(id=7), "what was not asked"),
    (done(logp=[None, None]), "what was not asked"),
    (done(logp=[-1.0]), "do not fit"),
    (done(tokens=[1, 8]), "do not fit"),
    (done(tokens=[1, -1]), "do not fit"),
    (done(tokens=[], logp=[]), "do not fit"),
    (done(tokens=[1] * 11, logp=[-1.0] * 11), "do not fit"),
    (done(logp=[-1.0, -math.inf]), "no numbers"),
]


@pytest.mark.parametrize(("says", "message"), LIES)
def test_a_worker_that_answers_nonsense_is_no_sampler(decoder: Decoder, says: str, message: str):
    sampler = VllmSampler(decoder, sys.executable, worker=FAKE, engine={"says": says}, patience=2.0)
    sampler.submit([1], (0,), TEN)
    with pytest.raises(UserError, match=message):
        sampler.poll()


def test_a_python_that_cannot_be_run_is_named(decoder: Decoder, tmp_path: Path):
    python = tmp_path / "python"
    python.write_text("")
    sampler = VllmSampler(decoder, python)
    sampler.submit([1], (0,), TEN)
    with pytest.raises(UserError, match="python cannot be run"):
        sampler.poll()


def test_probabilities_that_are_no_numbers_stop_the_run(decoder: Decoder):
    sampler = fake(decoder, nan=True)
    sampler.submit([1], (0,), TEN)
    with pytest.raises(UserError, match="no numbers"):
        sampler.poll()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_p": 0.9}, "whole distributions"),
        ({"top_k": 3}, "whole distributions"),
        ({"temperature": 0.0}, "whole distributions"),
        ({"max_tokens": 0}, "at least one"),
    ],
)
def test_sampling_that_it_cannot_do(decoder: Decoder, change: dict, message: str):
    with pytest.raises(UserError, match=message):
        fake(decoder).submit([1], (0,), Sampling(**{"max_tokens": 4, **change}))


def test_prompts_that_it_cannot_read(decoder: Decoder):
    sampler = fake(decoder)
    with pytest.raises(UserError, match="32 tokens leaves no room"):
        sampler.submit([1] * 32, (0,), TEN)
    with pytest.raises(ValueError, match="empty prompt"):
        sampler.submit([], (0,), TEN)
    sampler.submit([8], (0,), TEN)
    with pytest.raises(ValueError, match="outside the vocabulary of 8"):
        sampler.poll()


def test_a_missing_environment_names_the_target(decoder: Decoder, tmp_path: Path):
    with pytest.raises(UserError, match="make vllm-env"):
        VllmSampler(decoder, tmp_path / "python")


def test_an_environment_without_vllm_says_so(decoder: Decoder):
    sampler = VllmSampler(decoder, sys.executable, patience=60)
    sampler.submit([1], (0,), TEN)
    with pytest.raises(UserError, match=r"ended with exit status 1[\s\S]*No module named 'vllm'"):
        sampler.poll()


def test_what_cannot_be_handed_over(decoder: Decoder, tmp_path: Path):
    with pytest.raises(UserError, match="cannot sample a Tabular"):
        write_weights(Tabular(torch.zeros(5, 4), memory=1, context_length=8), tmp_path)
    double = Intervention(0, lambda hidden, places: 2 * hidden)
    with decoder.with_interventions(double), pytest.raises(UserError, match="hidden"):
        write_weights(decoder, tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_whole_and_the_head_is_its_own(tied: bool, tmp_path: Path):
    decoder = tiny_decoder(8, tied=tied)
    write_weights(decoder, tmp_path / "plain")
    read = Decoder.load(tmp_path / "plain")
    assert not read.config.tied, "a tied head would stay as it was when vLLM takes new weights"
    head = decoder.model.embed_tokens.weight if tied else decoder.get_parameter("lm_head.weight")
    assert torch.equal(read.get_parameter("lm_head.weight"), head)

    adapted = LoRADecoder(decoder, LoRA(rank=2, alpha=4.0), tmp_path, seed=0)
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter.add_(0.1)
    write_weights(adapted, tmp_path / "merged")
    batch = collate([rollout([1, 2, 3], [4, 5])])
    torch.testing.assert_close(Decoder.load(tmp_path / "merged")(batch).logp, adapted(batch).logp, atol=1e-5, rtol=0)


def rollout(prompt: list[int], answer: list[int], temperature: float = 1.0) -> Rollout:
    turns = [Turn(prompt, False), Turn(answer, True, logp=[0.0] * len(answer))]
    return Rollout("item", 0, 0, [turns], rewards={"correct": 1.0}, temperature=temperature)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_the_worker_ends_with_the_sampler_and_with_its_process(decoder: Decoder):
    sampler = fake(decoder)
    sample(sampler, [[1]], 1, TEN, seed=0)
    assert sampler._process is not None and sampler._process._process is not None
    pid, folder = sampler._process._process.pid, sampler._process.folder
    assert alive(pid) and folder.is_dir()
    del sampler
    assert not alive(pid) and not folder.exists()


@pytest.mark.slow
def test_a_killed_client_leaves_no_worker_behind(tmp_path: Path):
    """The stand-in ends by its closed input; the real worker also watches its parent, in the middle of a pass."""
    script = (
        "import sys, time; sys.path[:0] = sys.argv[1:]\n"
        "from policies.test_vllm import *\n"
        "sampler = fake(tiny_decoder(8)); sample(sampler, [[1]], 1, TEN, seed=0)\n"
        "print(sampler._process._process.pid, flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, str(ROOT / "tests"), str(ROOT / "src")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(tmp_path)}
    ) as client:
        assert client.stdout is not None
        pid = int(client.stdout.readline())
        assert alive(pid)
        client.send_signal(signal.SIGKILL)
    for _ in range(100):
        if not alive(pid):
            return
        time.sleep(0.1)
    raise AssertionError("the worker goes on")


def test_the_recipes_option_names_what_is_missing(tmp_path: Path):
    recipe = recipes_folder.load("reasoning")
    make_sampler = vars(sys.modules[recipe.main.__module__])["make_sampler"]
    policy = tiny_decoder(8)
    assert make_sampler(policy, recipe.config(), "float32") is None
    with pytest.raises(UserError, match="make vllm-env"):
        make_sampler(policy, recipe.config(sampler="vllm", vllm=str(tmp_path / "python")), "float32")
    made = make_sampler(policy, recipe.config(sampler="vllm", vllm=sys.executable, threads=3), "bfloat16")
    assert (made.threads, made._options["dtype"]) == (3, "bfloat16")


# ---------------------------------------------------------------- vLLM itself

LONG = [1 + n % 61 for n in range(240)]  # longer than a block of its prefix cache


def taller(vocabulary: int) -> Decoder:
    """Of sizes for which vLLM has kernels on processors."""
    return tiny_decoder(vocabulary, hidden=128, heads=4, kv_heads=2, head_size=32, context=512)


@pytest.fixture(scope="module")
def real() -> VllmSampler:
    """Of a tiny random decoder with a tied head. One engine serves all tests: it takes half a minute to start."""
    python = ROOT / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no {python}: make vllm-env")
    policy = taller(64)
    with torch.no_grad():  # tokens are far from equally likely, and layers matter more than the last token's embedding
        for parameter in policy.model.layers.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1)
        policy.model.norm.weight.mul_(8)
    return VllmSampler(policy, python, slots=32, threads=1)


def gap(sampler: VllmSampler, prompt: list[int], completion: Completion, temperature: float) -> float:
    """The largest difference between vLLM's log-probabilities and the policy's present forward pass."""
    batch = collate([rollout(prompt, completion.tokens, temperature)])
    assert isinstance(sampler.policy, Decoder)
    with torch.no_grad():
        logp = sampler.policy(batch).logp[batch.mask]
    return float((logp - torch.tensor(completion.logp)).abs().max())


def perturb(sampler: VllmSampler) -> None:
    """What an optimiser's step does, larger."""
    with torch.no_grad():
        for number, parameter in enumerate(p for p in sampler.policy.parameters()):
            torch.manual_seed(number)
            parameter.add_(0.3 * parameter.std() * torch.randn_like(parameter))
    sampler.refresh()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_vllms_log_probabilities_are_the_policys(real: VllmSampler, temperature: float):
    how = Sampling(max_tokens=20, temperature=temperature)
    prompts = [LONG, [5, 6, 7]]
    for prompt, group in zip(prompts, sample(real, prompts, 4, how, seed=1), strict=True):
        assert len({tuple(completion.tokens) for completion in group}) > 1
        for completion in group:
            assert len(completion.tokens) == len(completion.logp) == 20 and completion.stop == Stop.TRUNCATED
            assert gap(real, prompt, completion, temperature) < 2e-5


@pytest.mark.slow
def test_vllms_weights_are_fresh_after_every_step(real: VllmSampler):
    """All of them: tied heads, packed ones, and nothing of an old prompt in the prefix cache."""
    how = Sampling(max_tokens=8)
    for _ in range(3):
        [group] = sample(real, [LONG], 2, how, seed=1)
        assert max(gap(real, LONG, completion, 1.0) for completion in group) < 2e-5
        perturb(real)
        assert max(gap(real, LONG, completion, 1.0) for completion in group) > 0.05, "another policy"


@pytest.mark.slow
def test_vllm_draws_from_the_distribution(real: VllmSampler):
    """4,000 first tokens against their probabilities: Pearson's statistic below its 1 − 1e-4 quantile."""
    [group] = sample(real, [[1, 2, 3]], 4000, Sampling(max_tokens=1, temperature=0.8), seed=5)
    batch = collate([rollout([1, 2, 3], [token], 0.8) for token in range(64)])
    with torch.no_grad():
        expected = 4000 * real.policy(batch).logp[batch.mask].double().exp()
    assert float(expected.sum()) == pytest.approx(4000, abs=0.1)
    found = torch.bincount(torch.tensor([completion.tokens[0] for completion in group]), minlength=64).double()
    often = expected > 5
    cells = [*zip(found[often], expected[often], strict=True), (found[~often].sum(), expected[~often].sum())]
    statistic = sum(float((f - e) ** 2 / e) for f, e in cells if e > 0)
    assert statistic < chi2.ppf(1 - 1e-4, len(cells) - 1)


@pytest.mark.slow
def test_vllms_completions_follow_from_their_keys(real: VllmSampler):
    how = Sampling(max_tokens=12)
    [[alone]] = sample(real, [[9, 8]], 1, how, seed=2)
    crowd = sample(real, [[9, 8], LONG, [4]], 6, how, seed=2)
    assert crowd[0][0].tokens == alone.tokens
    assert len({tuple(completion.tokens) for completion in crowd[0]}) > 1
    [[other]] = sample(real, [[9, 8]], 1, how, seed=3)
    assert other.tokens != alone.tokens


@pytest.mark.slow
def test_vllm_stops_where_it_is_told_and_goes_on_with_a_session(real: VllmSampler):
    half = frozenset(range(32))
    session = real.submit([7, 7], (0, 0), Sampling(max_tokens=40, stop=half), keep=True)
    [first] = drain(real)[session]
    assert first.stop == Stop.FINISHED and first.tokens[-1] in half and not half & set(first.tokens[:-1])
    real.submit([3, 2, 1], (0, 1), Sampling(max_tokens=9), session)
    [second] = drain(real)[session]
    assert second.stop == Stop.TRUNCATED and len(second.tokens) == 9
    assert gap(real, [7, 7, *first.tokens, 3, 2, 1], second, 1.0) < 2e-5


@pytest.mark.slow
def test_vllm_samples_for_a_run_and_its_mismatch_is_logged(real: VllmSampler, tmp_path: Path):
    renderer = Characters("abcd")
    policy = taller(renderer.size)
    python = real.python
    sampler = VllmSampler(policy, python, threads=1, dtype="bfloat16")
    source = OnPolicy(
        copy_task(2, "abcd", seed=0),
        policy,
        renderer,
        groups_per_step=4,
        group_size=4,
        sampling=Sampling(max_tokens=3),
        make_sampler=lambda: sampler,
    )
    settings = Settings(steps=3, updates=1, learning_rate=0.01, importance_cap=1.0)
    train(method("grpo"), policy, source, settings, tmp_path / "run")
    steps = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "mismatch/mean" in line]
    assert len(steps) == 3
    for step in steps:  # bfloat16 against float32: not equal, and not of another step's weights
        assert 1e-5 < step["mismatch/mean"] < 0.05
    sampler.stop()


@pytest.mark.parametrize("name", ["logprobs_mode", "generation_config", "seed"])
def test_what_the_correction_rests_on_cannot_be_changed_in_vllms_engine(decoder: Decoder, name: str):
    with pytest.raises(UserError, match=f"option {name} of vLLM's engine is postrl's own"):
        fake(decoder, **{name: "raw_logprobs"})
