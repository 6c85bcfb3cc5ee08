"""Programmatic dependent launch, for short kernels in a row."""

import cutlass.cute as cute


def take_turn() -> None:
    """All threads, first: from here on the next kernel's CTAs may come, and what kernels before this one did is done.

    The next kernel waits here for the whole of this one, so a kernel never meets one but its neighbours."""
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
