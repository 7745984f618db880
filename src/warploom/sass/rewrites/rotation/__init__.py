"""Software pipelining of machine code: instructions over a loop's back edge, and its proof."""
