#include "decode.h"

#include <algorithm>
#include <climits>

namespace ptxsim {

const Type* find_type(const std::string& name) {
  static const std::unordered_map<std::string, Type> types = [] {
    std::unordered_map<std::string, Type> t;
    for (int bytes : {1, 2, 4, 8}) {
      std::string width = std::to_string(8 * bytes);
      t["b" + width] = {"b" + width, bytes, Type::bits};
      t["u" + width] = {"u" + width, bytes, Type::unsigned_int};
      t["s" + width] = {"s" + width, bytes, Type::signed_int};
    }
    t["b128"] = {"b128", 16, Type::bits};
    for (auto& f : {std::make_pair("f16", 2), {"bf16", 2}, {"f16x2", 4}, {"bf16x2", 4}, {"f32", 4}, {"f32x2", 8}, {"f64", 8}})
      t[f.first] = {f.first, f.second, Type::real};
    t["pred"] = {"pred", 0, Type::predicate};
    return t;
  }();
  auto it = types.find(name);
  return it == types.end() ? nullptr : &it->second;
}

namespace {
constexpr int kAlign = 64;
int32_t align_up(int64_t v, int64_t to) { return static_cast<int32_t>((v + to - 1) / to * to); }

const OpcodeTable& opcodes() {
  static const OpcodeTable table = [] {
    OpcodeTable t;
    register_integer(t);
    register_float(t);
    register_convert(t);
    register_control(t);
    register_memory(t);
    register_warp(t);
    register_matrix(t);
    register_mma(t);
    register_sync(t);
    register_async(t);
    register_cluster(t);
    register_tensormap(t);
    register_wgmma(t);
    register_tcgen05(t);
    register_setmaxnreg(t);
    return t;
  }();
  return table;
}
// `bar` stands for `barrier.cta` with `.aligned`.
bool is_aligned(const std::vector<std::string>& opcode) {
  auto has = [&](const char* part) { return std::find(opcode.begin(), opcode.end(), part) != opcode.end(); };
  return opcode[0] == "bar" ? !has("warp") : has("aligned");
}
}  // namespace

Decoder::Decoder(const Module& module, const Function& function, Program& program)
    : module_(module), function_(function), program_(program) {
  // Predicates first: one word each, lanes as bits.
  int64_t at = 0;
  program.register_slot.resize(function.registers.size());
  for (size_t i = 0; i < function.registers.size(); ++i)
    if (function.registers[i].bytes == 0) { program.register_slot[i] = static_cast<Slot>(at); at += 4; }
  at = align_up(at, kAlign);
  for (size_t i = 0; i < function.registers.size(); ++i)
    if (int bytes = function.registers[i].bytes) {
      program.register_slot[i] = static_cast<Slot>(at);
      at = align_up(at + int64_t{bytes} * kLanes, kAlign);
      if (at > INT32_MAX / 2) throw SimError("too many registers");
    }
  program.file_bytes = static_cast<uint32_t>(at);
}

void Decoder::fail(const std::string& what) const {
  throw SimError(format("PTX line %d: %s\n  %s", source->line, what.c_str(), source->text.c_str()));
}

bool Decoder::take(const char* modifier) {
  auto it = std::find(modifiers_.begin(), modifiers_.end(), modifier);
  if (it == modifiers_.end()) return false;
  modifiers_.erase(it);
  return true;
}

const char* Decoder::take_one(std::initializer_list<const char*> choices) {
  for (const char* c : choices)
    if (take(c)) return c;
  return "";
}

Type Decoder::optional_type(const char* fallback) {
  for (size_t i = 0; i < modifiers_.size(); ++i)
    if (const Type* t = find_type(modifiers_[i])) {
      modifiers_.erase(modifiers_.begin() + static_cast<long>(i));
      return *t;
    }
  return *find_type(fallback);
}

Type Decoder::type() {
  size_t before = modifiers_.size();
  Type t = optional_type("b32");
  if (modifiers_.size() == before) fail("no known type");
  return t;
}

void Decoder::drop(std::initializer_list<const char*> hints) {
  for (const char* h : hints) take(h);
}

const Operand& Decoder::operand(size_t i) const {
  if (i >= source->operands.size()) fail(format("operand %zu is missing", i + 1));
  return source->operands[i];
}

void Decoder::expect(size_t least, size_t most) {
  if (count() < least || count() > most) fail(format("%zu operands", count()));
}

Slot Decoder::constant(int bytes, uint64_t bits, Program::Relocation relocation) {
  if (bytes == 0) bits = bits != 0;
  else if (bytes < 8) bits &= (1ull << (8 * bytes)) - 1;
  auto key = std::make_pair(std::make_pair(bytes, static_cast<int>(relocation)), bits);
  auto it = constants_.find(key);
  if (it != constants_.end()) return it->second;
  Slot slot = static_cast<Slot>(program_.file_bytes);
  program_.file_bytes = static_cast<uint32_t>(align_up(int64_t{slot} + (bytes ? bytes * kLanes : 4), kAlign));
  program_.constants.push_back({slot, bytes, bits, relocation});
  return constants_[key] = slot;
}

Slot Decoder::scratch() {
  if (scratch_ < 0) {
    scratch_ = static_cast<Slot>(program_.file_bytes);
    program_.file_bytes += 16 * kLanes;
  }
  return scratch_;
}

Slot Decoder::carry() {
  if (carry_ < 0) {
    carry_ = static_cast<Slot>(program_.file_bytes);
    program_.file_bytes += kAlign;
  }
  return carry_;
}

const Symbol* Decoder::symbol(const std::string& name) const {
  for (const auto* list : {&function_.params, &function_.variables, &module_.variables})
    for (const Symbol& s : *list)
      if (s.name == name) return &s;
  fail("unknown name `" + name + "`");
}

uint64_t Decoder::symbol_address(const Symbol& s, Program::Relocation* relocation) const {
  *relocation = s.space == Symbol::param ? Program::param : s.space == Symbol::shared ? Program::shared : Program::none;
  return s.offset;
}

Slot Decoder::value(const Operand& o, const Type& type) {
  switch (o.kind) {
    case Operand::reg: {
      const Register& r = function_.registers[static_cast<size_t>(o.index)];
      if (r.bytes != type.bytes) fail(format("register %s has %d bytes, type .%s has %d", r.name.c_str(), r.bytes, type.name.c_str(), type.bytes));
      if (o.negated) fail("negated operand");
      used_.insert(o.index);
      sources_.insert(o.index);
      return program_.register_slot[static_cast<size_t>(o.index)];
    }
    case Operand::integer:
      if (type.cls == Type::real && type.bytes >= 4) fail("integer constant where a floating-point number is needed");
      return constant(type.bytes, o.value);
    case Operand::real: {
      double d = bit_cast<double>(o.value);
      if (type.bytes == 8) return constant(8, o.value);
      if (type.bytes == 4) return constant(4, bit_cast<uint32_t>(static_cast<float>(d)));
      fail("floating-point constant of a 16-bit type");
    }
    case Operand::symbol: {
      Program::Relocation relocation;
      uint64_t address = symbol_address(*symbol(o.name), &relocation) + o.value;
      if (type.bytes < 4) fail("address in a register that is too narrow");
      return constant(type.bytes, address, relocation);
    }
    case Operand::special: {
      if (type.bytes != 4) fail("special register in a register of another width");
      auto it = specials_.find(o.name);
      if (it != specials_.end()) return it->second;
      Slot slot = static_cast<Slot>(program_.file_bytes);
      program_.file_bytes = static_cast<uint32_t>(slot + 4 * kLanes);
      program_.specials.push_back({slot, o.name});
      return specials_[o.name] = slot;
    }
    default: fail("operand of a kind that is not possible here");
  }
}

Slot Decoder::target(const Operand& o, int bytes) {
  if (o.kind == Operand::sink) return scratch();
  if (o.kind != Operand::reg) fail("the destination is not a register");
  bool read = sources_.count(o.index);
  Slot slot = value(o, {"b" + std::to_string(8 * bytes), bytes, Type::bits});
  if (!read) sources_.erase(o.index);
  targets_.insert(o.index);
  return slot;
}

Slot Decoder::destination(size_t i, int bytes) { return target(operand(i), bytes); }
Slot Decoder::source_slot(size_t i, const Type& type) { return value(operand(i), type); }
Slot Decoder::predicate(size_t i) { return value(operand(i), *find_type("pred")); }
Slot Decoder::predicate_destination(size_t i) { return target(operand(i), 0); }

Slot Decoder::register_of(const Operand& o, int* bytes) {
  if (o.kind == Operand::sink) return scratch();
  if (o.kind == Operand::reg) *bytes = function_.registers[static_cast<size_t>(o.index)].bytes;
  Type t{"b" + std::to_string(8 * *bytes), *bytes, Type::bits};
  return value(o, t);
}

Slot Decoder::target_of(const Operand& o, int* bytes) {
  if (o.kind == Operand::reg) *bytes = function_.registers[static_cast<size_t>(o.index)].bytes;
  return target(o, *bytes);
}

Slot Decoder::address(const Operand& o, int* base_bytes) {
  if (o.kind != Operand::address) fail("expected an address in brackets");
  const Operand& base = o.items[0];
  in.imm = o.value;
  if (base.kind == Operand::reg) {
    *base_bytes = 8;
    return register_of(base, base_bytes);
  }
  if (base.kind == Operand::symbol) {
    // The parser moved the symbol's own offset into the address operand.
    *base_bytes = 8;
    return value(base, *find_type("b64"));
  }
  if (base.kind == Operand::integer) {
    *base_bytes = 8;
    return constant(8, 0);
  }
  fail("address of a kind that is not possible here");
}

const Operand& Decoder::element(const Operand& o, size_t e, size_t elements) const {
  bool vector = elements > 1;
  if (vector != (o.kind == Operand::vector) || (vector && o.items.size() != elements)) fail("number of registers and vector size differ");
  return vector ? o.items[e] : o;
}

Slot Decoder::address(size_t i, int wide) {
  int bytes = 0;
  Slot s = address(operand(i), &bytes);
  if (bytes == 8) in.kind |= wide;
  return s;
}

Slot Decoder::wide_address(size_t i) {
  int bytes = 0;
  Slot s = address(operand(i), &bytes);
  if (bytes != 8) fail("32-bit address of global memory");
  return s;
}

uint64_t Decoder::immediate(size_t i) const {
  if (operand(i).kind != Operand::integer) fail(format("operand %zu must be an integer constant", i + 1));
  return operand(i).value;
}

void Decoder::statement(const Statement& s) {
  source = &s;
  in = Instr();
  in.source = &s;
  lists_.clear();
  used_.clear();
  sources_.clear();
  targets_.clear();
  modifiers_.assign(s.opcode.begin() + 1, s.opcode.end());
  if (s.guard >= 0) {
    in.guard = program_.register_slot[static_cast<size_t>(s.guard)];
    in.guard_negated = s.guard_negated;
  }
  auto it = opcodes().find(s.opcode[0]);
  if (it == opcodes().end()) fail("unknown instruction `" + s.opcode[0] + "`");
  it->second(*this);
  if (!modifiers_.empty()) fail("unknown modifier `." + modifiers_[0] + "`");
  in.aligned = is_aligned(s.opcode);
  in.list = static_cast<int32_t>(program_.lists.size());
  program_.lists.insert(program_.lists.end(), lists_.begin(), lists_.end());
  in.uses = static_cast<int32_t>(program_.lists.size());
  in.use_count = static_cast<int32_t>(used_.size());
  program_.lists.insert(program_.lists.end(), used_.begin(), used_.end());
  program_.code.push_back(in);
  effects.push_back({{sources_.begin(), sources_.end()}, {targets_.begin(), targets_.end()}});
}

Program decode(const Module& module, const Function& function) {
  Program program;
  program.function = &function;
  Decoder decoder(module, function, program);
  for (const Statement& s : function.statements) decoder.statement(s);
  // Running off the end is a return.
  static const Statement end = [] { Statement s; s.opcode = {"ret"}; s.text = "end of the kernel"; return s; }();
  decoder.statement(end);
  for (const Statement& s : function.statements) program.moves_registers |= s.opcode[0] == "setmaxnreg";
  if (program.moves_registers) {
    std::vector<uint16_t> live = live_registers(function, decoder.effects);
    for (size_t i = 0; i < live.size(); ++i) program.code[i].live = live[i];
  }
  for (const Symbol& s : function.variables)
    if (s.space == Symbol::local) program.local_bytes = std::max(program.local_bytes, static_cast<uint32_t>(s.offset + s.bytes));
  program.dynamic_begin = static_cast<uint32_t>(module.dynamic_shared);
  watch_wgmma_registers(program);
  return program;
}

void place_variables(Module& module) {
  uint64_t shared = kSharedBegin;
  auto place = [](uint64_t& at, Symbol& s) {
    at = (at + s.align - 1) / s.align * s.align;
    s.offset = at;
    at += s.bytes;
  };
  // Extern arrays, which have no size, come after everything else: all of them start where dynamic memory starts.
  for (Symbol& s : module.variables) {
    if (s.space == Symbol::shared && s.bytes) place(shared, s);
    if (s.space == Symbol::global || s.space == Symbol::constant) {
      s.init.resize(s.bytes, 0);
      s.offset = reinterpret_cast<uint64_t>(s.init.data());
    }
  }
  for (Function& f : module.functions) {
    uint64_t local = 0, own = shared;
    for (Symbol& s : f.variables) {
      if (s.space == Symbol::local) place(local, s);
      if (s.space == Symbol::shared) place(own, s);
    }
    module.dynamic_shared = std::max(module.dynamic_shared, own);
  }
  module.dynamic_shared = std::max(module.dynamic_shared, shared);
  uint64_t align = 1;
  for (Symbol& s : module.variables)
    if (s.space == Symbol::shared && !s.bytes) align = std::max(align, s.align);
  module.dynamic_shared = (module.dynamic_shared + align - 1) / align * align;
  for (Symbol& s : module.variables)
    if (s.space == Symbol::shared && !s.bytes) s.offset = module.dynamic_shared;
}

}  // namespace ptxsim
