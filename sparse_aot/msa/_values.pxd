"""What kernels of block-sparse attention take: every parameter by its name in the manifest, in a slot of 8 bytes.

A call fills in what it has; each kernel takes what it needs (``_core/_kernel.pxd`` says how). Slots of a kind stand
together: pointers, then int64, int32 and float32. Tensor maps are numbered apart.
"""

from libc.stdint cimport int64_t
from libc.string cimport memcpy


cdef struct Values:
    # Pointers: what the caller gives or gets,
    int64_t q
    int64_t cu_seqlens_q
    int64_t cu_seqlens_k
    int64_t seqused_k
    int64_t page_table
    int64_t out
    int64_t lse
    int64_t lse_temperature
    int64_t q2k_indices
    int64_t row_ptr
    int64_t q_indices
    # the schedule,
    int64_t scheduler_metadata
    int64_t work_count
    int64_t qsplit_indices
    int64_t split_counts
    int64_t split_entries
    int64_t walk_blocks
    int64_t walk_counts
    int64_t walk_flags
    int64_t rest_indices
    # and what lies between the kernels of a call.
    int64_t work_counter
    int64_t entry_words
    int64_t partial_out
    int64_t partial_lse
    int64_t partial_lse_temperature
    int64_t row_of
    int64_t sequence_base
    int64_t row_sequence
    int64_t row_block
    int64_t counts
    int64_t totals
    int64_t keys
    int64_t values
    int64_t keys_in
    int64_t values_in
    int64_t keys_out
    int64_t values_out
    int64_t indices_out
    int64_t entries_out
    int64_t head_flags
    int64_t rest_out
    # int64: strides, in elements.
    int64_t q_stride_token
    int64_t q_stride_head
    int64_t out_stride_token
    int64_t out_stride_head
    int64_t lse_stride_token
    int64_t lse_stride_head
    int64_t page_table_stride
    int64_t q2k_stride_head
    int64_t q2k_stride_token
    # int32: sizes and options.
    int64_t batch
    int64_t total_q
    int64_t head_kv
    int64_t qhead_per_kv
    int64_t topk
    int64_t total_rows
    int64_t max_pages
    int64_t kv_extent
    int64_t causal
    int64_t work_capacity
    int64_t size
    int64_t tiles
    int64_t shift
    int64_t bits
    int64_t digits
    int64_t target_log2
    int64_t bucket_shift
    int64_t buckets
    int64_t groups
    int64_t tokens_per_group
    int64_t walk_cost
    int64_t walk_gain
    int64_t head_partials
    # float32
    int64_t softmax_scale
    int64_t lse_temperature_scale


cdef enum TensorMap:
    Q_MAP
    K_MAP
    V_MAP
    N_TENSOR_MAPS


cdef inline void set_float32(int64_t* slot, float value) noexcept nogil:
    memcpy(slot, &value, sizeof(value))
