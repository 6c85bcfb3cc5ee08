// Calls of device functions: a copy of the body, with registers and variables of its own, takes the call's place.
#include <algorithm>
#include <set>

#include "parser.h"

namespace ptxsim {
namespace {

class Inliner {
 public:
  explicit Inliner(Module& module) : module_(module) {}

  void expand(Function& f) {
    if (done_.count(&f) || std::none_of(f.statements.begin(), f.statements.end(), is_call)) return;
    open_.insert(&f);
    std::vector<Statement> before;
    before.swap(f.statements);
    std::vector<int> place;           // of each statement of `before`
    std::vector<size_t> own;          // `before` among the new statements
    for (Statement& s : before) {
      place.push_back(size(f));
      Function* callee = is_call(s) ? callee_of(s) : nullptr;
      if (callee) {
        expand(*callee);
        insert(f, s, *callee);
      } else {
        if (is_call(s)) load_arguments(f, s);
        own.push_back(f.statements.size());
        f.statements.push_back(s);
        if (is_call(s)) clear_returns(f, s);
      }
    }
    place.push_back(size(f));
    for (size_t i : own)
      for (Operand& o : f.statements[i].operands)
        if (o.kind == Operand::label) o.index = place[static_cast<size_t>(o.index)];
    open_.erase(&f);
    done_.insert(&f);
  }

 private:
  static bool is_call(const Statement& s) { return s.opcode[0] == "call"; }
  static int size(const Function& f) { return static_cast<int>(f.statements.size()); }

  // The function whose body takes the call's place; nullptr: the call stays.
  Function* callee_of(const Statement& call) {
    if (call.operands[1].kind != Operand::symbol || call.operands.size() > 3) return nullptr;
    for (Function& f : module_.device_functions)
      if (f.name == call.operands[1].name) return open_.count(&f) ? nullptr : &f;
    return nullptr;
  }

  static std::string bits(uint64_t bytes) { return bytes ? "b" + std::to_string(8 * bytes) : "pred"; }

  static Operand number_of(int reg) {
    Operand o;
    o.kind = Operand::reg;
    o.index = reg;
    return o;
  }

  // A statement in the call's place: the reports about it show the call.
  static void add(Function& f, const Statement& call, std::vector<std::string> opcode, std::vector<Operand> operands) {
    Statement s;
    s.line = call.line;
    s.text = call.text;
    s.guard = call.guard;
    s.guard_negated = call.guard_negated;
    s.opcode = std::move(opcode);
    s.operands = std::move(operands);
    f.statements.push_back(std::move(s));
  }

  [[noreturn]] static void fail(const Statement& call, const char* what) {
    throw SimError(format("PTX line %d: %s\n  %s", call.line, what, call.text.c_str()));
  }

  static uint64_t bytes_of(const Function& f, const Statement& call, const Operand& o) {
    if (o.kind == Operand::reg) return static_cast<uint64_t>(f.registers[static_cast<size_t>(o.index)].bytes);
    for (const Symbol& s : f.variables)
      if (s.name == o.name) return s.bytes;
    fail(call, "a parameter that is neither a register nor a .param variable");
  }

  // to = from, where each is a register or a variable in local memory, or `from` a number.
  static void assign(Function& f, const Statement& call, const Operand& to, const Operand& from) {
    bool store = to.kind == Operand::symbol, load = from.kind == Operand::symbol;
    uint64_t bytes = bytes_of(f, call, to);
    Operand place;
    place.kind = Operand::address;
    place.items.push_back(store ? to : from);
    if (store) add(f, call, {"st", "local", bits(bytes)}, {place, from});
    else if (load) add(f, call, {"ld", "local", bits(bytes)}, {to, place});
    else add(f, call, {"mov", bits(bytes)}, {to, from});
  }

  // What has no body here takes its arguments in registers.
  static void load_arguments(Function& f, Statement& call) {
    for (Operand& o : call.operands[2].items) {
      if (o.kind != Operand::symbol) continue;
      Operand loaded = number_of(static_cast<int>(f.registers.size()));
      f.registers.push_back({o.name, static_cast<int>(bytes_of(f, call, o))});
      assign(f, call, loaded, o);
      o = loaded;
    }
  }

