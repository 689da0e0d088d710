"""Hugging Face transformers, with the loss that the model itself returns for its labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from model_matrix.harness import Case

VOCABULARY, LENGTH = 64, 9
PAD, START, END = 0, 1, 2


def drawn(*shape: int, low: int = 0, high: int = VOCABULARY, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def tokens(n: int) -> dict[str, Tensor]:
    """Sentences of LENGTH tokens and their masks, all of them valid."""
    ids = drawn(n, LENGTH, low=3)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def padded(n: int) -> dict[str, Tensor]:
    """Sentences of 4 to LENGTH tokens, padded on the right."""
    ids = drawn(n, LENGTH, low=3)
    mask = (torch.arange(LENGTH) < drawn(n, 1, low=4, high=LENGTH + 1, seed=1)).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def classes(n: int) -> dict[str, Tensor]:
    return {**padded(n), "labels": drawn(n, high=3, seed=2)}


def unpadded_classes(n: int) -> dict[str, Tensor]:
    return {**tokens(n), "labels": drawn(n, high=3, seed=2)}


def classes_at_end(n: int) -> dict[str, Tensor]:
    """For models that classify at the one token that ends the sentence."""
    ids = drawn(n, LENGTH, low=3)
    ids[:, -1] = END
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": drawn(n, high=3, seed=2)}


def tags(n: int) -> dict[str, Tensor]:
    return {**tokens(n), "labels": drawn(n, LENGTH, high=3, seed=2)}


def language(n: int) -> dict[str, Tensor]:
    batch = tokens(n)
    return {**batch, "labels": batch["input_ids"]}


def padded_language(n: int) -> dict[str, Tensor]:
    batch = padded(n)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def masked(n: int) -> dict[str, Tensor]:
    return {**tokens(n), "labels": drawn(n, LENGTH, low=3, seed=3)}


def spans(n: int) -> dict[str, Tensor]:
    return {
        **tokens(n),
        "start_positions": drawn(n, high=LENGTH, seed=4),
        "end_positions": drawn(n, high=LENGTH, seed=5),
    }


def choices(n: int) -> dict[str, Tensor]:
    ids = drawn(n, 2, LENGTH, low=3)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": drawn(n, high=2, seed=2)}


def translation(n: int) -> dict[str, Tensor]:
    return {**padded(n), "labels": drawn(n, LENGTH - 2, low=3, seed=3)}


def unpadded_translation(n: int) -> dict[str, Tensor]:
    return {**tokens(n), "labels": drawn(n, LENGTH - 2, low=3, seed=3)}


def pixels(n: int) -> dict[str, Tensor]:
    images = torch.randn(n, 3, 16, 16, generator=torch.Generator().manual_seed(6))
    return {"pixel_values": images, "labels": drawn(n, high=3, seed=2)}


def own_loss(output: Any, batch: Any) -> Tensor:
    return output.loss


def loss_of_units(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """Next-token prediction averaged over each unit's own tokens, then over units: what a mean over valid tokens is to become."""
    losses = nn.functional.cross_entropy(output.logits[:, :-1].mT, batch["input_ids"][:, 1:], reduction="none")
    valid = batch["attention_mask"][:, 1:]
    return ((losses * valid).sum(1) / valid.sum(1)).mean()


BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "classifier_dropout": 0.0, "pad_token_id": PAD,
}  # fmt: skip
LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 32, "max_position_embeddings": 32, "attention_dropout": 0.0, "classifier_dropout": 0.0,
    "pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END,
}  # fmt: skip
GPT = {
    "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "resid_pdrop": 0.0, "summary_first_dropout": 0.0, "pad_token_id": PAD, "bos_token_id": START,
    "eos_token_id": END,
}  # fmt: skip
BART = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32,
    "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "classifier_dropout": 0.0, "pad_token_id": PAD,
    "bos_token_id": START, "eos_token_id": END, "decoder_start_token_id": START, "forced_eos_token_id": None,
}  # fmt: skip
T5 = {
    "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "pad_token_id": PAD, "eos_token_id": END,
    "decoder_start_token_id": PAD, "classifier_dropout": 0.0,
}  # fmt: skip
DISTIL = {
    "vocab_size": VOCABULARY, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 32,
    "dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0, "qa_dropout": 0.0, "pad_token_id": PAD,
}  # fmt: skip
DEBERTA = {
    **BERT,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "pooler_dropout": 0.0,
    "pooler_hidden_size": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
VIT = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 16,
    "patch_size": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def _build(family: str, head: str, config: dict[str, Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        settings = getattr(transformers, f"{family}Config")(
            **{**config, "num_labels": 2 if head == SPAN else 3, "use_cache": False}
        )
        settings._attn_implementation = config.get("attn_implementation", "eager")
        return getattr(transformers, f"{family}{head}")(settings)

    return build


CLASSIFIER, TAGGER, MASKED, CAUSAL = "ForSequenceClassification", "ForTokenClassification", "ForMaskedLM", "ForCausalLM"
SPAN, CHOICE, SEQ2SEQ, IMAGE = (
    "ForQuestionAnswering", "ForMultipleChoice", "ForConditionalGeneration", "ForImageClassification",
)  # fmt: skip
BATCHES = {
    CLASSIFIER: classes, TAGGER: tags, MASKED: masked, CAUSAL: padded, "LMHeadModel": padded, SPAN: spans,
    CHOICE: choices, SEQ2SEQ: translation, IMAGE: pixels,
}  # fmt: skip

# Family, its configuration, and the heads that are tried.
FAMILIES: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("Bert", BERT, (CLASSIFIER, TAGGER, MASKED, SPAN, CHOICE)),
    ("Roberta", BERT, (CLASSIFIER, TAGGER, MASKED)),
    ("XLMRoberta", BERT, (CLASSIFIER, MASKED)),
    ("XLMRobertaXL", BERT, (CLASSIFIER,)),
    ("Camembert", BERT, (CLASSIFIER,)),
    ("RobertaPreLayerNorm", BERT, (CLASSIFIER,)),
    ("Electra", {**BERT, "embedding_size": 8}, (CLASSIFIER, MASKED)),
    ("Albert", {**BERT, "embedding_size": 8, "classifier_dropout_prob": 0.0}, (CLASSIFIER, MASKED)),
    ("Deberta", DEBERTA, (CLASSIFIER, TAGGER)),
    ("DebertaV2", {**DEBERTA, "position_buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm"}, (CLASSIFIER, MASKED)),
    ("MPNet", {**BERT, "relative_attention_num_buckets": 32}, (CLASSIFIER, MASKED)),
    ("ConvBert", {**BERT, "embedding_size": 8}, (CLASSIFIER,)),
    ("FNet", {**BERT}, (CLASSIFIER, MASKED)),
    ("RoFormer", {**BERT, "embedding_size": 8}, (CLASSIFIER, MASKED)),
    ("SqueezeBert", {**BERT, "embedding_size": 16, "q_groups": 2, "k_groups": 2, "v_groups": 2, "post_attention_groups": 1,
                     "intermediate_groups": 2, "output_groups": 2}, (CLASSIFIER,)),
    ("MobileBert", {**BERT, "embedding_size": 8, "intra_bottleneck_size": 16, "num_feedforward_networks": 1}, (CLASSIFIER,)),
    ("DistilBert", DISTIL, (CLASSIFIER, MASKED, SPAN)),
    ("ModernBert", {**LLAMA, "classifier_dropout": 0.0, "global_attn_every_n_layers": 2, "local_attention": 4,
                    "embedding_dropout": 0.0, "mlp_dropout": 0.0}, (CLASSIFIER, MASKED)),
    ("Nystromformer", {**BERT, "segment_means_seq_len": LENGTH, "num_landmarks": LENGTH}, (CLASSIFIER,)),
    ("BigBird", {**BERT, "attention_type": "original_full"}, (CLASSIFIER,)),
    ("Longformer", {**BERT, "attention_window": [4, 4]}, (CLASSIFIER,)),
    ("Yoso", {**BERT, "use_expectation": True}, (CLASSIFIER,)),
    ("MegatronBert", BERT, (CLASSIFIER,)),
    ("Ernie", BERT, (CLASSIFIER,)),
    ("RemBert", {**BERT, "input_embedding_size": 8, "output_embedding_size": 8}, (CLASSIFIER,)),
    ("IBert", BERT, (CLASSIFIER,)),
    ("Xmod", {**BERT, "languages": ("en_XX",), "default_language": "en_XX"}, (CLASSIFIER,)),
    ("Funnel", {"vocab_size": VOCABULARY, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32, "block_sizes": [1, 1],
                "num_decoder_layers": 1, "hidden_dropout": 0.0, "attention_dropout": 0.0}, (CLASSIFIER,)),
    ("XLNet", {"vocab_size": VOCABULARY, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32, "dropout": 0.0,
               "summary_last_dropout": 0.0, "pad_token_id": PAD}, (CLASSIFIER,)),
    ("GPT2", GPT, (CLASSIFIER, TAGGER, "LMHeadModel")),
    ("OpenAIGPT", {**GPT, "afn": "gelu"}, (CLASSIFIER, "LMHeadModel")),
    ("GPTNeo", {"vocab_size": VOCABULARY, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]],
                "window_size": 4, "max_position_embeddings": 32, "embed_dropout": 0.0, "attention_dropout": 0.0, "resid_dropout": 0.0,
                "pad_token_id": PAD}, (CLASSIFIER, CAUSAL)),
    ("GPTJ", {**GPT, "rotary_dim": 4}, (CLASSIFIER, CAUSAL)),
    ("GPTNeoX", {**LLAMA, "hidden_dropout": 0.0, "classifier_dropout": 0.0}, (CLASSIFIER, CAUSAL)),
    ("CodeGen", {**GPT, "n_head": 4, "rotary_dim": 4}, (CAUSAL,)),
    ("GPTBigCode", GPT, (CLASSIFIER, CAUSAL)),
    ("CTRL", {**GPT, "dff": 32}, (CLASSIFIER,)),
    ("Bloom", {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 2, "pad_token_id": PAD}, (CLASSIFIER, CAUSAL)),
    ("OPT", {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32,
             "max_position_embeddings": 32, "word_embed_proj_dim": 8, "dropout": 0.0, "pad_token_id": PAD}, (CLASSIFIER, CAUSAL)),
    ("Llama", LLAMA, (CLASSIFIER, TAGGER, CAUSAL)),
    ("Mistral", {**LLAMA, "sliding_window": 8}, (CLASSIFIER, CAUSAL)),
    ("Qwen2", LLAMA, (CLASSIFIER, CAUSAL)),
    ("Qwen3", {**LLAMA, "head_dim": 8}, (CLASSIFIER, CAUSAL)),
    ("Gemma", {**LLAMA, "head_dim": 8}, (CLASSIFIER, CAUSAL)),
    ("Gemma2", {**LLAMA, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}, (CAUSAL,)),
    ("Phi", {**LLAMA, "resid_pdrop": 0.0, "embd_pdrop": 0.0}, (CLASSIFIER, CAUSAL)),
    ("Phi3", {**LLAMA, "resid_pdrop": 0.0, "embd_pdrop": 0.0}, (CAUSAL,)),
    ("StableLm", LLAMA, (CAUSAL,)),
    ("Starcoder2", {**LLAMA, "residual_dropout": 0.0, "embedding_dropout": 0.0}, (CAUSAL,)),
    ("Cohere", LLAMA, (CAUSAL,)),
    ("Olmo", LLAMA, (CAUSAL,)),
    ("Olmo2", LLAMA, (CAUSAL,)),
    ("Granite", LLAMA, (CAUSAL,)),
    ("SmolLM3", LLAMA, (CAUSAL,)),
    ("Glm", {**LLAMA, "head_dim": 8}, (CAUSAL,)),
    ("Falcon", {**LLAMA, "hidden_dropout": 0.0, "multi_query": True, "parallel_attn": True}, (CLASSIFIER, CAUSAL)),
    ("Mpt", {"vocab_size": VOCABULARY, "d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 32, "pad_token_id": PAD}, (CLASSIFIER, CAUSAL)),
    ("Nemotron", LLAMA, (CAUSAL,)),
    ("Mixtral", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}, (CAUSAL,)),
    ("Qwen2Moe", {**LLAMA, **EXPERTS, "shared_expert_intermediate_size": 16}, (CAUSAL,)),
    ("Olmoe", {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2}, (CAUSAL,)),
    ("Mamba", {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 2,
               "pad_token_id": PAD, "use_mambapy": False}, (CAUSAL,)),
    ("Mamba2", {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8,
                "n_groups": 1, "chunk_size": 4, "pad_token_id": PAD}, (CAUSAL,)),
    ("Rwkv", {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "attention_hidden_size": 16}, (CAUSAL,)),
    ("Bart", BART, (CLASSIFIER, CAUSAL, SEQ2SEQ)),
    ("MBart", BART, (CLASSIFIER, SEQ2SEQ)),
    ("Blenderbot", BART, (SEQ2SEQ,)),
    ("BlenderbotSmall", BART, (SEQ2SEQ,)),
    ("Pegasus", BART, (SEQ2SEQ,)),
    ("PLBart", BART, (CLASSIFIER, SEQ2SEQ)),
    ("M2M100", {**BART, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}, (SEQ2SEQ,)),
    ("LED", {**BART, "attention_window": 4, "max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32}, (SEQ2SEQ,)),
    ("T5", T5, (CLASSIFIER, TAGGER, SEQ2SEQ)),
    ("MT5", T5, (SEQ2SEQ,)),
    ("UMT5", T5, (SEQ2SEQ,)),
    ("LongT5", {**T5, "local_radius": 3}, (SEQ2SEQ,)),
    ("SwitchTransformers", {**T5, "num_experts": 2, "expert_capacity": 64, "num_sparse_encoder_layers": 1,
                            "num_sparse_decoder_layers": 1, "router_jitter_noise": 0.0}, (SEQ2SEQ,)),
    ("ViT", VIT, (IMAGE,)),
    ("DeiT", VIT, (IMAGE,)),
    ("Beit", {**VIT, "drop_path_rate": 0.0, "use_relative_position_bias": True}, (IMAGE,)),
    ("ConvNext", {"hidden_sizes": [8, 8], "depths": [1, 1], "num_stages": 2, "patch_size": 4, "image_size": 16}, (IMAGE,)),
    ("Swin", {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "image_size": 16, "patch_size": 2,
              "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "drop_path_rate": 0.0}, (IMAGE,)),
    ("PoolFormer", {"hidden_sizes": [8, 8], "depths": [1, 1], "num_encoder_blocks": 2, "patch_sizes": [3, 3], "strides": [2, 2],
                    "padding": [1, 1], "drop_path_rate": 0.0}, (IMAGE,)),
    ("ResNet", {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"}, (IMAGE,)),
]  # fmt: skip

HEADS = {
    CLASSIFIER: "classifier", TAGGER: "tagger", MASKED: "masked", CAUSAL: "causal", "LMHeadModel": "causal", SPAN: "spans",
    CHOICE: "choice", SEQ2SEQ: "seq2seq", IMAGE: "image",
}  # fmt: skip
# Some classify at the one token that ends the sentence; some return NaN where a window holds nothing but padding.
CLASSES: dict[str, Callable[[int], dict[str, Tensor]]] = {
    **dict.fromkeys(("Bart", "MBart", "PLBart", "T5"), classes_at_end),
    "ModernBert": unpadded_classes,
}


def _cases() -> list[Case]:
    cases = []
    for family, config, heads in FAMILIES:
        for head in heads:
            batch = CLASSES.get(family, classes) if head == CLASSIFIER else BATCHES[head]
            batch = unpadded_translation if family == "LED" else batch
            loss = loss_of_units if HEADS[head] == "causal" else own_loss
            cases.append(Case(f"hf.{family}.{HEADS[head]}", "transformers", _build(family, head, config), batch, loss))
    for family, config, head in (
        ("GPT2", GPT, "LMHeadModel"), ("Llama", LLAMA, CAUSAL), ("Bloom", FAMILIES_BY_NAME["Bloom"], CAUSAL),
    ):  # fmt: skip
        build = _build(family, head, config)
        # The model's own loss is a mean over the valid tokens of the batch: everybody's.
        cases.append(Case(f"hf.{family}.own_loss", "transformers", build, language, own_loss))
        cases.append(Case(f"hf.{family}.own_loss_padded", "transformers", build, padded_language, own_loss))
    for family, config, head in (("Bert", BERT, CLASSIFIER), ("GPT2", GPT, "LMHeadModel"), ("Llama", LLAMA, CAUSAL)):
        build = _build(family, head, {**config, "attn_implementation": "sdpa"})
        loss = own_loss if head == CLASSIFIER else loss_of_units
        cases.append(Case(f"hf.{family}.sdpa", "transformers", build, BATCHES[head], loss))
    return cases


FAMILIES_BY_NAME = {family: config for family, config, _ in FAMILIES}
CASES = _cases()
