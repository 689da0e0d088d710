"""What a private forward pass draws comes from the engine's key: the attack, every operation, its law, and the check."""

from __future__ import annotations

import itertools
import math
import random
import sys
import types
import unittest
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import sparsedp
from sparsedp import SparseDPError, UnitsMixedError, UnsupportedError
from sparsedp.capture import Capture, Draws, RepeatedDraws, Replaced
from sparsedp.capture.global_generators import GlobalGenerators
from sparsedp.capture.names import operation_name
from sparsedp.capture.randomness import may_draw
from sparsedp.capture.units import UnitAxis
from sparsedp.kernels import cipher, normals
from sparsedp.noise import RandomKey
from support import Apply, batch_of, clicks, dense, loader_of, make_private, train, unit_loss


def draws(seed: int = 0) -> Draws:
    made = Draws(RandomKey.from_seed(seed))
    made.begin(0)
    return made


def in_forward(call: Callable[[Tensor], Any], x: Tensor, key: Draws, passes: int = 1) -> list[Any]:
    """What `call` gives in training passes of a private module, which leave torch's generator as it was."""
    module = Apply(lambda m, x: (found.append(call(x)), m.layer(x))[1], layer=nn.Linear(x.shape[-1], 1)).to(x.dtype)
    found: list[Any] = []
    capture = Capture(module, dict(module.named_parameters()), batch_of(len(x)), key)
    capture.attach()
    before = torch.get_rng_state()
    try:
        for _ in range(passes):
            module(x)
        assert torch.equal(torch.get_rng_state(), before), "torch's generator was used"
    finally:
        capture.detach()
    return found


def other_generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def lstm(x: Tensor) -> Tensor:
    layer = frozen_lstm.to(x.dtype)
    return layer(x[:, None].expand(-1, 3, -1))[0]


def images(x: Tensor) -> Tensor:
    return x.view(len(x), -1, 1, 1) * torch.arange(1, 82.0).view(9, 9)


frozen_lstm = nn.LSTM(8, 4, 2, dropout=0.5, batch_first=True).requires_grad_(False)
frozen_attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True).requires_grad_(False)

