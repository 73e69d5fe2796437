"""Measuring: tasks, what counts as right, and how sure a difference is."""
