"""Parts making transformers' `Trainer`, and derived classes, train by a plan."""
