"""Settings that must be made before anything is imported."""

import os

import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported; no test asks the network
# the tests run in two processes on two cores, and tiny models gain nothing from threads, nor do the processes of tests
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
