"""Kernels small enough to compile in a blink, for the tests of the build. The tests copy and edit this package."""
