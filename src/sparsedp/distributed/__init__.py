"""Private training in several processes, over torch.distributed and TorchRec's sharded tables.

`make_private` finds out by itself whether it runs in a process group; see docs/distributed.md.
"""

from sparsedp.distributed.embeddings import shard_tables
from sparsedp.distributed.requirements import require_torchrec

__all__ = ["require_torchrec", "shard_tables"]
