"""The page in the browser that shows where the model looks, and why. Needs `arr-coc[demo]`."""
