"""Log of a run: metrics, summary, terminal display, trackers. Never imports torch.

Owns the files that the report, `top` and `--json` read.
"""
