"""Tiny models, and what training them by a plan is compared with."""
