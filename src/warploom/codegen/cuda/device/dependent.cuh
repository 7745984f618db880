// What reads memory in kernels that begin before the previous grid has ended, which may write there
// until then: ptxas moves a load of memory that never changes (`ld.global.nc`) in front of the wait.

//@ GIVEN
#define GIVEN(p) __ldca(p)

//@ READ_ONLY
#define READ_ONLY ""
