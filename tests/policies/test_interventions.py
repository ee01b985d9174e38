"""Hidden states read and changed: the same in training and sampling, shared or not, on both engines, and gone after."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from builders import ragged_rollouts, rollout
from postrl.batch import Batch
from postrl.errors import UserError
from postrl.policies import sampler as sampler_module
from postrl.policies.base import Completion, Sampling
from postrl.policies.decoder import Decoder
from postrl.policies.hf import HuggingFacePolicy
from postrl.policies.interventions import (
    Intervention,
    Places,
    Reader,
    ablate,
    everywhere,
    observed,
    prompt_end,
    prompt_ends,
    sampled,
    steer,
)
from postrl.policies.lora import LoRA, LoRADecoder
from postrl.policies.packing import pack
from postrl.policies.sampler import sample
from postrl.rollout import Rollout, Turn, collate
from tiny_models import save_model, tiny_model

LAYERS, HIDDEN, VOCABULARY = 3, 32, 40
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
OTHERS = {
    "gpt2": {"model_type": "gpt2", "vocab_size": 40, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "bloom": {"model_type": "bloom", "vocab_size": 40, "hidden_size": 32, "n_layer": 2, "n_head": 4},
}
MAMBA = {"model_type": "mamba", "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
SELECTORS = [everywhere, sampled, observed, prompt_end]
Make = Callable[[], Sequence[Intervention]]


def direction(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_position(layer: int) -> Intervention:
    """A change that depends on everything a change may know."""

    def change(hidden: Tensor, places: Places) -> Tensor:
        strength = 0.01 * places.positions + 0.02 * places.tokens - 0.3 * places.sampled + places.prompt_end
        return hidden * (1 + 0.1 * strength.to(hidden)[:, None]) + strength.to(hidden)[:, None]

    return Intervention(layer, change)


CHANGES: dict[str, Make] = {
    "embeddings": lambda: [steer(0, direction())],
    "sampled": lambda: [steer(2, 2 * direction(1), at=sampled)],
    "prompt end": lambda: [steer(1, 3 * direction(2), at=prompt_end)],
    "several": lambda: [ablate(1, direction(3)), steer(1, direction(4), at=observed), by_position(LAYERS)],
    "places": lambda: [by_position(0), by_position(2)],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model(**CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)
    return save_model(tmp_path_factory.mktemp("model"), model)


@pytest.fixture
def decoder(folder: Path) -> Decoder:
    return Decoder.load(folder)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> HuggingFacePolicy:
    return HuggingFacePolicy.load(folder)


@pytest.fixture
def huggingface(loaded: HuggingFacePolicy) -> HuggingFacePolicy:
    return copy.deepcopy(loaded)


@pytest.fixture(params=["decoder", "huggingface"])
def policy(request: pytest.FixtureRequest) -> Decoder | HuggingFacePolicy:
    return request.getfixturevalue(request.param)


def ragged(seed: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
    return collate(ragged_rollouts(seed, vocabulary=VOCABULARY)).to(dtype=dtype)


def plain(model: HuggingFacePolicy, batch: Batch, row: int, changes: dict[int, Callable[[Tensor], Tensor]]) -> Tensor:
    """Hidden states [T, d] of one row after the last block, by calling transformers' blocks one after the other."""
    causal, tokens = model.causal, batch.tokens[row : row + 1, : int(batch.valid[row].sum())]
    trunk = causal.base_model
    x = trunk.embed_tokens(tokens)
    angles = trunk.rotary_emb(x, torch.arange(tokens.shape[1])[None])
    length = tokens.shape[1]
    later = torch.full((length, length), -torch.inf).triu(1)[None, None]
    for layer in range(LAYERS + 1):
        if layer:
            out = trunk.layers[layer - 1](x, attention_mask=later, position_embeddings=angles)
            x = out if isinstance(out, Tensor) else out[0]
        if layer in changes:
            x = changes[layer](x[0])[None]
    return trunk.norm(x)[0]


# ----------------------------------------------------------------------------------------------------------- reference