# Every function of torch, torch.Tensor and torch.nn.functional that draws, in its forms: first the name, then the form.
CALLS: dict[str, Callable[[Tensor], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout inplace": lambda x: F.dropout(x + 0, 0.5, inplace=True),
    "dropout of a view": lambda x: F.dropout(x.t(), 0.5),
    "dropout in half": lambda x: F.dropout(x.half(), 0.5),
    "dropout of torch": lambda x: torch.dropout(x, 0.5, True),
    "dropout_": lambda x: torch.dropout_(x.clone(), 0.5, True),
    "dropout of aten": lambda x: torch.ops.aten.dropout(x, 0.5, True),
    "dropout of aten's overload": lambda x: torch.ops.aten.dropout.default(x, 0.5, True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "dropout1d": lambda x: F.dropout1d(x[:, :, None].expand(-1, -1, 3), 0.5),
    "dropout2d": lambda x: F.dropout2d(images(x), 0.5),
    "dropout3d": lambda x: F.dropout3d(images(x)[:, :, None], 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "alpha_dropout inplace": lambda x: F.alpha_dropout(x.clone(), 0.5, True, True),
    "alpha_dropout of torch": lambda x: torch.alpha_dropout(x, 0.5, True),
    "alpha_dropout_": lambda x: torch.alpha_dropout_(x.clone(), 0.5, True),
    "feature_dropout": lambda x: torch.feature_dropout(images(x), 0.5, True),
    "feature_dropout_": lambda x: torch.feature_dropout_(images(x), 0.5, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(images(x), 0.5, True),
    "feature_alpha_dropout_": lambda x: torch.feature_alpha_dropout_(images(x), 0.5, True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu of torch": lambda x: torch.rrelu(x, 0.1, 0.9, True),
    "rrelu_": lambda x: F.rrelu_(x.clone(), 0.1, 0.9, True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "gumbel_softmax hard": lambda x: F.gumbel_softmax(x.repeat(1, 8), hard=True),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(images(x), 2, 3),
    "fractional_max_pool3d": lambda x: F.fractional_max_pool3d(images(x)[:, :, None].repeat(1, 1, 9, 1, 1), 2, 3),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], None, 0.5),
    "multi_head_attention_forward": lambda x: frozen_attention.to(x.dtype)(x[None], x[None], x[None])[0],
    "lstm": lstm,
    "rand": lambda x: torch.rand(len(x), 1),
    "rand by generator": lambda x: torch.rand(len(x), 1, generator=other_generator()),
    "rand out": lambda x: torch.rand(len(x), 1, out=torch.empty(0)),
    "rand complex": lambda x: torch.rand(len(x), dtype=torch.complex64),
    "rand_like": lambda x: torch.rand_like(x),
    "randn": lambda x: torch.randn(len(x), 1, dtype=torch.bfloat16),
    "randn complex": lambda x: torch.randn(len(x), 1, dtype=torch.complex128),
    "randn_like": lambda x: torch.randn_like(x),
    "randint": lambda x: torch.randint(10**6, (len(x),)),
    "randint from": lambda x: torch.randint(-5, 10**6, (len(x),), dtype=torch.int32),
    "randint_like": lambda x: torch.randint_like(x, 10**6),
    "randperm": lambda x: torch.randperm(50),
    "normal": lambda x: torch.normal(x, 1.0),
    "normal by tensors": lambda x: torch.normal(0.0, x.abs()),
    "normal by numbers": lambda x: torch.normal(0.0, 2.0, (len(x),)),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid().repeat(1, 8)),
    "bernoulli by number": lambda x: x.repeat(1, 8).bernoulli(0.4),
    "multinomial": lambda x: torch.multinomial(x.exp().repeat(1, 8), 5),
    "multinomial again": lambda x: x.exp().repeat(1, 8).multinomial(5, replacement=True),
    "poisson": lambda x: torch.poisson(100 * x.exp()),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 1000), x.sigmoid()),
    "_standard_gamma": lambda x: torch._standard_gamma(x.exp()),
    "_sample_dirichlet": lambda x: torch._sample_dirichlet(x.exp()),
    "bernoulli_": lambda x: torch.empty(len(x), 8).bernoulli_(0.3),
    "bernoulli_ by tensor": lambda x: torch.empty(len(x), 64, dtype=torch.bool).bernoulli_(torch.rand(64)),
    "uniform_": lambda x: torch.empty_like(x).uniform_(2, 3),
    "normal_": lambda x: torch.empty_like(x).normal_(generator=other_generator()),
    "random_": lambda x: torch.empty_like(x).random_(),
    "random_ to": lambda x: torch.empty(len(x), dtype=torch.int64).random_(10**6),
    "random_ from": lambda x: torch.empty(len(x), dtype=torch.int64).random_(-(10**6), None),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "geometric_": lambda x: torch.empty(len(x), 50).geometric_(0.1),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "svd_lowrank": lambda x: torch.svd_lowrank(torch.arange(128.0).sin().view(16, 8), 2, niter=0)[0],
    "kaiming_uniform_": lambda x: nn.init.kaiming_uniform_(torch.empty(8, 8)),
    "trunc_normal_": lambda x: nn.init.trunc_normal_(torch.empty(8, 8)),
    "orthogonal_": lambda x: nn.init.orthogonal_(torch.empty(8, 8)),
    "distributions": lambda x: torch.distributions.Beta(x.exp(), x.exp()).rsample(),
}  # fmt: skip


@pytest.mark.parametrize("form", CALLS)
def test_every_operation_draws_from_the_key(form: str) -> None:
    """Not from torch's generator, nor from one that the module passes; anew in each pass; in torch's shape and type."""
    call, x = CALLS[form], torch.randn(16, 8, generator=other_generator())
    found = []
    for seed, key in ((0, 0), (1, 0), (0, 1)):
        torch.manual_seed(seed)
        found.append(in_forward(call, x, Draws(RandomKey.from_seed(key)), passes=2))
    one, other_torch_seed, other_key = found
    torch.manual_seed(0)
    plain = call(x)
    for mine, theirs in zip(one, other_torch_seed):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    for different in (one[1], other_key[0], plain):
        assert (one[0].dtype, one[0].shape, one[0].device) == (different.dtype, different.shape, different.device)
        assert not torch.equal(one[0], different)


def test_no_function_of_torch_that_draws_is_forgotten() -> None:
    """Whatever torch tags as random under a public name: a new one fails here."""
    covered = {form.split()[0].removesuffix("_") for form in CALLS}
    for space, name in itertools.product((torch, torch.Tensor, F), dir(torch.ops.aten)):
        packet = getattr(torch.ops.aten, name)
        tags = [getattr(packet, o).tags for o in getattr(packet, "overloads", list)()]
        if hasattr(space, name) and any(torch.Tag.nondeterministic_seeded in own for own in tags):
            assert may_draw(name)
            fused = name in ("gru", "rnn_tanh", "rnn_relu") or (name.startswith("_") and name != "_standard_gamma")
            assert fused or name == "miopen_rnn" or name.removesuffix("_") in covered, f"torch's {name}"


class _Watch(TorchFunctionMode):
    """Notes the names of the functions that move torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: set[str] = set()

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        before = torch.get_rng_state()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            if not torch.equal(before, torch.get_rng_state()):
                self.moved.add(operation_name(func))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_all_operations_that_torch_itself_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own list of operations with inputs: each that draws, also inside, is known by name and is replaced."""
    stub = types.ModuleType("expecttest")
    stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "expecttest", stub)  # which torch's list needs, and does not come with torch
    from torch.testing._internal.common_methods_invocations import op_db

    watch, key, tried = _Watch(), draws(), 0
    for operation in op_db:
        if torch.float32 not in operation.dtypes or operation.name.startswith("jiterator"):
            continue
        for sample in itertools.islice(operation.sample_inputs("cpu", torch.float32), 4):
            with watch:
                operation.op(sample.input, *sample.args, **sample.kwargs)
            before = torch.get_rng_state()
            with Replaced(key):
                operation.op(sample.input, *sample.args, **sample.kwargs)
            assert torch.equal(before, torch.get_rng_state()), operation.name
            tried += 1
    assert tried > 1000 and len(watch.moved) > 15
    assert all(may_draw(name) for name in watch.moved), watch.moved


# ---------------------------------------------------------------------- the attack


class Masked(nn.Module):
    """A model in which dropout decides most of a unit's gradient."""

    def __init__(self, features: int = 16, p: float = 0.5) -> None:
        super().__init__()
        self.drop, self.out = nn.Dropout(p), nn.Linear(features, 1, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(x)).squeeze(-1)


