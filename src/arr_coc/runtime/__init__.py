"""Shared helpers: input checks, CUDA graphs, saving and loading, atomic files, timing, the machine."""
