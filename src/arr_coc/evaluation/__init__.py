"""Evaluation: tasks, metrics, bootstrap intervals, timings and the report."""