def clipped_sum(x: Tensor, key: Draws) -> Tensor:
    """The sum of the units' gradients, each clipped to norm 1, after `torch.manual_seed(0)`."""
    torch.manual_seed(0)
    module = Masked(x.shape[1])
    torch.manual_seed(0)
    capture = Capture(module, dict(module.named_parameters()), batch_of(len(x)), key)
    capture.attach()
    F.binary_cross_entropy_with_logits(module(x), torch.ones(len(x)), reduction="sum").backward()
    found = capture.collect()
    capture.detach()
    assert found is not None
    uses = found.uses["out.weight"]
    factors = uses.squared_norms(len(x)).rsqrt().clamp_max(1)
    return dense(uses.weighted_sum(factors, module.out.weight.shape), module.out.weight.shape).flatten()


def guessed_sum(x: Tensor) -> Tensor:
    """The same by somebody who knows the data and torch's seed, and nothing of the key."""
    torch.manual_seed(0)
    gradients = -0.5 * F.dropout(x, 0.5)
    return (gradients / gradients.norm(dim=1, keepdim=True).clamp_min(1)).sum(0)


def test_a_known_torch_seed_does_not_tell_who_took_part() -> None:
    """One unit more in front shifts everybody's mask. Whoever knows them tells both sums apart at once."""
    torch.manual_seed(7)
    without, unit = torch.randn(256, 16), torch.randn(1, 16)
    more = torch.cat([unit, without])
    apart = float((guessed_sum(more) - guessed_sum(without)).norm())
    assert apart > 5  # of what one unit may move: this is the attack's signal
    closer = []
    for truth in (without, more):
        seen = [clipped_sum(truth, Draws(RandomKey.from_os())) for _ in range(40)]
        gaps = [[float((one - guessed_sum(data)).norm()) for data in (without, more)] for one in seen]
        assert min(map(min, gaps)) > 2  # neither guess is right
        closer.append(sum(with_unit < alone for alone, with_unit in gaps))
        # The sum varies as it does with fresh masks of torch's.
        torch.manual_seed(1)
        fresh = torch.stack([-0.5 * F.dropout(truth, 0.5) for _ in range(40)])
        fresh = (fresh / fresh.norm(dim=2, keepdim=True).clamp_min(1)).sum(1)
        ratio = torch.stack(seen).var(0).sum() / fresh.var(0).sum()
        assert 0.6 < float(ratio) < 1.6
    assert abs(closer[0] - closer[1]) < 25  # of 40 in each world: with masks that are known, 0 and 40


def test_masks_do_not_follow_from_torchs_seed_in_a_private_run() -> None:
    """Two unseeded runs on equal units after the same torch.manual_seed: other masks, so other weights, without noise."""
    weights = []
    for _ in range(2):
        torch.manual_seed(0)
        x = torch.ones(64, 16)
        engine, module, optimizer, loader = make_private(
            Masked(), loader_of(x, torch.ones(64), batch_size=64), seed=None, noise_multiplier=0.0,
            poisson_sampling=False,
        )  # fmt: skip
        for features, target in loader:
            F.binary_cross_entropy_with_logits(module(features), target).backward()
            optimizer.step()
        weights.append(module.out.weight.detach().clone())
    assert not torch.allclose(*weights)


# ---------------------------------------------------------------------- laws

N = 20_000


def drawn(call: Callable[[], Any], seed: int = 5) -> Any:
    with Replaced(draws(seed)):
        return call()


