"""What cannot be accounted for is refused, by name, and nothing is written."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import sparsedp
from sparsedp import SparseDPError, UnitsMixedError, UnsupportedError
from sparsedp.capture import Capture
from support import Apply, Clicks, assert_exact, batch_of, clicks, loader_of, make_private, train, unit_loss

B, D = 6, 8


def run(module: nn.Module, *inputs: torch.Tensor, loss: Callable = unit_loss) -> None:
    capture = Capture(module, dict(module.named_parameters()), batch_of(inputs[0].shape[0]))
    capture.attach()
    try:
        loss(module(*inputs)).backward()
    finally:
        capture.detach()


def private(module: nn.Module) -> None:
    data = loader_of(torch.randn(64, D), batch_size=8)
    make_private(module, data)


MODULES = {
    "BatchNorm1d": (nn.BatchNorm1d(D), ["BatchNorm1d", "GroupNorm"]),
    "BatchNorm without weights": (nn.Sequential(nn.BatchNorm1d(D, affine=False), nn.Linear(D, 1)), ["'0'", "GroupNorm"]),
    "LSTM": (nn.LSTM(D, 4), ["sparsedp.nn.LSTM"]),
    "GRU": (nn.GRU(D, 4), ["sparsedp.nn.GRU"]),
    "RNN": (nn.RNN(D, 4), ["sparsedp.nn"]),
    "max_norm": (nn.Embedding(9, D, max_norm=1.0), ["max_norm"]),
    "scale_grad_by_freq": (nn.EmbeddingBag(9, D, scale_grad_by_freq=True), ["scale_grad_by_freq"]),
    "half precision": (nn.Linear(D, 1).bfloat16(), ["bfloat16", "float32"]),
    "lazy": (nn.LazyLinear(3), ["initialised"]),
    "DataParallel": (nn.DataParallel(nn.Linear(D, 1)), ["DataParallel"]),
}  # fmt: skip


@pytest.mark.parametrize("case", MODULES)
def test_modules(case: str) -> None:
    module, words = MODULES[case]
    with pytest.raises(UnsupportedError) as error:
        private(module)
    for word in words:
        assert word in str(error.value)


@pytest.mark.filterwarnings("ignore:.*script.*:DeprecationWarning")
def test_scripted_module() -> None:
    with pytest.raises(UnsupportedError, match="scripted"):
        private(nn.Sequential(torch.jit.script(nn.Linear(D, 1))))


@pytest.mark.filterwarnings("ignore:module forward hook:UserWarning")
def test_frozen_batch_norm_is_accepted_until_it_trains_again() -> None:
    module = nn.Sequential(nn.BatchNorm1d(D).eval(), nn.Linear(D, 1))
    engine, module, optimizer, loader = make_private(module, loader_of(torch.randn(64, D), batch_size=8))
    (x,) = next(iter(loader))
    module(x).sum().backward()
    module.train()
    with pytest.raises(UnsupportedError, match="batch_norm"):
        module(x)


BIG = 70_000
OPERATIONS = {
    "unknown operation on a large parameter": (
        Apply(lambda m, x: torch.cdist(x, m.w), w=nn.Parameter(torch.randn(BIG // D, D))), torch.randn(B, D), ["cdist", "'w'"],
    ),
    "functional max_norm": (
        Apply(lambda m, i: F.embedding(i, m.w, max_norm=1.0), w=nn.Parameter(torch.randn(9, D))),
        torch.randint(9, (B,)), ["max_norm", "'w'"],
    ),
    "functional scale_grad_by_freq": (
        Apply(lambda m, i: F.embedding_bag(i, m.w, scale_grad_by_freq=True), w=nn.Parameter(torch.randn(9, D))),
        torch.randint(9, (B, 3)), ["scale_grad_by_freq"],
    ),
    "bag mode max": (nn.EmbeddingBag(9, D, mode="max"), torch.randint(9, (B, 3)), ["max", "mean"]),
    "units squeezed away": (
        Apply(lambda m, x: m.l(x[0]), l=nn.Linear(D, 1)), torch.randn(B, D, D), ["'l.weight'", "not known"],
    ),
    "map over units": (
        Apply(lambda m, x: F.linear(x.T, m.w), w=nn.Parameter(torch.randn(3, B))), torch.randn(B, D), ["sums over the units"],
    ),
    "token embedding of nothing": (
        Apply(lambda m, x: m.t(x.sum(0).long()[None] % 9), t=nn.Embedding(9, D)), torch.randn(B, D), ["reduced", "sum"],
    ),
    "fused lstm": (
        Apply(lambda m, x: torch.lstm(x[None], (x[None], x[None]), [m.a, m.b], False, 1, 0.0, True, False, False)[0],
              a=nn.Parameter(torch.randn(4 * D, D)), b=nn.Parameter(torch.randn(4 * D, D))),
        torch.randn(B, D), ["sparsedp.nn.LSTM", "replace_recurrent=True"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OPERATIONS)
def test_operations(case: str) -> None:
    module, inputs, words = OPERATIONS[case]
    with pytest.raises(UnsupportedError) as error:
        run(module, inputs)
    for word in words:
        assert word in str(error.value)


def test_the_error_names_the_module() -> None:
    inner = Apply(lambda m, x: torch.cdist(x, m.w), w=nn.Parameter(torch.randn(BIG // D, D)))
    with pytest.raises(UnsupportedError, match=r"cdist.*'block\.w'.*module 'block'"):
        run(Apply(lambda m, x: m.block(x), block=inner), torch.randn(B, D))


MIXING = {
    "batch mean": (lambda m, x: m.l(x - x.mean(0)), "mean"),
    "batch norm by hand": (lambda m, x: m.l((x - x.mean(0, keepdim=True)) / x.std(dim=0)), "mean"),
    "softmax over the batch": (lambda m, x: m.l(x) * x.softmax(0), "softmax"),
    "in-batch negatives": (lambda m, x: m.l(x) @ m.l(x).T, "in-batch negatives"),
    "pairwise differences": (
        lambda m, x: (m.l(x)[:, None] - m.l(x)[None]).abs().sum(-1),
        "in-batch negatives",
    ),
    "in-batch einsum": (lambda m, x: torch.einsum("id,jd->ij", m.l(x), m.l(x)), "in-batch negatives"),
    "seq-first batch mean": (lambda m, x: m.l(x.T.T - x.T.mean(1)), "mean"),
}


@pytest.mark.parametrize("case", MIXING)
def test_mixing_that_can_be_seen(case: str) -> None:
    forward, word = MIXING[case]
    with pytest.raises(UnitsMixedError, match=word):
        run(Apply(forward, l=nn.Linear(D, D)), torch.randn(B, D))


def test_autocast() -> None:
    with pytest.raises(UnsupportedError, match="autocast"), torch.autocast("cpu", dtype=torch.bfloat16):
        run(nn.Linear(D, 1), torch.randn(B, D))


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool) -> None:
    module = Apply(
        lambda m, x: torch.utils.checkpoint.checkpoint(m.l, m.f(x), use_reentrant=reentrant),
        l=nn.Linear(D, D), f=nn.Linear(D, D),
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="checkpointing"):
        run(module, torch.randn(B, D))


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_create_graph() -> None:
    def loss(out: torch.Tensor) -> torch.Tensor:
        value = unit_loss(out)
        value.backward(create_graph=True)
        return value

    with pytest.raises(UnsupportedError, match="create_graph"):
        run(nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 1)), torch.randn(B, D), loss=loss)


def test_changed_buffers() -> None:
    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        m.seen += x.detach().sum()
        return m.l(x)

    module = Apply(forward, l=nn.Linear(D, 1))
    module.register_buffer("seen", torch.zeros(()))
    with pytest.raises(UnsupportedError, match="'seen'"):
        run(module, torch.randn(B, D))


def test_input_without_tensors() -> None:
    module = Apply(lambda m: m.l(torch.ones(2, D)), l=nn.Linear(D, 1))
    capture = Capture(module, dict(module.named_parameters()))
    capture.attach()
    with pytest.raises(UnsupportedError, match="without any tensor"):
        module()


# ---------------------------------------------------------------------- uses that capture does not see


def _unseen_in_loss(module: Clicks, out: torch.Tensor) -> torch.Tensor:
    return out.mean() + module.table.weight[0].sum()


def _penalty(module: Clicks, out: torch.Tensor) -> torch.Tensor:
    return out.mean() + 0.01 * module.hidden.weight.square().sum()


@pytest.mark.parametrize("loss", [_unseen_in_loss, _penalty])
def test_ordinary_gradient_raises_and_writes_nothing(loss: Callable) -> None:
    engine, module, optimizer, loader = make_private(Clicks(), loader_of(*clicks(64), batch_size=8))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    ids, x, _ = next(iter(loader))
    with pytest.raises(SparseDPError, match="ordinary gradient"):
        loss(module, module(ids, x)).backward()
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert engine.ledger.steps == 0


def test_gradient_set_by_hand_is_refused() -> None:
    engine, module, optimizer, loader = make_private(Clicks(), loader_of(*clicks(64), batch_size=8))
    ids, x, _ = next(iter(loader))
    module(ids, x).mean().backward()
    module.out.bias.grad = torch.ones(1)
    with pytest.raises(SparseDPError, match=r"out\.bias"):
        optimizer.step()


def _matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    _scripted = torch.jit.script(_matmul)


class _Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):  # type: ignore[no-untyped-def, override]
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def, override]
        x, w = ctx.saved_tensors
        return grad @ w.T, x.T @ grad


def test_code_that_capture_cannot_look_into() -> None:
    module = Apply(lambda m, x: _scripted(x, m.w), w=nn.Parameter(torch.randn(D, 3)))
    with pytest.raises(SparseDPError, match="ordinary gradient"):
        run(module, torch.randn(B, D))


def test_custom_functions_whose_backward_is_their_derivative() -> None:
    assert_exact(Apply(lambda m, x: _Custom.apply(x, m.w), w=nn.Parameter(torch.randn(D, 3))), torch.randn(B, D))


def test_rows_that_a_mask_picks_do_not_make_a_loss() -> None:
    module = Apply(lambda m, x: m.l(x[x[:, 0] > -9]), l=nn.Linear(D, 1))
    with pytest.raises(UnitsMixedError, match="may mix the"):
        run(module, torch.randn(B, D))


# ---------------------------------------------------------------------- the loop


def test_batches_must_not_be_doubled() -> None:
    """Two rows for one unit would double its contribution."""
    engine, module, optimizer, loader = make_private(Clicks(), loader_of(*clicks(64), batch_size=8))
    ids, x, _ = next(iter(loader))
    with pytest.raises(SparseDPError, match="units"):
        module(torch.cat([ids, ids]), torch.cat([x, x])).mean().backward()


def test_part_of_a_batch_is_refused() -> None:
    engine, module, optimizer, loader = make_private(Clicks(), loader_of(*clicks(64), batch_size=32))
    ids, x, _ = next(iter(loader))
    with pytest.raises(SparseDPError, match="max_physical_batch"):
        module(ids[:3], x[:3]).mean().backward()


def test_second_step_on_one_batch_is_refused() -> None:
    engine, module, optimizer, loader = make_private(Clicks(), loader_of(*clicks(64), batch_size=8))
    ids, x, _ = next(iter(loader))
    module(ids, x).mean().backward()
    optimizer.step()
    module(ids, x).mean().backward()
    with pytest.raises(SparseDPError, match="already had its step"):
        optimizer.step()
    assert engine.ledger.steps == 1


def test_step_without_backward_and_without_batch() -> None:
    original = loader_of(*clicks(64), batch_size=8)
    engine, module, optimizer, loader = make_private(Clicks(), original)
    with pytest.raises(SparseDPError, match="loader that make_private returned"):
        train(module, optimizer, original)
    next(iter(loader))
    optimizer.zero_grad()
    with pytest.raises(SparseDPError, match="without a backward"):
        optimizer.step()


def test_not_finite() -> None:
    engine, module, optimizer, loader = make_private(Clicks(), loader_of(*clicks(64), batch_size=8))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    ids, x, _ = next(iter(loader))
    x[0] = float("inf")
    module(ids, x).mean().backward()
    with pytest.raises(sparsedp.NonFiniteGradientError, match="NaN or infinite"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert engine.ledger.steps == 0


# ---------------------------------------------------------------------- make_private


def test_parameters_and_optimizer_must_match() -> None:
    data = loader_of(*clicks(64), batch_size=8)
    module = Clicks()
    with pytest.raises(UnsupportedError, match=r"hidden\.weight"):
        make_private(module, data, optimizer=torch.optim.SGD(module.table.parameters(), lr=0.1))
    with pytest.raises(UnsupportedError, match="do not belong"):
        make_private(module, data, optimizer=torch.optim.SGD(Clicks().parameters(), lr=0.1))


def test_parameters_cannot_join_later() -> None:
    engine, module, optimizer, loader = make_private(Clicks(), loader_of(*clicks(64), batch_size=8))
    with pytest.raises(UnsupportedError, match="cannot join"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"clipping": "adaptive"}, "clipping"),
        ({"loss_reduction": "max"}, "loss_reduction"),
        ({"unit": "household"}, "unit"),
        ({"mechanism": "dpsgd"}, "mechanism"),
    ],
)
def test_settings(options: dict, word: str) -> None:
    with pytest.raises((ValueError, TypeError, UnsupportedError), match=word):
        make_private(Clicks(), loader_of(*clicks(64), batch_size=8), **options)


def test_optimizers() -> None:
    for kind, word in ((torch.optim.LBFGS, "LBFGS"), (torch.optim.SparseAdam, "SparseAdam")):
        module = Clicks()
        with pytest.raises(UnsupportedError, match=word):
            make_private(module, loader_of(*clicks(64), batch_size=8), optimizer=kind(list(module.parameters())))


def test_one_engine_one_module() -> None:
    engine, module, optimizer, loader = make_private(Clicks(), loader_of(*clicks(64), batch_size=8))
    other = Clicks()
    with pytest.raises(SparseDPError, match="already trains"):
        engine.make_private(
            module=other, optimizer=torch.optim.SGD(other.parameters(), lr=0.1),
            data_loader=loader_of(*clicks(64), batch_size=8), noise_multiplier=1.0, max_grad_norm=1.0,
        )  # fmt: skip