@pytest.mark.parametrize("at", SELECTORS)
def test_steering_and_ablation_equal_a_plain_loop_over_the_blocks(
    policy: Decoder | HuggingFacePolicy, huggingface: HuggingFacePolicy, at: Callable
) -> None:
    batch, v, w = ragged(1), 2 * direction(), direction(1)
    with policy.with_interventions(steer(2, v, at), ablate(1, w, at)), torch.no_grad():
        found = policy(batch).logp
    unit = w / w.norm()
    for b in range(len(batch.tokens)):
        length = int(batch.valid[b].sum())
        chosen = torch.zeros(length, dtype=torch.bool)
        first = int(batch.mask[b].int().argmax()) if batch.mask[b].any() else length
        for t in range(length):
            roles = {"sampled": bool(batch.mask[b, t]), "prompt_end": t == first - 1, "everywhere": True}
            chosen[t] = roles["sampled"] is False if at is observed else roles[at.__name__]
        mark = chosen.float()[:, None]
        with torch.no_grad():
            states = plain(
                huggingface,
                batch,
                b,
                {1: lambda h, m=mark: h - m * (h @ unit)[:, None] * unit, 2: lambda h, m=mark: h + m * v},
            )
            logits = states @ huggingface._head_weight().T / batch.temperature[b]
        expected = logits.log_softmax(-1)
        for t in batch.mask[b].nonzero()[:, 0].tolist():
            assert found[b, t].item() == pytest.approx(expected[t - 1, batch.tokens[b, t]].item(), abs=2e-5)


def test_activations_equal_transformers_hidden_states(
    policy: Decoder | HuggingFacePolicy, huggingface: HuggingFacePolicy
) -> None:
    """At every real token, also the last of a row, which predicts nothing; of rows that share a prefix and others."""
    batch = ragged(2)
    found = policy.activations(batch, range(LAYERS + 1), batch.valid)
    assert found.shape == (LAYERS + 1, int(batch.valid.sum()), HIDDEN)
    with torch.no_grad():
        expected = huggingface.causal.base_model(input_ids=batch.tokens, output_hidden_states=True).hidden_states
    for layer in range(LAYERS):
        torch.testing.assert_close(found[layer], expected[layer][batch.valid], atol=2e-5, rtol=1e-5)
    # The last of transformers' hidden states is after the final norm.
    norm = huggingface.causal.base_model.norm
    torch.testing.assert_close(norm(found[LAYERS]), expected[LAYERS][batch.valid], atol=2e-5, rtol=1e-5)


def test_activations_of_some_tokens_and_layers(policy: Decoder | HuggingFacePolicy) -> None:
    batch = ragged(2)
    whole = policy.activations(batch, range(LAYERS + 1), batch.valid)
    at = prompt_ends(batch) | (batch.mask & (batch.tokens % 3 == 0))
    some = policy.activations(batch, [2, 0], at)
    torch.testing.assert_close(some, whole[[2, 0]][:, at[batch.valid]], atol=1e-5, rtol=1e-5)
    nowhere = torch.zeros_like(at)
    assert policy.activations(batch, [1], nowhere).shape == (1, 0, HIDDEN)
    with pytest.raises(ValueError, match="`at` must lie within `valid`"):
        policy.activations(batch, [1], ~batch.valid)
    with policy.with_interventions(steer(1, direction())):
        torch.testing.assert_close(policy.activations(batch, [1], at)[0], whole[1][at[batch.valid]] + direction())


def test_activations_run_only_what_they_need(decoder: Decoder) -> None:
    """A prompt that rows share once, nothing after the last token asked for."""
    prompt = list(range(1, 11))
    batch = collate([rollout(0, i, prompt=prompt, completion=range(1, 2 + i)) for i in range(4)])
    assert len(pack(batch, prompt_ends(batch)).tokens) == 10
    assert len(pack(batch, batch.valid, places=True).tokens) == 10 + 1 + 2 + 3 + 4
    reader = Reader(2)
    with decoder.with_interventions(reader.intervention):
        decoder.activations(batch, [1], prompt_ends(batch))
        assert not reader.passes  # layers after the last one asked for
        decoder.activations(batch, [3], prompt_ends(batch))
    [(hidden, places)] = reader.passes
    assert places.tokens.tolist() == prompt and places.positions.tolist() == list(range(10)) and len(hidden) == 10


