"""Numbers with fewer digits than float32's on the way of gradients, which are refused.

The bound holds if one unit more changes the sum by what that unit adds, C at most. What it changes in the gradients of the n
others comes on top, also if it is rounding alone: a mean divides by n + 1 now, and a product of matrices with another number
of rows may add in another order. In float32 that comes to some n 2^-24 C. In bfloat16 it may be n 2^-9 C, several times C in
a batch of a thousand units that are alike, although norms and sums are exact. So gradients stay in float32 or float64 from
the loss to the weights. What no gradient passes through, such as a frozen encoder at the beginning, may have any type.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparsedp._torch import float32_precision, is_any_autocast_enabled
from sparsedp.errors import UnsupportedError

# The types with fewer digits than float32.
LOW_PRECISION = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
    and (dtype.is_floating_point or dtype.is_complex)
    and dtype.itemsize < (8 if dtype.is_complex else 4)
)

# Where torch says in which precision it multiplies float32 numbers.
_PRODUCTS = (("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn"), ("cuda", "matmul"))
_EXACT = {"none", "ieee"}
_SMALL, _ONE = np.float32(1e-40), np.float32(1)


def low_precision_refused(tensor: Tensor, what: str, where: str) -> UnsupportedError:
    """The error for gradients through `tensor`: `what` has it."""
    kind = str(tensor.dtype).removeprefix("torch.")
    return UnsupportedError(
        f"{what}{where} has numbers in {kind}, and their gradients are rounded to {kind}: otherwise for another number of units "
        "in the batch, so that one unit more moves the sum of all others by more than the bound allows. Keep float32 "
        "from the first trained parameter to the loss: .float(), also on frozen parts in between. What gets no gradient "
        f"may stay in {kind}, under torch.no_grad()."
    )


def refuse_autocast() -> None:
    """For forward passes with gradients on, backward passes and steps."""
    if is_any_autocast_enabled():
        raise UnsupportedError(
            "torch.autocast rounds gradients, otherwise for another number of units in the batch, so that one unit more moves "
            "the sum of all others by more than the bound allows. Train in float32, without autocast around forward, "
            "backward and step (torch.autocast(device, enabled=False) within it), and without GradScaler."
        )


def refuse_rounding() -> None:
    """Settings under which norms and sums are less exact than their bound allows for."""
    refuse_autocast()
    if _rounds_products():
        raise UnsupportedError(
            "torch.set_float32_matmul_precision, or fp32_precision of torch.backends, lets products of float32 numbers be "
            "rounded by more than the norms of gradients allow for. Train with 'highest' or 'ieee', as torch does of itself."
        )
    if _SMALL * _ONE == 0:
        raise UnsupportedError(
            "torch.set_flush_denormal(True) lets small gradients vanish from norms that are not small any more when they are "
            "added up. Train without it."
        )


def _rounds_products() -> bool:
    """Whether products of float32 matrices may be computed in fewer digits."""
    if float32_precision is None:
        return torch.get_float32_matmul_precision() != "highest"
    return not {float32_precision(*place) for place in _PRODUCTS} <= _EXACT
