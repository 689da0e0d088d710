"""torch-rechub: ranking, matching, multi-task and generative models, called with a dict of features."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from model_matrix.harness import Case
from model_matrix.parts import AsForward, clicks, drawn, normal, without_batch_norm

ROWS, DIM, LENGTH, NEGATIVES = 12, 8, 6, 3


def features(n: int) -> dict[str, Tensor]:
    """Every feature that a model here may ask for; histories are padded with 0 on the right."""
    lengths = drawn(n, 1, low=2, high=LENGTH + 1, seed=1)
    valid = torch.arange(LENGTH) < lengths
    return {
        "user": drawn(n, low=1, high=ROWS, seed=2),
        "group": drawn(n, low=1, high=ROWS, seed=3),
        "item": drawn(n, low=1, high=ROWS, seed=4),
        "age": normal(n, seed=5),
        "price": normal(n, seed=6),
        "history": drawn(n, LENGTH, low=1, high=ROWS, seed=7) * valid,
        "negative_history": drawn(n, LENGTH, low=1, high=ROWS, seed=8) * valid,
        "negatives": drawn(n, NEGATIVES, low=1, high=ROWS, seed=9),
        "one_negative": drawn(n, low=1, high=ROWS, seed=10),
        "seq": drawn(n, LENGTH, low=1, high=ROWS, seed=7) * valid,
        "pos": drawn(n, LENGTH, low=1, high=ROWS, seed=11) * valid,
        "neg": drawn(n, LENGTH, low=1, high=ROWS, seed=8) * valid,
        "sample_weight": torch.ones(n),
        "label": clicks(n),
        "second_label": clicks(n).flip(0),
    }


class Features:
    """The features as the package declares them. Small initial tables, 1e-4, would make small gradients."""

    def __init__(self) -> None:
        from torch_rechub.basic.features import DenseFeature, SequenceFeature, SparseFeature
        from torch_rechub.basic.initializers import RandomNormal

        start = RandomNormal(0, 0.3)

        def sparse(name: str, **options: Any) -> Any:
            return SparseFeature(name, ROWS, DIM, initializer=start, **options)

        def sequence(name: str, pooling: str) -> Any:
            return SequenceFeature(
                name, ROWS, DIM, pooling=pooling, shared_with="item", padding_idx=0, initializer=start
            )

        self.user, self.group, self.item = sparse("user"), sparse("group"), sparse("item")
        self.dense = [DenseFeature("age"), DenseFeature("price")]
        self.sparse = [self.user, self.group, self.item]
        self.history, self.negative_history = sequence("history", "concat"), sequence("negative_history", "concat")
        self.mean_history = sequence("history", "mean")
        self.negatives = sequence("negatives", "concat")
        self.one_negative = sparse("one_negative", shared_with="item")
        self.crossed = [SparseFeature(name, ROWS * 3, DIM, initializer=start) for name in ("user", "group", "item")]
        self.sequence = SequenceFeature("seq", ROWS, DIM, pooling="concat", padding_idx=0, initializer=start)
        self.following, self.other = (
            SequenceFeature(name, ROWS, DIM, pooling="concat", shared_with="seq", padding_idx=0)
            for name in ("pos", "neg")
        )

    @property
    def mlp(self) -> dict[str, Any]:
        """The package changes what it is given: new each time."""
        return {"dims": [8], "dropout": 0.0, "activation": "relu"}


Make = Callable[[Any, Features], nn.Module]


def probability_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.binary_cross_entropy(output, batch["label"].to(output.dtype))


def tasks_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    labels = torch.stack([batch["label"], batch["second_label"]], 1).to(output.dtype)
    return nn.functional.binary_cross_entropy(output[:, :2], labels)


def three_tasks_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """ESMM: click and conversion after a click; its first column is not trained by itself."""
    return tasks_loss(output[:, 1:], batch)


def first_of_list_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The positive comes first among the candidates."""
    return nn.functional.cross_entropy(output, torch.zeros(len(output), dtype=torch.long))


