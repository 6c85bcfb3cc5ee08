// From a parsed statement to an executable instruction. Each unit registers a decode function for its opcodes; the
// function takes the modifiers and operands that it knows, and whatever is left over is an error.
#pragma once

#include <set>
#include <unordered_map>

#include "core.h"

namespace ptxsim {

struct Type {
  std::string name;
  int bytes;
  enum Class { bits, unsigned_int, signed_int, real, predicate } cls;
};

// The basic types; nullptr if `name` is not one.
const Type* find_type(const std::string& name);

class Decoder {
 public:
  Decoder(const Module& module, const Function& function, Program& program);
  void statement(const Statement& statement);

  // ---- modifiers ----
  bool take(const char* modifier);              // takes it if it is there
  const char* take_one(std::initializer_list<const char*> choices);  // the one that is there, or ""
  Type type();                                  // takes the first basic type that is left
  Type optional_type(const char* fallback);
  void drop(std::initializer_list<const char*> hints);  // modifiers that mean nothing here, such as cache hints

  // ---- operands ----
  size_t count() const { return source->operands.size(); }
  const Operand& operand(size_t i) const;
  void expect(size_t least, size_t most);
  Slot destination(size_t i, int bytes);
  Slot source_slot(size_t i, const Type& type);
  Slot predicate(size_t i);                     // source; a negated one is not possible here
  Slot predicate_destination(size_t i);
  // Of any operand, wherever it stands.
  Slot value(const Operand& o, const Type& type);
  Slot target(const Operand& o, int bytes);
  Slot register_of(const Operand& o, int* bytes);  // source of any width; immediates get `*bytes`
  Slot target_of(const Operand& o, int* bytes);    // destination of any width
  // Address operand: the slot of its base, with the base's width, and the offset in `in.imm`.
  Slot address(const Operand& o, int* base_bytes);
  Slot address(size_t i, int wide);             // `wide` is set in `in.kind` where the base has 64 bits
  Slot wide_address(size_t i);                  // whose base must have them
  // Of an operand that is a register, or as many in braces as a vector has elements.
  const Operand& element(const Operand& o, size_t e, size_t elements) const;
  Slot constant(int bytes, uint64_t bits, Program::Relocation relocation = Program::none);
  Slot scratch();                               // sink of results that nobody wants
  Slot carry();                                 // predicate word: the carry flag of add.cc and its kind
  void list(Slot slot) { lists_.push_back(slot); }
  uint64_t immediate(size_t i) const;           // must be an integer constant
  const Symbol* symbol(const std::string& name) const;
  const Module& module() const { return module_; }
  const Statement& statement_of(const Operand& label) const { return function_.statements[static_cast<size_t>(label.index)]; }

  [[noreturn]] void fail(const std::string& what) const;

  const Statement* source = nullptr;
  Instr in;
  std::vector<Effects> effects;                 // of each statement

 private:
  uint64_t symbol_address(const Symbol& s, Program::Relocation* relocation) const;
  const Module& module_;
  const Function& function_;
  Program& program_;
  std::vector<std::string> modifiers_;
  std::vector<int32_t> lists_;
  std::set<int> used_, sources_, targets_;
  std::map<std::pair<std::pair<int, int>, uint64_t>, Slot> constants_;
  std::map<std::string, Slot> specials_;
  Slot scratch_ = -1, carry_ = -1;
};

using DecodeFunction = void (*)(Decoder&);
using OpcodeTable = std::unordered_map<std::string, DecodeFunction>;

void register_integer(OpcodeTable& table);
void register_float(OpcodeTable& table);
void register_convert(OpcodeTable& table);
void register_control(OpcodeTable& table);
void register_memory(OpcodeTable& table);
void register_warp(OpcodeTable& table);
void register_matrix(OpcodeTable& table);
void register_mma(OpcodeTable& table);
void register_sync(OpcodeTable& table);
void register_async(OpcodeTable& table);
void register_cluster(OpcodeTable& table);
void register_tensormap(OpcodeTable& table);
void register_wgmma(OpcodeTable& table);
void register_tcgen05(OpcodeTable& table);
void register_setmaxnreg(OpcodeTable& table);

}  // namespace ptxsim
