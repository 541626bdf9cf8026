"""Everything that needs CUDA: devices, kernels, nvImageCodec, nvCOMP and GPUDirect Storage."""
