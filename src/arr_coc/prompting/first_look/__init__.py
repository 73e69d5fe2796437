"""What the model itself makes of a small or pooled picture, before it is decided what it reads."""
