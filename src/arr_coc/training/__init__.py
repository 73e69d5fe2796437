"""Training a selector: what learns, from what, and the loop. `trainer.train(TrainConfig(...))` does all of it."""
