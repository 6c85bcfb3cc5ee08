// Registers of threads: what a kernel needs, what a warp may use, and setmaxnreg, which moves them between warps.
#pragma once

#include <vector>

#include "parser.h"

namespace ptxsim {

struct Cta;
struct Instr;
struct Launch;
struct Program;
struct Warp;

// Numbers of the registers that an instruction reads and writes.
struct Effects {
  std::vector<int> sources, targets;
};

// What a CTA's warps have given back, in registers of each thread of one warp.
struct RegisterPool {
  uint32_t free = 0;
  std::vector<std::vector<const Instr*>> changes;  // by warpgroup: each setmaxnreg, of the first warp that came to it
};

constexpr uint32_t kRegistersOfSm = 64 * 1024, kMostRegisters = 256;

// How many 32-bit registers at least hold values that are still needed, before each instruction.
std::vector<uint16_t> live_registers(const Function& function, const std::vector<Effects>& effects);

// Of each thread, when the kernel starts.
uint32_t launch_registers(const Program& program, const Launch& launch);

// At the exit of a warp: the others of its warpgroup can not have executed more of them.
void check_register_changes(const Warp& warp);

}  // namespace ptxsim
