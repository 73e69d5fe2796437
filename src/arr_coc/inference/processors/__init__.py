"""Processors of pictures and clips that need no torchvision, beside those of transformers."""