def ranking_loss(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return -(output[0] - output[1]).sigmoid().log().mean()


def item_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output, batch["item"])


def next_item_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output.mT, batch["pos"])


def dien_loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    return (
        probability_loss(output[0], batch) + output[1] if isinstance(output, tuple) else probability_loss(output, batch)
    )


def sequence_pair_loss(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    valid = (batch["history"] > 0).to(output[0].dtype)
    losses = -(output[0].sigmoid().log() + (1 - output[1].sigmoid()).log())
    return ((losses * valid).sum(1) / valid.sum(1)).mean()


# File, name of the case (its class up to the first point), how it is made, and its loss.
MODELS: list[tuple[str, str, Make, Callable[..., Tensor]]] = [
    ("ranking.widedeep", "WideDeep", lambda M, f: M(f.dense, f.sparse, f.mlp), probability_loss),
    ("ranking.deepfm", "DeepFM", lambda M, f: M(f.sparse + f.dense, f.sparse, f.mlp), probability_loss),
    ("ranking.dcn", "DCN", lambda M, f: M(f.sparse + f.dense, 2, f.mlp), probability_loss),
    ("ranking.dcn_v2", "DCNv2", lambda M, f: M(f.sparse + f.dense, 2, f.mlp, low_rank=3, num_experts=2), probability_loss),
    ("ranking.dcn_v2", "DCNv2.matrix", lambda M, f: M(f.sparse + f.dense, 2, f.mlp, use_low_rank_mixture=False), probability_loss),
    ("ranking.edcn", "EDCN", lambda M, f: M(f.sparse, 2, f.mlp), probability_loss),
    ("ranking.edcn", "EDCN.attention", lambda M, f: M(f.sparse, 2, f.mlp, bridge_type="attention_pooling"), probability_loss),
    ("ranking.afm", "AFM", lambda M, f: M(f.sparse, DIM, 4), probability_loss),
    ("ranking.fibinet", "FiBiNet", lambda M, f: M(f.sparse, f.mlp), probability_loss),
    ("ranking.fibinet", "FiBiNet.all", lambda M, f: M(f.sparse, f.mlp, bilinear_type="field_all"), probability_loss),
    ("ranking.deepffm", "DeepFFM", lambda M, f: M(f.sparse, f.crossed, DIM, f.mlp), probability_loss),
    ("ranking.deepffm", "FatDeepFFM", lambda M, f: M(f.sparse, f.crossed, DIM, 1, f.mlp), probability_loss),
    ("ranking.autoint", "AutoInt", lambda M, f: M(f.sparse, f.dense, 2, 2, 0.0, f.mlp), probability_loss),
    ("ranking.bst", "BST", lambda M, f: M([f.user], [f.history], [f.item], f.mlp, 2, 0.0, 1, LENGTH + 1), probability_loss),
    ("ranking.din", "DIN", lambda M, f: M([f.user], [f.history], [f.item], {"dims": [8]}, {"dims": [4], "activation": "relu"}),
     probability_loss),
    ("ranking.dien", "DIEN", lambda M, f: M([f.user], [f.history], [f.negative_history], [f.item], {"dims": [8]}), dien_loss),
    ("multi_task.shared_bottom", "SharedBottom", lambda M, f: M(f.sparse, ["classification"] * 2, f.mlp, [f.mlp, f.mlp]), tasks_loss),
    ("multi_task.mmoe", "MMOE", lambda M, f: M(f.sparse, ["classification"] * 2, 2, f.mlp, [f.mlp, f.mlp]), tasks_loss),
    ("multi_task.ple", "PLE", lambda M, f: M(f.sparse, ["classification"] * 2, 1, 1, 1, f.mlp, [f.mlp, f.mlp]), tasks_loss),
    ("multi_task.esmm", "ESMM", lambda M, f: M([f.user], [f.item], f.mlp, f.mlp), three_tasks_loss),
    ("multi_task.aitm", "AITM", lambda M, f: M(f.sparse, 2, f.mlp, [f.mlp, f.mlp]), tasks_loss),
    ("matching.dssm", "DSSM", lambda M, f: M([f.user, f.mean_history], [f.item], f.mlp, f.mlp), probability_loss),
    ("matching.dssm_senet", "DSSM.senet", lambda M, f: M([f.user, f.group], [f.item, f.group], f.mlp, f.mlp), probability_loss),
    ("matching.dssm_facebook", "FaceBookDSSM", lambda M, f: M([f.user], [f.item], [f.one_negative], f.mlp, f.mlp), ranking_loss),
    ("matching.youtube_dnn", "YoutubeDNN", lambda M, f: M([f.user, f.mean_history], [f.item], [f.negatives], f.mlp), first_of_list_loss),
    ("matching.gru4rec", "GRU4Rec", lambda M, f: M([f.user], [f.history], [f.item], [f.negatives], {"dims": [DIM]}),
     first_of_list_loss),
    ("matching.comirec", "ComirecSA", lambda M, f: M([f.user], [f.history], [f.item], [f.negatives]), first_of_list_loss),
    ("matching.mind", "MIND", lambda M, f: M([f.user], [f.history], [f.item], [f.negatives], LENGTH), first_of_list_loss),
    ("matching.sine", "SINE", lambda M, f: M(["history"], ["item"], ["negatives"], ROWS, DIM, DIM, 4, 2, LENGTH), first_of_list_loss),
    ("matching.sasrec", "SASRec", lambda M, f: M([f.sequence, f.following, f.other], LENGTH, 0.0, 1, 1), sequence_pair_loss),
    ("matching.narm", "NARM", lambda M, f: M(f.mean_history, DIM, 0.0, 0.0), item_loss),
    ("matching.stamp", "STAMP", lambda M, f: M(f.mean_history, 0.2, 0.2), item_loss),
    ("matching.youtube_sbc", "YoutubeSBC", lambda M, f: M([f.user], [f.item], [type(f.dense[0])("sample_weight")], f.mlp, f.mlp, 6), first_of_list_loss),
    ("generative.hstu", "HSTUModel", lambda M, f: AsForward(M(ROWS, DIM, 2, 1, 4, 4, LENGTH, 0.0, use_time_embedding=False),
                                                           lambda own, **x: own(x["history"])), next_item_loss),
    ("generative.hllm", "HLLMModel", lambda M, f: AsForward(M(normal(ROWS, DIM), ROWS, DIM, 2, 1, LENGTH, 0.0, use_time_embedding=False),
                                                           lambda own, **x: own(x["history"])), next_item_loss),
]  # fmt: skip


class Undrawn:
    """torch for a file whose forward passes draw: the same numbers for every unit, which a reference can repeat."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def randn(self, units: int, *sizes: int, **options: Any) -> Tensor:
        return (
            torch.linspace(-1, 1, math.prod(sizes), device=options.get("device"))
            .view(1, *sizes)
            .repeat(units, *[1] * len(sizes))
        )


def _build(file: str, name: str, make: Make, batch_norm: bool = False) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        importlib.import_module("torch_rechub.basic.layers").torch = Undrawn()  # MIND's capsules
        model = make(getattr(importlib.import_module(f"torch_rechub.models.{file}"), name.split(".")[0]), Features())
        model = model if batch_norm else without_batch_norm(model)
        return model if isinstance(model, AsForward) else AsForward(model, lambda own, **x: own(x))

    return build


CASES = [
    *(Case(f"rechub.{name}", "torch_rechub", _build(file, name, make), features, loss) for file, name, make, loss in MODELS),
    *(Case(f"rechub.{name}.batch_norm", "torch_rechub", _build(file, name, make, True), features, loss)
      for file, name, make, loss in (MODELS[0], MODELS[1], MODELS[14])),
]  # fmt: skip