def test_gradients_reach_activations(decoder: Decoder, huggingface: HuggingFacePolicy) -> None:
    batch, found = ragged(2), []
    for policy in (decoder, huggingface):
        policy.activations(batch, [2], prompt_ends(batch)).pow(2).sum().backward()
        found.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None and p.grad.any()})
    ours, theirs = found[0], {name.removeprefix("model."): grad for name, grad in found[1].items()}
    assert ours.keys() == theirs.keys() and not any("layers.2" in name for name in ours)
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).abs().max() < 1e-4 * gradient.abs().max()


# ------------------------------------------------------------------------------------------------ training and sampling


def as_turns(prompt: Sequence[int], completion: Completion) -> list[Turn]:
    return [Turn(list(prompt), False), Turn(completion.tokens, True, logp=completion.logp)]


def difference(policy: Decoder | HuggingFacePolicy, turns: Sequence[Sequence[Turn]]) -> float:
    """Largest difference between the sampler's log-probabilities and the training forward's."""
    rollouts = [Rollout("x", i, 0, [list(own)], rewards={"r": 0.0}) for i, own in enumerate(turns)]
    batch = collate(rollouts)
    with torch.no_grad():
        return float((policy(batch).logp - batch.logp_sampler).abs().max())


@pytest.fixture(params=["decoder, shared prompts", "decoder, copied prompts", "huggingface"])
def sampled_policy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Decoder | HuggingFacePolicy:
    monkeypatch.setattr(sampler_module, "SHARE_BYTES", 0 if "shared" in request.param else 10**9)
    return request.getfixturevalue(request.param.split(",")[0])


@pytest.mark.parametrize("name", CHANGES)
def test_what_sampling_reports_is_what_training_computes(
    sampled_policy: Decoder | HuggingFacePolicy, name: str
) -> None:
    """Fewer slots than completions, so that they leave and enter, several on one prompt."""
    policy = sampled_policy
    prompts = [[5, 9, 1], [7, 3, 2, 8, 8, 1], [4]]
    sampling = Sampling(max_tokens=12, stop=frozenset({3, 7}))
    without = sample(policy.sampler(4), prompts, 3, sampling, seed=1)
    with policy.with_interventions(*CHANGES[name]()):
        groups = sample(policy.sampler(4), prompts, 3, sampling, seed=1)
        turns = [as_turns(prompt, c) for prompt, group in zip(prompts, groups, strict=True) for c in group]
        assert difference(policy, turns) < 2e-5
    assert difference(policy, turns) > 1e-2 and groups != without


def test_sessions_go_on_under_an_intervention(sampled_policy: Decoder | HuggingFacePolicy) -> None:
    policy = sampled_policy
    sampling = Sampling(max_tokens=6, stop=frozenset({3, 7}))
    with policy.with_interventions(*CHANGES["places"](), steer(1, direction(), at=observed)):
        sampler, prompts = policy.sampler(2), [[5, 9], [5, 9], [1, 2, 3]]
        history = [[Turn(prompt, False)] for prompt in prompts]
        sessions = [sampler.submit(prompt, (0, i, 0), sampling, keep=True) for i, prompt in enumerate(prompts)]
        while completions := sampler.poll():
            for c in completions:
                _, i, turn = c.key
                history[i].append(Turn(c.tokens, True, logp=c.logp))
                if turn == 2:
                    sampler.close(c.session)
                else:
                    history[i].append(Turn([11 + i] * turn, False))
                    sampler.submit([11 + i] * turn, (0, i, turn + 1), sampling, session=sessions[i], keep=True)
        assert difference(policy, history) < 2e-5


