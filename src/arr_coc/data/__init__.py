"""What is asked: one `Example` type, readers that give it, and worlds that draw it."""
