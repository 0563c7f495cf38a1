"""What all stages import; the process that they are forked from imports it once, without a GPU."""

import proof.smoke
import proof.speed  # noqa: F401
