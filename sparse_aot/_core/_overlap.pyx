"""Whether arrays have bytes in common, exactly: views that interleave in one buffer do not.

An array is runs of contiguous bytes at sums of multiples of its strides. Two arrays overlap where such sums of one and
of the other are less than a run apart, so each question is whether a sum of bounded multiples of strides falls into an
interval. The search takes the strides from the longest on and leaves a branch where the shorter ones cannot reach the
interval. With strides that nest, as those of views of one buffer do, that is at most a few steps a dimension.
"""

from libc.stdint cimport int64_t

from sparse_aot._core._checks cimport element_count
from sparse_aot._core._dlpack cimport MAX_RANK


cdef enum:
    MAX_STEPS = 10000  # of a search; strides that need more are taken to overlap


# multiples low .. high of a positive stride in bytes
cdef struct Term:
    int64_t stride
    int64_t low
    int64_t high


# The bytes of an array: runs of `run` bytes, from `first` on; the longest strides first.
cdef struct Footprint:
    int64_t first
    int64_t run
    int count
    Term[MAX_RANK] terms


cdef void measure(const View* view, Footprint* area) noexcept nogil:
    """Negative strides count from their other end; dimensions that continue a run become part of it."""
    cdef int dim, at
    cdef int64_t stride
    cdef int64_t size = (view.dtype & 0xFF) >> 3
    area.first = bounds_of(view).first
    area.run = size
    area.count = 0
    for dim in range(view.ndim):
        stride = view.strides[dim] * size
        if stride < 0:
            stride = -stride
        if view.shape[dim] <= 1 or stride == 0:
            continue
        at = area.count
        while at > 0 and area.terms[at - 1].stride < stride:
            area.terms[at] = area.terms[at - 1]
            at -= 1
        area.terms[at] = Term(stride, 0, view.shape[dim] - 1)
        area.count += 1
    while area.count and area.terms[area.count - 1].stride == area.run:
        area.count -= 1
        area.run *= area.terms[area.count].high + 1


cdef bint reaches(const Term* terms, int count, int64_t low, int64_t high, int* steps) noexcept nogil:
    """Whether a sum of a multiple of each stride lies in ``low .. high``; also True where ``steps`` run out."""
    cdef int i
    cdef int64_t multiple, first, last
    cdef int64_t least = 0
    cdef int64_t most = 0
    if count == 0:
        return low <= 0 <= high
    for i in range(1, count):
        least += terms[i].low * terms[i].stride
        most += terms[i].high * terms[i].stride
    first = max(terms[0].low, -((most - low) // terms[0].stride))
    last = min(terms[0].high, (high - least) // terms[0].stride)
    for multiple in range(first, last + 1):
        steps[0] -= 1
        if steps[0] < 0 or reaches(
            terms + 1, count - 1, low - multiple * terms[0].stride, high - multiple * terms[0].stride, steps
        ):
            return True
    return False


cdef bint overlap(const Footprint* a, const Footprint* b) noexcept nogil:
    """Whether ``a.first + sum - (b.first + sum)`` is less than a run, whichever array's comes second."""
    cdef Term[2 * MAX_RANK] terms
    cdef int i = 0
    cdef int j = 0
    cdef int count = 0
    cdef int steps = MAX_STEPS
    while i < a.count or j < b.count:
        if j == b.count or (i < a.count and a.terms[i].stride > b.terms[j].stride):
            terms[count] = a.terms[i]
            i += 1
        elif i == a.count or b.terms[j].stride > a.terms[i].stride:
            terms[count] = Term(b.terms[j].stride, -b.terms[j].high, 0)
            j += 1
        else:  # the difference of two multiples of one stride is one too
            terms[count] = Term(a.terms[i].stride, -b.terms[j].high, a.terms[i].high)
            i += 1
            j += 1
        count += 1
    return reaches(terms, count, b.first - a.first - a.run + 1, b.first - a.first + b.run - 1, &steps)


cdef int check_apart(str name, const View* written, str other_name, const View* other) except -1:
    cdef Footprint a, b
    cdef Bounds bounds = bounds_of(written)
    if not meets(&bounds, other):
        return 0
    measure(written, &a)
    measure(other, &b)
    if overlap(&a, &b):
        raise ValueError(f"{name}: expected memory of its own, got some of {other_name}")
    return 0


cdef int check_no_overlap_within(str name, const View* view) except -1:
    cdef Footprint a
    cdef Term[MAX_RANK] terms
    cdef int i, j
    cdef int steps = MAX_STEPS
    if element_count(view) == 0:
        return 0
    measure(view, &a)
    # Of two runs that overlap, take the longest stride of which they have different multiples: the same holds for the
    # differences, in which this one is positive, longer ones are 0 and shorter ones are anything.
    for i in range(a.count):
        terms[i] = Term(a.terms[i].stride, 1, a.terms[i].high)
        for j in range(i + 1, a.count):
            terms[j] = Term(a.terms[j].stride, -a.terms[j].high, a.terms[j].high)
        if reaches(terms + i, a.count - i, 1 - a.run, a.run - 1, &steps):
            strides = [view.strides[dim] for dim in range(view.ndim)]
            shape = [view.shape[dim] for dim in range(view.ndim)]
            raise ValueError(f"{name}: expected elements that do not overlap, got strides {strides} for shape {shape}")
    return 0
