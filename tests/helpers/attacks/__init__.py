"""Attacks from outside, and files spoilt by chance."""
