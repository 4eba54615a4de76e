"""Stateless operations on tensors, one per file. Every file has the same order:

1. `plain_X`: the operation in PyTorch. Tests compare the kernel with it.
2. The kernel, and `triton_X`, which launches it.
3. `X`: the operation as layers call it. Its docstring has shapes, dtypes and errors. `use_kernels` chooses between the
   two. A layer gets that choice when it is made, because `use_kernels=False` must be plain all the way through.

If a kernel joins several operations, so that its plain twin is not in the same file, the docstring names the twin.
kernel.py, dependent_launch.py, upload.py and collectives.py are helpers of the operations. The formats of FP8 are in
quantize.py (rows and weights) and layer_cache.py (keys and values).
"""
