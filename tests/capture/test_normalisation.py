"""Trained norms over the last dimensions: what their graph keeps, and that making it again changes no number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedp.capture import Capture

B, L, D, LAYERS = 4, 6, 16, 5


class Norms(nn.Module):
    """Norms of one another. `apart`: normalised without parameters, then scaled and shifted by operations of their own."""

    def __init__(self, kind: str, apart: bool = False) -> None:
        super().__init__()
        self.first, self.kind, self.apart = nn.Linear(D, D), kind, apart
        make = nn.LayerNorm if kind == "layer_norm" else nn.RMSNorm
        self.norms = nn.ModuleList(make(D) for _ in range(LAYERS))
        for norm in self.norms:
            nn.init.normal_(norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for norm in self.norms:
            if not self.apart:
                x = norm(x)
                continue
            x = (F.layer_norm if self.kind == "layer_norm" else F.rms_norm)(x, (D,), eps=norm.eps) * norm.weight
            x = x if self.kind == "rms_norm" else x + norm.bias
        return x


def nodes(tensor: Tensor) -> Iterator[Any]:
    """Of a tensor's graph, each once."""
    waiting, seen = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
            yield node


def bytes_of_graph(out: Tensor, module: nn.Module) -> int:
    """What a graph keeps, but for the output and the parameters."""
    saved: list[Any] = []
    for node in nodes(out):
        saved += getattr(node, "saved_tensors", ())
        saved += [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved if isinstance(t, Tensor)}
    for tensor in (out, *module.parameters()):
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def captured_after(module: nn.Module, x: Tensor) -> tuple[Capture, Tensor]:
    capture = Capture(module, dict(module.named_parameters()))
    capture.attach()
    return capture, module(x)


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_a_norm_keeps_its_input_and_not_what_is_normalised(kind: str) -> None:
    x, module = torch.randn(B, L, D), Norms(kind)
    plain = bytes_of_graph(module(x), module)
    _, out = captured_after(module, x)
    private = bytes_of_graph(out, module)
    apart = Norms(kind, apart=True)
    _, out = captured_after(apart, x)

    activation = B * L * D * 4
    assert private < plain + activation // 2
    assert bytes_of_graph(out, apart) >= private + (LAYERS - 1) * activation, "what is normalised would count"


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("frozen", [(), ("weight",), ("bias",)])
def test_what_is_made_again_is_the_same_bit_for_bit(kind: str, frozen: tuple[str, ...]) -> None:
    x, once, apart = torch.randn(B, L, D), Norms(kind), Norms(kind, apart=True)
    apart.load_state_dict(once.state_dict())
    found = []
    for module in (once, apart):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not name.startswith("norms") or not name.endswith(frozen or "none"))
        capture, out = captured_after(module, x)
        out.square().sum().backward()
        captured = capture.collect()
        assert captured is not None
        factors = torch.rand(B, generator=torch.Generator().manual_seed(1))
        found.append(
            {
                name: (
                    captured.squared_norms(captured.uses[name]),
                    captured.uses[name].weighted_sum(factors, parameter.shape),
                )
                for name, parameter in module.named_parameters()
                if parameter.requires_grad
            }
        )
        assert len(found[-1]) == sum(parameter.requires_grad for parameter in module.parameters())
    for name, (square, total) in found[0].items():
        assert torch.equal(square, found[1][name][0])
        assert torch.equal(total, found[1][name][1])
