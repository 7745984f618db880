"""GPUs as data: every number with its unit and its source."""
