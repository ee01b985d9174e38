"""Any causal language model as a policy: right for several architectures, equal to the decoder where both can run."""

import builtins
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertLMHeadModel, T5Config, T5ForConditionalGeneration

from builders import ragged_rollouts, rollout
from postrl.batch import Stop
from postrl.errors import UserError
from postrl.policies.base import Completion, Policy, Sampler, Sampling
from postrl.policies.decoder import Decoder
from postrl.policies.hf import NO_LIMIT, HuggingFacePolicy
from postrl.policies.lora import LoRA
from postrl.policies.sampler import sample
from postrl.rollout import collate
from tiny_models import LLAMA, TINY, save_model, smollm2, tiny_model

EVERYTHING = frozenset({"entropy", "logits", "hidden"})
SIZES = {"vocab_size": 61, "intermediate_size": 64, "max_position_embeddings": 64}
GPT2 = {"model_type": "gpt2", "vocab_size": 61, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
ARCHITECTURES = {
    "llama": {**LLAMA, "vocab_size": 61},
    "gpt2": GPT2,  # learned positions, dropout in its default configuration
    "gemma2": {
        "model_type": "gemma2",
        **TINY,
        **SIZES,
        "head_dim": 8,
        "sliding_window": 4,
        "final_logit_softcapping": 2.0,
    },
    "granite": {"model_type": "granite", **TINY, **SIZES, "logits_scaling": 3.0},
    "phi": {"model_type": "phi", **TINY, **SIZES, "num_key_value_heads": 4},  # a head with a bias
    "bloom": {"model_type": "bloom", "vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4},  # ALiBi
    "mamba": {"model_type": "mamba", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}


@pytest.fixture(params=ARCHITECTURES)
def policy(request: pytest.FixtureRequest) -> HuggingFacePolicy:
    return HuggingFacePolicy(tiny_model(**ARCHITECTURES[request.param]))


def llama(seed: int = 0) -> HuggingFacePolicy:
    return HuggingFacePolicy(tiny_model(seed, **ARCHITECTURES["llama"]))


def test_log_probabilities_are_those_of_each_row_alone(policy: HuggingFacePolicy) -> None:
    batch = collate(ragged_rollouts(0))
    batch.temperature[::2] = 0.7
    out = policy(batch, EVERYTHING if policy.context_length != NO_LIMIT else frozenset({"entropy", "logits"}))
    assert out.entropy is not None and out.logits is not None
    for b in range(len(batch.tokens)):
        length = int(batch.valid[b].sum())
        with torch.no_grad():
            logits = policy.causal(input_ids=batch.tokens[b : b + 1, :length]).logits[0] / batch.temperature[b]
        logs = logits.log_softmax(-1)
        for t in range(batch.tokens.shape[1]):
            if batch.mask[b, t]:
                assert out.logp[b, t].item() == pytest.approx(logs[t - 1, batch.tokens[b, t]].item(), abs=1e-4)
                entropy = -(logs[t - 1].exp() * logs[t - 1]).sum()
                assert out.entropy[b, t].item() == pytest.approx(entropy.item(), abs=1e-4)
                torch.testing.assert_close(out.logits[b, t].log_softmax(-1), logs[t - 1], rtol=0, atol=1e-4)
            else:
                assert out.logp[b, t] == 0 and out.entropy[b, t] == 0 and (out.logits[b, t] == 0).all()


def test_sampled_log_probabilities_are_the_forward_passes(policy: HuggingFacePolicy) -> None:
    """Contexts of different length, several temperatures, early stops."""
    policy.train()
    sampler = policy.sampler()
    stop = frozenset(range(12))
    prompts = {(7, n): [5 + n, *range(20, 20 + 2 * n), 3] for n in range(5)}
    for key, prompt in prompts.items():
        sampler.submit(prompt, key, Sampling(temperature=0.6 + 0.2 * key[1], max_tokens=9, stop=stop))
    done = drain(sampler)
    assert policy.training and {c.key for c in done} == set(prompts)
    assert len({len(c.tokens) for c in done}) > 1
    for c in done:
        ended = c.tokens[-1] in stop
        assert c.stop == (Stop.FINISHED if ended else Stop.TRUNCATED) and (ended or len(c.tokens) == 9)
        assert not stop & set(c.tokens[:-1])
        batch = collate([rollout(prompt=prompts[c.key], completion=c.tokens, temperature=0.6 + 0.2 * c.key[1])])
        logp = policy(batch).logp[batch.mask]
        torch.testing.assert_close(logp, torch.tensor(c.logp), rtol=0, atol=1e-4)


def test_samples_do_not_depend_on_batching(policy: HuggingFacePolicy) -> None:
    sampling = Sampling(max_tokens=6, stop=frozenset({1, 2, 3}))
    prompts = [[5] * (1 + n) for n in range(6)]
    together, alone = policy.sampler(), policy.sampler(slots=1)
    for sampler, order in ((together, range(6)), (alone, reversed(range(6)))):
        for n in order:
            sampler.submit(prompts[n], (3, n), sampling)
    found = [{c.key: c.tokens for c in drain(sampler)} for sampler in (together, alone)]
    assert found[0] == found[1] and len(found[0]) == 6


def drain(sampler: Sampler) -> list[Completion]:
    done: list[Completion] = []
    while completions := sampler.poll():
        done += completions
    return done


def test_gradients_reach_every_parameter_and_equal_the_models() -> None:
    policy = llama()
    batch = collate([rollout(prompt=[4, 5], completion=[6, 7, 8]), rollout(sample=1, prompt=[4], completion=[9])])
    out = policy(batch, frozenset({"entropy"}))
    assert out.entropy is not None
    (out.logp.sum() + out.entropy.sum()).backward()
    found = {name: parameter.grad.clone() for name, parameter in policy.causal.named_parameters()}
    policy.zero_grad()
    logs = [policy.causal(input_ids=torch.tensor([row])).logits[0].log_softmax(-1) for row in ([4, 5, 6, 7], [4])]
    chosen = logs[0][1, 6] + logs[0][2, 7] + logs[0][3, 8] + logs[1][0, 9]
    entropy = sum(-(x.exp() * x).sum() for x in (logs[0][1:], logs[1]))
    (chosen + entropy).backward()
    for name, parameter in policy.causal.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-4)


def test_agrees_with_the_decoder(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    theirs, ours = HuggingFacePolicy.load(folder), Decoder.load(folder)
    batch = collate(ragged_rollouts(1))
    a, b = theirs(batch, EVERYTHING), ours(batch, EVERYTHING)
    for x, y in ((a.logp, b.logp), (a.entropy, b.entropy), (a.logits, b.logits), (a.hidden, b.hidden)):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    sampling = Sampling(temperature=0.9, max_tokens=8, stop=frozenset({3}))
    for settings in (sampling, Sampling(temperature=0, max_tokens=8), Sampling(top_p=0.6, top_k=7, max_tokens=8)):
        drawn = [sample(p.sampler(), [[5, 6], [7]], 3, settings, seed=2) for p in (theirs, ours)]
        assert [[c.tokens for c in g] for g in drawn[0]] == [[c.tokens for c in g] for g in drawn[1]]
        for x, y in zip(*([c for group in groups for c in group] for groups in drawn), strict=True):
            assert x.stop == y.stop and x.logp == pytest.approx(y.logp, abs=1e-4)


@pytest.mark.slow
def test_agrees_with_the_decoder_on_smollm2() -> None:
    folder = smollm2()
    batch = collate([rollout(prompt=[1, 4093, 198, 6004, 2, 198], completion=[20, 30, 4000, 9, 2])])
    a, b = HuggingFacePolicy.load(folder)(batch, EVERYTHING), Decoder.load(folder)(batch, EVERYTHING)
    torch.testing.assert_close(a.logp, b.logp, rtol=0, atol=1e-4)
    torch.testing.assert_close(a.logits, b.logits, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "name, plain", [("llama", True), ("gpt2", True), ("gemma2", False), ("granite", False), ("phi", False)]
)
def test_heads_that_do_more_than_a_product_are_found(name: str, plain: bool) -> None:
    assert HuggingFacePolicy(tiny_model(**ARCHITECTURES[name]))._whole_head is not plain


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_models_that_bear_padding_are_sampled_in_batches(name: str) -> None:
    policy = HuggingFacePolicy(tiny_model(**ARCHITECTURES[name]))
    sampler = policy.sampler(slots=8)
    assert sampler.slots == (1 if name == "mamba" else 8)
    reads = 0

    def count(*_: object) -> None:
        nonlocal reads
        reads += 1

    policy.causal.register_forward_pre_hook(count)
    for n in range(8):
        sampler.submit([5] * (n + 1), (n,), Sampling(max_tokens=5))
    assert len(drain(sampler)) == 8
    assert reads == (40 if name == "mamba" else 5)


def test_dropout_is_off_in_training() -> None:
    policy = HuggingFacePolicy(tiny_model(**{**GPT2, "resid_pdrop": 0.5, "embd_pdrop": 0.5})).train()
    batch = collate([rollout()])
    assert torch.equal(policy(batch).logp, policy(batch).logp)


def test_sessions_go_on_where_they_stopped() -> None:
    policy = llama()
    sampler = policy.sampler()
    session = sampler.submit([5, 6], (0, 0), Sampling(max_tokens=3), keep=True)
    with pytest.raises(ValueError, match="session"):
        sampler.submit([7], (0, 9), Sampling(), session=session)
    (first,) = sampler.poll()
    with pytest.raises(ValueError, match="open"):
        sampler.refresh()
    assert sampler.submit([7, 8], (0, 1), Sampling(max_tokens=4), session=session) == session
    (second,) = sampler.poll()
    turns = [5, 6, *first.tokens, 7, 8]
    batch = collate([rollout(prompt=turns, completion=second.tokens)])
    torch.testing.assert_close(policy(batch).logp[batch.mask], torch.tensor(second.logp), rtol=0, atol=1e-4)
    sampler.refresh()
    with pytest.raises(ValueError, match="session"):
        sampler.close(session)


def test_the_context_ends_a_completion() -> None:
    policy = HuggingFacePolicy(tiny_model(**{**ARCHITECTURES["llama"], "max_position_embeddings": 10}))
    sampler = policy.sampler()
    session = sampler.submit([5] * 7, (0, 0), Sampling(max_tokens=50), keep=True)
    (first,) = sampler.poll()
    assert len(first.tokens) == 3 and first.stop == Stop.TRUNCATED
    sampler.submit([6], (0, 1), Sampling(), session=session)
    (second,) = sampler.poll()
    assert second.tokens == [] and second.stop == Stop.TRUNCATED
    with pytest.raises(UserError, match="context of 10"):
        sampler.submit([5] * 10, (0, 2), Sampling())


def test_sampler_refuses_what_cannot_be_sampled() -> None:
    sampler = llama().sampler()
    with pytest.raises(ValueError, match="empty prompt"):
        sampler.submit([], (0,), Sampling())
    with pytest.raises(ValueError, match="vocabulary"):
        sampler.submit([61], (0,), Sampling())
    with pytest.raises(UserError, match="max_tokens"):
        sampler.submit([1], (0,), Sampling(max_tokens=0))
    assert sampler.poll() == []


def test_frequencies_are_the_policys_probabilities() -> None:
    policy = llama()
    drawn = sample(policy.sampler(), [[5, 6]], 4000, Sampling(max_tokens=1, temperature=0.8), seed=1)[0]
    counts = torch.bincount(torch.tensor([c.tokens[0] for c in drawn]), minlength=61) / 4000
    with torch.no_grad():
        exact = (policy.causal(input_ids=torch.tensor([[5, 6]])).logits[0, -1] / 0.8).softmax(-1)
    assert (counts - exact).abs().sum() < 0.12  # about 61 · √(2p(1−p)/π/4000) is expected: 0.09


def test_the_seam_and_the_context_length() -> None:
    policy = llama()
    assert isinstance(policy, Policy) and isinstance(policy.sampler(), Sampler)
    assert policy.context_length == 128
    assert HuggingFacePolicy(tiny_model(**GPT2)).context_length == 64
    assert HuggingFacePolicy(tiny_model(**ARCHITECTURES["mamba"])).context_length == NO_LIMIT


def test_batches_that_cannot_be_scored_are_refused() -> None:
    policy = llama()
    with pytest.raises(ValueError, match="row 0 begins with a sampled token"):
        policy(collate([rollout(prompt=[])]))
    with pytest.raises(ValueError, match="values"):
        policy(collate([rollout()]), frozenset({"values"}))
    empty = policy(collate([rollout(completion=[])]), frozenset({"entropy"}))
    assert empty.logp.shape == (1, 2) and not empty.logp.any()


def test_saved_and_loaded_is_the_same(tmp_path: Path) -> None:
    policy = llama()
    policy.save(tmp_path)
    again = HuggingFacePolicy.load(tmp_path)
    batch = collate(ragged_rollouts(2))
    assert torch.equal(policy(batch).logp, again(batch).logp)
    half = HuggingFacePolicy.load(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert half(batch).logp.dtype == torch.float32


# ------------------------------------------------------------------------------------------ adapters


def test_lora_through_peft_trains_only_the_adapter_and_travels(tmp_path: Path) -> None:
    save_model(tmp_path / "base", tiny_model(**ARCHITECTURES["llama"]))
    batch = collate(ragged_rollouts(3))
    plain = HuggingFacePolicy.load(tmp_path / "base")(batch).logp
    policy = HuggingFacePolicy.load(tmp_path / "base").with_lora(LoRA(rank=4, targets=("q_proj", "up_proj")), seed=1)
    assert torch.equal(policy(batch).logp, plain)
    policy(batch).logp.sum().backward()
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert trained == {name for name, parameter in policy.named_parameters() if parameter.grad is not None}
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name in trained:
                parameter.add_(0.1)
    policy.save(tmp_path / "adapter")
    again = HuggingFacePolicy.load(tmp_path / "base").with_adapter(tmp_path / "adapter")
    assert torch.equal(again(batch).logp, policy(batch).logp)
    assert (again(batch).logp - plain).abs().max() > 1e-3
    drawn = sample(again.sampler(), [[5, 6]], 2, Sampling(max_tokens=4), seed=0)[0]
    scored = collate([rollout(prompt=[5, 6], completion=drawn[0].tokens)])
    torch.testing.assert_close(again(scored).logp[scored.mask], torch.tensor(drawn[0].logp), rtol=0, atol=1e-4)


def test_lora_on_the_layers_another_architecture_has() -> None:
    policy = HuggingFacePolicy(tiny_model(**GPT2)).with_lora(LoRA(targets=("c_attn",)))
    assert any(parameter.requires_grad for parameter in policy.parameters())
    with pytest.raises(UserError, match=r"q_proj.*c_attn"):
        HuggingFacePolicy(tiny_model(**GPT2)).with_lora(LoRA())


def test_lora_dropout_follows_the_mode_and_the_models_does_not() -> None:
    policy = HuggingFacePolicy(tiny_model(**{**GPT2, "resid_pdrop": 0.5})).with_lora(
        LoRA(targets=("c_attn",), dropout=0.5)
    )
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * parameter.requires_grad)
    batch = collate([rollout()])
    assert not torch.equal(policy.train()(batch).logp, policy(batch).logp)
    assert torch.equal(policy.eval()(batch).logp, policy(batch).logp)


def test_without_peft_the_install_command_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without_peft(name: str, *rest: object, **named: object) -> object:
        if name == "peft":
            raise ImportError(name)
        return original(name, *rest, **named)

    policy = llama()
    monkeypatch.setattr(builtins, "__import__", without_peft)
    with pytest.raises(UserError, match=r"pip install 'postrl\[lora\]'"):
        policy.with_lora(LoRA())


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    small, large = (tiny_model(**{**ARCHITECTURES["llama"], "num_hidden_layers": n}) for n in (2, 3))
    HuggingFacePolicy(small).with_lora(LoRA(targets=("q_proj",))).save(tmp_path / "small")
    HuggingFacePolicy(large).with_lora(LoRA(targets=("q_proj",))).save(tmp_path / "large")
    for own, other in ((2, "large"), (3, "small")):
        policy = HuggingFacePolicy(tiny_model(**{**ARCHITECTURES["llama"], "num_hidden_layers": own}))
        with pytest.raises(UserError, match=r"adapter_model\.safetensors"):
            policy.with_adapter(tmp_path / other)
    with pytest.raises(UserError, match=r"adapter_model\.safetensors"):
        llama().with_adapter(tmp_path)


# ------------------------------------------------------------------------------------------ what is refused


def test_encoder_decoders_and_bidirectional_models_are_refused(tmp_path: Path) -> None:
    size = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4, "vocab_size": 61}
    T5ForConditionalGeneration(T5Config(**size)).save_pretrained(tmp_path / "t5")
    with pytest.raises(UserError, match="encoder-decoder"):
        HuggingFacePolicy.load(tmp_path / "t5")
    bert = BertConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=16)
    BertLMHeadModel(bert).save_pretrained(tmp_path / "bert")
    with pytest.raises(UserError, match="not causal"):
        HuggingFacePolicy.load(tmp_path / "bert")


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    whole = file.read_bytes()
    save_file({k: v for k, v in tensors.items() if "layers.1.mlp.up_proj" not in k}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj"):
        HuggingFacePolicy.load(folder)
    save_file({**tensors, "model.norm.weight": torch.ones(31)}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=folder.name):
        HuggingFacePolicy.load(folder)
    file.write_bytes(whole[:1000])
    with pytest.raises(UserError, match=folder.name):
        HuggingFacePolicy.load(folder)
    (folder / "config.json").write_text('{"model_type": "nonsense"}', encoding="utf-8")
    with pytest.raises(UserError, match=r"config\.json"):
        HuggingFacePolicy.load(folder)


def test_bfloat16_products_of_float32_weights() -> None:
    """By autocast, in training and sampling alike: near float32, not equal to it, with gradients in float32."""
    policy, batch = llama(), collate(ragged_rollouts(0))
    exact = policy(batch, frozenset({"entropy"})).logp.detach()
    policy.compute_dtype = torch.bfloat16
    out = policy(batch, frozenset({"entropy"}))
    out.logp.sum().backward()
    assert out.logp.dtype == torch.float32 and all(p.grad.dtype == torch.float32 for p in policy.parameters())
    assert 1e-5 < (out.logp - exact).abs().max() < 0.1
    groups = sample(policy.sampler(), [[1, 2], [3, 4, 5]], 2, Sampling(max_tokens=4), seed=0)
    policy.compute_dtype = None
    assert sample(policy.sampler(), [[1, 2], [3, 4, 5]], 2, Sampling(max_tokens=4), seed=0) != groups
