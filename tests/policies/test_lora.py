"""Adapters on the decoder: PEFT's files both ways, sampling from merged weights, and nothing else trained."""

import json
from pathlib import Path

import peft
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import AutoModelForCausalLM

from builders import rollout
from postrl.enrich import forward_all
from postrl.errors import UserError
from postrl.optimise import Seen, Trainer, update
from postrl.papers.reinforce import reinforce
from postrl.policies.base import Sampling
from postrl.policies.decoder import Decoder
from postrl.policies.hf import HuggingFacePolicy
from postrl.policies.loading import load_policy
from postrl.policies.lora import CONFIG, WEIGHTS, LoRA, LoRADecoder
from postrl.policies.sampler import sample
from postrl.rollout import collate
from postrl.settings import Settings
from tiny_models import LLAMA, save_model, tiny_model

SMALL = LoRA(rank=4, alpha=12.0, targets=("q_proj", "v_proj", "down_proj"))
WHOLE = frozenset({"logits"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "base")


def adapted(folder: Path, lora: LoRA = SMALL) -> LoRADecoder:
    """An adapter that does something: both of its matrices are random."""
    policy = LoRADecoder(Decoder.load(folder), lora, folder)
    torch.manual_seed(1)
    for parameter in policy.tensors().values():
        nn.init.normal_(parameter, std=0.2)
    return policy


def batch():
    rows = [rollout(prompt=[5, 6, 7], completion=[8, 9, 10, 11]), rollout(sample=1, prompt=[5, 6, 7], completion=[12])]
    return collate(rows)


def largest(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    assert a is not None and b is not None
    return (a - b).abs().max().item()


def test_a_fresh_adapter_changes_nothing(folder: Path) -> None:
    base, policy = Decoder.load(folder), LoRADecoder(Decoder.load(folder), SMALL, folder)
    assert largest(policy(batch()).logp, base(batch()).logp) == 0


def test_only_the_adapter_trains(folder: Path) -> None:
    policy = adapted(folder)
    policy(batch()).logp.sum().backward()
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, parameter in policy.named_parameters() if parameter.grad is not None}
    assert trained and all("lora_" in name for name in trained)
    assert sum(p.numel() for p in policy.parameters() if p.requires_grad) == 2 * (
        4 * (32 + 32) + 4 * (32 + 16) + 4 * (64 + 32)
    )


def test_gradients_are_those_of_the_merged_weight(folder: Path) -> None:
    """∂/∂A of f(W + s·B A) = s·Bᵀ ∂f/∂W and likewise for B, with ∂f/∂W from a decoder that has the merged weights."""
    policy = adapted(folder)
    merged = policy.merged()
    policy(batch()).logp.sum().backward()
    merged(batch()).logp.sum().backward()
    for name in policy.adapters:
        layer, whole = policy.decoder.get_submodule(name), merged.get_submodule(name)
        scale = SMALL.alpha / SMALL.rank
        torch.testing.assert_close(layer.lora_A.grad, scale * layer.lora_B.T @ whole.weight.grad, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(layer.lora_B.grad, scale * whole.weight.grad @ layer.lora_A.T, rtol=1e-3, atol=1e-4)


def test_peft_loads_ours_and_agrees(folder: Path, tmp_path: Path) -> None:
    policy = adapted(folder)
    policy.save(tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter").eval()
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
    with torch.no_grad():
        expected = theirs(input_ids=tokens).logits[0, 2:6]
        base = theirs.get_base_model()
        with theirs.disable_adapter():
            plain = base(input_ids=tokens).logits[0, 2:6]
    ours = policy(batch(), WHOLE).logits
    assert ours is not None
    assert largest(ours[0, 3:7], expected) < 1e-4
    assert largest(ours[0, 3:7], plain) > 0.01  # the adapter does something


def test_ours_loads_pefts_and_agrees(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules=["k_proj", "up_proj"], init_lora_weights=False)
    theirs = peft.get_peft_model(model, config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    policy = LoRADecoder.load(tmp_path / "adapter", Decoder.load(folder), folder)
    assert policy.lora == LoRA(rank=3, alpha=7, targets=("k_proj", "up_proj"))
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([[5, 6, 7, 8, 9, 10, 11]])).logits[0, 2:6]
    ours = policy(batch(), WHOLE).logits
    assert ours is not None and largest(ours[0, 3:7], expected) < 1e-4


def test_saved_and_loaded_through_its_folder(folder: Path, tmp_path: Path) -> None:
    policy = adapted(folder)
    policy.save(tmp_path / "adapter")
    again, _ = load_policy(tmp_path / "adapter")
    assert isinstance(again, LoRADecoder) and again.lora == LoRA(4, 12.0, 0.0, ("down_proj", "q_proj", "v_proj"))
    assert largest(again(batch()).logp, policy(batch()).logp) == 0
    other, _ = load_policy(tmp_path / "adapter", engine="hf")
    assert isinstance(other, HuggingFacePolicy)
    assert largest(other(batch()).logp, policy(batch()).logp) < 1e-4
    assert any(parameter.requires_grad for parameter in other.parameters())
    with pytest.raises(UserError, match="lora"):
        load_policy(tmp_path / "adapter", lora=SMALL)


def test_the_sampler_sees_the_adapter_and_its_updates(folder: Path) -> None:
    policy = adapted(folder)
    sampler = policy.sampler()
    for _ in range(2):
        drawn = sample(sampler, [[5, 6, 7]], 4, Sampling(max_tokens=6), seed=0)[0]
        rows = [rollout(sample=n, prompt=[5, 6, 7], completion=c.tokens) for n, c in enumerate(drawn)]
        logp = policy(collate(rows)).logp[:, 3:]
        torch.testing.assert_close(logp, torch.tensor([c.logp for c in drawn]), rtol=0, atol=1e-4)
        before = logp
        with torch.no_grad():
            for parameter in policy.tensors().values():
                parameter.add_(0.1)
        sampler.refresh()
    assert largest(policy(collate(rows)).logp[:, 3:], before) > 1e-3


def test_merged_is_a_plain_decoder_with_the_same_predictions(folder: Path, tmp_path: Path) -> None:
    policy = adapted(folder)
    merged = policy.merged()
    assert largest(merged(batch()).logp, policy(batch()).logp) < 1e-5
    merged.save(tmp_path / "merged")
    again, _ = load_policy(tmp_path / "merged")
    assert isinstance(again, Decoder)
    assert largest(again(batch()).logp, merged(batch()).logp) == 0


def test_dropout_is_on_in_training_only(folder: Path) -> None:
    policy = adapted(folder, LoRA(rank=4, dropout=0.5))
    trained = [policy.train()(batch()).logp for _ in range(2)]
    evaluated = [policy.eval()(batch()).logp for _ in range(2)]
    assert largest(*trained) > 0 and largest(*evaluated) == 0


@pytest.mark.parametrize("engine", ["decoder", "transformers"])
def test_an_update_has_dropout_and_no_other_pass_has(engine: str, folder: Path) -> None:
    lora = LoRA(rank=4, dropout=0.5)
    policy = adapted(folder, lora) if engine == "decoder" else HuggingFacePolicy.load(folder).with_lora(lora)
    for parameter in policy.parameters() if engine == "transformers" else ():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.2)
    for training in (False, True):  # whatever the mode was, it is again
        policy.train(training)
        given = batch()
        old = forward_all(policy, given, 100).logp
        assert largest(old, policy.eval()(given).logp.detach()) == 0
        policy.train(training)
        given.logp_old.copy_(old)
        seen = Seen(torch.ones_like(old), torch.zeros_like(old), old.clone())
        optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.0)
        trainer = Trainer(reinforce(), policy, optimizer, Accelerator(), Settings(importance_cap=None), False)
        update(trainer, given, torch.arange(2), given.mask.float(), 0.0, seen)
        assert (seen.ratio[given.mask] - 1).abs().max() > 1e-3, "the pass of the update has dropout"
        assert policy.training == training and largest(forward_all(policy, given, 100).logp, old) == 0


def test_seeds_choose_the_first_values(folder: Path) -> None:
    first, same, other = (LoRADecoder(Decoder.load(folder), SMALL, folder, seed).tensors() for seed in (0, 0, 1))
    for name in first:
        assert torch.equal(first[name], same[name])
        assert torch.equal(first[name], other[name]) == name.endswith("lora_B.weight")


def test_an_adapter_of_an_untied_head_trains(tmp_path: Path) -> None:
    folder = save_model(tmp_path, tiny_model(**{**LLAMA, "tie_word_embeddings": False}))
    policy = adapted(folder, LoRA(rank=2, targets=("lm_head",)))
    policy(batch()).logp.sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in policy.tensors().values())
    assert largest(policy(batch()).logp, policy.merged()(batch()).logp) < 1e-5


