"""Checkpoints of furious in Hugging Face's transformers.

    model = furious.hf.from_pretrained("run")     a module on furious.mixer; the newest checkpoint of a training run

    furious.hf.register()
    model = transformers.AutoModelForCausalLM.from_pretrained("run/latest")     the same

``generate()`` of transformers computes the whole sequence for every token; furious.Model decodes with a state.
`furious export` writes directories that transformers loads without this package.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import torch.nn.functional as F

from ._furious import Error
from ._presets import normal_config
from .nn import LanguageModel, _Trunk

__all__ = ["from_pretrained", "register"]


@functools.lru_cache(maxsize=None)
def register() -> tuple[type, type]:
    """Makes AutoConfig and AutoModelForCausalLM know the model type "furious"; returns its two classes."""
    try:
        import transformers
        from transformers.modeling_outputs import CausalLMOutput
    except ImportError as error:
        raise Error("transformers is not installed; install it to use Hugging Face's classes") from error

    class FuriousConfig(transformers.PretrainedConfig):
        model_type = "furious"

        def furious(self) -> dict[str, Any]:
            """The keys of furious alone, also those that config.json leaves out."""
            keys = {key: value for key, value in self.to_dict().items() if key not in ("dtype", "torch_dtype")}
            return normal_config(keys)

        def to_diff_dict(self) -> dict[str, Any]:
            """Also what is as transformers has it by default: furious asks for it."""
            return {**super().to_diff_dict(), "tie_word_embeddings": self.tie_word_embeddings}

    class FuriousForCausalLM(transformers.PreTrainedModel, transformers.GenerationMixin):
        config_class = FuriousConfig
        base_model_prefix = "model"
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

        def __init__(self, config: Any):
            super().__init__(config)
            own = config.furious()
            self.model = _Trunk(own)
            self.lm_head = torch.nn.Linear(own["hidden_size"], own["vocab_size"], bias=False)
            self.post_init()

        def _init_weights(self, module: torch.nn.Module) -> None:
            pass  # modules draw their own weights

        def get_input_embeddings(self) -> torch.nn.Module:
            return self.model.embed_tokens

        def get_output_embeddings(self) -> torch.nn.Module:
            return self.lm_head

        def prepare_inputs_for_generation(self, input_ids: Any, *_: Any, attention_mask: Any = None,
                                          **__: Any) -> dict[str, Any]:
            return {"input_ids": input_ids, "attention_mask": attention_mask}

        def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **_: Any) -> Any:
            """input_ids ``[B, T]``, logits ``[B, T, vocabulary]``. Padding belongs behind the texts."""
            if attention_mask is not None and not bool((attention_mask[:, 0] != 0).all()):
                raise Error("attention_mask: padding before a text, which a state would read; put it behind the text")
            logits = LanguageModel.forward(self, input_ids)
            loss = None
            if labels is not None:
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)
            return CausalLMOutput(loss=loss, logits=logits)

    transformers.AutoConfig.register("furious", FuriousConfig)
    transformers.AutoModelForCausalLM.register(FuriousConfig, FuriousForCausalLM)
    return FuriousConfig, FuriousForCausalLM


def from_pretrained(path: str | os.PathLike[str], **options: Any) -> Any:
    """A checkpoint directory, or the newest checkpoint of a training run, as a module of transformers.

    ``options``: of ``AutoModelForCausalLM.from_pretrained``.
    """
    register()
    import transformers

    newest = os.path.join(path, "latest")
    return transformers.AutoModelForCausalLM.from_pretrained(newest if os.path.isdir(newest) else path, **options)
