"""The parts of the page, one file each, in the order in which they stand there."""