LAWS: dict[str, tuple[Callable[[], Tensor], Any]] = {
    "rand": (lambda: torch.rand(N), stats.uniform()),
    "rand in double": (lambda: torch.rand(N, dtype=torch.float64), stats.uniform()),
    "rand complex": (lambda: torch.view_as_real(torch.rand(N, dtype=torch.complex64)).flatten(), stats.uniform()),
    "uniform_": (lambda: torch.empty(N).uniform_(-1, 4), stats.uniform(-1, 5)),
    "randn": (lambda: torch.randn(N), stats.norm()),
    "randn in double": (lambda: torch.randn(N, dtype=torch.float64), stats.norm()),
    "randn complex": (lambda: torch.randn(N, dtype=torch.complex64).imag, stats.norm(0, math.sqrt(0.5))),
    "normal_": (lambda: torch.empty(N).normal_(3, 2), stats.norm(3, 2)),
    "normal": (lambda: torch.normal(torch.full((N,), 3.0), torch.tensor(2.0)), stats.norm(3, 2)),
    "log_normal_": (lambda: torch.empty(N).log_normal_(0.5, 0.3), stats.lognorm(0.3, scale=math.exp(0.5))),
    "exponential_": (lambda: torch.empty(N).exponential_(2.5), stats.expon(scale=0.4)),
    "cauchy_": (lambda: torch.empty(N).cauchy_(1, 2), stats.cauchy(1, 2)),
    "gamma": (lambda: torch._standard_gamma(torch.full((N,), 0.7, dtype=torch.float64)), stats.gamma(0.7)),
    "dirichlet": (lambda: torch._sample_dirichlet(torch.tensor([[0.5, 2.0, 1.0]]).expand(N, 3))[:, 0], stats.beta(0.5, 3)),
    "rrelu": (lambda: -F.rrelu(-torch.ones(N), 0.2, 0.6, training=True), stats.uniform(0.2, 0.4)),
    "gumbel_softmax": (lambda: F.gumbel_softmax(torch.zeros(N, 2)).logit()[:, 0], stats.logistic()),
    "bernoulli": (lambda: torch.bernoulli(torch.full((N,), 0.3)), stats.bernoulli(0.3)),
    "bernoulli by number": (lambda: torch.empty(N).bernoulli_(0.3), stats.bernoulli(0.3)),
    "geometric_": (lambda: torch.empty(N).geometric_(0.3), stats.geom(0.3)),
    "poisson": (lambda: torch.poisson(torch.full((N,), 3.3)), stats.poisson(3.3)),
    "binomial": (lambda: torch.binomial(torch.full((N,), 9.0), torch.tensor(0.3)), stats.binom(9, 0.3)),
    "randint": (lambda: torch.randint(-3, 9, (N,)), stats.randint(-3, 9)),
    "random_": (lambda: torch.empty(N, dtype=torch.int64).random_(12), stats.randint(0, 12)),
    "random_ in bytes": (lambda: torch.empty(N, dtype=torch.uint8).random_(), stats.randint(0, 256)),
    "randperm": (lambda: torch.stack([torch.randperm(7) for _ in range(3000)])[:, 2], stats.randint(0, 7)),
    "multinomial": (
        lambda: torch.multinomial(torch.tensor([0.0, 1, 2, 0, 5, 0]), N, True),
        stats.rv_discrete(values=([1, 2, 4], [1 / 8, 2 / 8, 5 / 8])),
    ),
    "multinomial once": (
        lambda: torch.multinomial(torch.tensor([[0.0, 1, 2, 0, 5]]).expand(N, 5), 1).flatten(),
        stats.rv_discrete(values=([1, 2, 4], [1 / 8, 2 / 8, 5 / 8])),
    ),
    # Without replacement, the second: 1 (after 2 or 4), 2, 4.
    "multinomial's second": (
        lambda: torch.multinomial(torch.tensor([[0.0, 1, 2, 0, 5]]).expand(N, 5), 2)[:, 1],
        stats.rv_discrete(values=([1, 2, 4], [2/8*1/6 + 5/8*1/3, 1/8*2/7 + 5/8*2/3, 1/8*5/7 + 2/8*5/6])),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAWS)
def test_laws(name: str) -> None:
    call, law = LAWS[name]
    values = drawn(call).double().numpy()
    if isinstance(getattr(law, "dist", law), stats.rv_discrete):
        places, counts = np.unique(values, return_counts=True)
        expected = law.pmf(places) * len(values)
        assert expected.sum() > 0.999 * len(values) - 10  # nothing that cannot be, and nothing is missing
        often = expected >= 5
        rest = [counts[~often].sum()], [len(values) - expected[often].sum()]
        counts, expected = (np.append(part[often], more) for part, more in zip((counts, expected), rest))
        keep = expected > 0.5
        total = expected[keep] * counts[keep].sum() / expected[keep].sum()
        assert stats.chisquare(counts[keep], total).pvalue > 1e-4
    else:
        assert stats.kstest(values, law.cdf).pvalue > 1e-4
    # Neighbours are independent.
    assert abs(stats.spearmanr(values[:-1], values[1:]).statistic) < 5 / math.sqrt(len(values))


def test_edges_of_laws() -> None:
    assert drawn(lambda: torch.poisson(torch.zeros(3))).tolist() == [0, 0, 0]
    counts = drawn(lambda: torch.binomial(torch.tensor([0.0, 7, 7]), torch.tensor([0.5, 0, 1])))
    assert counts.tolist() == [0, 0, 7]
    assert drawn(lambda: torch.empty(3).geometric_(1)).tolist() == [1, 1, 1]
    assert drawn(lambda: torch.empty(3).bernoulli_(0)).tolist() == [0, 0, 0]
    assert drawn(lambda: torch.empty(3).bernoulli_(1)).tolist() == [1, 1, 1]
    assert sorted(drawn(lambda: torch.randperm(9)).tolist()) == list(range(9))
    assert sorted(drawn(lambda: torch.multinomial(torch.tensor([1.0, 0, 2, 3]), 3)).tolist()) == [0, 2, 3]
    assert drawn(lambda: torch.rand(0, 3)).shape == (0, 3) and drawn(lambda: torch.rand(())).ndim == 0
    for call in (
        lambda: torch.empty(3).bernoulli_(1.5), lambda: torch.bernoulli(torch.tensor([2.0])),
        lambda: torch.empty(3).exponential_(-1), lambda: torch.empty(3).geometric_(0), lambda: torch.randint(3, 3, (2,)),
        lambda: torch.empty(3).normal_(0, -1), lambda: torch.multinomial(torch.zeros(3), 1),
        lambda: torch.multinomial(torch.tensor([1.0, 0.0]), 2), lambda: torch.poisson(torch.tensor([-1.0])),
        lambda: F.dropout(torch.ones(3), 1.5),
    ):  # fmt: skip
        with pytest.raises((RuntimeError, ValueError)):
            drawn(call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_dropout_keeps_the_mean_and_its_rate(dtype: torch.dtype) -> None:
    """Directly, and through the operations that it is made of: the rate is p, and what is left is scaled by 1/(1 - p)."""
    for p, form in itertools.product((0.1, 0.5, 0.9), ("direct", "made of others")):
        ones = torch.ones(200, 300, dtype=dtype)
        key = draws(1)
        out = (
            key.replacing("dropout", F.dropout, None)(ones, p)
            if form == "direct"
            else drawn(lambda: F.dropout(ones, p))
        )
        assert out.dtype == dtype and set(out.unique().tolist()) == {0.0, out.max().item()}
        assert out.max().item() == pytest.approx(1 / (1 - p), rel=2e-3 if dtype == torch.float16 else 1e-6)
        assert stats.binomtest(int((out == 0).sum()), out.numel(), p).pvalue > 1e-4
    assert torch.equal(draws().replacing("dropout", F.dropout, None)(ones, 0.5, False), ones)
    assert draws().replacing("dropout", F.dropout, None)(ones, 1.0).abs().sum() == 0


def test_dropout_of_features_and_alpha_dropout() -> None:
    whole = drawn(lambda: F.dropout2d(torch.ones(200, 30, 4, 4), 0.3))
    assert torch.equal(whole.amin((2, 3)), whole.amax((2, 3)))  # a channel at a time
    assert stats.binomtest(int((whole[:, :, 0, 0] == 0).sum()), 6000, 0.3).pvalue > 1e-4
    normal = torch.randn(400_000, generator=other_generator())
    alpha = drawn(lambda: F.alpha_dropout(normal, 0.3, True))
    assert abs(float(alpha.mean())) < 0.01 and abs(float(alpha.std()) - 1) < 0.01  # what its two constants are for
    by_channel = drawn(lambda: F.feature_alpha_dropout(torch.ones(50, 20, 6), 0.5, True))
    assert torch.equal(by_channel.amin(2), by_channel.amax(2)) and len(by_channel.unique()) == 2


def test_large_masks_are_drawn_in_parts_that_fit_together() -> None:
    """On all cores as on one: the numbers of a stream, one after the other."""
    count = (1 << 18) * 2 + 77
    key = RandomKey.from_seed(0).stream(0, 0, 0)
    mask = draws().mask((count,), 0.3, 2.0, torch.float32).numpy()
    words = np.empty(2 * count, np.uint32)
    cipher.fill_words(words, key)
    assert np.array_equal(mask, np.where(words[:count] < round(0.3 * 2**32), np.float32(2), np.float32(0)))
    assert np.array_equal(draws().uniform((count,), torch.float32).numpy(), (words[:count] >> 8) * np.float32(2**-24))
    pairs = words.reshape(-1, 2).astype(np.uint64)
    wanted = (((pairs[:, 0] >> np.uint64(6)) << np.uint64(27)) | (pairs[:, 1] >> np.uint64(5))) * 2.0**-53
    assert np.array_equal(draws().uniform((count,), torch.float64).numpy(), wanted)
    for law in (torch.float32, torch.float64):
        drawn = draws().standard_normal((count,), law).numpy()
        alone = np.empty(count, drawn.dtype)
        normals.fill_normal(alone, 1.0, key)
        assert np.array_equal(drawn, alone)


def test_draws_of_a_pass_do_not_overlap() -> None:
    key = draws()
    found = torch.cat([key.words((n,)) for n in (1, 1024, 700, 5, 5)])
    assert len(found.unique()) == len(found)
    both = torch.stack([key.standard_normal((64,), torch.float32), key.standard_normal((64,), torch.float32)])
    assert len(both.unique()) == 128


def test_masks_that_cannot_be_drawn_are_refused() -> None:
    key, out = RandomKey.from_seed(0).stream(), np.empty(3, np.float32)
    for wrong in (-0.1, 1.1, math.nan):
        with pytest.raises(SparseDPError, match="probability"):
            normals.fill_mask(out, wrong, 1.0, key)
    with pytest.raises(SparseDPError, match="counted"):
        normals.fill_mask(out, 0.5, 1.0, key, -1)
    with pytest.raises(SparseDPError, match="counted"):
        normals.fill_uniform(out, key, -1)
    with pytest.raises(SparseDPError, match="float32 or float64"):
        normals.fill_uniform(np.empty(3, np.int64), key)


# ---------------------------------------------------------------------- what is not seen is refused


@pytest.mark.parametrize(
    ("call", "whose"),
    [
        (lambda x: x * float(np.random.rand()), "numpy"),
        (lambda x: x * torch.from_numpy(np.random.permutation(8)), "numpy"),
        (lambda x: x * random.random(), "Python"),
        (lambda x: x[:, random.sample(range(8), 8)], "Python"),
        (lambda x: (torch.manual_seed(0), x)[1], "torch"),
        (lambda x: (np.random.seed(0), x)[1], "numpy"),
    ],
)  # fmt: skip
def test_other_global_generators(call: Callable[[Tensor], Tensor], whose: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{whose}'s global generator"):
        in_forward(call, torch.randn(6, 8), draws())


def test_a_drawing_operation_that_is_not_known_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new one of torch's would be: the pass is refused after it moved torch's generator."""
    monkeypatch.setattr("sparsedp.capture.capture.may_draw", lambda name: False)
    with pytest.raises(UnsupportedError, match="torch's global generator"):
        in_forward(lambda x: F.dropout(x, 0.5), torch.randn(6, 8), draws())


def test_a_fused_kernel_that_draws_is_refused_by_name() -> None:
    q = torch.randn(2, 2, 4, 8)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with Replaced(draws()), pytest.raises(UnsupportedError, match=r"_flash_attention_for_cpu.*secret key"):
        fused(q, q, q, 0.5)
    with Replaced(draws()):
        fused(q, q, q, 0.0)  # draws nothing
    with Replaced(draws()), pytest.raises(UnsupportedError, match="native_dropout"):
        torch.ops.aten.native_dropout.out(q, 0.5, True, out0=torch.empty(0), out1=torch.empty(0, dtype=torch.bool))


def test_every_use_of_a_global_generator_is_seen() -> None:
    generators = GlobalGenerators()
    places = generators.places()
    assert generators.places() == places
    for name, use in {
        "torch": lambda: torch.rand(1), "numpy": lambda: np.random.rand(), "Python": lambda: random.random(),
    }.items():  # fmt: skip
        for _ in range(700):  # more often than a Mersenne Twister has words
            use()
            now = generators.places()
            assert {key for key in now if now[key] != places[key]} == {name}
            places = now
    old = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        places = generators.places()
        np.random.rand()
        assert generators.places()["numpy"] != places["numpy"]
    finally:
        np.random.set_bit_generator(old)


def test_evaluation_draws_as_the_user_has_it() -> None:
    module = Apply(lambda m, x: m.l(x * torch.rand(3) + np.random.rand()), l=nn.Linear(3, 1))
    make_private(module, loader_of(torch.randn(20, 3), torch.zeros(20), batch_size=5))
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        with torch.no_grad():
            found.append(module.eval()(torch.ones(4, 3)))
    assert torch.equal(*found)
    module.train()
    with torch.no_grad(), pytest.raises(UnsupportedError, match="numpy"):  # a teacher: its output may reach the loss
        module(torch.ones(4, 3))


def test_a_teacher_in_training_mode_draws_from_the_key() -> None:
    module = Apply(lambda m, x: m.l(F.dropout(x)), l=nn.Linear(3, 1))
    make_private(module, loader_of(torch.randn(20, 3), torch.zeros(20), batch_size=5))
    before = torch.get_rng_state()
    with torch.no_grad():
        one, two = module(torch.ones(4, 3)), module(torch.ones(4, 3))
    assert torch.equal(torch.get_rng_state(), before) and not torch.equal(one, two)


# ---------------------------------------------------------------------- gradients and the check


def path(x: Tensor) -> Tensor:
    """Stochastic depth: a unit keeps or loses the whole branch."""
    return x + x.tanh() * x.new_empty(x.shape[0], *[1] * (x.ndim - 1)).bernoulli_(0.5).div_(0.5)


def floor_path(x: Tensor) -> Tensor:
    return x * torch.floor(0.6 + torch.rand((x.shape[0],) + (1,) * (x.ndim - 1), dtype=x.dtype)) / 0.6


def negatives(m: Any, x: Tensor) -> Tensor:
    ids = torch.randint(20, (x.shape[0], 3))
    return (m.table(ids) * m.l(x)[:, None]).sum((1, 2))[:, None]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1)),
    "in place": lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3, inplace=True), nn.Linear(8, 1)),
    "alpha": lambda: nn.Sequential(nn.Linear(8, 8), nn.SELU(), nn.AlphaDropout(0.3), nn.Linear(8, 1)),
    "features": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 6, 3), nn.Dropout1d(0.4), nn.Flatten(), nn.Linear(12, 1)
    ),
    "rrelu": lambda: nn.Sequential(nn.Linear(8, 8), nn.RReLU(), nn.Linear(8, 1)),
    "path": lambda: Apply(lambda m, x: m.o(path(m.l(x))), l=nn.Linear(8, 8), o=nn.Linear(8, 1)),
    "floor path": lambda: Apply(lambda m, x: m.o(floor_path(m.l(x))), l=nn.Linear(8, 8), o=nn.Linear(8, 1)),
    "layer drop": lambda: Apply(
        lambda m, x: m.o(m.l(x) if torch.rand([]) < 0.5 else x), l=nn.Linear(8, 8), o=nn.Linear(8, 1)
    ),
    "gumbel": lambda: Apply(
        lambda m, x: m.o(F.gumbel_softmax(m.l(x), 0.7, hard=True)), l=nn.Linear(8, 8), o=nn.Linear(8, 1)
    ),
    "noise": lambda: Apply(lambda m, x: m.o((m.l(x) + torch.randn_like(x)).tanh()), l=nn.Linear(8, 8), o=nn.Linear(8, 1)),
    "exponential": lambda: Apply(
        lambda m, x: m.o(m.l(x) * torch.empty_like(x).exponential_()), l=nn.Linear(8, 8), o=nn.Linear(8, 1)
    ),
    "shared": lambda: Apply(lambda m, x: m.o(m.l(x) * torch.rand(8)), l=nn.Linear(8, 8), o=nn.Linear(8, 1)),
    "negatives": lambda: Apply(negatives, table=nn.Embedding(20, 8), l=nn.Linear(8, 8)),
    "variational": lambda: Apply(
        lambda m, x: m.o(torch.distributions.Normal(m.l(x), m.s(x).exp()).rsample()),
        l=nn.Linear(8, 4), s=nn.Linear(8, 4), o=nn.Linear(4, 1),
    ),
    "sampled": lambda: Apply(
        lambda m, x: m.o(m.e(torch.multinomial(m.l(x).detach().softmax(-1), 2))).sum(1),
        l=nn.Linear(8, 8), e=nn.Embedding(8, 4), o=nn.Linear(4, 1),
    ),
    "weights dropped": lambda: Apply(
        lambda m, x: m.o(F.linear(x, F.dropout(m.l.weight, 0.3))), l=nn.Linear(8, 8), o=nn.Linear(8, 1)
    ),
    "heads": lambda: Apply(
        lambda m, x: m.o(F.dropout(m.l(x).view(-1, 4, 2).flatten(0, 1), 0.5).view(-1, 8)),
        l=nn.Linear(8, 8), o=nn.Linear(8, 1),
    ),
    "sequence first": lambda: Apply(
        lambda m, x: m.o(F.dropout(m.l(x.view(-1, 2, 4).transpose(0, 1)), 0.5).transpose(0, 1).flatten(1)),
        l=nn.Linear(4, 4), o=nn.Linear(8, 1),
    ),
    "encoder": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True), nn.Flatten(), nn.Linear(8, 1)
    ),
    "attention": lambda: Apply(
        lambda m, x: m.o(m.a(*[x.view(-1, 2, 4)] * 3)[0].flatten(1)),
        a=nn.MultiheadAttention(4, 2, dropout=0.4, batch_first=True), o=nn.Linear(8, 1),
    ),
    "recurrent": lambda: Apply(
        lambda m, x: m.o(m.r(x.view(-1, 2, 4))[0].flatten(1)),
        r=sparsedp.nn.GRU(4, 3, num_layers=2, dropout=0.4, batch_first=True), o=nn.Linear(6, 1),
    ),
}  # fmt: skip


def logistic(out: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(out.squeeze(-1), y)


@pytest.mark.parametrize("name", MODELS)
def test_check_works_with_masks_on(name: str) -> None:
    torch.manual_seed(3)
    module, batch = MODELS[name]().train(), (torch.randn(6, 8), torch.rand(6).round())
    before = torch.get_rng_state()
    report = sparsedp.check(module, logistic, batch, units=6)
    assert report.largest_difference < 1e-9
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", MODELS)
def test_training_leaves_the_users_generators_and_repeats(name: str) -> None:
    """Whatever torch was seeded with in between: the engine's seed decides alone."""
    results = []
    for torch_seed in (0, 1):
        torch.manual_seed(3)
        module = MODELS[name]().train()
        x, y = torch.randn(24, 8), torch.rand(24).round()
        engine, module, optimizer, loader = make_private(module, loader_of(x, y, batch_size=6), max_physical_batch=4)
        torch.manual_seed(torch_seed)
        before = torch.get_rng_state()
        for features, target in loader:
            optimizer.zero_grad()
            logistic(module(features), target).backward()
            optimizer.step()
        assert torch.equal(torch.get_rng_state(), before)
        results.append({key: value.clone() for key, value in module.state_dict().items()})
    for key, value in results[0].items():
        assert torch.equal(value, results[1][key])


def test_gradients_by_hand_given_the_masks() -> None:
    """The masks are read off a layer that shows them; units of users add up."""
    torch.manual_seed(0)
    x, owners = torch.randn(6, 8, dtype=torch.float64), torch.tensor([0, 1, 1, 2, 0, 1])
    shown: list[Tensor] = []

    def forward(m: Any, x: Tensor) -> Tensor:
        mask = F.dropout(torch.ones_like(x), 0.5)
        shown.append(mask)
        return m.l(x * mask)

    module = Apply(forward, l=nn.Linear(8, 2, bias=False)).double()
    info = sparsedp.sampling.BatchInfo(3, 3, True, True, 0, owners=owners)
    capture = Capture(module, dict(module.named_parameters()), lambda: info, draws(2))
    capture.attach()
    unit_loss(module(x)).backward()
    captured = capture.collect()
    capture.detach()
    assert captured is not None
    weight = module.l.weight.detach().requires_grad_()
    squares = torch.zeros(3, dtype=torch.float64)
    for user in range(3):
        mine = owners == user
        loss = unit_loss((x * shown[0])[mine] @ weight.T)
        squares[user] = torch.autograd.grad(loss, weight)[0].square().sum()
    torch.testing.assert_close(captured.squared_norms(captured.uses["l.weight"]), squares)
    assert 10 < int((shown[0] == 0).sum()) < 40


def test_check_sees_randomness_across_units() -> None:
    batch = (torch.randn(6, 8), torch.rand(6).round())
    shuffled = Apply(lambda m, x: m.o(x + x[torch.randperm(len(x))]), o=nn.Linear(8, 1))
    with pytest.raises((UnitsMixedError, UnsupportedError)):
        sparsedp.check(shuffled, logistic, batch)
    by_size = Apply(lambda m, x: m.o(x * torch.randint(len(x), (len(x), 1))), o=nn.Linear(8, 1))
    with pytest.raises(UnitsMixedError):
        sparsedp.check(by_size, logistic, batch)
    by_rate = Apply(lambda m, x: m.o(F.dropout(x, 1 / (1 + len(x)))), o=nn.Linear(8, 1))
    with pytest.raises(SparseDPError, match="other laws"):
        sparsedp.check(by_rate, logistic, batch)
    one_by_one = Apply(lambda m, x: m.o(torch.stack([row * torch.rand(8) for row in x])), o=nn.Linear(8, 1))
    with pytest.raises((UnsupportedError, SparseDPError)):
        sparsedp.check(one_by_one, logistic, batch)
    by_value = Apply(lambda m, x: m.o(x) + 0 * torch.rand(int((x > 0).sum())).sum(), o=nn.Linear(8, 1))
    with pytest.raises(SparseDPError, match="which unit"):
        sparsedp.check(by_value, logistic, batch)


def test_check_repeats_what_the_loss_draws() -> None:
    def noisy(out: Tensor, y: Tensor) -> Tensor:
        return logistic(out + torch.randn_like(out), y)

    sparsedp.check(nn.Linear(8, 1), noisy, (torch.randn(6, 8), torch.rand(6).round()))


def test_one_unit_gets_its_part_wherever_the_units_are() -> None:
    """On an axis of their own, before or behind positions on the same one, or split off."""
    for shape, alone, axis in (
        ((3, 4, 2), (1, 4, 2), None), ((4, 3, 2), (4, 1, 2), None), ((12, 2), (4, 2), None),
        ((12, 2), (4, 2), UnitAxis(0, 1)), ((12, 2), (4, 2), UnitAxis(0, 2)), ((3, 4, 2), (4, 2), None),
    ):  # fmt: skip
        repeated = RepeatedDraws()
        repeated.together(3)
        repeated._expect(axis)
        whole = repeated.standard_normal(shape, torch.float64)
        inner = axis.inner if axis else math.prod(shape) // math.prod(shape[1:]) // 3
        for unit in range(3):
            repeated.alone(unit)
            mine = repeated.standard_normal(alone, torch.float64)
            if shape[0] == 4:
                wanted = whole[:, unit : unit + 1]
            else:
                wanted = whole.unflatten(0, (-1, 3, inner))[:, unit]
            assert torch.equal(mine.flatten(), wanted.flatten())
            repeated.finish()


# ---------------------------------------------------------------------- steps, passes, resuming


def test_draws_are_fresh_in_each_step_and_pass_of_any_kind() -> None:
    step = 0
    key = Draws(RandomKey.from_seed(0), lambda: step)
    seen = []
    for step, kind, _ in itertools.product(range(3), range(3), range(2)):  # noqa: B007
        key.begin(kind)
        seen.append(tuple(key.words((2,)).tolist()))
    assert len(set(seen)) == len(seen)
    # A run that goes on from step 2 draws what this one drew there, whatever it evaluated or counted before.
    step = 2
    resumed = Draws(RandomKey.from_seed(0), lambda: step)
    resumed.begin(2)
    resumed.begin(0)
    assert tuple(resumed.words((2,)).tolist()) == seen[12]


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(50, 6), nn.Linear(9, 1)

    def forward(self, ids: Tensor, features: Tensor) -> Tensor:
        joined = torch.cat([path(self.table(ids)), features + 0.1 * torch.randn_like(features)], -1)
        return self.out(F.dropout(joined, 0.3)).squeeze(-1)


@pytest.mark.parametrize("mechanism", [sparsedp.DPSGD(), sparsedp.LazyDP(), sparsedp.FEST(k=20, epsilon=1.0)])
def test_a_resumed_run_draws_what_the_uninterrupted_one_does(mechanism: Any, tmp_path: Any) -> None:
    def start() -> tuple[Any, ...]:
        torch.manual_seed(0)
        return make_private(Dropped(), loader_of(*clicks(64), batch_size=8), mechanism=mechanism, max_physical_batch=5)

    engine, module, optimizer, loader = start()
    train(module, optimizer, loader, epochs=1)
    engine.save_checkpoint(tmp_path / "half")
    with torch.no_grad():  # what a run evaluates with dropout on does not change what it trains with
        module(*clicks(9)[:2])
    train(module, optimizer, loader, epochs=1)
    wanted = module.state_dict()
    engine, module, optimizer, loader = start()
    engine.load_checkpoint(tmp_path / "half")
    torch.manual_seed(99)
    train(module, optimizer, loader, epochs=1)
    for name, value in module.state_dict().items():
        assert torch.equal(value, wanted[name]), name


def test_an_unseeded_run_that_is_resumed_draws_other_masks(tmp_path: Any) -> None:
    shown: list[Tensor] = []

    def forward(m: Any, x: Tensor) -> Tensor:
        shown.append(F.dropout(torch.ones(64)))
        return m.l(x)

    module = Apply(forward, l=nn.Linear(3, 1))
    engine, module, _, loader = make_private(module, loader_of(torch.randn(20, 3), batch_size=5), seed=None)
    engine.save_checkpoint(tmp_path / "start")
    for _ in range(2):
        module(torch.ones(4, 3))
        engine.load_checkpoint(tmp_path / "start")
    assert not torch.equal(*shown)


def test_passes_that_count_rows_draw_from_the_key() -> None:
    module = Dropped()
    capture = Capture(module, dict(module.named_parameters()), draws=draws())
    capture.attach()
    before = torch.get_rng_state()
    capture.capture_forward_only(lambda: module(*clicks(6)[:2]))
    assert torch.equal(torch.get_rng_state(), before)
    capture.detach()
