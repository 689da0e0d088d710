"""Units of unequal lengths whose rows lie end to end: jagged tensors, what a mask picks, torch's nested tensors."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import sparsedp
from sparsedp import UnitsMixedError, UnsupportedError
from sparsedp.check import take_units
from support import Apply, make_private

ROWS, DIM, FEATURES, LONGEST, SIZE, CLIP = 9, 3, 2, 4, 24, 0.3
pytestmark = pytest.mark.filterwarnings("ignore")  # torch calls nested tensors a prototype
REFUSED = (UnsupportedError, UnitsMixedError)


@dataclass
class Keyed:
    """The fields of TorchRec's KeyedJaggedTensor."""

    _keys: list[str]
    _values: Tensor
    _weights: Tensor | None = None
    _lengths: Tensor | None = None
    _offsets: Tensor | None = None


Example = tuple[list[Tensor], list[Tensor], Tensor]


def examples(lengths: Callable[[int, int], int] = lambda i, f: (i + 2 * f) % (LONGEST + 1)) -> list[Example]:
    """For each feature ids, some of them repeated and some features without any, and weights; and a number."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i in range(SIZE):
        ids = [torch.randint(ROWS, (lengths(i, f),), generator=generator) for f in range(FEATURES)]
        weights = [torch.rand(len(of_feature), generator=generator, dtype=torch.float64) for of_feature in ids]
        made.append((ids, weights, torch.rand((), generator=generator, dtype=torch.float64)))
    return made


def keyed(batch: list[Example], by_offsets: bool = False) -> tuple[Keyed, Tensor]:
    pairs = [(ids[f], weights[f]) for f in range(FEATURES) for ids, weights, _ in batch]
    lengths = torch.tensor([len(ids) for ids, _ in pairs])
    told = {"_offsets": F.pad(lengths.cumsum(0), (1, 0))} if by_offsets else {"_lengths": lengths}
    values, weights = torch.cat([ids for ids, _ in pairs]), torch.cat([weights for _, weights in pairs])
    keys = [f"f{f}" for f in range(FEATURES)]
    return Keyed(keys, values, weights, **told), torch.stack([number for _, _, number in batch])


def features_of(texts: Keyed) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Ids, weights and offsets of each feature, as to_dict() makes them."""
    lengths = texts._lengths if texts._lengths is not None else texts._offsets.diff()  # type: ignore[union-attr]
    by_feature = lengths.view(FEATURES, -1)
    sizes = by_feature.sum(1).tolist()
    offsets = torch.cat([by_feature.new_zeros(FEATURES, 1), by_feature.cumsum(1)], 1)
    assert texts._weights is not None
    return list(zip(texts._values.split(sizes), texts._weights.split(sizes), offsets))


