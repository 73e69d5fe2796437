"""What serves everything else: input checks, CUDA graphs, saving and loading, files, times, the machine."""
