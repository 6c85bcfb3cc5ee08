// The C interface that __init__.py binds with ctypes. Every function returns 0, or 1 after it has put a
// message into `error` (of `error_bytes`).
#include <cstdio>
#include <mutex>

#include "core.h"
#include "tensor_map.h"

using namespace ptxsim;

namespace {

struct Loaded {
  Module module;
  std::mutex lock;
  std::map<std::string, std::unique_ptr<Program>> programs;  // decoded at their first launch

  const Program& program(const std::string& kernel) {
    std::lock_guard<std::mutex> hold(lock);
    auto& slot = programs[kernel];
    if (!slot) {
      const Function* f = module.find(kernel);
      if (!f) throw SimError("no kernel named " + kernel);
      slot = std::make_unique<Program>(decode(module, *f));
    }
    return *slot;
  }
};

template <class F>
int guarded(char* error, size_t error_bytes, F f) {
  try {
    f();
    return 0;
  } catch (const std::exception& e) {
    std::snprintf(error, error_bytes, "%s", e.what());
    return 1;
  }
}

}  // namespace

extern "C" {

struct ptxsim_buffer {
  const void* data;
  uint64_t bytes;
  const char* name;
};

struct ptxsim_launch_arguments {
  uint32_t grid[3], block[3], cluster[3];
  uint32_t dynamic_shared;
  uint32_t registers;
  const void* params;
  uint64_t param_bytes;
  uint64_t seed;
  uint32_t checks;
  uint32_t resident;
  uint64_t max_steps;
  uint32_t chip_accuracy;
  const volatile uint32_t* stop;
  void* stream;        // of ptxsim_new_stream; null: the launch stands alone
  uint32_t dependent;
};

struct ptxsim_statistics {
  uint64_t warp_instructions, thread_instructions;
};

int ptxsim_load(const char* text, void** module, char* error, size_t error_bytes) {
  return guarded(error, error_bytes, [&] {
    auto loaded = std::make_unique<Loaded>();
    loaded->module = parse(text);
    place_variables(loaded->module);
    *module = loaded.release();
  });
}

void ptxsim_unload(void* module) { delete static_cast<Loaded*>(module); }

void* ptxsim_new_stream() { return new Stream; }
void ptxsim_delete_stream(void* stream) { delete static_cast<Stream*>(stream); }

// Lines "kernel <name>", each followed by its parameters' "<offset> <bytes>".
int ptxsim_describe(void* module, char* text, size_t text_bytes, char* error, size_t error_bytes) {
  return guarded(error, error_bytes, [&] {
    std::string all;
    for (const Function& f : static_cast<Loaded*>(module)->module.functions) {
      all += "kernel " + f.name + "\n";
      for (const Symbol& p : f.params) all += format("%llu %llu\n", static_cast<unsigned long long>(p.offset), static_cast<unsigned long long>(p.bytes));
    }
    if (all.size() >= text_bytes) throw SimError("the description does not fit");
    std::snprintf(text, text_bytes, "%s", all.c_str());
  });
}

// lines[n] becomes 1 where an instruction of PTX line n was executed.
int ptxsim_launch(void* module, const char* kernel, const ptxsim_launch_arguments* arguments, const ptxsim_buffer* buffers,
                  size_t buffer_count, ptxsim_statistics* statistics, uint8_t* lines, size_t line_count, char* error, size_t error_bytes) {
  return guarded(error, error_bytes, [&] {
    Loaded& loaded = *static_cast<Loaded*>(module);
    const Program& program = loaded.program(kernel);
    Launch launch{};
    for (int d = 0; d < 3; ++d) {
      launch.grid[d] = arguments->grid[d];
      launch.block[d] = arguments->block[d];
      launch.cluster[d] = arguments->cluster[d];
    }
    launch.dynamic_shared = arguments->dynamic_shared;
    launch.registers = arguments->registers;
    const uint8_t* params = static_cast<const uint8_t*>(arguments->params);
    launch.params.assign(params, params + arguments->param_bytes);
    launch.seed = arguments->seed;
    launch.checks = arguments->checks;
    launch.resident = arguments->resident;
    launch.max_steps = arguments->max_steps;
    launch.chip_accuracy = arguments->chip_accuracy;
    launch.stop = arguments->stop;
    launch.dependent = arguments->dependent;
    Stream own;
    Stream& stream = arguments->stream ? *static_cast<Stream*>(arguments->stream) : own;
    GlobalMemory global(launch.checks, stream);
    for (size_t i = 0; i < buffer_count; ++i) global.add(buffers[i].data, buffers[i].bytes, buffers[i].name);
    for (const Symbol& s : loaded.module.variables)
      if (!s.init.empty()) global.add(s.init.data(), s.init.size(), s.name, s.space == Symbol::global);
    Machine machine(loaded.module, program, launch, global, stream);
    machine.run();
    statistics->warp_instructions = machine.steps;
    statistics->thread_instructions = machine.lane_steps;
    for (size_t i = 0; i < program.code.size(); ++i) {
      size_t line = static_cast<size_t>(program.code[i].source->line);
      if (machine.executed[i] && line < line_count) lines[line] = 1;
    }
  });
}

int ptxsim_encode_tiled(void* map, int type, int rank, uint64_t address, const uint64_t* extents, const uint64_t* strides,
                        const uint32_t* box, const uint32_t* element_strides, int interleave, int swizzle, int oob_fill,
                        char* error, size_t error_bytes) {
  return guarded(error, error_bytes, [&] {
    std::memset(map, 0, TensorMap::kBytes);
    encode_tiled(type, rank, address, extents, strides, box, element_strides, interleave, swizzle, oob_fill).write(static_cast<uint8_t*>(map));
  });
}

// The name of check number `index`, or nullptr past the last.
const char* ptxsim_check_name(int index) { return kCheckNames[index]; }

}  // extern "C"
