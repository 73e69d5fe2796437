"""Layers that compute the same as those of transformers, faster: leaner ones on CUDA, with oneDNN on a CPU."""
