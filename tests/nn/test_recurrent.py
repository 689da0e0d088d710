"""sparsedp.nn.LSTM and GRU against torch's own."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

from sparsedp.errors import UnsupportedError
from sparsedp.nn import GRU, LSTM

PAIRS = [pytest.param(LSTM, nn.LSTM, id="LSTM"), pytest.param(GRU, nn.GRU, id="GRU")]
CONFIGS = [
    {"num_layers": layers, "bias": bias, "batch_first": first, "bidirectional": both}
    for layers, bias, first, both in itertools.product((1, 3), (True, False), (True, False), (True, False))
]


def _flat(outputs):
    """Output, h_n (and c_n) in one list."""
    output, state = outputs
    return [output, *state] if isinstance(state, tuple) else [output, state]


def _data(config, batch, length=5, given=True, lstm=True):
    generator = torch.Generator().manual_seed(batch)
    shape = (batch, length, 4) if config["batch_first"] else (length, batch, 4)
    x = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    rows = config["num_layers"] * (1 + config["bidirectional"])
    states = [
        torch.randn((rows, batch, 6), generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(1 + lstm)
    ]
    hx = (tuple(states) if lstm else states[0]) if given else None
    return x, hx, [x, *states] if given else [x]


@pytest.mark.parametrize("ours, theirs", PAIRS)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("batch, given", [(3, True), (3, False), (1, True), (1, False)])
def test_values_and_gradients_equal_torch(ours, theirs, config, batch, given):
    reference = theirs(4, 6, dtype=torch.float64, **config)
    layer = ours(4, 6, dtype=torch.float64, **config)
    layer.load_state_dict(reference.state_dict())
    x, hx, leaves = _data(config, batch, given=given, lstm=ours is LSTM)

    expected, actual = _flat(reference(x, hx)), _flat(layer(x, hx))
    weights = [torch.randn_like(e) for e in expected]
    grads = []
    for outputs, module in ((expected, reference), (actual, layer)):
        loss = sum((o * w).sum() for o, w in zip(outputs, weights))
        grads.append(torch.autograd.grad(loss, [*leaves, *module.parameters()]))

    for e, a in [*zip(expected, actual), *zip(*grads)]:
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("ours, theirs", PAIRS)
def test_state_dict_and_initialisation_equal_torch(ours, theirs):
    config = {"num_layers": 2, "bidirectional": True}
    torch.manual_seed(5)
    reference = theirs(4, 6, **config)
    torch.manual_seed(5)
    layer = ours(4, 6, **config)
    for (name_a, a), (name_b, b) in zip(layer.state_dict().items(), reference.state_dict().items(), strict=True):
        assert name_a == name_b
        assert torch.equal(a, b)

    layer.reset_parameters()
    reference.load_state_dict(layer.state_dict())
    x = torch.randn(7, 2, 4)
    torch.testing.assert_close(layer(x)[0], reference(x)[0])
    assert all(p.abs().max() <= 6**-0.5 for p in layer.parameters())


@pytest.mark.parametrize("ours, theirs", PAIRS)
@pytest.mark.parametrize("batch_first", [True, False])
def test_empty_batch(ours, theirs, batch_first):
    config = {"num_layers": 2, "bidirectional": True, "batch_first": batch_first}
    x = torch.zeros((0, 5, 4) if batch_first else (5, 0, 4))
    layer = ours(4, 6, **config)
    outputs = _flat(layer(x))
    assert [o.shape for o in outputs] == [o.shape for o in _flat(theirs(4, 6, **config)(x))]
    outputs[0].sum().backward()
    assert all(not p.grad.any() for p in layer.parameters())


@pytest.mark.parametrize("ours, theirs", PAIRS)
def test_dropout_acts_in_training_only(ours, theirs):
    layer, reference = ours(4, 6, num_layers=2, dropout=0.5), theirs(4, 6, num_layers=2, dropout=0.5)
    reference.load_state_dict(layer.state_dict())
    x = torch.randn(3, 2, 4)
    torch.testing.assert_close(layer.eval()(x)[0], reference.eval()(x)[0])
    layer.train()
    assert not torch.equal(layer(x)[0], layer(x)[0])
    # Dropout acts between the layers, so the first one's final state stays as it is.
    h_n = [_flat(layer(x))[1] for _ in range(2)]
    assert torch.equal(h_n[0][0], h_n[1][0])
    assert not torch.equal(h_n[0][1], h_n[1][1])
    with pytest.warns(UserWarning, match="one layer only"):
        ours(4, 6, dropout=0.5)


@pytest.mark.parametrize("ours, theirs", PAIRS)
@pytest.mark.parametrize("batch_first", [True, False])
def test_batch_is_axis_0_at_every_parameter(ours, theirs, batch_first):
    batch, length, seen = 3, 5, []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if any(isinstance(a, nn.Parameter) for a in args):
                seen.append((function, args[0].shape))
            return function(*args, **(kwargs or {}))

    layer = ours(4, 6, num_layers=2, bidirectional=True, batch_first=batch_first)
    with Watch():
        layer(torch.randn((batch, length, 4) if batch_first else (length, batch, 4)))
    assert {function for function, _ in seen} == {nn.functional.linear}
    assert all(shape[0] == batch for _, shape in seen)
    assert len(seen) == 4 * (1 + length)


@pytest.mark.parametrize("ours, theirs", PAIRS)
@pytest.mark.parametrize("form", [{}, {"num_layers": 2, "bidirectional": True}])
@pytest.mark.parametrize("batch_first", [True, False])
def test_packed_sequences_are_as_torch_has_them(ours, theirs, form, batch_first):
    wanted, layer = (kind(4, 3, batch_first=batch_first, **form).double() for kind in (theirs, ours))
    layer.load_state_dict(wanted.state_dict())
    x = torch.randn(5, 6, 4).double()
    first = torch.randn(len(form) ** 2 or 1, 5, 3).double()
    for lengths in ([3, 1, 6, 2, 6], [6, 6, 3, 2, 1], [1, 1, 1, 1, 1]):
        is_sorted = lengths == sorted(lengths, reverse=True)
        for enforced in {False, is_sorted}:
            packed = pack_padded_sequence(x if batch_first else x.transpose(0, 1), lengths, batch_first, enforced)
            for states in (None, (first, 2 * first) if ours is LSTM else first):
                (out, last), (expected, expected_last) = layer(packed, states), wanted(packed, states)
                torch.testing.assert_close(out.data, expected.data)
                torch.testing.assert_close(last, expected_last)
                padded, sizes = pad_packed_sequence(out, batch_first)
                assert sizes.tolist() == lengths


@pytest.mark.parametrize("ours, theirs", PAIRS)
def test_refusals(ours, theirs):
    with pytest.raises(UnsupportedError, match="proj_size"):
        ours(4, 6, proj_size=2)
    layer = ours(4, 6, batch_first=True)
    with pytest.raises(ValueError, match="initial state"):
        states = torch.zeros(1, 3, 6)
        layer(pack_sequence([torch.randn(3, 4), torch.randn(2, 4)]), (states, states) if ours is LSTM else states)
    with pytest.raises(UnsupportedError, match="unsqueeze"):
        layer(torch.randn(5, 4))
    with pytest.raises(ValueError, match="features"):
        layer(torch.randn(2, 5, 3))
    with pytest.raises(ValueError, match="at least one step"):
        layer(torch.randn(2, 0, 4))
    with pytest.raises(ValueError, match="initial state"):
        layer(torch.randn(2, 5, 4), torch.zeros(1, 3, 6) if ours is GRU else (torch.zeros(1, 3, 6),) * 2)
    with pytest.raises(ValueError, match="num_layers"):
        ours(4, 6, num_layers=0)
    with pytest.raises(ValueError, match="dropout"):
        ours(4, 6, num_layers=2, dropout=1.5)


def test_drop_in_details():
    layer = LSTM(4, 6, 2, True, True, 0.0, True)
    layer.flatten_parameters()
    assert repr(layer) == "LSTM(4, 6, num_layers=2, batch_first=True, bidirectional=True)"
    with pytest.raises(ValueError, match="initial state"):
        layer(torch.randn(2, 5, 4), (torch.zeros(4, 2, 6),))
