"""Loop bodies that ship: each a function of tile sizes, sub-tiles and a cost table."""
