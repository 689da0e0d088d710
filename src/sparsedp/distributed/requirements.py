"""Whether TorchRec, and the FBGEMM that it runs on, fit the torch that is installed. Their packages do not say so themselves."""

from __future__ import annotations

import importlib
import re
from importlib.metadata import PackageNotFoundError, version

from sparsedp.errors import UnsupportedError, one_line

# The FBGEMM release that loads beside each torch release. (1.8.0 was tried here; the others are by FBGEMM's own table.)
FBGEMM_FOR_TORCH = {"2.13": "1.8.0", "2.10": "1.5.0", "2.9": "1.4.0", "2.7": "1.2.0"}
# The releases that are taken, from the first, with which all tests run, to the last, with which those of one process against
# many ran once. What is between the two was not tried.
TORCHREC = ("1.8.0", "1.9.2")
_INSTALL = f'pip install "sparsedp[torchrec]" && pip install --no-deps torchrec=={TORCHREC[0]}'


def require_torchrec() -> None:
    """Raises, with what to install, unless TorchRec is of a release that fits and FBGEMM's operators run."""
    import torch

    release = ".".join(torch.__version__.split(".")[:2])
    fitting = FBGEMM_FOR_TORCH.get(release)
    wanted = f"fbgemm-gpu-cpu=={fitting}" if fitting else f"the FBGEMM release of torch {release}"
    try:
        importlib.import_module("fbgemm_gpu")
        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(torch.tensor([2, 1]))
        if offsets.tolist() != [0, 2, 3]:
            raise ImportError(f"its cumulative sum of 2 and 1 is {offsets.tolist()}")
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"Sharded tables need TorchRec and FBGEMM ({one_line(error)}). Install them: {_INSTALL}"
        ) from error
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        raise UnsupportedError(
            f"FBGEMM {_installed()} does not load beside torch {torch.__version__}: {one_line(error)}. An FBGEMM release fits "
            f"one torch release, and pip does not know it. Install {wanted}: pip install --no-deps --force-reinstall {wanted}"
        ) from error
    try:
        torchrec = importlib.import_module("torchrec")
    except ImportError as error:
        raise UnsupportedError(f"TorchRec cannot be imported ({one_line(error)}). Install it: {_INSTALL}") from error
    _require_release(str(torchrec.__version__))


def _require_release(release: str) -> None:
    first, last = (_numbers(known) for known in TORCHREC)
    if not first <= _numbers(release) <= last:
        raise UnsupportedError(
            f"TorchRec {release} was not tried with SparseDP, which reads TorchRec's own shards and plans: {TORCHREC[0]} is "
            f"tested, and up to {TORCHREC[1]} is taken. Install what is tested: pip install --no-deps torchrec=={TORCHREC[0]}"
        )


def _numbers(release: str) -> tuple[int, ...]:
    """1.9.2 of 1.9.2+cpu, to compare by. What is before a release, such as 1.9.2rc1, is not told apart from it."""
    return tuple(int(part) for part in re.findall(r"\d+", release.partition("+")[0])[:3])


def _installed() -> str:
    for name in ("fbgemm-gpu-cpu", "fbgemm-gpu"):
        try:
            return f"{version(name)} ({name})"
        except PackageNotFoundError:
            continue
    return "(of unknown version)"
