"""The engine beside DDP, FSDP2 and a plain loop: the same model and batches, no emulation."""
