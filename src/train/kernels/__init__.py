"""Triton kernels of ours where bytes say that Inductor leaves a per cent of a step or more (docs/kernels.md).

jit/ holds the kernels and needs Triton; the modules beside it have the plain torch form of each, which runs where Triton
can't, and what the trainer calls.
"""
