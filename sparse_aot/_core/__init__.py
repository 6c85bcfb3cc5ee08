"""What every family of kernels stands on: the driver, arrays over DLPack, one public call, the bundle, launching."""
