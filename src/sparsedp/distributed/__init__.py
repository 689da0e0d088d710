"""Private training in several processes, over torch.distributed and TorchRec's sharded tables."""
