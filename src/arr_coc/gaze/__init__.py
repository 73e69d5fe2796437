"""Mode `"saccade"`: planning gestalt and saccades, reading the full-resolution picture, compressing the gestalt."""
