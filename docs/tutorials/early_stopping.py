# %% [markdown]
# # Stopping early on a private validation set
#
# When to stop is learned from a validation set whose units are private, too. Each look at it releases one number with noise, and
# the target epsilon pays for training and for all looks that are planned.

# %%
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as loss_fn
from torch.utils.data import DataLoader, TensorDataset

import sparsedp

torch.manual_seed(0)  # of the data and of the model's start; noise and samples do not follow it
ids = torch.randint(0, 300, (12_000, 3))
liked = torch.randn(300)
target = (liked[ids].sum(1) + torch.randn(12_000) > 0).float()
training = TensorDataset(ids[:10_000], target[:10_000])
validation_ids, validation_target = ids[10_000:], target[10_000:]

model = nn.Sequential(nn.EmbeddingBag(300, 8, mode="sum"), nn.Linear(8, 1), nn.Flatten(0))
EPOCHS = 10

# %% [markdown]
# Nine looks at 2,000 units, each with noise of deviation 0.02 on the mean loss.

# %%
engine = sparsedp.PrivacyEngine()
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=torch.optim.Adagrad(model.parameters(), lr=0.2),
    data_loader=DataLoader(training, batch_size=500),
    target_epsilon=3.0,
    target_delta=1e-6,
    epochs=EPOCHS,
    max_grad_norm=1.0,
    validation=sparsedp.PrivateValidation(units=2_000, looks=EPOCHS - 1, std=0.02),
)
stopping = sparsedp.EarlyStopping(patience=2)


def losses():
    """Of each example of the validation set."""
    model.eval()
    with torch.no_grad():
        return loss_fn(model(validation_ids), validation_target, reduction="none")


for epoch in range(EPOCHS):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
    if epoch + 1 < EPOCHS:
        value = engine.validate(losses())
        print(f"epoch {epoch + 1}: {value:.3f}")
        if stopping(value):
            print("it is not getting better: training stops")
            break

# %% [markdown]
# A run that stops early saves time, and no epsilon: when to stop is learned from what was released. The promise is that of the
# whole plan, and the statement says so.

# %%
print(engine.statement())

# %% [markdown]
# From here: [early stopping](../tuning.md#early-stopping), [how the guarantee holds](../guarantee.md).
