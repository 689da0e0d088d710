"""DLRM under SGD, DP-SGD, LazyDP, EANA and AdaFEST."""
