"""Plans: stages, workers, shares, explanations and traces. Values only."""
