"""What the commands do; imported only when one of them is called."""