def test_foreign_targets_are_named(folder: Path) -> None:
    with pytest.raises(UserError, match=r"c_attn.*q_proj"):
        LoRADecoder(Decoder.load(folder), LoRA(targets=("q_proj", "c_attn")), folder)
    for wrong in ({"rank": 0}, {"targets": ()}, {"dropout": 1.0}):
        with pytest.raises(UserError, match="LoRA needs"):
            LoRA(**wrong)


def test_adapters_that_are_damaged_or_of_another_kind_are_named(folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "adapter"
    adapted(folder).save(saved)

    def fails(message: str, **changes: object) -> None:
        config = json.loads((saved / CONFIG).read_text(encoding="utf-8"))
        broken = tmp_path / "broken"
        broken.mkdir(exist_ok=True)
        (broken / CONFIG).write_text(json.dumps({**config, **changes}), encoding="utf-8")
        (broken / WEIGHTS).write_bytes((saved / WEIGHTS).read_bytes())
        with pytest.raises(UserError, match=message):
            load_policy(broken)

    fails("use_dora", use_dora=True)
    fails("peft_type", peft_type="IA3")
    fails("rank_pattern", rank_pattern={"q_proj": 2})
    fails(r"lora_A.*needs \[5, ", r=5)
    fails("base model", base_model_name_or_path=None)
    (saved / WEIGHTS).write_bytes((saved / WEIGHTS).read_bytes()[:200])
    with pytest.raises(UserError, match=WEIGHTS):
        load_policy(saved)
    (saved / WEIGHTS).unlink()
    with pytest.raises(UserError, match=WEIGHTS):
        load_policy(saved)


def test_an_adapter_of_a_larger_model_is_refused(folder: Path, tmp_path: Path) -> None:
    larger = save_model(tmp_path / "larger", tiny_model(**{**LLAMA, "num_hidden_layers": 3}))
    adapted(larger).save(tmp_path / "adapter")
    with pytest.raises(UserError, match=r"layers\.2"):
        LoRADecoder.load(tmp_path / "adapter", Decoder.load(folder), folder)
