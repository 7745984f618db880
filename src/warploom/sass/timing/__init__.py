"""When a warp's instructions issue: one warp, a scheduler partition."""
