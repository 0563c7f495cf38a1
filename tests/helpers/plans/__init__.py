"""Made-up profiles and plans, and planners to compare with."""
