// Indices that round towards minus infinity, as those of tile programs do.

//@ floor_div
DEVICE int floor_div(int a, int b) { return a / b - ((a % b != 0) && ((a < 0) != (b < 0))); }

//@ floor_mod
DEVICE int floor_mod(int a, int b) { return a - floor_div(a, b) * b; }
