"""The block program and what it is made from: plan, placement, layouts, targets."""
