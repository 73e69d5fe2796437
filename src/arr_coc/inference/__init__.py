"""Running a model on the tokens that were chosen: the session, `attach`, `ARRCOCQwen`, opening models, prompts."""
