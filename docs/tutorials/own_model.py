# %% [markdown]
# # A report on a model of your own
#
# A model and data that are yours, trained by the command line: what comes out is a folder with a report for those who may see the
# data, and a model card for everybody. `sparsedp init --own-model` writes an example like this one.

# %%
import importlib
import sys
from pathlib import Path

import torch

_ = Path("ours.py").write_text('''
import torch
from torch import nn
from torch.utils.data import TensorDataset


def visits(count):
    """(training set, held-out set) of pages that a visit saw, and whether it ended with an order."""
    draw = torch.Generator().manual_seed(0)
    pages = torch.randint(1, 300, (count, 6), generator=draw)
    worth = torch.randn(300, generator=draw)
    order = (worth[pages].sum(1) + torch.randn(count, generator=draw) > 0).float()
    kept = count // 5
    return TensorDataset(pages[kept:], order[kept:]), TensorDataset(pages[:kept], order[:kept])


class Orders(nn.Module):
    def __init__(self, training, dim):
        super().__init__()
        self.pages = nn.EmbeddingBag(300, dim, mode="sum")
        self.out = nn.Linear(dim, 1)

    def forward(self, pages):
        return self.out(self.pages(pages)).squeeze(1)
''')

_ = Path("ours.yaml").write_text("""
data: {kind: "ours:visits", options: {count: 20000}}
model: {kind: "ours:Orders", options: {dim: 8}}
loss: binary_cross_entropy
optimizer: {name: Adagrad, lr: 0.2}
training: {epochs: 6, batch_size: 800, evaluate_every: 40, log_every: 5}
privacy: {target_epsilon: 3.0, max_grad_norm: 1.0}
""")

# %%
# !sparsedp train ours.yaml --run-dir run --quiet

# %% [markdown]
# What a step is expected to touch, take and need is predicted on a model that is thrown away; the report puts it beside what
# happened.

# %%
# !sparsedp plan ours.yaml --json --quiet > run/private/predictions.json
# !sparsedp report run

# %% [markdown]
# `run/private/report.html` is one page that needs no network: the promise in words, what was planned and what happened, curves,
# where the time went, who may read what. It shows exact losses and metrics, so it is as private as the data. What may leave is in
# `run/release`, and a model card beside it is made of that alone. What no configuration tells is left to fill in.

# %%
# !sparsedp report run --markdown
# !head -12 run/release/README.md
# !ls run/release

# %% [markdown]
# The weights are under the module's own names:

# %%
sys.path.insert(0, ".")
model = importlib.import_module("ours").Orders(None, dim=8)
model.load_state_dict(torch.load("run/release/model.pt"))
print(torch.sigmoid(model(torch.tensor([[1, 2, 3, 4, 5, 6]]))).item())

# %% [markdown]
# From here: [reports](../report.md), [code of your own](../command-line.md#code-of-your-own), [serving a model](../serving.md).
