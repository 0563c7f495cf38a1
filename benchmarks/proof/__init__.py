"""The proof of gpumix on one GPU: a module for each stage, and what stages share."""
