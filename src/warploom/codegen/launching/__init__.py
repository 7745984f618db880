"""A built kernel on tensors: descriptors, parameters, the grid."""
