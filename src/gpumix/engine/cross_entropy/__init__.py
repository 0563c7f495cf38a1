"""Cross-entropy without all logits: in chunks of rows, fused, or by a Triton kernel.

May use `engine.model` for lazy outputs.
"""
