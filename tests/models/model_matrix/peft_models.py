"""peft: adapters of many kinds on models of transformers, whose own weights are frozen."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from model_matrix import hf
from model_matrix.harness import Case

LAYERS = {"Bert": ["query", "value"], "GPT2": ["c_attn"], "Llama": ["q_proj", "v_proj"], "T5": ["q", "v"]}
BASES: dict[str, tuple[str, dict[str, Any], str, Callable[[int], Any], Callable[..., Any]]] = {
    "Bert": (hf.CLASSIFIER, hf.BERT, "SEQ_CLS", hf.classes, hf.own_loss),
    "GPT2": ("LMHeadModel", hf.GPT, "CAUSAL_LM", hf.padded, hf.loss_of_units),
    "Llama": (hf.CAUSAL, hf.LLAMA, "CAUSAL_LM", hf.padded, hf.loss_of_units),
    "T5": (hf.SEQ2SEQ, hf.T5, "SEQ_2_SEQ_LM", hf.translation, hf.own_loss),
}


def _build(base: str, method: str, options: dict[str, Any], targets: bool) -> Callable[[], nn.Module]:
    head, settings, task, _, _ = BASES[base]

    def build() -> nn.Module:
        peft = importlib.import_module("peft")
        where = {"target_modules": LAYERS[base]} if targets else {}
        config = getattr(peft, f"{method}Config")(task_type=task, **{**where, **options})
        return peft.get_peft_model(hf._build(base, head, settings)(), config)

    return build


VIRTUAL = {"num_virtual_tokens": 3}
# Name (its method up to the first point), base, options, and whether it names the layers that it changes.
METHODS: list[tuple[str, str, dict[str, Any], bool]] = [
    *(("Lora", base, {"r": 2, "init_lora_weights": False}, True) for base in BASES),
    ("Lora.default", "Bert", {"r": 2}, True),
    ("Lora.all", "Bert", {"r": 2, "init_lora_weights": False, "target_modules": "all-linear"}, True),
    ("Lora.embedding", "Llama", {"r": 2, "init_lora_weights": False, "target_modules": ["embed_tokens", "q_proj"]}, True),
    ("Lora.rank_stable", "Llama", {"r": 2, "init_lora_weights": False, "use_rslora": True}, True),
    ("Lora.dora", "Bert", {"r": 2, "init_lora_weights": False, "use_dora": True}, True),
    ("Lora.dora", "Llama", {"r": 2, "init_lora_weights": False, "use_dora": True}, True),
    ("Lora.bias", "Bert", {"r": 2, "init_lora_weights": False, "bias": "all"}, True),
    ("Lora.saved", "Llama", {"r": 2, "init_lora_weights": False, "modules_to_save": ["lm_head"]}, True),
    ("LoHa", "Bert", {"r": 2, "init_weights": False}, True),
    ("LoHa", "Llama", {"r": 2, "init_weights": False}, True),
    ("LoKr", "Bert", {"r": 2, "init_weights": False}, True),
    ("LoKr", "Llama", {"r": 2, "init_weights": False, "decompose_both": True}, True),
    ("IA3", "Bert", {"target_modules": ["key", "value", "output.dense"], "feedforward_modules": ["output.dense"]}, True),
    ("IA3", "Llama", {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}, True),
    ("IA3", "GPT2", {"target_modules": ["c_attn", "mlp.c_proj"], "feedforward_modules": ["mlp.c_proj"]}, True),
    ("AdaLora", "Bert", {"init_r": 3, "target_r": 2, "total_step": 10, "init_lora_weights": False, "orth_reg_weight": 0.0}, True),
    ("OFT", "Llama", {"oft_block_size": 4, "init_weights": False, "use_cayley_neumann": False}, True),
    ("OFT.neumann", "Llama", {"oft_block_size": 4, "init_weights": False}, True),
    ("BOFT", "Bert", {"boft_block_size": 4, "init_weights": False}, True),
    ("Vera", "Llama", {"r": 4, "target_modules": ["q_proj"]}, True),
    ("HRA", "Llama", {"r": 2}, True),
    ("Road", "Llama", {"group_size": 8}, True),
    ("FourierFT", "Llama", {"n_frequency": 5}, True),
    ("RandLora", "Llama", {"r": 4, "target_modules": ["q_proj"]}, True),
    ("C3A", "Llama", {"block_size": 4, "target_modules": ["q_proj"]}, True),
    ("Miss", "Llama", {"r": 2, "init_weights": False}, True),
    ("Shira", "Llama", {"r": 2}, True),
    ("VBLoRA", "Llama", {"r": 2, "num_vectors": 6, "vector_length": 4, "topk": 2, "target_modules": ["q_proj"]}, True),
    ("LNTuning", "Bert", {"target_modules": ["LayerNorm"]}, True),
    ("LNTuning", "Llama", {"target_modules": ["input_layernorm", "post_attention_layernorm"]}, True),
    ("TrainableTokens", "Llama", {"target_modules": ["embed_tokens"], "token_indices": [3, 5, 7]}, True),
    *(("PromptTuning", base, VIRTUAL, False) for base in BASES),
    ("PromptEncoder", "Bert", {**VIRTUAL, "encoder_hidden_size": 8}, False),
    ("PromptEncoder", "GPT2", {**VIRTUAL, "encoder_hidden_size": 8}, False),
    ("PromptEncoder.lstm", "GPT2", {**VIRTUAL, "encoder_hidden_size": 8, "encoder_reparameterization_type": "LSTM"}, False),
    ("PrefixTuning", "GPT2", VIRTUAL, False),
    ("PrefixTuning", "Llama", VIRTUAL, False),
    ("PrefixTuning.projected", "Llama", {**VIRTUAL, "prefix_projection": True, "encoder_hidden_size": 8}, False),
    ("PrefixTuning", "T5", VIRTUAL, False),
    ("AdaptionPrompt", "Llama", {"adapter_len": 3, "adapter_layers": 1}, False),
]  # fmt: skip


def virtual_loss(output: Any, batch: dict[str, Any]) -> Any:
    """Next-token prediction where the model puts tokens of its own before the unit's."""
    output.logits = output.logits[:, -batch["input_ids"].shape[1] :]
    return hf.loss_of_units(output, batch)


CASES = [
    Case(f"peft.{name}.{base}", "peft", _build(base, name.split(".")[0], options, targets), BASES[base][3],
         virtual_loss if BASES[base][2] == "CAUSAL_LM" else BASES[base][4])
    for name, base, options, targets in METHODS
]  # fmt: skip
