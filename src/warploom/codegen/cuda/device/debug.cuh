// What a build with `debug` has instead of the function of the same name.

//@ barrier_wait
DEVICE void barrier_wait(unsigned bar, unsigned parity) {
  asm volatile("{ .reg .pred done, late; .reg .u64 begin, now;\nmov.u64 begin, %%globaltimer;\n"
               "AGAIN:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra DONE;\n"
               "mov.u64 now, %%globaltimer;\nsub.u64 now, now, begin;\n"
               "setp.gt.u64 late, now, 500000000;\n@late trap;\n"
               "bra AGAIN;\nDONE: }" ::"r"(bar), "r"(parity) : "memory");
}