@pytest.mark.parametrize("name", CHANGES)
def test_both_engines_agree_in_values_and_gradients(
    decoder: Decoder, huggingface: HuggingFacePolicy, name: str
) -> None:
    batch, found = ragged(3), []
    for policy in (decoder, huggingface):
        vector = direction(6).requires_grad_()
        with policy.with_interventions(*CHANGES[name](), steer(1, vector, at=observed), ablate(3, vector)):
            out = policy(batch, frozenset({"entropy"}))
            (out.logp + out.entropy).sum().backward()
        gradients = {n.removeprefix("model.").removeprefix("model."): p.grad for n, p in policy.named_parameters()}
        gradients["vector"] = vector.grad
        found.append((out.logp, out.entropy, gradients))
    (logp, entropy, ours), (other_logp, other_entropy, theirs) = found
    torch.testing.assert_close(logp, other_logp, atol=2e-5, rtol=0)
    torch.testing.assert_close(entropy, other_entropy, atol=2e-5, rtol=0)
    assert ours.keys() == theirs.keys()
    for parameter, gradient in theirs.items():
        assert (ours[parameter] - gradient).abs().max() < 1e-4 * gradient.abs().max(), parameter


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("seed", range(2))
def test_a_shared_prefix_sees_a_change_once(folder: Path, name: str, seed: int) -> None:
    decoder, batch, found = Decoder.load(folder, torch.float64), ragged(seed, torch.float64), []
    vector = direction(5, torch.float64).requires_grad_()
    for rows in (batch, replace(batch, prefix_id=torch.arange(len(batch.tokens)))):
        decoder.zero_grad()
        vector.grad = None
        with decoder.with_interventions(*CHANGES[name](), steer(2, vector, at=observed)):
            logp = decoder(rows).logp
            (logp * torch.arange(logp.numel()).view(logp.shape)).sum().backward()
        found.append((logp, vector.grad, *(p.grad for p in decoder.parameters())))
    assert found[0][1].abs().max() > 0
    for shared, alone in zip(*found, strict=True):
        assert (shared - alone).abs().max() <= 1e-11 * alone.abs().max()


def test_rows_share_a_prefix_only_where_its_places_agree(decoder: Decoder) -> None:
    """An empty first turn ends the shared prefix, but that row's prompt ends later; a token drawn in one row and given
    in another is not one token either."""
    contexts = [
        [Turn([1, 2, 3], False), Turn([4, 5], True, logp=[-1.0, -1.0])],
        [Turn([1, 2, 3], False), Turn([6], True, logp=[-1.0])],
        [Turn([1, 2, 3], False), Turn([], True, logp=[]), Turn([8], False), Turn([5], True, logp=[-1.0])],
    ]
    batch = collate([Rollout("x", 0, i, [context], rewards={"r": 0.0}) for i, context in enumerate(contexts)])
    batch.mask[1, 1] = True
    alone = replace(batch, prefix_id=torch.arange(3))
    with decoder.with_interventions(steer(1, 3 * direction(), at=prompt_end), steer(2, direction(1), at=sampled)):
        torch.testing.assert_close(decoder(batch).logp, decoder(alone).logp, atol=1e-5, rtol=0)
    batch.mask[1, 1] = False
    assert len(pack(batch, places=True).tokens) == 3 + 1 + 0 + 4  # the first two still share theirs


# ----------------------------------------------------------------------------------------------------- gradients, modes


def test_gradients_flow_through_a_change(folder: Path) -> None:
    """By finite differences along a random change of the vector, in float64."""
    policy, batch = Decoder.load(folder, torch.float64), ragged(1, torch.float64)
    vector, step = direction(0, torch.float64).requires_grad_(), direction(1, torch.float64)

    def total(v: Tensor) -> Tensor:
        with policy.with_interventions(ablate(1, v), steer(2, v, at=sampled)):
            return policy(batch).logp.sum()

    total(vector).backward()
    with torch.no_grad():
        numeric = (total(vector + 1e-5 * step) - total(vector - 1e-5 * step)) / 2e-5
    assert float(vector.grad @ step) == pytest.approx(float(numeric), rel=1e-6)


