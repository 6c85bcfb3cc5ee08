// PTX text to a syntax tree. Names are resolved here: registers to numbers, labels to statement numbers.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common.h"

namespace ptxsim {

// A register of the kernel, after scopes are resolved.
struct Register {
  std::string name;
  int bytes;  // 0: predicate
};

// A named place: a kernel parameter, a shared, local, global or constant variable.
struct Symbol {
  enum Space { param, shared, local, global, constant };
  std::string name;
  Space space;
  uint64_t offset = 0;  // within its space
  uint64_t bytes = 0;
  uint64_t align = 1;
  DeviceBytes init;  // global and constant
};

struct Operand {
  enum Kind {
    reg,      // `index`; `negated` for !p; `second` is the number after `|`, or -1
    integer,  // `value`
    real,     // `value` holds float64 bits; `single` when it was written 0f...
    symbol,   // `name`, `value` is added to its address
    label,    // `index` = statement number
    vector,   // `items`
    address,  // items[0] is the base, `value` the byte offset, items[1] (a vector) tensor coordinates where there are any
    sink,     // `_`
    special,  // `name`, such as %tid.x
  };
  Kind kind = integer;
  int index = -1;
  int second = -1;
  bool negated = false;
  bool single = false;
  uint64_t value = 0;
  std::string name;
  std::vector<Operand> items;
};

struct Statement {
  int line = 0;
  std::string text;                 // as written, for reports
  std::vector<std::string> opcode;  // split at dots; `::` stays inside a part
  int guard = -1;                   // predicate register
  bool guard_negated = false;
  std::vector<Operand> operands;
};

struct Function {
  std::string name;
  std::vector<Symbol> params;
  std::vector<Register> registers;
  std::vector<Symbol> variables;  // .shared and .local declared in the body, and .param, which is local memory there
  std::vector<Statement> statements;
  uint32_t required_threads[3] = {0, 0, 0};  // .reqntid
  uint32_t max_threads[3] = {0, 0, 0};       // .maxntid
  uint32_t required_cluster[3] = {0, 0, 0};  // .reqnctapercluster
  uint32_t max_registers = 0;                // .maxnreg
  uint32_t min_ctas = 1;                     // .minnctapersm
  uint64_t param_bytes = 0;
  int line = 0;
  // Of a device function (.func): its formal parameters, registers or names of variables.
  std::vector<Operand> returns, arguments;
};

struct Module {
  std::string target;
  std::vector<Symbol> variables;  // module scope
  std::vector<Function> functions;         // kernels
  std::vector<Function> device_functions;  // with a body
  uint64_t dynamic_shared = 0;    // address at which dynamic shared memory starts; set by place_variables
  const Function* find(const std::string& name) const;
};

// Puts the bodies of device functions where they are called. Calls that have none, or are recursive, stay as they are.
void inline_calls(Module& module);

// Throws SimError naming the line on anything it can not read.
Module parse(const std::string& text);

}  // namespace ptxsim
