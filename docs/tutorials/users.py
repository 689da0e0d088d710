# %% [markdown]
# # Sequences, with users as units
#
# What somebody did, in order of time, is a sequence; a model of it says what comes next. Long histories are cut into several
# examples here, and all that one user has is protected together.

# %%
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from sparsedp.nn import sequence_loss

USERS, ITEMS, LENGTH = 4_000, 200, 8
torch.manual_seed(0)  # of the data and of the model's start; noise and samples do not follow it
follows = torch.randperm(ITEMS) + 1  # what nobody sees: which item comes after which; 0 is padding


def history():
    """Of one user: mostly the item that follows the one before, else any. Some users have more of it than others."""
    items, examples = [int(torch.randint(1, ITEMS + 1, ()))], int(torch.randint(1, 6, ()))
    while len(items) < examples * LENGTH + 1:
        follow = torch.rand(()) < 0.8
        items.append(int(follows[items[-1] - 1]) if follow else int(torch.randint(1, ITEMS + 1, ())))
    return items


examples, owners = [], []
for user in range(USERS):
    items = history()
    for start in range(0, len(items) - LENGTH, LENGTH):
        examples.append(items[start : start + LENGTH + 1])
        owners.append(user)
windows, owners = torch.tensor(examples), torch.tensor(owners)
data = TensorDataset(windows[:, :-1], windows[:, 1:])
print(f"{USERS:,} users have {len(data):,} examples; the first three have {torch.bincount(owners)[:3].tolist()}")

# %% [markdown]
# A recurrent model with one table. Its loss has one value for each example, and a mean over examples: `sparsedp.check` tries
# whether examples stay apart.

# %%


class Next(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.items = nn.Embedding(ITEMS + 1, dim, padding_idx=0)
        self.cell = sparsedp.nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, ITEMS + 1)

    def forward(self, history):
        return self.out(self.cell(self.items(history))[0])


def loss_fn(logits, target):
    return sequence_loss(logits, target)


model = Next()
loader = DataLoader(data, batch_size=400)
report = sparsedp.check(model, loss_fn, data_loader=loader)

# %% [markdown]
# With `unit="user"` the batch size counts users, and a drawn user brings all of their examples, here at most three.

# %%
EPOCHS = 10
engine = sparsedp.PrivacyEngine()
engine.add_check(report)
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=torch.optim.Adam(model.parameters(), lr=0.02),
    data_loader=loader,
    unit="user",
    users=owners,
    max_examples_per_user=3,
    target_epsilon=8.0,
    target_delta=1e-5,
    epochs=EPOCHS,
    max_grad_norm=1.0,
)
for epoch in range(EPOCHS):
    for history_of_batch, target in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(history_of_batch), target)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch + 1}: loss {loss.item():.2f}, as private as the data")

# %% [markdown]
# How often the item that mostly follows is the first of the model's list (by chance: one in 200):

# %%
model.eval()
with torch.no_grad():
    first = model(torch.arange(1, ITEMS + 1)[:, None])[:, -1, 1:].argmax(1) + 1
print(f"{(first == follows).float().mean():.0%} of the items")

# %%
print(engine.statement())

# %% [markdown]
# From here: [users](../guarantee.md#users), [sequence models](../sequences.md), [tuning](../tuning.md).
