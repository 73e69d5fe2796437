"""Pixel-level building blocks of textures: block statistics, saliency, patches, picture files, the previous frame."""
