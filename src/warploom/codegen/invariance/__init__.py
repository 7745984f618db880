"""What the bits of a kernel's results are a function of, proved from its block program.

`facts` follows what a tile depends on through one op, `trace` through a program, `certificate`
states it for every output and decides along which dimensions results know nothing of each other.
Nothing here shares code with the passes, the analyses or the printers: it reads the block program,
which the rules of `codegen.ir.spec` hold against the tile program in it.
"""
