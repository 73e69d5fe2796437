"""The microscope: a page in the browser that shows where and why it looks. Needs `arr-coc[demo]`."""
