# %% [markdown]
# # A large table
#
# DP-SGD puts noise on every row of a table in every step. `LazyDP` trains by the same law, and gives a row the noise that it is
# owed when the row is next read. Here is a table of a million rows, of which a batch touches some hundreds.

# %%
import time

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as loss_fn
from torch.utils.data import DataLoader, TensorDataset

import sparsedp

ROWS = 1_000_000
ids = torch.randint(0, ROWS, (20_000, 2))
target = (ids.sum(1) % 3 == 0).float()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ROWS, 16)
        self.out = nn.Linear(32, 1)

    def forward(self, ids):
        return self.out(self.table(ids).flatten(1)).squeeze(1)


# %%
def private(mechanism):
    model = Model()
    engine = sparsedp.PrivacyEngine()
    return engine, *engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(TensorDataset(ids, target), batch_size=512),
        mechanism=mechanism,
        target_epsilon=3.0,
        target_delta=1e-6,
        steps=40,
        max_grad_norm=1.0,
    )


def seconds_of_a_step(model, optimizer, loader, steps):
    taken = []
    for step, (x, y) in enumerate(loader):
        started = time.perf_counter()
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
        taken.append(time.perf_counter() - started)
        if step + 1 == steps:
            break
    return min(taken)


# %% [markdown]
# The same plan, the same noise multiplier, the same epsilon: what differs is who pays for a million rows, and when.

# %%
dense, *dense_run = private(sparsedp.DPSGD())
lazy, *lazy_run = private(sparsedp.LazyDP())
slow, fast = seconds_of_a_step(*dense_run, steps=4), seconds_of_a_step(*lazy_run, steps=20)
print(f"noise multiplier {dense.plan.noise_multiplier:.3f} and {lazy.plan.noise_multiplier:.3f}")
print(f"DP-SGD {slow * 1000:.1f} ms a step, LazyDP {fast * 1000:.1f} ms")

# %% [markdown]
# The rows that no batch has read since are still owed noise. Whatever lets weights out, such as `state_dict()`, settles it.

# %%
print("rows that are owed noise:", lazy.pending())
lazy_run[0].state_dict()
print("afterwards:", lazy.pending())

# %%
print(lazy.statement())

# %% [markdown]
# From here: [LazyDP](../lazydp.md), [mechanisms](../mechanisms.md), [how fast is it](../speed/README.md).
