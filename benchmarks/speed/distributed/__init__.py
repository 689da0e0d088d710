"""Several processes with TorchRec's sharded tables: private steps against TorchRec's own."""
