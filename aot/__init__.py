"""Build time: the kernels in CuTe DSL and what compiles them into the bundle of cubins. Never needed to run."""
