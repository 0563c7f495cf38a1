"""Rehearsal of the first step: do losses of parts of a batch add up to the batch's loss?

Owns the verdict on a model and a loss, and the watch on later steps. Uses the engine from above.
"""
