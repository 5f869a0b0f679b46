"""Kernels for training: each operation beside its reference in PyTorch, its CUDA twin in `cuda/`."""
