"""Caches of measurements, by hashes of models, code and devices."""
