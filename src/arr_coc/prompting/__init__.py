"""From a full prompt to a shorter one: the question, the layout, and one file for each way to shorten it."""
