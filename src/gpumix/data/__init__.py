"""Data loading: global order, per-rank shares, packing, text and prefetching."""
