"""What `python -m ptxsim run` puts in the place of a CUDA device, so that a CuTe DSL program runs unmodified.

``run`` is the command. ``launches`` gives the program's kernels to the simulator, ``memory`` keeps the torch tensors
that are on the device, ``device`` says what it is, to CUDA's callers, torch and the DSL. ``operations`` has those that
torch lacks without a device. ``source`` tells where in the program something is from, ``tensor_map`` and ``cubin`` read
formats of the hardware, ``runtime.cpp`` has the functions that compiled host code calls.
"""
