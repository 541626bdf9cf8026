"""All that needs CUDA: devices, memory, kernels, nvImageCodec, nvCOMP and GPUDirect Storage."""
