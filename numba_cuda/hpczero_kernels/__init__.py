"""Kernels for training: each operation beside its PyTorch reference; CUDA kernels in `cuda/`."""
