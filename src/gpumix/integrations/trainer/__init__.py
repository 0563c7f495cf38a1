"""What makes a `Trainer` of transformers, and what derives from it, train by a plan."""
