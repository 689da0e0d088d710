"""RecBole's recommenders, each with its own calculate_loss(interaction) and its own defaults, smaller."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from model_matrix.harness import Case
from model_matrix.parts import drawn, without_batch_norm

USERS, ITEMS, LENGTH, GROUPS, TAGS = 12, 14, 5, 4, 6
DATA_SIZE = 40

SETTINGS: dict[str, Any] = {
    "USER_ID_FIELD": "user_id", "ITEM_ID_FIELD": "item_id", "RATING_FIELD": "rating", "TIME_FIELD": "timestamp",
    "LABEL_FIELD": "label", "NEG_PREFIX": "neg_", "LIST_SUFFIX": "_list", "ITEM_LIST_LENGTH_FIELD": "item_length",
    "MAX_ITEM_LIST_LENGTH": LENGTH, "device": torch.device("cpu"), "numerical_features": [], "train_batch_size": 4,
    "embedding_size": 8, "hidden_size": 8, "inner_size": 16, "n_heads": 2, "n_layers": 2, "num_layers": 1,
    "dropout_prob": 0.0, "dropout_probs": [0.0, 0.0, 0.0], "hidden_dropout_prob": 0.0, "attn_dropout_prob": 0.0, "dropout": 0.0,
    "emb_dropout_prob": 0.0, "mlp_dropout_prob": 0.0, "sess_dropout": 0.0, "item_dropout": 0.0, "seed": 1,
    "mlp_hidden_size": [8, 8], "train_neg_sample_args": {"distribution": "uniform", "sample_num": 1, "dynamic": False},
    "selected_features": ["tags"], "attribute_hidden_size": [8], "use_pretrain": False, "MASK_ITEM_SEQ": "masked_list", "POS_ITEMS": "masked_items", "NEG_ITEMS": "other_items",
    "MASK_INDEX": "masked_places", "INVERSE_ITEM_SEQ": "inverse_list", "item_attribute": "tags", "reranker_CAN_NUM": "4",
     "data_path": ".",
}  # fmt: skip


class Settings(dict[str, Any]):
    """RecBole's Config: what is not set is None."""

    def __missing__(self, key: str) -> None:
        return None

    def __getattr__(self, key: str) -> Any:
        return self[key]


def _settings(model: str, changes: dict[str, Any]) -> Settings:
    """The package's own defaults for the model, made small."""
    import yaml

    spec = importlib.util.find_spec("recbole")
    assert spec is not None and spec.origin is not None
    loader = yaml.SafeLoader
    loader.add_implicit_resolver(  # 1e-4 is a number, as RecBole reads it
        "tag:yaml.org,2002:float", __import__("re").compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )
    page = Path(spec.origin).parent / "properties" / "model" / f"{model}.yaml"
    defaults = yaml.load(page.read_text(), Loader=loader) or {}
    return Settings({**defaults, **SETTINGS, **changes})


class Data:
    """What models ask of RecBole's Dataset: sizes, kinds of fields, and the interactions as a matrix."""

    user_num, item_num, inter_num = USERS, ITEMS, DATA_SIZE
    uid_field, iid_field, time_field, dataset_path = "user_id", "item_id", "timestamp", "."
    sizes = {"user_id": USERS, "item_id": ITEMS, "group": GROUPS, "tags": TAGS, "label": 2}  # noqa: RUF012
    field2seqlen = {"item_id_list": LENGTH, "tags": 3}  # noqa: RUF012

    def __init__(self) -> None:
        from recbole.utils import FeatureSource, FeatureType

        generator = np.random.default_rng(0)
        self.users, self.items = generator.integers(1, USERS, DATA_SIZE), generator.integers(1, ITEMS, DATA_SIZE)
        self.field2type = {
            "user_id": FeatureType.TOKEN, "item_id": FeatureType.TOKEN, "group": FeatureType.TOKEN,
            "tags": FeatureType.TOKEN_SEQ, "label": FeatureType.FLOAT,
        }  # fmt: skip
        self.field2source = {
            "user_id": FeatureSource.USER_ID, "item_id": FeatureSource.ITEM_ID, "group": FeatureSource.USER,
            "tags": FeatureSource.ITEM, "label": FeatureSource.INTERACTION,
        }  # fmt: skip
        self.inter_feat = self._interaction(
            user_id=torch.from_numpy(self.users), item_id=torch.from_numpy(self.items), rating=torch.ones(DATA_SIZE),
            timestamp=torch.arange(DATA_SIZE).float(),
        )  # fmt: skip
        self.config = Settings(SETTINGS)

    @staticmethod
    def _interaction(**fields: Tensor) -> Any:
        from recbole.data.interaction import Interaction

        return Interaction(fields)

    def num(self, name: str) -> int:
        return self.sizes[name]

    def fields(self, ftype: Any = None, source: Any = None) -> list[str]:
        return [name for name in self.field2type if source is None or self.field2source[name] in source]

    def get_user_feature(self) -> Any:
        return self._interaction(user_id=torch.arange(USERS), group=torch.arange(USERS) % GROUPS)

    def get_item_feature(self) -> Any:
        return self._interaction(item_id=torch.arange(ITEMS), tags=drawn(ITEMS, 3, high=TAGS, seed=9))

    def inter_matrix(self, form: str = "coo", value_field: str | None = None) -> Any:
        from scipy.sparse import coo_matrix

        matrix = coo_matrix((np.ones(DATA_SIZE, np.float32), (self.users, self.items)), shape=(USERS, ITEMS))
        return matrix if form == "coo" else matrix.tocsr()

    def history_item_matrix(self, value_field: str | None = None, max_history_len: int | None = None) -> Any:
        return self._history(self.users, self.items, USERS, max_history_len)

    def history_user_matrix(self, value_field: str | None = None, max_history_len: int | None = None) -> Any:
        return self._history(self.items, self.users, ITEMS, max_history_len)

    def _history(self, keys: Any, values: Any, count: int, longest: int | None) -> Any:
        lists = [sorted(set(values[keys == key].tolist()))[:longest] for key in range(count)]
        width = max(map(len, lists))
        ids = torch.tensor([line + [0] * (width - len(line)) for line in lists])
        return ids, (ids > 0).float(), torch.tensor([len(line) for line in lists])


