"""The kernels themselves. Importing a module of this folder needs Triton."""
