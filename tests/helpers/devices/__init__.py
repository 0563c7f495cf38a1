"""Made-up devices, clusters and measurements."""