def interactions(n: int) -> dict[str, Tensor]:
    """Every field that a model of RecBole's may ask for."""
    lengths = drawn(n, low=2, high=LENGTH + 1, seed=1)
    valid = torch.arange(LENGTH) < lengths[:, None]
    return {
        "user_id": drawn(n, low=1, high=USERS, seed=2),
        "item_id": drawn(n, low=1, high=ITEMS, seed=3),
        "neg_item_id": drawn(n, low=1, high=ITEMS, seed=4),
        "neg_user_id": drawn(n, low=1, high=USERS, seed=10),
        "group": drawn(n, low=1, high=GROUPS, seed=5),
        "tags": drawn(n, 3, low=1, high=TAGS, seed=6),
        "label": drawn(n, high=2, seed=7).float(),
        "rating": drawn(n, low=1, high=6, seed=8).float(),
        "item_length": lengths,
        "item_id_list": drawn(n, LENGTH, low=1, high=ITEMS, seed=9) * valid,
        "neg_item_id_list": drawn(n, LENGTH, low=1, high=ITEMS, seed=11) * valid,
        "tags_list": drawn(n, LENGTH, 3, low=1, high=TAGS, seed=12) * valid[..., None],
        "inverse_list": drawn(n, LENGTH, low=1, high=ITEMS, seed=14) * valid,
        "masked_list": (drawn(n, LENGTH, low=1, high=ITEMS, seed=9) * valid).index_fill(1, torch.tensor([1]), ITEMS),
        "masked_places": torch.ones(n, 1, dtype=torch.long),
        "masked_items": drawn(n, 1, low=1, high=ITEMS, seed=9),
        "other_items": drawn(n, 1, low=1, high=ITEMS, seed=15),
        "neg_tags_list": drawn(n, LENGTH, 3, low=1, high=TAGS, seed=13) * valid[..., None],
    }