def padded(rows: Tensor, offsets: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(rows, offsets).to_padded_tensor(0.0)


FORMS: dict[str, Callable[..., Tensor]] = {
    "bags": lambda e, ids, w, offsets: F.embedding_bag(ids, e.weight, offsets[:-1], mode="sum"),
    "weighted bags": lambda e, ids, w, offsets: F.embedding_bag(
        ids, e.weight, offsets, mode="sum", per_sample_weights=w, include_last_offset=True
    ),
    "rows": lambda e, ids, w, offsets: padded(e(ids), offsets).sum(1),
    "rows that get weights": lambda e, ids, w, offsets: padded(e(ids).float().double() * w[:, None], offsets).sum(1),
    "rows by index": lambda e, ids, w, offsets: padded(e.weight[(ids * 3) % ROWS].sin(), offsets).sum(1),
    "a part of rows": lambda e, ids, w, offsets: padded(e(ids)[:, 1:], offsets).sum(1).repeat(1, 2)[:, :DIM],
    "weights alone": lambda e, ids, w, offsets: padded(w[:, None], offsets).sum(1) * e(torch.zeros((), dtype=torch.long)),
}  # fmt: skip


def reader(form: Callable[..., Tensor]) -> nn.Module:
    def forward(m: nn.Module, texts: Keyed) -> Tensor:
        return m.l(torch.cat([form(m.e, *feature) for feature in features_of(texts)], 1)).squeeze(-1)

    return Apply(forward, e=nn.Embedding(ROWS, DIM), l=nn.Linear(FEATURES * DIM, 1)).double()


def loss_of(out: Tensor, number: Tensor) -> Tensor:
    return (out.sin() * (1 + number)).sum()


DRAWN = ([0, 3, 4, 8, 11, 15, 20], [1, 7], [5], [])


def assert_steps_are_exact(
    model: nn.Module, data: list[Any], collate: Callable[[list[Any]], Any], mechanism: sparsedp.Mechanism
) -> None:
    """Clipped sums of batches of 7, 2, 1 and no examples against each example alone, in float64."""
    reference, drawn = copy.deepcopy(model), iter(DRAWN)
    with mock.patch("sparsedp.sampling.draws.poisson_indices", lambda *_: np.array(next(drawn), dtype=np.int64)):
        _, module, optimizer, loader = make_private(
            model, DataLoader(data, batch_size=6, shuffle=True, collate_fn=collate), noise_multiplier=0.0,  # type: ignore[arg-type]
            max_grad_norm=CLIP, loss_reduction="sum", optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            mechanism=mechanism,
        )  # fmt: skip
        for indices, (texts, number) in zip(DRAWN, loader):
            reference.load_state_dict(module.state_dict())
            optimizer.zero_grad()
            loss_of(module(texts), number).backward()
            optimizer.step()
            wanted = {name: p.detach().clone() for name, p in reference.named_parameters()}
            for index in indices:
                reference.zero_grad()
                texts, number = collate([data[index]])
                loss_of(reference(texts), number).backward()
                grads = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
                norm = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()
                for name, grad in grads.items():
                    wanted[name] -= grad * (CLIP / norm.clamp_min(CLIP))
            for name, parameter in module.named_parameters():
                torch.testing.assert_close(parameter, wanted[name], rtol=1e-6, atol=1e-7)


MECHANISMS = [sparsedp.DPSGD(), sparsedp.LazyDP(), sparsedp.AdaFEST(threshold=1e-12, noise_ratio=1.0, map_clip=1.0)]


@pytest.mark.parametrize("by_offsets", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_jagged_tensors_are_exact(form: str, by_offsets: bool) -> None:
    assert_steps_are_exact(
        reader(FORMS[form]), examples(), lambda batch: keyed(batch, by_offsets), mechanism=sparsedp.DPSGD()
    )


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: mechanism.name)
@pytest.mark.parametrize("lengths", [lambda i, f: 1, lambda i, f: i % 5 // 4, lambda i, f: i % 2, lambda i, f: LONGEST])
def test_sequences_are_exact_for_every_mechanism(
    mechanism: sparsedp.Mechanism, lengths: Callable[[int, int], int]
) -> None:
    assert_steps_are_exact(reader(FORMS["rows"]), examples(lengths), keyed, mechanism)


@pytest.mark.parametrize("form", FORMS)
def test_check_accepts_what_the_step_accepts(form: str) -> None:
    loader = DataLoader(examples(), batch_size=6, collate_fn=keyed)  # type: ignore[arg-type]
    report = sparsedp.check(reader(FORMS[form]), loss_of, data_loader=loader, loss_reduction="sum")
    assert report.largest_difference < 1e-9


# ------------------------------------------------------------------ what mixes units


def turned(tensor: Tensor) -> Tensor:
    return tensor[torch.arange(len(tensor) - 1, -1, -1)]


MIXED: dict[str, Callable[..., Tensor]] = {
    "others' rows": lambda e, ids, w, offsets: padded(turned(e(ids)), offsets).sum(1),
    "rows of others' ids": lambda e, ids, w, offsets: padded(e(turned(ids)), offsets).sum(1),
    "bags of others' ids": lambda e, ids, w, offsets: F.embedding_bag(turned(ids), e.weight, offsets[:-1], mode="sum"),
    "others' weights": lambda e, ids, w, offsets: F.embedding_bag(
        ids, e.weight, offsets[:-1], mode="sum", per_sample_weights=turned(w)
    ),
    "weights over those of all": lambda e, ids, w, offsets: F.embedding_bag(
        ids, e.weight, offsets[:-1], mode="sum", per_sample_weights=w / w.sum()
    ),
    "rows one further": lambda e, ids, w, offsets: padded(e(ids)[1:], (offsets - 1).clamp_min(0)).sum(1),
    "bags one further": lambda e, ids, w, offsets: F.embedding_bag(
        ids[1:], e.weight, (offsets[:-1] - 1).clamp_min(0), mode="sum"
    ),
    "offsets of others": lambda e, ids, w, offsets: padded(e(ids), F.pad(turned(offsets.diff()).cumsum(0), (1, 0))).sum(1),
    "bags by others' offsets": lambda e, ids, w, offsets: F.embedding_bag(
        ids, e.weight, F.pad(turned(offsets.diff()).cumsum(0), (1, 0)), mode="sum", include_last_offset=True
    ),
    "rows of the first unit left out": lambda e, ids, w, offsets: padded(
        e(ids)[int(offsets[1]) :], F.pad((offsets - offsets[1])[1:], (1, 0))
    ).sum(1),
    "the first rows of all": lambda e, ids, w, offsets: padded(e(ids)[:5], offsets.clamp_max(5)).sum(1),
    "rows less their mean": lambda e, ids, w, offsets: padded(e(ids) - e(ids).mean(0), offsets).sum(1),
    "a softmax over all rows": lambda e, ids, w, offsets: padded(e(ids).softmax(0), offsets).sum(1),
    "a sum of all rows": lambda e, ids, w, offsets: e(ids).sum(0).expand(len(offsets) - 1, DIM),
    "rows that were sorted": lambda e, ids, w, offsets: padded(e(ids.sort().values), offsets).sum(1),
    "running sums": lambda e, ids, w, offsets: padded(e(ids).cumsum(0), offsets).sum(1),
    "every second row": lambda e, ids, w, offsets: padded(e(ids)[::2], (offsets + 1) // 2).sum(1),
    "rows of two features": lambda e, ids, w, offsets: padded(e(ids) * e(turned(ids)), offsets).sum(1),
    "rows side by side": lambda e, ids, w, offsets: padded(
        torch.cat([e(ids)[1:], e(ids)[:1]]), offsets
    ).sum(1),
    "a table of activations": lambda e, ids, w, offsets: padded(F.embedding(ids % 2, e(ids)[:2]), offsets).sum(1),
    "rows changed in place": lambda e, ids, w, offsets: padded(e(ids).index_copy(0, torch.tensor([0]), e(ids)[-1:]), offsets).sum(1),
}  # fmt: skip


def take_a_step(form: Callable[..., Tensor], collate: Callable[[list[Example]], Any] = keyed) -> None:
    model = reader(form)
    data = examples(lambda i, f: 1 + (i + 2 * f) % LONGEST)
    _, module, optimizer, loader = make_private(
        model, DataLoader(data, batch_size=8, shuffle=True, collate_fn=collate), loss_reduction="sum",  # type: ignore[arg-type]
        max_grad_norm=CLIP,
    )  # fmt: skip
    for texts, number in loader:
        if loader.current.units > 2:
            optimizer.zero_grad()
            loss_of(module(texts), number).backward()
            optimizer.step()


@pytest.mark.parametrize("form", MIXED)
def test_rows_of_units_do_not_meet(form: str) -> None:
    with pytest.raises(REFUSED):
        take_a_step(MIXED[form])
    with pytest.raises(REFUSED):
        loader = DataLoader(examples(lambda i, f: 1 + (i + 2 * f) % LONGEST), batch_size=8, collate_fn=keyed)  # type: ignore[arg-type]
        sparsedp.check(reader(MIXED[form]), loss_of, data_loader=loader, loss_reduction="sum")


def changed(change: Callable[[Keyed], None]) -> Callable[[list[Example]], tuple[Keyed, Tensor]]:
    def collate(batch: list[Example]) -> tuple[Keyed, Tensor]:
        texts, number = keyed(batch)
        change(texts)
        return texts, number

    return collate


def _roll_lengths(texts: Keyed) -> None:
    assert texts._lengths is not None
    texts._lengths = texts._lengths.view(FEATURES, -1).roll(1, 1).reshape(-1)


def _roll_values(texts: Keyed) -> None:
    texts._values = texts._values.roll(1)


def _sort_values(texts: Keyed) -> None:
    texts._values = texts._values.sort().values


def _weigh_by_all(texts: Keyed) -> None:
    assert texts._weights is not None
    texts._weights = texts._weights / texts._weights.sum()


@pytest.mark.parametrize("change", [_roll_lengths, _roll_values, _sort_values, _weigh_by_all])
def test_collate_functions_that_mix_the_rows_of_examples_are_refused(change: Callable[[Keyed], None]) -> None:
    with pytest.raises(UnsupportedError, match="other rows of a jagged tensor"):
        take_a_step(FORMS["rows"], changed(change))


def _one_more(texts: Keyed) -> None:
    texts._values = torch.cat([texts._values, texts._values[:1]])


def _one_longer(texts: Keyed) -> None:
    assert texts._lengths is not None
    texts._lengths = texts._lengths + F.one_hot(torch.tensor(0), len(texts._lengths))


def _negative(texts: Keyed) -> None:
    lengths = texts._lengths
    assert lengths is not None
    if len(lengths) > FEATURES:
        shift = torch.zeros_like(lengths)
        shift[0], shift[1] = -lengths[0] - 1, lengths[0] + 1
        texts._lengths = lengths + shift


def _other_offsets(texts: Keyed) -> None:
    assert texts._lengths is not None
    texts._offsets = F.pad(texts._lengths.roll(1).cumsum(0), (1, 0))


@pytest.mark.parametrize("change", [_one_more, _one_longer, _negative, _other_offsets])
def test_jagged_tensors_that_contradict_themselves_are_refused(change: Callable[[Keyed], None]) -> None:
    with pytest.raises(UnsupportedError, match="contradicts itself"):
        take_a_step(FORMS["rows"], changed(change))


def test_activations_in_a_jagged_tensor_stay_their_units() -> None:
    """What a part of the module made is known: lengths of the loop's own do not give it to others."""

    def forward(m: nn.Module, x: Tensor | Keyed) -> Tensor:
        if isinstance(x, Tensor):
            return m.a(x)
        assert x._offsets is not None
        return padded(x._values, x._offsets).sum(1) + 0 * m.a.bias.sum()

    model = Apply(forward, a=nn.Linear(DIM, DIM)).double()
    data = [(torch.randn(DIM, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)) for _ in range(8)]
    _, module, _, loader = make_private(model, DataLoader(data, batch_size=8), poisson_sampling=False)  # type: ignore[arg-type]
    for x, _ in loader:
        h = module(x)
        offsets = torch.tensor([0, 3, 3, *range(4, 10)])[: len(x) + 1].clamp_max(len(x))
        offsets[-1] = len(x)
        with pytest.raises(REFUSED):
            module(Keyed(["f0"], h, None, offsets.diff(), offsets)).square().sum().backward()


# ------------------------------------------------------------------ what a mask picks, and nested tensors


def picked(m: nn.Module, ids: Tensor, lengths: Tensor, turn: bool = False) -> Tensor:
    mask = torch.arange(LONGEST) < lengths[:, None]
    rows = m.e(ids)[mask.flip(0) if turn else mask]
    return m.l(padded(rows, F.pad(lengths.cumsum(0), (1, 0))).sum(1)).squeeze(-1)


def plain(batch: list[Example]) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.stack([F.pad(own[0], (0, LONGEST - len(own[0]))) for own, _, _ in batch])
    return ids, torch.tensor([len(own[0]) for own, _, _ in batch]), torch.stack([number for _, _, number in batch])


def test_rows_that_a_mask_picks_are_exact() -> None:
    def forward(m: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        return picked(m, *given)

    model = Apply(forward, e=nn.Embedding(ROWS, DIM), l=nn.Linear(DIM, 1)).double()
    assert_steps_are_exact(model, examples(), lambda b: (plain(b)[:2], plain(b)[2]), sparsedp.DPSGD())


def test_rows_that_a_mask_of_others_picks_are_refused() -> None:
    model = Apply(
        lambda m, given: picked(m, *given, turn=True), e=nn.Embedding(ROWS, DIM), l=nn.Linear(DIM, 1)
    ).double()
    with pytest.raises(REFUSED):
        assert_steps_are_exact(model, examples(), lambda b: (plain(b)[:2], plain(b)[2]), sparsedp.DPSGD())


def nested(batch: list[Example]) -> tuple[Tensor, Tensor]:
    ids = torch.nested.nested_tensor([own[0] for own, _, _ in batch], layout=torch.jagged)  # type: ignore[no-untyped-call]
    return ids, torch.stack([number for _, _, number in batch])


NESTED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "rows": lambda m, ids: m.l(m.e(ids).to_padded_tensor(0.0).sum(1)),
    "rows times two": lambda m, ids: m.l((m.e(ids) * 2).sin().to_padded_tensor(0.0).sum(1)),
    "torch.nested": lambda m, ids: m.l(torch.nested.to_padded_tensor(m.e(ids), 0.0).sum(1)),
    "ids": lambda m, ids: m.l((m.e(ids.to_padded_tensor(0)) * (ids.to_padded_tensor(-1) >= 0)[..., None]).sum(1)),
    "values": lambda m, ids: m.l(padded(m.e(ids.values()), ids.offsets()).sum(1)),
    "bags": lambda m, ids: m.l(F.embedding_bag(ids.values(), m.e.weight, ids.offsets()[:-1], mode="sum")),
}


@pytest.mark.parametrize("form", NESTED)
def test_nested_tensors_are_exact(form: str) -> None:
    forward = NESTED[form]
    model = Apply(lambda m, ids: forward(m, ids).squeeze(-1), e=nn.Embedding(ROWS, DIM), l=nn.Linear(DIM, 1)).double()
    assert_steps_are_exact(model, examples(lambda i, f: 1 + i % LONGEST), nested, sparsedp.DPSGD())


MIXED_NESTED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "others' values": lambda m, ids: m.l(padded(m.e(turned(ids.values())), ids.offsets()).sum(1)),
    "where the unit begins": lambda m, ids: m.l(m.e(ids).to_padded_tensor(0.0).sum(1)) * ids.offsets()[1:, None],
    "parts": lambda m, ids: m.l(m.e(ids).to_padded_tensor(0.0).sum(1)) * (ids * 2)._values.sum(),
    "a sum of all": lambda m, ids: m.l(m.e(ids).to_padded_tensor(0.0).sum(1)) * ids.values().sum(),
    "made anew": lambda m, ids: m.l(
        torch.nested.nested_tensor_from_jagged(turned(m.e(ids).values()), ids.offsets()).to_padded_tensor(0.0).sum(1)
    ),
    "parts of rows": lambda m, ids: m.l(padded(turned(m.e(ids)._values), ids.offsets()).sum(1)),
    "a dense layer": lambda m, ids: m.l(m.e(ids)).to_padded_tensor(0.0).sum(1),
}


@pytest.mark.parametrize("form", MIXED_NESTED)
def test_nested_tensors_do_not_mix_units(form: str) -> None:
    forward = MIXED_NESTED[form]
    model = Apply(lambda m, ids: forward(m, ids).squeeze(-1), e=nn.Embedding(ROWS, DIM), l=nn.Linear(DIM, 1)).double()
    with pytest.raises(REFUSED):
        assert_steps_are_exact(model, examples(lambda i, f: 1 + i % LONGEST), nested, sparsedp.DPSGD())


# ------------------------------------------------------------------ loops over the units of a batch

Rows = tuple[Tensor, Tensor]


def bags_of(m: nn.Module, rows: list[Tensor]) -> Tensor:
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    return F.embedding_bag(torch.cat(rows), m.e.weight, offsets, mode="sum", include_last_offset=True)


LOOPS: dict[str, Callable[[nn.Module, Tensor, list[int]], Tensor]] = {
    "bags": lambda m, ids, n: bags_of(m, [row[:k] for row, k in zip(ids, n)]),
    "bags by index": lambda m, ids, n: bags_of(m, [ids[i, :k] for i, k in enumerate(n)]),
    "stacked": lambda m, ids, n: m.e(torch.stack([row[:2].sort().values for row in ids.unbind()])).sum(1),
    "stacked pieces": lambda m, ids, n: m.e(torch.stack([torch.cat([row[:1], row[2:]]) for row in ids])).sum(1),
    "pieces": lambda m, ids, n: bags_of(m, [torch.cat([row[:1], row[2:], row.new_zeros(1)]) for row in ids]),
    "twice": lambda m, ids, n: sum(m.e(torch.stack([row[0] for row in ids] + [row[1] for row in ids])).chunk(2)),
}  # fmt: skip


def run_loop(form: Callable[[nn.Module, Tensor, list[int]], Tensor]) -> None:
    def forward(m: nn.Module, given: Rows) -> Tensor:
        return m.l(form(m, given[0], given[1].tolist())).squeeze(-1)

    model = Apply(forward, e=nn.Embedding(ROWS, DIM), l=nn.Linear(DIM, 1)).double()
    assert_steps_are_exact(model, examples(), lambda b: (plain(b)[:2], plain(b)[2]), sparsedp.DPSGD())


@pytest.mark.parametrize("form", LOOPS)
def test_units_that_are_taken_one_by_one_are_exact(form: str) -> None:
    run_loop(LOOPS[form])


MIXED_LOOPS: dict[str, Callable[[nn.Module, Tensor, list[int]], Tensor]] = {
    "in another order": lambda m, ids, n: bags_of(m, [ids[-1 - i, :k] for i, k in enumerate(n)]),
    "the first left out": lambda m, ids, n: bags_of(m, [ids[0, :0] * 0, *(row[:k] for row, k in zip(ids[1:], n[1:]))]),
    "the first for all": lambda m, ids, n: m.e(torch.stack([ids[0] for _ in n])).sum(1),
    "with the first": lambda m, ids, n: m.e(torch.stack([(row + ids[0]) % ROWS for row in ids])).sum(1),
    "sorted": lambda m, ids, n: m.e(torch.stack(sorted(ids.unbind(), key=lambda row: int(row[0])))).sum(1),
    "a running sum": lambda m, ids, n: m.e(torch.stack(list(itertools.accumulate(ids, lambda a, b: (a + b) % ROWS)))).sum(1),
    "columns for units": lambda m, ids, n: bags_of(m, [ids[:, 0], *([ids[:, 0] * 0] * (len(n) - 1))]),
}  # fmt: skip


@pytest.mark.parametrize("form", MIXED_LOOPS)
def test_units_that_are_taken_one_by_one_do_not_meet(form: str) -> None:
    with pytest.raises(REFUSED):
        run_loop(MIXED_LOOPS[form])


# ------------------------------------------------------------------ units out of a batch


class Made:
    """As TorchRec's: made of keys, values, weights and lengths or offsets, with what is computed of them kept beside."""

    def __init__(
        self, keys: list[str], values: Tensor, weights: Tensor | None = None, lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._keys, self._values, self._weights, self._lengths, self._offsets = keys, values, weights, lengths, offsets
        self._length_per_key = (lengths if lengths is not None else offsets.diff()).view(len(keys), -1).sum(1).tolist()  # type: ignore[union-attr]


def made(batch: list[Example], by_offsets: bool = False) -> tuple[Made, Tensor]:
    texts, numbers = keyed(batch, by_offsets)
    return Made(texts._keys, texts._values, texts._weights, texts._lengths, texts._offsets), numbers


@pytest.mark.parametrize("by_offsets", [False, True])
@pytest.mark.parametrize("build", [keyed, made])
@pytest.mark.parametrize("form", FORMS)
def test_check_takes_units_out_of_jagged_tensors(form: str, build: Callable[..., Any], by_offsets: bool) -> None:
    batch = build(examples()[:6], by_offsets)
    report = sparsedp.check(reader(FORMS[form]), loss_of, batch, loss_reduction="sum", units=6)
    assert report.largest_difference < 1e-9 and report.units == 6 and report.dtype == torch.float64
    assert sparsedp.explain(reader(FORMS[form]), loss_of, batch).units == 6


def test_what_is_taken() -> None:
    """Each unit's values and weights, feature by feature, as often as it is named."""
    rows = examples()[:5]
    for build, by_offsets in itertools.product((keyed, made), (False, True)):
        batch = build(rows, by_offsets)
        for indices in ([2], [4, 0, 4], [], [0, 1, 2, 3, 4]):
            taken, numbers = take_units(batch, indices)
            wanted = build([rows[i] for i in indices], by_offsets)[0] if indices else None
            assert torch.equal(numbers, batch[1][indices])
            if wanted is None:
                assert not len(taken._values) and not len(taken._weights)
                continue
            for field in ("_values", "_weights"):
                assert torch.equal(getattr(taken, field), getattr(wanted, field))
            lengths = [t._lengths if t._lengths is not None else t._offsets.diff() for t in (taken, wanted)]
            assert torch.equal(*lengths)
            if build is made:
                assert taken._length_per_key == wanted._length_per_key


def test_units_that_mix_are_seen_in_a_batch_of_jagged_tensors() -> None:
    with pytest.raises(REFUSED):
        sparsedp.check(reader(MIXED["others' rows"]), loss_of, made(examples()[:6]), loss_reduction="sum")


def test_jagged_tensors_that_cannot_be_cut() -> None:
    """They are refused with what to give: the module is not blamed."""
    model = reader(FORMS["bags"])
    texts, numbers = made(examples()[:6])
    texts._keys = [*texts._keys, "another", "and another", "and a last one"]
    with pytest.raises(UnsupportedError, match=r"a length for each unit.*data_loader=.*take="):
        sparsedp.check(model, loss_of, (texts, numbers), loss_reduction="sum")
    texts, numbers = made(examples()[:6])
    texts.variable_stride_per_key = lambda: True
    with pytest.raises(UnsupportedError, match="data_loader="):
        sparsedp.check(model, loss_of, (texts, numbers), loss_reduction="sum")

    class Other(Made):
        def __init__(self, rows: list[Example]) -> None:
            self.__dict__.update(vars(made(rows)[0]))

    with pytest.raises(UnsupportedError, match=r"Other.*not made of values, weights and lengths.*take="):
        sparsedp.check(model, loss_of, (Other(examples()[:6]), numbers), loss_reduction="sum")
    report = sparsedp.check(
        model, loss_of, (Other(examples()[:6]), numbers), loss_reduction="sum",
        take=lambda batch, units: (Other([examples()[i] for i in units]), batch[1][units]),
    )  # fmt: skip
    assert report.largest_difference < 1e-9
