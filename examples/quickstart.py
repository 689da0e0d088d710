"""Private training of your own model, in full: two tables, a dense layer, and the usual loop.

Run: python examples/quickstart.py
"""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as loss_fn
from torch.utils.data import DataLoader, TensorDataset

import sparsedp


class TwoTables(nn.Module):
    def __init__(self, users: int, items: int, dim: int = 8) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, dim), nn.Embedding(items, dim)
        self.out = nn.Linear(2 * dim, 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.users(user), self.items(item)], dim=1)).squeeze(1)


def main() -> None:
    user, item = torch.randint(100, (20_000,)), torch.randint(40, (20_000,))
    clicked = (user % 5 + item % 4 > 3).float()  # learnable from the tables alone
    loader = DataLoader(TensorDataset(user, item, clicked), batch_size=500, shuffle=True)
    model = TwoTables(100, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=4.0)

    report = sparsedp.check(model, loss_fn, data_loader=loader)
    print(report)
    engine = sparsedp.PrivacyEngine()
    engine.add_check(report)  # the statement then says that the check ran
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader,
        target_epsilon=3.0, target_delta=1e-5, epochs=3, max_grad_norm=1.0,
    )  # fmt: skip
    for epoch in range(3):
        for *inputs, target in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(*inputs), target)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}, epsilon spent {engine.get_epsilon():.2f}")
    print(engine.statement())


if __name__ == "__main__":
    main()
