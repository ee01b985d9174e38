"""Any Hugging Face causal language model as a policy: right, not fast. `decoder.py` is the fast one.

Rows are padded on the right and the model is causal, so no sampled token can see padding and no attention mask is
needed in training. Sampling pads on the left and masks.
"""

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Bool, Float
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from postrl.batch import Batch
from postrl.errors import UserError
from postrl.method import Forward
from postrl.policies.head import head
from postrl.policies.hf_blocks import blocks, check_blocks, hooked
from postrl.policies.hf_sampler import HuggingFaceSampler
from postrl.policies.interventions import NONE, Changes, Intervention, Places, Reader, prompt_ends, scope
from postrl.policies.lora import LoRA

PARTS = frozenset({"entropy", "logits", "hidden"})
NO_LIMIT = 2**31 - 1  # the context of architectures that name none (state-space models, ALiBi)


class HuggingFacePolicy(nn.Module):
    """A causal language model of transformers behind the policy seam.

    Dropout is off, in training too: a policy must give the same log-probability twice. Only an adapter's own dropout
    follows `train()`. compute_dtype: of the matrix products (autocast), if not the weights' own type. Raises UserError
    if the model is not causal.
    """

    def __init__(self, model: PreTrainedModel, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.compute_dtype = compute_dtype
        self.model: nn.Module = model
        self.accepts = frozenset(inspect.signature(model.forward).parameters)
        self.interventions: Changes = NONE
        self._whole_head, self._checked = not _probe(model), False
        self.eval()

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype = torch.float32, compute_dtype: torch.dtype | None = None) -> Self:
        """A Hugging Face folder with safetensors. Raises UserError naming what is missing, damaged or not causal."""
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"{folder / 'config.json'} describes no model that transformers knows ({_line(error)})"
            ) from error
        if config.is_encoder_decoder:
            raise UserError(f"{folder} is an encoder-decoder ({config.model_type}); give a causal (decoder-only) model")
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
                trust_remote_code=False,
            )
        except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
            raise UserError(f"the model in {folder} cannot be loaded ({_line(error)})") from error
        model, report = loaded
        if wrong := sorted(report["missing_keys"]) or [str(key) for key in report["mismatched_keys"]]:
            raise UserError(f"the weights in {folder} do not fit its config.json: {wrong[0]} is missing or has another "
                            "shape; restore them from the original model")  # fmt: skip
        return cls(model, compute_dtype)

    def with_lora(self, lora: LoRA, seed: int = 0) -> Self:
        """Freeze the weights and train an adapter. Raises UserError without peft, or for targets the model has not."""
        peft = _peft()
        config = peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=list(lora.targets),
            task_type="CAUSAL_LM",
        )
        model, have = self.causal, _layer_names(self.causal)
        if foreign := [target for target in lora.targets if target not in have]:
            raise UserError(f"LoRA's target {foreign[0]} is no layer of this {model.config.model_type} model; it has "
                            f"{', '.join(have)}")  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = peft.get_peft_model(model, config)
        self._whole_head = not _probe(self.causal)
        return self.train(self.training)

    def with_adapter(self, folder: Path) -> Self:
        """Go on with an adapter in PEFT's files. Raises UserError without peft, or naming a file that does not fit."""
        peft = _peft()
        file = folder / "adapter_model.safetensors"
        if not file.exists():
            raise UserError(f"{folder} holds no adapter_model.safetensors; save the adapter with save_pretrained first")
        try:
            with safe_open(file, framework="pt") as opened:
                found = set(opened.keys())
            self.model = peft.PeftModel.from_pretrained(self.model, folder, is_trainable=True)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            raise UserError(f"the adapter {file} does not fit its base model ({_line(error)})") from error
        wanted = set(peft.get_peft_model_state_dict(self.model))  # PEFT itself only warns, or says nothing
        if odd := sorted(found ^ wanted):
            what = "is missing" if odd[0] in wanted else "has no place in the base model"
            raise UserError(f"the adapter {file} does not fit its base model: {odd[0]} {what}")
        self._whole_head = not _probe(self.causal)
        return self.train(self.training)

    @property
    def causal(self) -> PreTrainedModel:
        """transformers' model, with the adapter's layers in it if there is an adapter."""
        model = self.model if isinstance(self.model, PreTrainedModel) else self.model.get_base_model()  # pyright: ignore
        assert isinstance(model, PreTrainedModel)
        return model

    @property
    def context_length(self) -> int:
        """Most tokens a row may have."""
        config = self.causal.config.get_text_config()
        name = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
        return config.to_dict().get(name) or NO_LIMIT

    def train(self, mode: bool = True) -> Self:
        """Gradients do not depend on the mode; only an adapter's dropout does."""
        super().train(False)
        self.training = mode
        for name, module in self.named_modules():
            if isinstance(module, nn.Dropout) and "lora_dropout" in name:
                module.train(mode)
        return self

    def forward(self, batch: Batch, want: frozenset[str] = frozenset()) -> Forward:
        """Log-probabilities [B, T] (nats) of masked tokens at the rows' temperature (0 is read as 1), 0 elsewhere.

        want: "entropy" [B, T] nats, "hidden" [B, T, d] and "logits" [B, T, V] that predict each masked token.
        Raises ValueError for an unknown wish or a sampled token that nothing predicts.
        """
        if unknown := want - PARTS:
            raise ValueError(f"this policy cannot give {sorted(unknown)}; it has {sorted(PARTS)}")
        if batch.mask[:, :1].any():
            b = int(batch.mask[:, 0].nonzero()[0])
            raise ValueError(f"row {b} begins with a sampled token, which nothing predicts: give it a token of context")
        if (batch.mask & ~batch.valid).any():
            raise ValueError("a masked token is padding: `mask` must lie within `valid`")
        row, column = batch.mask.nonzero(as_tuple=True)
        temperature = torch.where(batch.temperature == 0, 1.0, batch.temperature)[row]
        targets = batch.tokens[row, column]
        with self._hooked(batch), self.products():
            hidden, logits = self._predictions(batch.tokens, row, column, want)
        if logits is not None:
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature[:, None].to(logits.dtype)
            logs = torch.log_softmax(logits, -1)
            logp = logs.gather(1, targets[:, None]).squeeze(1)
            entropy = -(logs.exp() * logs).sum(-1) if "entropy" in want else None
        else:
            assert hidden is not None
            logp, entropy = head(
                hidden, self._head_weight(), targets, temperature, "entropy" in want, self.compute_dtype
            )

        def grid(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.new_zeros(*batch.tokens.shape, *x.shape[1:]).index_put((row, column), x)

        return Forward(
            logp=x if (x := grid(logp)) is not None else logp,
            entropy=grid(entropy),
            logits=grid(logits) if "logits" in want else None,
            hidden=grid(hidden) if "hidden" in want else None,
        )

    def with_interventions(self, *interventions: Intervention) -> AbstractContextManager[None]:
        """Inside the `with` block, training and sampling read or change hidden states (policies/interventions.py).
        Raises UserError if this model's hidden states cannot be reached."""
        if not self._checked:
            check_blocks(self.causal)
            self._checked = True
        return scope(self, len(blocks(self.causal)), interventions)

    def activations(self, batch: Batch, layers: Sequence[int], at: Bool[Tensor, "B T"]) -> Float[Tensor, "layers n d"]:
        """Hidden states after these layers (0: the embeddings) at the n tokens chosen by `at`, in the order of
        `at.nonzero()`; with gradients, and after the interventions in force. Raises UserError for a layer this model
        has not, ValueError if `at` chooses padding."""
        if (at & ~batch.valid).any():
            raise ValueError("a masked token is padding: `at` must lie within `valid`")
        readers = [Reader(layer) for layer in layers]
        with (
            self.with_interventions(*(reader.intervention for reader in readers)),
            self._hooked(batch),
            self.products(),
        ):
            self.causal.base_model(input_ids=batch.tokens, use_cache=False)
        return torch.stack([reader.passes[0][0][at[batch.valid]] for reader in readers])

    def _hooked(self, batch: Batch) -> AbstractContextManager[None]:
        if not self.interventions:
            return nullcontext()
        position = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
        grids = (batch.tokens, position, batch.mask, prompt_ends(batch))
        return hooked(self.causal, self.interventions, Places(*(x[batch.valid] for x in grids)), batch.valid)

    def sampler(self, slots: int = 64) -> HuggingFaceSampler:
        """Samples up to `slots` completions at a time from the present weights."""
        return HuggingFaceSampler(self, slots)

    def save(self, folder: Path) -> None:
        """A Hugging Face folder, or a PEFT folder if only an adapter is trained."""
        folder.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(folder)  # pyright: ignore

    def products(self) -> AbstractContextManager[object]:
        """Inside, matrix products have `compute_dtype`."""
        weight = next(self.parameters())
        product = self.compute_dtype or weight.dtype
        return torch.autocast(weight.device.type, dtype=product, enabled=product != weight.dtype)

    def _head_weight(self) -> Tensor:
        embeddings = self.causal.get_output_embeddings()
        assert isinstance(embeddings, nn.Linear)
        return embeddings.weight

    def _predictions(
        self, tokens: Tensor, row: Tensor, column: Tensor, want: frozenset[str]
    ) -> tuple[Tensor | None, Tensor | None]:
        """What predicts the tokens at (row, column): hidden states [n, d] and, where they are wanted or where the head
        is more than a product with a matrix, logits [n, V]."""
        hidden = None
        if "hidden" in want or not self._whole_head:
            hidden = self.causal.base_model(input_ids=tokens, use_cache=False).last_hidden_state[row, column - 1]
        if not self._whole_head:
            return hidden, hidden @ self._head_weight().T if "logits" in want and hidden is not None else None
        if "logits_to_keep" not in self.accepts or not len(column):
            return hidden, self.causal(input_ids=tokens, use_cache=False).logits[row, column - 1]
        columns, place = (column - 1).unique(return_inverse=True)
        logits = self.causal(input_ids=tokens, use_cache=False, logits_to_keep=columns).logits
        return hidden, logits[row, place]


@torch.no_grad()
def _probe(model: PreTrainedModel) -> bool:
    """Whether logits are the last hidden states times the head's matrix, found by trying: some models scale or cap
    them, add a bias, or have no such head. Raises UserError if a later token changes an earlier prediction."""
    training = model.training
    model.eval()
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.arange(8).repeat(2, 1) % vocabulary
    tokens[1, 4:] = (tokens[1, 4:] + 1) % vocabulary
    tokens = tokens.to(next(model.parameters()).device)
    logits = model(input_ids=tokens, use_cache=False).logits
    early, scale = logits[:, :4].double(), 64 * torch.finfo(logits.dtype).eps * logits.double().abs().max()
    if (early[0] - early[1]).abs().max() > scale:
        raise UserError(f"{model.config.model_type} is not causal: a later token changes an earlier prediction; give a "
                        "decoder-only language model")  # fmt: skip
    embeddings = model.get_output_embeddings()
    plain = False
    if isinstance(embeddings, nn.Linear) and embeddings.bias is None and model.base_model is not model:
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        plain = hidden.shape[-1] == embeddings.in_features and torch.equal(embeddings(hidden), logits)
    model.train(training)
    return plain


def _layer_names(model: nn.Module) -> list[str]:
    """Last parts of the names of layers that LoRA can adapt."""
    kinds = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd, Conv1D)
    return sorted({name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, kinds)})


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise UserError("LoRA on a Hugging Face policy needs peft: pip install 'postrl[lora]'") from error
    return peft


def _line(error: BaseException) -> str:
    """An error on one line, for the middle of a sentence."""
    return " ".join(str(error).split())[:200] or type(error).__name__
