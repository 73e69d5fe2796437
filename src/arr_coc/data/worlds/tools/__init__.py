"""What worlds are drawn and worded with."""
