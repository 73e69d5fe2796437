"""Running a model on the tokens that a selector keeps: the session, `attach`, `ARRCOCQwen`, loading, prompts."""
