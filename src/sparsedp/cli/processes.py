"""The processes that run one command together: `torchrun` started them, or `--nproc` did (`launch.py`).

One of them, the first, writes files and shows progress. Whichever is the first to fail says why, and the others end silently.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sparsedp._torch import default_store
from sparsedp.distributed.long_work import lost_ranks
from sparsedp.distributed.ranks import missing_ranks
from sparsedp.errors import RankLostError, SparseDPError, UnsupportedError, one_line

_REFUSED, _INTERRUPTED = 2, 130
_FAILED = "sparsedp/failed"  # in the store of all processes: the rank that says why they end
_FIRST_FAILS_TOO = timedelta(seconds=2)  # what the first process is given to say of all what failed on all


class Processes:
    """A process that works alone."""

    rank, count = 0, 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def several(self) -> bool:
        return self.count > 1

    def from_first(self, value: Any) -> Any:
        """The first process's value, for all."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Every process's value."""
        return [value]

    def any(self, flag: bool) -> bool:
        """Whether it holds for one of them."""
        return flag

    def add_up(self, value: float) -> float:
        return value

    def in_turns(self, work: Callable[[], Any]) -> Any:
        """What `work` gives. On each machine one process does it before the others: it may leave files for them."""
        return work()

    def all_failed(self, step: int, error: BaseException) -> bool:
        """Whether all processes come here with an error after the same step, and can do something together yet."""
        return True


ALONE = Processes()


class Together(Processes):
    """Of several processes, one."""

    def __init__(self) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()

    def from_first(self, value: Any) -> Any:
        sent = [value]
        self._waiting(lambda: dist.broadcast_object_list(sent, src=0))
        return sent[0]

    def gather(self, value: Any) -> list[Any]:
        every: list[Any] = [None] * self.count
        self._waiting(lambda: dist.all_gather_object(every, value))
        return every

    def any(self, flag: bool) -> bool:
        return self._sum(float(flag)) > 0

    def add_up(self, value: float) -> float:
        return self._sum(value)

    def in_turns(self, work: Callable[[], Any]) -> Any:
        made = work() if _local_rank() == 0 else None
        self.gather(None)
        return work() if _local_rank() else made

    def all_failed(self, step: int, error: BaseException) -> bool:
        if isinstance(error, (RankLostError, KeyboardInterrupt)):
            return False
        store = default_store()
        with suppress(RuntimeError):
            store.set(f"sparsedp/stopped/{step}/{self.rank}", "here")
            store.wait([f"sparsedp/stopped/{step}/{rank}" for rank in range(self.count)], _FIRST_FAILS_TOO)
            return True
        return False

    def _sum(self, value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64)
        self._waiting(lambda: dist.all_reduce(total))
        return float(total)

    def _waiting(self, message: Callable[[], Any]) -> None:
        try:
            message()
        except RuntimeError as error:
            raise lost_ranks(missing_ranks(self.rank, self.count), self.count) from error


def started_together() -> bool:
    """Whether this process is one of several that run the same command."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def run_together(program: str, debug: bool, work: Callable[[Processes], int]) -> int:
    """Calls `work` with the processes that this one is one of; returns its exit code, or does not return if there are several."""
    if not started_together():
        return work(ALONE)
    if not dist.is_available():
        raise UnsupportedError(
            "This torch was built without torch.distributed, so that several processes cannot train together."
        )
    # TorchRec's ways of importing and of dividing tensors are not the user's concern.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
    dist.init_process_group("gloo")
    processes = Together()
    try:
        code = work(processes)
    except KeyboardInterrupt:
        code = _INTERRUPTED
        _say_once(processes, f"{program}: interrupted")
    except (SparseDPError, OSError) as error:
        code = _REFUSED
        text = traceback.format_exc() if debug else f"{program}: error: {_on_rank(processes.rank, one_line(error))}"
        _say_once(processes, text, waits=isinstance(error, RankLostError))
    except Exception:
        code = 1
        _say_once(processes, traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads may abort a process that ends in the ordinary way, after its work is done (pytorch#190489).
    os._exit(code)


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _on_rank(rank: int, text: str) -> str:
    return text if rank == 0 or text.startswith(("On rank", "Rank")) else f"On rank {rank}: {text}"


def _say_once(processes: Processes, text: str, waits: bool = False) -> None:
    """Prints, unless another process did. The first one has precedence, and whoever only lost others has none."""
    mine = str(processes.rank)
    said = mine
    with suppress(RuntimeError):  # no store any more: whoever had it is gone
        store = default_store()
        if not processes.is_first or waits:
            with suppress(RuntimeError):
                store.wait([_FAILED], _FIRST_FAILS_TOO)
        said = store.compare_set(_FAILED, "", mine).decode()
    if said == mine:
        print(text, file=sys.stderr)