class OwnLoss(nn.Module):
    """calculate_loss as forward: what is used there is used inside of the module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        if hasattr(model, "reparameterize"):  # draws, which no reference repeats
            self.model.reparameterize = lambda mu, logvar: mu + 0.01 * torch.exp(0.5 * logvar)
        if hasattr(model, "sample_timesteps"):  # likewise
            self.model.sample_timesteps = lambda units, *_: (torch.arange(units) * 0 + 2, torch.ones(units))

    def forward(self, **fields: Tensor) -> Tensor:
        from recbole.data.interaction import Interaction

        # RecVAE trains its two halves in turn, the encoder first.
        stage = {"encoder_flag": True} if type(self.model).__name__ == "RecVAE" else {}
        losses = self.model.calculate_loss(Interaction(fields), **stage)
        return (sum(losses) if isinstance(losses, tuple) else losses).reshape(())


def _build(kind: str, model: str, changes: dict[str, Any], batch_norm: bool = False) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        package = importlib.import_module(f"recbole.model.{kind}_recommender")
        built = OwnLoss(getattr(package, model)(_settings(model, changes), Data()))
        if (
            model == "MacridVAE"
        ):  # it divides by the length of a vector that starts near zero, and steps would go anywhere
            nn.init.normal_(built.model.encoder[-1].bias)
        return built if batch_norm else without_batch_norm(built)

    return build


def the_loss(loss: Tensor, batch: Any) -> Tensor:
    return loss


# Kind, model, and what differs from the package's defaults. Losses that draw (MacridVAE, DiffRec) draw nothing here, and do not
# change with the number of their calls: no reference repeats that.
MODELS: list[tuple[str, str, dict[str, Any]]] = [
    ("general", "ConvNCF", {"embedding_size": 16, "cnn_channels": [1, 4, 4], "cnn_kernels": [4, 4], "cnn_strides": [4, 4]}),
    *(("general", model, {}) for model in (
        "BPR", "NeuMF", "DMF", "FISM", "NAIS", "CDAE", "MultiDAE", "MultiVAE", "RecVAE", "RaCT",
        "ENMF", "SimpleX", "LINE", "NNCF", "DGCF", "SGL",
    )),
    ("general", "MacridVAE", {"nogb": True, "dropout_prob": 0.0, "total_anneal_steps": 0, "reg_weights": [0.001, 0.001]}),
    ("context_aware", "PNN", {"reg_weight": 0.01}),
    *(("context_aware", model, {}) for model in (
        "LR", "FM", "FFM", "FNN", "FwFM", "NFM", "AFM", "WideDeep", "DeepFM", "xDeepFM", "DCN", "DCNV2", "DSSM",
        "AutoInt", "FiGNN", "EulerNet",
    )),
    *(("sequential", model, {}) for model in (
        "FPMC", "GRU4Rec", "NARM", "STAMP", "Caser", "NextItNet", "TransRec", "SASRec", "BERT4Rec", "SRGNN", "GCSAN",
        "GRU4RecF", "SASRecF", "FDSA", "S3Rec", "HGN", "HRM", "NPE", "SHAN", "RepeatNet", "FOSSIL", "SINE", "LightSANs",
        "CORE", "DIN", "DIEN", "SASRecCPR", "GRU4RecCPR",
    )),
]  # fmt: skip


def _caser(model: Any) -> Tensor:
    norms = [model.user_embedding, model.item_embedding, model.conv_v, model.fc1, model.fc2]
    return model.reg_weight * model.reg_loss([part.weight for part in norms]) + model.reg_loss_conv_h()


def _cdae(model: Any) -> Tensor:
    weights = [model.h_user.weight, model.h_item.weight]
    return model.reg_weight_1 * sum(w.norm(p=1) for w in weights) + model.reg_weight_2 * sum(w.norm() for w in weights)


# What the loss adds that depends on parameters alone.
PENALTIES: dict[str, Callable[[Any], Tensor]] = {
    **dict.fromkeys(("ConvNCF", "FISM", "NAIS", "PNN"), lambda model: model.reg_loss()),
    "AFM": lambda model: model.reg_weight * model.attlayer.w.weight.norm(2),
    "xDeepFM": lambda model: model.reg_weight * model.calculate_reg_loss(),
    "EulerNet": lambda model: model.RegularLoss(model.reg_weight),
    **dict.fromkeys(("DCN", "DCNV2"), lambda model: model.reg_weight * model.reg_loss(model.cross_layer_w)),
    "Caser": _caser,
    "CDAE": _cdae,
    "NextItNet": lambda model: (
        model.reg_weight * model.reg_loss([model.item_embedding.weight, model.final_layer.weight]) + model.reg_loss_rb()
    ),
    "MacridVAE": lambda model: model.reg_loss(),
    "TransRec": lambda model: model.reg_loss(model.T),
}


def _case(name: str, kind: str, model: str, changes: dict[str, Any], batch_norm: bool = False) -> Case:
    penalty = PENALTIES.get(model)
    return Case(
        name, "recbole", _build(kind, model, changes, batch_norm), interactions, the_loss,
        penalty=None if penalty is None else lambda module: penalty(module.model),
        loss_reduction="sum" if model in ("CDAE", "ConvNCF") else "mean",
    )  # fmt: skip


def _diffrec_without_history() -> nn.Module:
    """The package draws steps by the losses of earlier batches, which it keeps, and swallows what is refused there.

    So its own form ends one way or the other. Without that, steps are drawn uniformly.
    """
    built = _build("general", "DiffRec", {"noise_scale": 0.0})()
    built.model.update_Lt_history = lambda *_: None
    return built


BPR = ("SASRec", "GRU4Rec", "NARM", "Caser", "STAMP", "LightSANs")

CASES = [
    *(_case(f"recbole.{model}", kind, model, changes) for kind, model, changes in MODELS),
    Case("recbole.DiffRec.uniform", "recbole", _diffrec_without_history, interactions, the_loss),
    *(_case(f"recbole.{model}.bpr", "sequential", model, {"loss_type": "BPR"}) for model in BPR),
    *(_case(f"recbole.{model}.batch_norm", "context_aware", model, {}, True) for model in ("NFM", "DCN")),
]
