"""Which tiles, in what order, from where: cache, scheduler and array-likes."""
