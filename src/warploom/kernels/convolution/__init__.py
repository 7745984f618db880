"""Long convolution by Fourier transforms that are matmuls: program, matrices, reference."""
