"""Units of a batch do not meet where their place is not known: in outputs, in what is kept, in sizes that are equal by chance."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from sparsedp import UnitsMixedError, UnsupportedError
from support import Apply

B, D = 8, 8
REFUSED = (UnsupportedError, UnitsMixedError)


def run(
    forward: Callable[..., Any], loss: Callable[[Any], Tensor], inputs: Any = lambda x, w: (x,), batch: int = B
) -> int:
    """How many steps were taken over one epoch."""
    module = Apply(forward, a=nn.Linear(D, D))
    module, optimizer, loader = sparsedp.PrivacyEngine(seed=2).make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), noise_multiplier=0.0, max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(torch.randn(B, D), torch.rand(B)), batch_size=batch),
    )  # fmt: skip
    steps = 0
    for x, w in loader:
        optimizer.zero_grad()
        loss(module(*inputs(x, w))).backward()
        optimizer.step()
        steps += 1
    return steps


def mean_of_squares(out: Tensor) -> Tensor:
    return out.square().mean()


@pytest.mark.parametrize("meet", [lambda h, kept: kept @ h.T, lambda h, kept: torch.einsum("bd,kd->bk", h, kept)])
def test_units_do_not_meet_those_of_an_earlier_batch(meet: Callable[[Tensor, Tensor], Tensor]) -> None:
    kept: list[Tensor] = []

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        out = meet(h, kept[-1]) if kept else h
        kept.append(h.detach())
        return out

    with pytest.raises(UnitsMixedError, match="earlier batch"):
        run(forward, mean_of_squares, batch=4)


def test_what_is_kept_for_looking_at_does_no_harm() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.last = m.a(x)
        return m.last

    assert run(forward, mean_of_squares, batch=4) == 2


def permuted_mask(m: Any, x: Tensor) -> Tensor:
    mask = x > 0
    mask[torch.arange(B - 1, -1, -1)] = x > 0.5
    return m.a(x) * mask


def columns_of_units(m: Any, x: Tensor) -> Tensor:
    changed = x.clone()
    changed[:, x[:, 0] > 0] = 0
    return m.a(changed)


EQUAL_SIZES: dict[str, Callable[..., Tensor]] = {
    "quantiles": lambda m, x: m.a(torch.quantile(x, torch.linspace(0.1, 0.9, B), dim=1)),
    "unequal parts": lambda m, x: m.a(torch.cat([x, x]).split([4, B, 4])[1]) + m.a(x),
    "parts at places": lambda m, x: m.a(torch.cat([x, x]).tensor_split((3, 3 + B))[1]) + m.a(x),
    "an array as index": lambda m, x: m.a(x.T[np.arange(D)]),
    "a tuple as index": lambda m, x: m.a(x.T[(tuple(range(D)),)]),
    "indices of two dimensions": lambda m, x: m.a(x[torch.arange(B), torch.arange(D).repeat(B, 1)]),
    "a mask of all dimensions": lambda m, x: m.a(x[..., torch.ones(B, D, dtype=torch.bool)].view(B, D)),
    "a permuted mask": permuted_mask,
    "columns by units": columns_of_units,
    "new_full": lambda m, x: m.a(x) * x.new_full((D,), x.mean()),
}


def rows_of_others(m: Any, x: Tensor) -> Tensor:
    words = torch.zeros(len(x), D)
    words[torch.arange(len(x)).flip(0), (x[:, 0] > 0).long()] = x[:, 1]
    return m.a(words)


def parameters_by_place(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h[:, :2] = m.a.weight[: len(x), :2]
    return h


def rows_by_data(m: Any, x: Tensor) -> Tensor:
    words = torch.zeros(len(x), D)
    words.index_put_(((x[:, 0] > 0).long(), torch.zeros(len(x), dtype=torch.long)), x[:, 1])
    return m.a(words)


def columns_by_units(m: Any, x: Tensor) -> Tensor:
    words = torch.zeros(len(x), D)
    words[(x[:, 0] > 0).long(), torch.arange(len(x))] = x[:, 1]
    return m.a(words)


def the_same_mask_written(m: Any, x: Tensor) -> Tensor:
    mask = x > 0
    alias = torch.BoolTensor(mask)  # type: ignore[arg-type]
    mask[:] = (x > 0).flip(0)
    return m.a(x) * alias


def positions_of_others(m: Any, x: Tensor) -> Tensor:
    return m.a(x[x > 0][: x.numel() // D * 2].repeat(4)[: x.numel()].view(-1, D))


# Operations that are followed, in forms in which units do meet.
MIXING: dict[str, Callable[..., Tensor]] = {
    "addmm over units": lambda m, x: torch.addmm(torch.ones(D, D), m.a(x).T, x),
    "addmm of pairs": lambda m, x: torch.addmm(torch.ones(len(x)), m.a(x), x.T),
    "addmm beside another's": lambda m, x: torch.addmm(m.a(x).flip(0), x, torch.eye(D)),
    "addmm on a transposed sum": lambda m, x: torch.addmm(m.a(x).T, x, torch.eye(D)),
    "baddbmm over units": lambda m, x: torch.baddbmm(torch.ones(1, D, D), m.a(x).T[None], x[None]),
    "addbmm": lambda m, x: m.a(torch.addbmm(torch.zeros(D, D), x[:, :, None], x[:, None])),
    "addmv over units": lambda m, x: torch.addmv(torch.zeros(D), m.a(x).T, x[:, 0]),
    "tensordot over units": lambda m, x: m.a(torch.tensordot(x, x, ([0], [0]))),
    "tensordot of pairs": lambda m, x: torch.tensordot(m.a(x), x, ([1], [1])),
    "tensordot of a parameter over units": lambda m, x: torch.tensordot(m.a.weight[:, : len(x)], x, 1),
    "einsum with dots over units": lambda m, x: torch.einsum("b...,b...->...", m.a(x), x),
    "einsum with dots of pairs": lambda m, x: torch.einsum("b...,c...->bc", m.a(x), x),
    "einsum without a result": lambda m, x: torch.einsum("bd,bk", m.a(x), x),
    "einsum of a parameter over units": lambda m, x: torch.einsum("bd,bk,kd->dk", x, x, m.a.weight),
    "einsum of a parameter by place": lambda m, x: torch.einsum("bd,bk->bdk", m.a.weight[: len(x)] * 2, x),
    "matrices by place": lambda m, x: (m.a.weight * 2)[: len(x), None] @ x[:, :, None],
    "flattened parts by place": lambda m, x: x.repeat_interleave(2, 0) + (m.a.weight * 2)[: len(x)].repeat(2, 1),
    "parameters by place": parameters_by_place,
    "heads of others": lambda m, x: (
        torch.cat([m.a(x)[:, :4].reshape(-1, 2), x[:, :2].repeat(2, 1)]).view(2, -1, 2).sum(0)
    ),
    "rows of others": rows_of_others,
    "rows by data": rows_by_data,
    "columns by units": columns_by_units,
    "a mask that was written": the_same_mask_written,
    "what a mask picks": positions_of_others,
    "padding among units": lambda m, x: m.a(F.pad(x, [0, 0, 1, 0])[:-1]),
    "boundaries of the batch": lambda m, x: m.a(torch.bucketize(x, x[:, 0].sort()[0]).float()),
    "places in the batch": lambda m, x: m.a(torch.searchsorted(x[:, 0].sort()[0], x).float()),
    "rows of the batch": lambda m, x: m.a(x.index_select(0, (x[:, 0] > 0).long())),
    "frequencies of units": lambda m, x: m.a(torch.fft.fft(x, dim=0).real),
    "a changed alias": lambda m, x: m.a(x.data.copy_(x.flip(0))),
}


@pytest.mark.parametrize("name", MIXING)
def test_forms_of_followed_operations_that_mix_units_are_refused(name: str) -> None:
    with pytest.raises(REFUSED):
        for _ in range(20):  # the loader may draw too few units to mix
            run(MIXING[name], mean_of_squares)


@pytest.mark.parametrize("name", EQUAL_SIZES)
def test_sizes_that_are_equal_by_chance_do_not_mix_units(name: str) -> None:
    with pytest.raises(REFUSED):
        for _ in range(20):  # the loader may draw another number of units
            run(EQUAL_SIZES[name], mean_of_squares)


@dataclass(slots=True)
class Slots:
    weights: Tensor


@pytest.mark.parametrize(
    ("wrap", "unwrap"), [(Slots, lambda s: s.weights), (lambda w: deque([w]), lambda d: d[0])], ids=["slots", "deque"]
)
def test_inputs_in_any_container_are_of_units(wrap: Callable, unwrap: Callable) -> None:
    with pytest.raises(UnitsMixedError, match="mean"):
        run(lambda m, x, o: m.a(x) * unwrap(o).mean(), mean_of_squares, inputs=lambda x, w: (x, wrap(w)))
    run(lambda m, x, o: m.a(x) * unwrap(o)[:, None], mean_of_squares, inputs=lambda x, w: (x, wrap(w)))


# ---------------------------------------------------------------------- behind the last parameter


@torch.jit.script
def scripted_mean(x: Tensor) -> Tensor:
    return x.mean() * torch.ones_like(x)


@torch.jit.script
def scripted_twice(x: Tensor) -> Tensor:
    return 2 * x


@torch.jit.script
def scripted_positions(x: Tensor) -> Tensor:
    return torch.arange(x.size(1)).expand(x.size(0), x.size(1))


@torch.jit.script
def scripted_write(x: Tensor) -> Tensor:
    x += x.mean()
    return x


MIXING_AT_THE_END: dict[str, Callable[..., Tensor]] = {
    "linear with itself": lambda m, x: F.linear(h := m.a(x), h),
    "covariances": lambda m, x: torch.cov(m.a(x).T),
    "a mean over what a mask picks": lambda m, x: F.cross_entropy(m.a(x)[x[:, 0] > 0], x[x[:, 0] > 0].argmax(1)),
    "distances of all pairs": lambda m, x: F.pdist(m.a(x)),
    "a mapped function": lambda m, x: torch.vmap(lambda row, all_rows: row - all_rows.mean(0), (0, None))(
        h := m.a(x), h
    ),
    "a parameter in a mapped function": lambda m, x: torch.vmap(lambda row: row - m.a(x).mean(0))(x),
    "a scripted function": lambda m, x: scripted_mean(m.a(x)),
    "the logarithm of determinants": lambda m, x: torch.logdet(torch.eye(B) + m.a(x) @ m.a(x).T),
    "covariances of a part": lambda m, x: torch.cov(m.a(x).T[:4]),
    "correlations": lambda m, x: torch.corrcoef(m.a(x).T),
    "a histogram": lambda m, x: m.a(x) * torch.bincount((x[:, 0] > 0).long(), minlength=D),
}


@pytest.mark.parametrize("name", MIXING_AT_THE_END)
def test_units_do_not_mix_behind_the_last_parameter(name: str) -> None:
    with pytest.raises(REFUSED):
        for _ in range(20):  # the loader may draw too few units to mix
            run(MIXING_AT_THE_END[name], mean_of_squares)


APART_AT_THE_END: dict[str, Callable[..., Tensor]] = {
    "threshold": lambda m, x: F.threshold(m.a(x), 0.1, 0.0),
    "prelu": lambda m, x: F.prelu(m.a(x), torch.tensor([0.25])),
    "pooling without channels": lambda m, x: F.adaptive_avg_pool1d(m.a(x), 4),
    "pooling with places": lambda m, x: F.adaptive_max_pool1d(m.a(x)[:, None], 4, return_indices=True)[0],
    "windows": lambda m, x: m.a(x).unfold(1, 3, 2),
    "windows of images": lambda m, x: F.unfold(m.a(x).view(-1, 1, 2, 4), 2),
    "frequencies": lambda m, x: torch.fft.irfft(torch.fft.rfft(m.a(x), dim=1) * 0.5, n=D, dim=1),
    "matrices": lambda m, x: torch.linalg.inv(torch.eye(2) * 9 + m.a(x).view(-1, 2, 2, 2)[:, 0]),
    "diagonals": lambda m, x: torch.diag_embed(m.a(x)),
    "three dimensions": lambda m, x: torch.atleast_3d(m.a(x)),
    "a turn": lambda m, x: torch.rot90(m.a(x).view(-1, 2, 4), 1, (1, 2)),
    "mean over the batch": lambda m, x: m.a(x).square().mean(),
    "scripted on inputs": lambda m, x: m.a(scripted_twice(x)),
    "scripted shapes": lambda m, x: m.a(x) * scripted_positions(x),
}


@pytest.mark.parametrize("name", APART_AT_THE_END)
def test_what_keeps_units_apart_behind_the_last_parameter_works(name: str) -> None:
    assert run(APART_AT_THE_END[name], mean_of_squares) == 1


@pytest.mark.parametrize(
    "forward",
    [lambda m, x: m.a(x) * scripted_mean(x), lambda m, x: m.a(scripted_mean(x)),
     lambda m, x: m.a(scripted_write(x.clone()))],
    ids=["on activations", "on a parameter", "in place"],
)  # fmt: skip
def test_scripted_functions_of_inputs_do_not_mix_units(forward: Callable[..., Tensor]) -> None:
    with pytest.raises(REFUSED):
        for _ in range(20):
            run(forward, mean_of_squares)


def test_scripted_functions_are_as_they_were_after_a_pass() -> None:
    call = torch.jit.ScriptFunction.__call__
    run(APART_AT_THE_END["scripted on inputs"], mean_of_squares)
    assert torch.jit.ScriptFunction.__call__ is call


# ---------------------------------------------------------------------- inputs that are no tensors


def scaled(m: Any, x: Tensor, plain: Any) -> Tensor:
    return m.a(x) * torch.as_tensor(np.asarray(plain, dtype=np.float32)).mean()


@pytest.mark.parametrize("wrap", [list, tuple, np.asarray, lambda w: {"deep": [w]}, lambda w: [[v, v] for v in w]])
def test_lists_and_arrays_of_units_are_refused(wrap: Callable) -> None:
    def forward(m: Any, x: Tensor, plain: Any) -> Tensor:
        return scaled(m, x, plain["deep"][0] if isinstance(plain, dict) else plain)

    with pytest.raises(UnsupportedError, match="as many items"):
        for _ in range(20):
            run(forward, mean_of_squares, inputs=lambda x, w: (x, wrap(w.tolist())))


def test_texts_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="as many items"):
        for _ in range(20):
            run(lambda m, x, texts: m.a(x) * len(texts[0]), mean_of_squares, inputs=lambda x, w: (x, ["a"] * len(x)))


def test_settings_of_a_length_that_is_sometimes_that_of_the_batch_work() -> None:
    module = Apply(scaled, a=nn.Linear(D, D))
    module, optimizer, loader = sparsedp.PrivacyEngine(seed=2).make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), noise_multiplier=0.0, max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(torch.randn(40, D)), batch_size=2), max_physical_batch=2,
    )  # fmt: skip
    sizes = set()
    for (x,) in loader:
        if not sizes and len(x) == 2:
            continue
        sizes.add(len(x))
        optimizer.zero_grad()
        module(x, (3.0, 3.0)).square().mean().backward()
        optimizer.step()
    assert {1, 2} <= sizes


# ---------------------------------------------------------------------- anywhere in forward


def cov_kept_in_an_attribute(m: Any, x: Tensor) -> Tensor:
    m.aux = torch.cov(m.a(x).T).square().sum()
    return m.a(x)


@torch.library.custom_op("sparsedp_tests::relu", mutates_args=())
def others_relu(x: Tensor) -> Tensor:
    return x - x.mean(0)


others_relu.register_autograd(lambda ctx, grad: grad - grad.mean(0))

MIXING_ANYWHERE: dict[str, Callable[..., Tensor]] = {
    "a number in a list of lists": lambda m, x: m.a(x) * torch.tensor([[x.mean()]]),
    "an index in a list": lambda m, x: m.a(x)[:, [x.mean(0).argmax()]],
    "the end of a slice": lambda m, x: m.a(x)[:, : (x > 0).sum(1).max()],
    "as many classes as there are": lambda m, x: m.a(x)[:, :1] * F.one_hot((x[:, 0] > 0).long()).float().mean(1, True),
    "torch.Tensor of a tensor": lambda m, x: m.a(x) * torch.Tensor(means := x.mean(0)) * means.new_ones(()),
    "another class": lambda m, x: m.a(x) * x.mean(0).as_subclass(torch.Tensor),
    "dlpack": lambda m, x: m.a(x) * torch.from_dlpack(x.mean(0)),
    "nested tensors": lambda m, x: m.a(x) * torch.nested.nested_tensor([x.mean(0)]).to_padded_tensor(0.0)[0],
    "all pairs in mse_loss": lambda m, x: F.mse_loss(m.a(x)[:, :1], x[:, 0], reduction="none").mean(1),
    "all pairs in a mean": lambda m, x: F.smooth_l1_loss(m.a(x)[:, :1], x[:, 0]),
    "a softmax over units": lambda m, x: F.cross_entropy(m.a(x)[:, 0], x[:, 0].sigmoid()),
    "units as classes": lambda m, x: F.cross_entropy(m.a(x)[None], torch.zeros(1, D, dtype=torch.long)),
    "pairs by index": lambda m, x: m.a(x)[torch.arange(len(x))[:, None], (x[:, 0] > 0).long()].log_softmax(1),
    "torch.embedding": lambda m, x: m.a(x) * torch.embedding(m.a(x), torch.arange(len(x)).flip(0)),
    "torch.embedding_bag": lambda m, x: m.a(x) - torch.embedding_bag(
        m.a(x), torch.arange(len(x)).repeat(len(x)), torch.arange(len(x)) * len(x), False, 1)[0],
    "another's relu": lambda m, x: m.a(torch.ops.sparsedp_tests.relu(m.a(x))),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING_ANYWHERE)
def test_units_do_not_mix_anywhere(name: str) -> None:
    with pytest.raises(REFUSED):
        for _ in range(20):  # the loader may draw too few units to mix
            run(MIXING_ANYWHERE[name], mean_of_squares)


def test_a_loss_that_is_kept_in_an_attribute_is_held_to_the_same() -> None:
    module = Apply(cov_kept_in_an_attribute, a=nn.Linear(D, D))
    module, optimizer, loader = sparsedp.PrivacyEngine(seed=2).make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), noise_multiplier=0.0, max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(torch.randn(B, D)), batch_size=B), poisson_sampling=False,
    )  # fmt: skip
    for (x,) in loader:
        out = module(x)
        with pytest.raises(UnitsMixedError, match="may mix the 8 units"):
            (out.square().mean() + module.aux).backward()


@pytest.mark.parametrize("part", [lambda m, x: m.w[: len(x)], lambda m, x: m.table(torch.arange(len(x))).squeeze(1)])
def test_parameters_by_the_place_in_the_batch_are_refused(part: Callable[..., Tensor]) -> None:
    module = Apply(
        lambda m, x: m.a(x).squeeze(1) * part(m, x),
        a=nn.Linear(D, 1), w=nn.Parameter(torch.ones(40)), table=nn.Embedding(40, 1),
    )  # fmt: skip
    module, optimizer, loader = sparsedp.PrivacyEngine(seed=2).make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), noise_multiplier=0.0, max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(torch.randn(B, D)), batch_size=B), poisson_sampling=False,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="by their place in the batch"):
        module(next(iter(loader))[0])


def copy_into(view: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Any]:
    return lambda memory, means: view(memory).copy_(means)


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "itself": copy_into(lambda memory: memory),
    "data": copy_into(lambda memory: memory.data),
    "view": copy_into(lambda memory: memory.view(-1)),
    "detached": copy_into(lambda memory: memory.detach()),
    "slice": copy_into(lambda memory: memory[0:]),
    "part": copy_into(lambda memory: memory.split(D)[0]),
    "lists": lambda memory, means: torch._foreach_copy_([memory.data], [means]),
    "several outputs": lambda memory, means: torch.max(
        means[None], 0, out=(memory.data, torch.zeros(D, dtype=torch.long))
    ),
}


@pytest.mark.parametrize("is_read_before", [False, True], ids=["written first", "read first"])
@pytest.mark.parametrize("name", WRITES)
def test_memory_that_an_earlier_batch_wrote_through_an_alias(name: str, is_read_before: bool) -> None:
    memory, passes = torch.ones(D), []

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        out = h * memory.clone() if is_read_before or passes else h  # a copy, which autograd may keep
        passes.append(len(x))
        with torch.no_grad():
            WRITES[name](memory, h.detach().mean(0))
        return out

    with pytest.raises(UnitsMixedError, match="earlier batch"):
        run(forward, mean_of_squares, batch=4)


@pytest.mark.parametrize("write", [
    lambda m, x: m.scale.fill_(x.abs().max().item()), lambda m, x: m.scale.mul_(float(x.abs().max())),
    lambda m, x: m.a.weight.data.fill_(x.abs().max().tolist()), lambda m, x: m.scale.add_(int(x.abs().max())),
])  # fmt: skip
def test_python_numbers_of_the_batch_do_not_reach_the_state(write: Callable[[Any, Tensor], Any]) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            write(m, x)
        return m.a(x)

    module = Apply(forward, a=nn.Linear(D, D))
    module.register_buffer("scale", torch.ones(()))
    module, optimizer, loader = sparsedp.PrivacyEngine(seed=2).make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), noise_multiplier=0.0, max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(torch.randn(B, D)), batch_size=B), poisson_sampling=False,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="Python value of the batch"):
        module(next(iter(loader))[0])


BAGS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "a softmax over all weights": lambda ids, w: (ids.flatten(), w.flatten().softmax(0)),
    "weights less their mean": lambda ids, w: (ids.flatten(), (w - w.mean()).flatten()),
    "ids turned around": lambda ids, w: (ids.flatten().flip(0), w.flatten()),
    "ids by columns": lambda ids, w: (ids.T.flatten(), w.flatten()),
}


@pytest.mark.parametrize("name", [*BAGS, "as they are"])
def test_bags_with_offsets_hold_what_is_the_units_own(name: str) -> None:
    change = BAGS.get(name, lambda ids, w: (ids.flatten(), w.flatten()))

    def forward(m: Any, ids: Tensor, w: Tensor) -> Tensor:
        flat_ids, flat_weights = change(ids, w)
        return m.bag(flat_ids, torch.arange(len(ids)) * 3, flat_weights)

    module = Apply(forward, bag=nn.EmbeddingBag(9, D, mode="sum"))
    module, optimizer, loader = sparsedp.PrivacyEngine(seed=2).make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), noise_multiplier=0.0, max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(torch.randint(0, 9, (B, 3)), torch.rand(B, 3)), batch_size=B),
        poisson_sampling=False,
    )  # fmt: skip
    ids, w = next(iter(loader))
    if name in BAGS:
        with pytest.raises(REFUSED):
            module(ids, w)
    else:
        module(ids, w).square().mean().backward()
        optimizer.step()


# ------------------------------------------------------------------ sequences as long as the batch is large

SEQUENCES = torch.randn(2 * B, B, D, generator=torch.Generator().manual_seed(0))


def batch_first(examples: list[Any]) -> tuple[Tensor]:
    return (torch.stack([x for (x,) in examples]),)


def sequence_first(examples: list[Any]) -> tuple[Tensor]:
    return (torch.stack([x for (x,) in examples], 1),)


def arrays(examples: list[Any]) -> tuple[np.ndarray]:
    return (torch.stack([x for (x,) in examples]).numpy(),)


def steps_over_sequences(
    collate: Callable | None,
    change: Callable[[Any], Tensor],
    loss: Callable[[Any], Tensor] = mean_of_squares,
    **how: Any,
) -> tuple[nn.Module, Tensor]:
    """The model before its steps, and the sum of the clipped gradients of all of them."""
    torch.manual_seed(0)
    first, module = nn.Linear(D, 3), nn.Linear(D, 3)
    first.load_state_dict(module.state_dict())
    options = {} if collate is None else {"collate_fn": collate}
    module, optimizer, loader = sparsedp.PrivacyEngine(seed=2).make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(SEQUENCES), batch_size=B, **options), loss_reduction="sum",
        poisson_sampling=False, **how,
    )  # fmt: skip
    for (x,) in loader:
        optimizer.zero_grad()
        loss(module(change(x))).backward()
        optimizer.step()
    pairs = zip(first.parameters(), module.parameters())
    return first, torch.cat([(before - after).detach().flatten() for before, after in pairs])


POSITIONS_FIRST: dict[str, tuple[Callable | None, Callable[[Any], Tensor]]] = {
    "transposed": (None, lambda x: x.transpose(0, 1)),
    "permuted": (None, lambda x: x.permute(2, 1, 0)),
    "transposed and copied": (None, lambda x: x.transpose(0, 1).contiguous()),
    "transposed and of another type": (None, lambda x: x.transpose(0, 1).double().float()),
    "one unit's positions": (None, lambda x: x[0]),
    "the first positions of all": (None, lambda x: x.flatten(0, 1)[:B]),
    "repeated": (None, lambda x: x[:, 0].expand(B, B, D)),
    "transposed, of a collate function": (batch_first, lambda x: x.transpose(0, 1)),
    "by the collate function": (sequence_first, lambda x: x),
    "by the collate function, copied": (sequence_first, lambda x: x.clone()),
    "by the collate function, a part": (sequence_first, lambda x: x[:, :, :D]),
    "arrays": (arrays, lambda x: torch.from_numpy(x).transpose(0, 1)),
    "arrays, copied": (arrays, lambda x: torch.tensor(x.swapaxes(0, 1))),
}


@pytest.mark.parametrize("name", POSITIONS_FIRST)
def test_positions_do_not_pass_for_units(name: str) -> None:
    with pytest.raises(UnsupportedError, match="does not have the units on axis 0"):
        steps_over_sequences(*POSITIONS_FIRST[name])


UNITS_FIRST: dict[str, tuple[Callable | None, Callable[[Any], Tensor]]] = {
    "as it is": (None, lambda x: x),
    "copied": (None, lambda x: x.clone()),
    "of another type": (None, lambda x: x.double().float()),
    "a position": (None, lambda x: x[:, 1]),
    "some positions": (None, lambda x: x[:, 2:5]),
    "every second position": (None, lambda x: x[:, 1::2]),
    "the last positions": (None, lambda x: x[:, 1 - B :]),
    "positions and columns exchanged": (None, lambda x: x.mT),
    "one column, repeated": (None, lambda x: x[..., :1].expand(-1, -1, D)),
    "one more axis": (None, lambda x: x[:, None].expand(B, 2, B, D)),
    "flat and back": (None, lambda x: x.flatten(1).unflatten(1, (B, D))),
    "positions by a step": (None, lambda x: x.flatten(0, 1)[3::B]),
    "computed": (None, lambda x: x * 2),
    "of a collate function": (batch_first, lambda x: x[:, ::2]),
    "sequence first, transposed": (sequence_first, lambda x: x.transpose(0, 1)),
    "sequence first, transposed and copied": (sequence_first, lambda x: x.transpose(0, 1).contiguous()),
    "sequence first, one position": (sequence_first, lambda x: x[2]),
    "sequence first, some positions": (sequence_first, lambda x: x[2:6].transpose(0, 1)),
    "arrays": (arrays, lambda x: torch.from_numpy(x)),
}


@pytest.mark.parametrize("name", UNITS_FIRST)
def test_views_that_keep_the_units_first_are_exact(name: str) -> None:
    collate, change = UNITS_FIRST[name]
    loss: Callable[[Any], Tensor] = lambda out: out.square().sum()  # noqa: E731
    model, total = steps_over_sequences(collate, change, loss)
    wanted = torch.zeros_like(total)
    for start in (0, B):
        gradients = []
        batch = (collate or batch_first)([(x,) for x in SEQUENCES[start : start + B]])[0]
        for unit in change(batch):
            own = torch.autograd.grad(loss(model(unit[None])), list(model.parameters()))
            flat = torch.cat([g.flatten() for g in own])
            gradients.append(flat * min(1.0, 1.0 / float(flat.norm())))
        step = torch.stack(gradients).sum(0)
        wanted += step
        with torch.no_grad():
            for parameter, part in zip(model.parameters(), step.split([p.numel() for p in model.parameters()])):
                parameter -= part.view_as(parameter)
    torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-5)