def test_recomputing_sees_each_change_once_and_changes_nothing(folder: Path) -> None:
    batch, found = ragged(1, torch.float64), []
    for recompute in (False, True):
        decoder, reader = Decoder.load(folder, torch.float64, recompute=recompute), Reader(2)
        with decoder.with_interventions(*CHANGES["several"](), reader.intervention):
            decoder(batch).logp.sum().backward()
        assert len(reader.passes) == 1
        found.append([p.grad for p in decoder.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_changes_are_made_in_full_precision_under_bfloat16(folder: Path) -> None:
    """The same numbers in training, where products run in bfloat16 by autocast, as in sampling."""
    decoder = Decoder.load(folder, compute_dtype=torch.bfloat16)
    seen: list[torch.dtype] = []

    def change(hidden: Tensor, places: Places) -> Tensor:
        seen.append((hidden @ direction()).dtype)
        return hidden

    with decoder.with_interventions(Intervention(1, change)):
        decoder(ragged()).logp.sum().backward()
        sample(decoder.sampler(), [[1, 2]], 1, Sampling(max_tokens=3), seed=0)
    assert len(seen) == 1 + 3 and set(seen) == {torch.float32}


def test_an_adapted_decoder_has_interventions_too(decoder: Decoder, folder: Path) -> None:
    adapted, batch = LoRADecoder(Decoder.load(folder), LoRA(rank=2), folder), ragged()
    with decoder.with_interventions(*CHANGES["several"]()), adapted.with_interventions(*CHANGES["several"]()):
        assert torch.equal(decoder(batch).logp, adapted(batch).logp)
        prompts = [[1, 2], [3]]
        ours, theirs = (sample(p.sampler(), prompts, 2, Sampling(max_tokens=5), seed=0) for p in (decoder, adapted))
        assert ours == theirs
    assert torch.equal(decoder.activations(batch, [1], batch.mask), adapted.activations(batch, [1], batch.mask))


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures(name: str) -> None:
    policy = HuggingFacePolicy(tiny_model(**OTHERS[name]))
    batch = ragged(1)
    found = policy.activations(batch, [0, 1], batch.valid)
    states = policy.causal.base_model(input_ids=batch.tokens, use_cache=False, output_hidden_states=True).hidden_states
    for layer in (0, 1):
        torch.testing.assert_close(found[layer], states[layer][batch.valid])
    with policy.with_interventions(by_position(1), steer(2, direction(), at=prompt_end)):
        sampler, prompts = policy.sampler(), [[5, 9, 1], [4]]
        groups = sample(sampler, prompts, 2, Sampling(max_tokens=6), seed=1)
        turns = [as_turns(prompt, c) for prompt, group in zip(prompts, groups, strict=True) for c in group]
        assert difference(policy, turns) < 1e-4
    assert difference(policy, turns) > 1e-3


def test_a_model_whose_hidden_states_cannot_be_reached_is_refused() -> None:
    policy = HuggingFacePolicy(tiny_model(**CONFIG))
    trunk = policy.causal.base_model
    trunk.layers = nn.ModuleList([*trunk.layers, nn.Identity()])
    with pytest.raises(UserError, match="a LlamaModel has no list of 3 layers"):
        policy.with_interventions(steer(1, direction()))
    other = HuggingFacePolicy(tiny_model(**MAMBA))  # its hidden_states begin after the first block
    with pytest.raises(UserError, match="hidden states of a mamba model cannot be reached"):
        other.with_interventions(steer(1, direction()))


# --------------------------------------------------------------------------------------------------------------- scope


def hooks(policy: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in policy.modules())


def test_nothing_remains_after_the_scope(policy: Decoder | HuggingFacePolicy) -> None:
    batch, sampling = ragged(), Sampling(max_tokens=5)
    with policy.with_interventions():  # transformers puts hooks of its own on a model asked for its hidden states
        own = hooks(policy)
    logp, drawn = policy(batch).logp, sample(policy.sampler(), [[1, 2]], 2, sampling, seed=0)

    def fails(hidden: Tensor, places: Places) -> Tensor:
        raise RuntimeError("a probe that fails")

    with policy.with_interventions(by_position(1)):
        inner = policy(batch).logp
        with policy.with_interventions(by_position(1)):
            assert not torch.equal(policy(batch).logp, inner)
        assert torch.equal(policy(batch).logp, inner)
        assert hooks(policy) == own
    for use in (lambda: policy(batch), lambda: sample(policy.sampler(), [[1, 2]], 2, sampling, seed=0)):
        with pytest.raises(RuntimeError, match="a probe that fails"), policy.with_interventions(Intervention(1, fails)):
            use()
        assert not policy.interventions and hooks(policy) == own
    assert torch.equal(policy(batch).logp, logp)
    assert sample(policy.sampler(), [[1, 2]], 2, sampling, seed=0) == drawn


def test_the_outer_scope_comes_first(policy: Decoder | HuggingFacePolicy) -> None:
    double, add = Intervention(1, lambda hidden, places: 2 * hidden), steer(1, direction())
    batch = ragged()
    plain = policy.activations(batch, [1], batch.mask)
    with policy.with_interventions(double), policy.with_interventions(add):
        torch.testing.assert_close(policy.activations(batch, [1], batch.mask), 2 * plain + direction())
    with policy.with_interventions(add, double):
        torch.testing.assert_close(policy.activations(batch, [1], batch.mask), 2 * (plain + direction()))


def test_absent_interventions_leave_no_trace(decoder: Decoder) -> None:
    """The same numbers bit for bit and the same graph, node for node, with none, after a scope, and with changes of
    layers only in another policy; `places` are not even made."""

    def nodes(tensor: Tensor) -> list[str]:
        todo, names = [tensor.grad_fn], []
        while todo:
            node = todo.pop()
            names.append(type(node).__name__)
            todo += [next_node for next_node, _ in node.next_functions if next_node is not None]
        return names

    batch = ragged()
    before = decoder(batch).logp
    with decoder.with_interventions():
        inside = decoder(batch).logp
    after = decoder(batch).logp
    assert torch.equal(before, inside) and torch.equal(before, after)
    assert nodes(before) == nodes(inside) == nodes(after)
    assert pack(batch).places is None
    with decoder.with_interventions(steer(1, direction())):
        assert len(nodes(decoder(batch).logp)) > len(nodes(before))


def test_open_sessions_do_not_change_their_interventions(policy: Decoder | HuggingFacePolicy) -> None:
    """Keys and values made under one change do not fit another; nothing is computed again behind the caller's back."""
    sampler = policy.sampler()
    with policy.with_interventions(steer(1, direction())):
        session = sampler.submit([1, 2], (0,), Sampling(max_tokens=3), keep=True)
        sampler.poll()
    for forbidden in (sampler.poll, lambda: sampler.submit([1], (1,), Sampling(), session=session)):
        with pytest.raises(ValueError, match="began under other interventions"):
            forbidden()
    sampler.close(session)
    again, fresh = (sample(s, [[1, 2]], 2, Sampling(max_tokens=3), seed=0)[0] for s in (sampler, policy.sampler()))
    assert [(c.tokens, c.logp) for c in again] == [(c.tokens, c.logp) for c in fresh]


def test_wrong_interventions_are_refused(policy: Decoder | HuggingFacePolicy) -> None:
    for layer in (-1, LAYERS + 1):
        with (
            pytest.raises(UserError, match=f"at layer {layer}: this policy has the layers 0 to 3"),
            policy.with_interventions(steer(layer, direction())),
        ):
            pass
    for change in (lambda hidden, places: hidden[:1], lambda hidden, places: hidden.double()):
        with (
            policy.with_interventions(Intervention(1, change)),
            pytest.raises(ValueError, match="an intervention made"),
        ):
            policy(ragged())
