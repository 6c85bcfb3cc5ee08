// Approximate functions with the errors that chips make.
#pragma once

#include "decode.h"

namespace ptxsim {

enum class Approximate { ex2, lg2, rcp, sqrt, rsqrt, sin, cos, tanh };
enum class ApproximateType { f32, f16, bf16 };

// Wraps the handler of a decoded instruction, which computes f as exactly as it can, for runs with accuracy "chip".
void allow_errors(Decoder& d, Approximate f, const Type& t, bool ftz);

}  // namespace ptxsim
