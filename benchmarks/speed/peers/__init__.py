"""SparseDP beside what a user would pick instead. A script `worker_*.py` for each library, run in a process of its own."""
