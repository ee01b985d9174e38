"""The decoder against transformers, against itself without its short cuts, and its files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from builders import ragged_batch, ragged_rollouts, rollout
from postrl.batch import Batch
from postrl.errors import UserError
from postrl.policies import attention, head
from postrl.policies.base import Sampling
from postrl.policies.decoder import Decoder, choose_compute_dtype
from postrl.policies.decoder_config import DecoderConfig
from postrl.policies.packing import pack
from postrl.policies.sampler import sample
from postrl.rollout import collate
from tiny import TINY, tiny_decoder
from tiny_models import save_model, smollm2, tiny_model

SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
ARCHITECTURES = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama3 rope": {"model_type": "llama", "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    "linear rope": {"model_type": "llama", "tie_word_embeddings": True, "rope_parameters": LINEAR},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 16},
}


def foreign(name: str, seed: int = 0) -> PreTrainedModel:
    """A transformers model whose every weight, norms and biases too, is far from its initial value."""
    model = tiny_model(seed, **SIZES, **ARCHITECTURES[name])
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.2 if parameter.ndim > 1 else 0.3))
            if parameter.ndim == 1:
                parameter.add_(0.5)
    return model


def mixed_batch(seed: int = 0, vocabulary: int = 61) -> Batch:
    """Ragged rows with several turns and contexts, at three temperatures."""
    batch = collate(ragged_rollouts(seed, vocabulary=vocabulary))
    return replace(batch, temperature=torch.tensor([0.7, 1.0, 1.3])[torch.arange(len(batch.tokens)) % 3])


def unshared(batch: Batch) -> Batch:
    return replace(batch, prefix_id=torch.arange(len(batch.tokens)))


def reference(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """log-probabilities and entropies [B, T] by transformers, zeros off the mask."""
    logits = model(input_ids=batch.tokens, attention_mask=batch.valid.long()).logits[:, :-1]
    table = (logits / batch.temperature[:, None, None]).log_softmax(-1)
    logp = table.gather(-1, batch.tokens[:, 1:, None])[..., 0]
    entropy = -(table.exp() * table).sum(-1)
    return tuple(torch.where(batch.mask, torch.nn.functional.pad(x, (1, 0)), 0) for x in (logp, entropy))


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def random_weight(batch: Batch, seed: int = 5) -> Tensor:
    return torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(seed), dtype=batch.logp_old.dtype)


# ---------------------------------------------------------------------------------------------- against transformers


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_values_and_every_gradient_equal_transformers(name: str, tmp_path: Path) -> None:
    model = foreign(name)
    decoder = Decoder.load(save_model(tmp_path, model))
    batch = mixed_batch()
    weight, other = random_weight(batch), random_weight(batch, 6)

    logp, entropy = reference(model, batch)
    (weight * logp + other * entropy).sum().backward()
    out = decoder(batch, frozenset({"entropy", "logits"}))
    (weight * out.logp + other * out.entropy).sum().backward()

    torch.testing.assert_close(out.logp, logp, atol=2e-5, rtol=0)
    torch.testing.assert_close(out.entropy, entropy, atol=2e-5, rtol=0)
    ours, theirs = gradients(decoder), gradients(model)
    assert ours.keys() == theirs.keys() and all(g.abs().max() > 0 for g in theirs.values())
    for parameter, gradient in theirs.items():
        error = (ours[parameter] - gradient).abs().max() / gradient.abs().max()
        assert error < 1e-4, (parameter, error)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_transformers_reads_what_a_random_decoder_saves(name: str, tmp_path: Path) -> None:
    config = DecoderConfig.from_huggingface(foreign(name).config.to_dict())
    decoder = Decoder.random(config, seed=1)
    decoder.save(tmp_path)
    model, batch = AutoModelForCausalLM.from_pretrained(tmp_path), mixed_batch()
    torch.testing.assert_close(decoder(batch).logp, reference(model, batch)[0], atol=2e-5, rtol=0)
    assert DecoderConfig.from_huggingface(model.config.to_dict()) == config


@pytest.mark.slow
def test_smollm2_equals_transformers(tmp_path: Path) -> None:
    """Logits, greedy continuations of 20 prompts, and the way back through transformers."""
    folder = smollm2()
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    decoder = Decoder.load(folder, torch.float32)
    text = "What is the sum of 7 and 5? Tell me a very short story about one dog that likes the rain, please."
    prompts = [tokenizer.encode(text[i : 3 + 5 * i]) for i in range(20)]
    assert len({len(prompt) for prompt in prompts}) > 10
    greedy = sample(decoder.sampler(), prompts, 1, Sampling(temperature=0.0, max_tokens=8), seed=0)
    rollouts = [
        rollout(i, prompt=p, completion=c.tokens) for i, (p, [c]) in enumerate(zip(prompts, greedy, strict=True))
    ]
    batch = collate(rollouts)
    decoder.save(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        ours = decoder(batch, frozenset({"logits"})).logits
        for other in (model, again):
            logits = other(input_ids=batch.tokens, attention_mask=batch.valid.long()).logits
            theirs = torch.nn.functional.pad(logits[:, :-1], (0, 0, 1, 0))
            torch.testing.assert_close(ours[batch.mask], theirs[batch.mask], atol=1e-4, rtol=0)
            # Each greedy token is transformers' choice after the same tokens, so its continuation is the same.
            assert torch.equal(theirs.argmax(-1)[batch.mask], batch.tokens[batch.mask])


# ------------------------------------------------------------------------------------------------------ shared prefixes


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_a_shared_prefix_changes_nothing(seed: int, dtype: torch.dtype, tolerance: float) -> None:
    batch = ragged_batch(seed, dtype=dtype)
    decoder = tiny_decoder(7, dtype=dtype, qk_norm=bool(seed % 2))
    found = []
    for rows in (batch, unshared(batch)):
        decoder.zero_grad()
        out = decoder(rows, frozenset({"entropy", "hidden"}))
        ((out.logp + out.entropy) * random_weight(batch)).sum().backward()
        found.append((out.logp, out.entropy, out.hidden, *(gradients(decoder).values())))
    for shared, alone in zip(*found, strict=True):
        assert (shared - alone).abs().max() <= tolerance * alone.abs().max().clamp(min=1e-3)


def test_a_shared_prefix_runs_once_and_the_last_tokens_not_at_all() -> None:
    prompt = list(range(1, 11))
    batch = collate([rollout(0, i, prompt=prompt, completion=range(1, 2 + i)) for i in range(4)])
    assert len(pack(batch).tokens) == 10 + 0 + 1 + 2 + 3
    assert len(pack(unshared(batch)).tokens) == 4 * 10 + 0 + 1 + 2 + 3


def test_rows_that_only_claim_to_share_a_prefix_are_refused() -> None:
    batch = collate([rollout(0, 0, prompt=[1, 2, 3]), rollout(0, 1, prompt=[1, 2, 3])])
    batch.tokens[1, 1] = 5
    with pytest.raises(ValueError, match="rows 0 and 1 have prefix_id 0 but do not begin alike"):
        tiny_decoder()(batch)
    batch.tokens[1, 1], batch.prefix_length[1] = 2, 2
    with pytest.raises(ValueError, match="do not begin alike"):
        tiny_decoder()(batch)


def test_sampled_tokens_inside_the_shared_prefix() -> None:
    batch = collate([rollout(0, i, prompt=[1, 2, 3, 4], completion=[5, 6][:i]) for i in range(3)])
    batch.mask[:, 2] = True  # a demonstration may train on part of what rows share
    decoder = tiny_decoder()
    torch.testing.assert_close(decoder(batch).logp, decoder(unshared(batch)).logp, atol=1e-6, rtol=0)
    assert (decoder(batch).logp[:, 2] < 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_attention_of_other_devices_equals_the_cpu_kernel(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    q, grad = (torch.randn(2, 6, 5, 8, generator=generator, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(2, 3, 5, 8, generator=generator, dtype=dtype) for _ in range(2))
    bias = torch.zeros(2, 1, 1, 5, dtype=dtype)
    bias[1, ..., 3:] = -torch.inf
    tolerance = {"atol": 1e-12, "rtol": 0} if dtype == torch.float64 else {"atol": 0.05, "rtol": 0.05}
    for causal, hidden in ((True, None), (False, bias)):
        flash, plain = attention._flash(q, k, v, causal, hidden), attention._plain(q, k, v, causal, hidden)
        torch.testing.assert_close(flash, plain, **tolerance)
        back = attention._flash_backward(grad, q, k, v, *flash, causal, hidden)
        other = attention._plain_backward(grad, q, k, v, *flash, causal, hidden)
        torch.testing.assert_close(back, other, **tolerance)


# ------------------------------------------------------------------------------------------------------------- the head


@pytest.mark.parametrize("vocabulary", [1, 7, 61])
def test_chunked_head_equals_the_whole_one(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_BYTES", 3 * vocabulary * 8)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(n, 5, generator=generator, dtype=torch.float64, requires_grad=True) for n in (10, vocabulary)
    )
    targets = torch.randint(0, vocabulary, (10,), generator=generator)
    temperature = torch.rand(10, generator=generator, dtype=torch.float64) + 0.5
    factor = torch.randn(2, 10, generator=generator, dtype=torch.float64)
    table = (hidden @ weight.T / temperature[:, None]).log_softmax(-1)
    logp, entropy = table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)
    for with_logp, with_entropy in ((True, None), (True, True), (True, False), (False, True)):  # None: not computed
        got = head.head(hidden, weight, targets, temperature, with_entropy is not None)
        torch.testing.assert_close(got[0], logp)
        expected, found = torch.zeros(10, dtype=torch.float64), torch.zeros(10, dtype=torch.float64)
        if with_logp:
            expected, found = logp * factor[0], got[0] * factor[0]
        if with_entropy is not None:
            torch.testing.assert_close(got[1], entropy)
        if with_entropy:
            expected, found = expected + entropy * factor[1], found + got[1] * factor[1]
        grads = [torch.autograd.grad(x.sum(), (hidden, weight), retain_graph=True) for x in (found, expected)]
        torch.testing.assert_close(*grads)


def test_the_head_in_bfloat16_adds_the_gradient_up_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator, requires_grad=True) for n in (10, 61))
    targets, temperature = torch.randint(0, 61, (10,), generator=generator), torch.full((10,), 0.7)
    exact, found = [], []
    for product, kept in ((torch.float32, exact), (torch.bfloat16, found), (torch.bfloat16, found)):
        monkeypatch.setattr(head, "SUM_BYTES", 7 * 16 * 4 if found else 2**20)  # at last in parts of seven words
        got = head.head(hidden, weight, targets, temperature, True, product)
        kept.append((got[0], *torch.autograd.grad((got[0] * torch.linspace(-1, 2, 10)).sum(), (hidden, weight))))
    for x, y, whole in zip(found[1], exact[0], found[0], strict=True):
        assert (x - y).norm() < 0.01 * y.norm()
        torch.testing.assert_close(x, whole)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.2])
@pytest.mark.parametrize(
    ("kept", "product"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
def test_the_head_in_a_narrow_type_gives_what_a_sampler_computes(kept, product, temperature) -> None:
    """A sampler divides the product by the temperature: a hidden state divided first is rounded to another number."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator).to(kept) for n in (10, 61))
    targets = torch.randint(0, 61, (10,), generator=generator)
    got = head.head(hidden, weight, targets, torch.full((10,), temperature), product=product)[0]
    sampled = (hidden.to(product) @ weight.T.to(product)).float() / temperature
    torch.testing.assert_close(got, sampled.log_softmax(1).gather(1, targets[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    whole = head.logits(hidden, weight, torch.full((10,), temperature))
    torch.testing.assert_close(whole, (hidden @ weight.T).float() / temperature, rtol=1e-5, atol=1e-5)


class Largest(TorchDispatchMode):
    """The most numbers any tensor made inside has."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            self.size = max(self.size, x.numel()) if isinstance(x, Tensor) else self.size
        return out


def test_logits_never_exist_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_BYTES", 2 * 1000 * 4)
    batch = collate([rollout(0, i, prompt=[1] * 5, completion=[2] * 30) for i in range(10)])
    decoder = tiny_decoder(1000)
    with Largest() as largest:
        out = decoder(batch, frozenset({"entropy"}))
        (out.logp + out.entropy).sum().backward()
    assert largest.size <= 1000 * 32 < 300 * 1000  # the embedding is the largest


# ------------------------------------------------------------------------------------------------ what it reads


def test_each_row_is_read_at_its_own_temperature_and_only_on_the_mask() -> None:
    batch, decoder = mixed_batch(2, 32), tiny_decoder()
    out = decoder(batch, frozenset({"entropy", "logits", "hidden"}))
    for part in (out.logp, out.entropy, out.logits.abs().sum(-1), out.hidden.abs().sum(-1)):
        assert torch.equal(part != 0, batch.mask)
    table = out.logits.log_softmax(-1)
    torch.testing.assert_close(table.gather(-1, batch.tokens[..., None])[..., 0][batch.mask], out.logp[batch.mask])
    logits = out.hidden @ decoder.head_weight.T / batch.temperature[:, None, None]
    torch.testing.assert_close(logits, out.logits)


def test_padding_and_the_future_are_not_read() -> None:
    batch, decoder = mixed_batch(3, 32), tiny_decoder()
    logp = decoder(batch).logp
    garbage = torch.where(batch.valid, batch.tokens, torch.full_like(batch.tokens, 31))
    assert torch.equal(decoder(replace(batch, tokens=garbage)).logp, logp)
    b = int(batch.mask.sum(1).argmax())
    last = int(batch.mask[b].nonzero()[-1])
    batch.tokens[b, last] = (batch.tokens[b, last] + 1) % 32
    changed = (decoder(batch).logp != logp).nonzero().tolist()
    assert changed == [[b, last]]


def test_rows_and_batches_without_sampled_tokens() -> None:
    decoder = tiny_decoder()
    batch = collate([rollout(0, 0, completion=[]), rollout(0, 1, completion=[4, 5]), rollout(1, 0, completion=[])])
    assert torch.equal(decoder(batch).logp != 0, batch.mask) and batch.mask.sum() == 2
    empty = collate([rollout(0, 0, completion=[]), rollout(0, 1, completion=[])])
    out = decoder(empty, frozenset({"entropy", "logits", "hidden"}))
    assert out.logp.shape == empty.mask.shape and not out.logp.any()
    out.logp.sum().backward()  # the loop's backward pass must not stumble over an empty micro-batch
    found = gradients(decoder)
    assert len(found) == len(list(decoder.parameters())) and not any(gradient.any() for gradient in found.values())
    none = empty.rows(torch.zeros(0, dtype=torch.int64))
    assert decoder(none).logp.shape == none.tokens.shape


def test_one_token_vocabulary() -> None:
    batch = collate([rollout(0, i, prompt=[0], completion=[0, 0]) for i in range(2)])
    out = tiny_decoder(1)(batch, frozenset({"entropy"}))
    assert not out.logp.any() and not out.entropy.any()


def test_what_cannot_be_read_is_refused() -> None:
    decoder, batch = tiny_decoder(), collate([rollout()])
    with pytest.raises(ValueError, match="cannot give \\['values'\\]"):
        decoder(batch, frozenset({"values"}))
    first = collate([rollout(prompt=[])])
    with pytest.raises(ValueError, match="row 0 begins with a sampled token"):
        decoder(first)
    padded = replace(batch, valid=torch.zeros_like(batch.valid))
    with pytest.raises(ValueError, match="masked token is padding"):
        decoder(padded)


def test_recomputing_activations_changes_nothing() -> None:
    batch, found = ragged_batch(1), []
    for recompute in (False, True):
        decoder = tiny_decoder(7, dtype=torch.float64)
        decoder.recompute = recompute
        logp = decoder(batch).logp
        (logp * random_weight(batch)).sum().backward()
        found.append([logp, *gradients(decoder).values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_recomputing_keeps_fewer_activations() -> None:
    batch = mixed_batch(1, 32)

    def kept(recompute: bool) -> int:
        decoder, sizes = tiny_decoder(layers=6), []
        decoder.recompute = recompute
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            decoder(batch)
        return sum(sizes)

    assert kept(True) < 0.5 * kept(False)


# ------------------------------------------------------------------------------------------------------- bfloat16


def test_bfloat16_products_err_no_more_than_transformers(tmp_path: Path) -> None:
    """float32 master weights with bfloat16 products: error against float32 at most 1.2 times that of transformers in
    bfloat16; gradients arrive in float32."""
    errors = {"ours": 0.0, "theirs": 0.0}
    for seed in range(3):
        model = foreign("llama", seed)
        folder, batch = save_model(tmp_path / str(seed), model), mixed_batch(seed)
        exact = Decoder.load(folder)(batch).logp
        decoder = Decoder.load(folder, compute_dtype=torch.bfloat16)
        logp = decoder(batch).logp
        logp.sum().backward()
        exact, logp = exact.detach(), logp.detach()
        assert logp.dtype == torch.float32 and all(g.dtype == torch.float32 for g in gradients(decoder).values())
        errors["ours"] += float((logp - exact).abs().sum())
        errors["theirs"] += float((reference(model.bfloat16(), batch)[0].detach() - exact).abs().sum())
    assert 0 < errors["ours"] <= 1.2 * errors["theirs"], errors


def test_bfloat16_weights_train_too(tmp_path: Path) -> None:
    model = foreign("qwen3").bfloat16()
    decoder = Decoder.load(save_model(tmp_path, model))
    assert {p.dtype for p in decoder.parameters()} == {torch.bfloat16}
    out = decoder(mixed_batch(), frozenset({"entropy"}))
    (out.logp + out.entropy).sum().backward()
    assert all(g.isfinite().all() for g in gradients(decoder).values())


def test_compute_dtype_is_one_of_two_and_measured_once() -> None:
    assert choose_compute_dtype(torch.device("cpu")) in (torch.float32, torch.bfloat16)
    before = choose_compute_dtype.cache_info().hits
    choose_compute_dtype(torch.device("cpu"))
    assert choose_compute_dtype.cache_info().hits == before + 1


# ------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard_bytes", [10**9, 40_000])
def test_load_and_save_keep_every_bit_and_every_file(dtype: torch.dtype, shard_bytes: int, tmp_path: Path) -> None:
    first = save_model(tmp_path / "first", foreign("qwen2").to(dtype))
    Decoder.load(first).save(tmp_path / "second", shard_bytes)
    Decoder.load(tmp_path / "second").save(tmp_path / "third")
    before, after = load_file(first / "model.safetensors"), load_file(tmp_path / "third" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype == dtype and torch.equal(tensor, after[name])
    sharded = len(list((tmp_path / "second").glob("model-*.safetensors")))
    assert sharded > 3 if shard_bytes < 10**9 else sharded == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (first / name).read_bytes() == (tmp_path / "third" / name).read_bytes()
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (first, tmp_path / "third"))
    assert old == new


def test_saving_again_with_other_shards_leaves_one_checkpoint(tmp_path: Path) -> None:
    decoder = tiny_decoder()
    for shard_bytes in (5_000, 10**9, 10_000):
        with torch.no_grad():
            decoder.model.norm.weight.add_(1)
        decoder.save(tmp_path, shard_bytes)
        assert torch.equal(Decoder.load(tmp_path).model.norm.weight, decoder.model.norm.weight)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert {file.name for file in tmp_path.glob("*.safetensors")} == set(index["weight_map"].values())
    assert not list(tmp_path.glob(".*"))


def test_a_tied_head_stored_twice_is_read_once(tmp_path: Path) -> None:
    decoder = tiny_decoder()
    decoder.save(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    table = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": table.clone()}, file)
    assert Decoder.load(tmp_path).lm_head is None
    save_file({**tensors, "lm_head.weight": table + 1}, file)
    with pytest.raises(UserError, match="ties the head to the embeddings"):
        Decoder.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not one of the decoder's .* engine 'hf'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_scaling 'dynamic'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": 33}, "'model.embed_tokens.weight' is \\[32, 32\\], its config.json says \\[33, 32\\]"),
        ({"num_hidden_layers": 3}, "no tensor 'model.layers.2"),
        ({"num_hidden_layers": 1}, "holds 'model.layers.1"),
    ],
)
def test_what_the_decoder_has_not_is_refused_by_name(change: dict, message: str, tmp_path: Path) -> None:
    tiny_decoder().save(tmp_path)
    config = {**json.loads((tmp_path / "config.json").read_text()), **change}
    config = {name: value for name, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        Decoder.load(tmp_path)


def test_absent_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        Decoder.load(tmp_path)
    tiny_decoder().save(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        Decoder.load(tmp_path)
    weights.unlink()
    with pytest.raises(UserError, match="only safetensors"):
        Decoder.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json"):
        Decoder.load(tmp_path)


def test_random_weights_depend_on_the_seed_alone() -> None:
    first, again, other = (Decoder.random(TINY, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
