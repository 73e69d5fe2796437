"""What textures are made of: block statistics, saliency, patches, picture files, and the frame before."""
