"""Learning where to look."""