  // And returns zeros.
  static void clear_returns(Function& f, const Statement& call) {
    for (const Operand& o : call.operands[0].items) assign(f, call, o, Operand());
  }

  void insert(Function& f, const Statement& call, const Function& callee) {
    const std::vector<Operand>&returns = call.operands[0].items, &arguments = call.operands[2].items;
    if (returns.size() != callee.returns.size() || arguments.size() != callee.arguments.size()) fail(call, "the function takes another number of parameters");
    int first_register = static_cast<int>(f.registers.size());
    f.registers.insert(f.registers.end(), callee.registers.begin(), callee.registers.end());
    // A formal parameter in memory is the variable that is passed, as nobody may write to an argument.
    std::map<std::string, std::string> names;
    auto alias = [&](const std::vector<Operand>& formals, const std::vector<Operand>& actuals) {
      for (size_t i = 0; i < formals.size(); ++i)
        if (formals[i].kind == Operand::symbol && actuals[i].kind == Operand::symbol) {
          if (bytes_of(callee, call, formals[i]) > bytes_of(f, call, actuals[i])) fail(call, "a parameter is smaller than the function's");
          names[formals[i].name] = actuals[i].name;
        }
    };
    alias(callee.returns, returns);
    alias(callee.arguments, arguments);
    std::string site = callee.name + "#" + std::to_string(sites_++) + ".";
    for (Symbol s : callee.variables) {
      if (names.count(s.name)) continue;
      // Shared memory is there once, whoever calls.
      std::string name = (s.space == Symbol::shared ? callee.name + "." : site) + s.name;
      names[s.name] = name;
      s.name = name;
      bool there = std::any_of(f.variables.begin(), f.variables.end(), [&](const Symbol& v) { return v.name == name; });
      if (!there) f.variables.push_back(std::move(s));
    }
    auto inside = [&](Operand o) { return renamed(std::move(o), first_register, 0, names); };
    int skip = -1;
    if (call.guard >= 0) {
      skip = size(f);
      add(f, call, {"bra"}, {Operand()});
      f.statements.back().guard_negated = !call.guard_negated;
    }
    Statement open = call;  // from here on only lanes run that call
    open.guard = -1;
    for (size_t i = 0; i < arguments.size(); ++i) {
      Operand formal = inside(callee.arguments[i]);
      if (formal.kind == Operand::reg || arguments[i].kind != Operand::symbol) assign(f, open, formal, arguments[i]);
    }
    int begin = size(f), end = begin + size(callee);
    for (Statement s : callee.statements) {
      if (s.guard >= 0) s.guard += first_register;
      if (s.opcode[0] == "ret") {
        s.opcode = {"bra"};
        s.operands = {label(end)};
      } else {
        for (Operand& o : s.operands) o = renamed(std::move(o), first_register, begin, names);
      }
      f.statements.push_back(std::move(s));
    }
    for (size_t i = 0; i < returns.size(); ++i) {
      Operand formal = inside(callee.returns[i]);
      if (formal.kind == Operand::reg || returns[i].kind != Operand::symbol) assign(f, open, returns[i], formal);
    }
    if (skip >= 0) f.statements[static_cast<size_t>(skip)].operands[0] = label(size(f));
  }

  static Operand label(int statement) {
    Operand o;
    o.kind = Operand::label;
    o.index = statement;
    return o;
  }

  static Operand renamed(Operand o, int first_register, int first_statement, const std::map<std::string, std::string>& names) {
    if (o.kind == Operand::reg) {
      o.index += first_register;
      if (o.second >= 0) o.second += first_register;
    }
    if (o.kind == Operand::label) o.index += first_statement;
    if (o.kind == Operand::symbol) {
      auto it = names.find(o.name);
      if (it != names.end()) o.name = it->second;
    }
    for (Operand& item : o.items) item = renamed(std::move(item), first_register, first_statement, names);
    return o;
  }

  Module& module_;
  std::set<const Function*> open_, done_;
  int sites_ = 0;
};

}  // namespace

void inline_calls(Module& module) {
  Inliner inliner(module);
  for (Function& f : module.functions) inliner.expand(f);
}

}  // namespace ptxsim
