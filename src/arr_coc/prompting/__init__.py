"""Turning a full prompt into a shorter one: the question, the layout, and one file for each way to shorten it."""
