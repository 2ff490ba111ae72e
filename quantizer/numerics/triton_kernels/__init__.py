"""Triton kernels for NVIDIA GPUs: quantized products that write 8 bits, and norms. Imported only where they run."""
