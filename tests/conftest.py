import torch

# the tests run in two processes on two cores, and tiny models gain nothing from threads
torch.set_num_threads(1)
