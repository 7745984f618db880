"""Operations on rows at the rate of memory: norms, softmax, losses, gates, rotations."""
