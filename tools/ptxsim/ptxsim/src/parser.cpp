#include "parser.h"

#include <algorithm>
#include <cctype>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace ptxsim {

std::string format(const char* fmt, ...) {
  va_list args, copy;
  va_start(args, fmt);
  va_copy(copy, args);
  std::string text(std::vsnprintf(nullptr, 0, fmt, copy), '\0');
  va_end(copy);
  std::vsnprintf(&text[0], text.size() + 1, fmt, args);
  va_end(args);
  return text;
}

const Function* Module::find(const std::string& name) const {
  for (const Function& f : functions)
    if (f.name == name) return &f;
  return nullptr;
}

namespace {

struct Token {
  enum Kind { word, number, text, punct, end };
  Kind kind;
  std::string value;
  int line;
  size_t begin, stop;  // positions in the text
};

bool word_start(char c) { return std::isalpha(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' || c == '.'; }
bool word_char(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$'; }

std::vector<Token> tokenize(const std::string& s) {
  std::vector<Token> tokens;
  int line = 1;
  size_t i = 0;
  while (i < s.size()) {
    char c = s[i];
    if (c == '\n') { ++line; ++i; continue; }
    if (std::isspace(static_cast<unsigned char>(c))) { ++i; continue; }
    if (s.compare(i, 2, "//") == 0) { while (i < s.size() && s[i] != '\n') ++i; continue; }
    if (s.compare(i, 2, "/*") == 0) {
      size_t close = s.find("*/", i + 2);
      if (close == std::string::npos) throw SimError(format("PTX line %d: comment is not closed", line));
      for (; i < close + 2; ++i) line += s[i] == '\n';
      continue;
    }
    Token t{Token::punct, "", line, i, i};
    size_t j = i;
    if (c == '"') {
      size_t close = s.find('"', i + 1);
      if (close == std::string::npos) throw SimError(format("PTX line %d: string is not closed", line));
      t.kind = Token::text;
      j = close + 1;
    } else if (std::isdigit(static_cast<unsigned char>(c))) {
      t.kind = Token::number;
      while (j < s.size()) {
        if (std::isalnum(static_cast<unsigned char>(s[j])) || s[j] == '.') { ++j; continue; }
        bool exponent = (s[j] == '+' || s[j] == '-') && (s[j - 1] == 'e' || s[j - 1] == 'E') && s.compare(i, 2, "0x") != 0;
        if (!exponent) break;
        ++j;
      }
    } else if (word_start(c)) {
      // A word takes dots and `::` along, so an opcode with its modifiers is one token.
      t.kind = Token::word;
      ++j;
      while (j < s.size()) {
        if (word_char(s[j])) { ++j; continue; }
        if (s[j] == '.' && j + 1 < s.size() && word_char(s[j + 1])) { ++j; continue; }
        if (s.compare(j, 2, "::") == 0) { j += 2; continue; }
        break;
      }
    } else {
      ++j;
    }
    t.value = s.substr(i, j - i);
    t.stop = j;
    tokens.push_back(t);
    i = j;
  }
  tokens.push_back({Token::end, "", line, s.size(), s.size()});
  return tokens;
}

int type_bytes(const std::string& type) {  // ".b32" -> 4; predicates are 0; unknown: -1
  static const std::map<std::string, int> sizes = {
      {".pred", 0}, {".b8", 1}, {".u8", 1}, {".s8", 1}, {".b16", 2}, {".u16", 2}, {".s16", 2}, {".f16", 2}, {".bf16", 2},
      {".b32", 4}, {".u32", 4}, {".s32", 4}, {".f32", 4}, {".f16x2", 4}, {".bf16x2", 4}, {".b64", 8}, {".u64", 8},
      {".s64", 8}, {".f64", 8}, {".b128", 16}};
  auto it = sizes.find(type);
  return it == sizes.end() ? -1 : it->second;
}

class Parser {
 public:
  explicit Parser(const std::string& source) : source_(source), tokens_(tokenize(source)) {}

  Module run() {
    while (peek().kind != Token::end) {
      const std::string& word = peek().value;
      if (word == ".version" || word == ".address_size") { next(); next(); }
      else if (word == ".target") { next(); module_.target = next().value; while (accept(",")) next(); }
      else if (word == ".file" || word == ".section") fail("debug information: compile without -lineinfo");
      else if (word == ".visible" || word == ".extern" || word == ".weak" || word == ".common") next();
      else if (word == ".entry") function();
      else if (word == ".func") device_function();
      else if (word == ".shared" || word == ".global" || word == ".const") module_.variables.push_back(variable());
      else fail("unexpected `" + word + "` at module scope");
    }
    return std::move(module_);
  }

 private:
  const Token& peek(size_t ahead = 0) const { return tokens_[std::min(at_ + ahead, tokens_.size() - 1)]; }
  const Token& next() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_]; }
  bool accept(const char* value) { if (peek().value == value && peek().kind != Token::text) { next(); return true; } return false; }
  void expect(const char* value) { if (!accept(value)) fail(format("expected `%s`, found `%s`", value, peek().value.c_str())); }
  [[noreturn]] void fail(const std::string& what) const { throw SimError(format("PTX line %d: %s", peek().line, what.c_str())); }

  int64_t integer() {
    bool minus = accept("-");
    const Token& t = next();
    if (t.kind != Token::number) throw SimError(format("PTX line %d: expected an integer, found `%s`", t.line, t.value.c_str()));
    uint64_t v = std::strtoull(t.value.c_str(), nullptr, 0);
    if (t.value.size() > 2 && t.value[1] == 'b') v = std::strtoull(t.value.c_str() + 2, nullptr, 2);
    return minus ? -static_cast<int64_t>(v) : static_cast<int64_t>(v);
  }

  // `.shared .align 16 .b8 name[bytes] = {..};` and the same for .local, .global, .const.
  Symbol variable() {
    Symbol s;
    std::string space = next().value;
    s.space = space == ".shared" ? Symbol::shared : space == ".local" || space == ".param" ? Symbol::local : space == ".global" ? Symbol::global : Symbol::constant;
    int element = -1;
    while (peek().value[0] == '.') {
      std::string word = next().value;
      if (word == ".align") s.align = static_cast<uint64_t>(integer());
      else if ((element = type_bytes(word)) < 0) fail("unknown variable attribute `" + word + "`");
    }
    if (element <= 0) fail("variable without a type");
    s.align = std::max<uint64_t>(s.align, static_cast<uint64_t>(element));
    s.name = next().value;
    uint64_t count = 1;
    while (accept("[")) {
      count *= peek().value == "]" ? 0 : static_cast<uint64_t>(integer());
      expect("]");
    }
    s.bytes = count * static_cast<uint64_t>(element);
    if (accept("=")) {
      auto put = [&] {
        uint64_t v = static_cast<uint64_t>(integer());
        for (int b = 0; b < element; ++b) s.init.push_back(static_cast<uint8_t>(v >> (8 * b)));
      };
      if (accept("{")) { do put(); while (accept(",")); expect("}"); } else put();
    }
    expect(";");
    return s;
  }

  void function() {
    fn_ = Function();
    fn_.line = next().line;
    fn_.name = next().value;
    if (accept("(")) {
      while (!accept(")")) {
        Symbol p = parameter();
        fn_.param_bytes = (fn_.param_bytes + p.align - 1) / p.align * p.align;
        p.offset = fn_.param_bytes;
        fn_.param_bytes += p.bytes;
        fn_.params.push_back(p);
        accept(",");
      }
    }
    while (peek().value != "{") {
      std::string word = next().value;
      uint32_t* dims = word == ".reqntid" ? fn_.required_threads : word == ".maxntid" ? fn_.max_threads
                       : word == ".reqnctapercluster" ? fn_.required_cluster : nullptr;
      if (dims) {
        dims[0] = dims[1] = dims[2] = 1;
        for (int i = 0; i < 3; ++i) { dims[i] = static_cast<uint32_t>(integer()); if (!accept(",")) break; }
      } else if (word == ".maxnreg") {
        fn_.max_registers = static_cast<uint32_t>(integer());
      } else if (word == ".minnctapersm") {
        fn_.min_ctas = std::max<uint32_t>(1, static_cast<uint32_t>(integer()));
      } else if (word == ".maxclusterrank") {
        integer();
      } else if (word != ".explicitcluster" && word != ".blocksareclusters") {
        fail("unknown performance directive `" + word + "`");
      }
    }
    scope();
    module_.functions.push_back(std::move(fn_));
  }

  // `.func (returns) name (arguments) { ... }`; without a body it only declares, and is forgotten.
  void device_function() {
    fn_ = Function();
    fn_.line = next().line;
    scopes_.emplace_back();
    auto formals = [&](std::vector<Operand>& list) {
      while (!accept(")")) { list.push_back(formal()); accept(","); }
    };
    if (accept("(")) formals(fn_.returns);
    fn_.name = next().value;
    if (accept("(")) formals(fn_.arguments);
    accept(".noreturn");
    if (accept(";")) {
      scopes_.pop_back();
      return;
    }
    scope();
    close_scope();
    module_.device_functions.push_back(std::move(fn_));
  }

  Operand formal() {
    Operand o;
    if (accept(".reg")) {
      int bytes = type_bytes(next().value);
      if (bytes < 0) fail("unknown register type");
      o.kind = Operand::reg;
      o.index = declare(next().value, bytes);
      return o;
    }
    Symbol p = parameter();
    p.space = Symbol::local;
    o.kind = Operand::symbol;
    o.name = declare(std::move(p));
    return o;
  }

  Symbol parameter() {
    expect(".param");
    Symbol p;
    p.space = Symbol::param;
    int element = -1;
    while (peek().value[0] == '.') {
      std::string word = next().value;
      if (word == ".align") p.align = static_cast<uint64_t>(integer());
      else if (word == ".ptr") {
        while (peek().value[0] == '.') if (next().value == ".align") integer();
      } else if ((element = type_bytes(word)) <= 0) fail("unknown parameter attribute `" + word + "`");
    }
    p.name = next().value;
    p.bytes = static_cast<uint64_t>(element);
    p.align = std::max<uint64_t>(p.align, p.bytes);
    if (accept("[")) { p.bytes *= static_cast<uint64_t>(integer()); expect("]"); }
    return p;
  }

  struct Pending { size_t statement, operand; std::string name; int line; };
  struct Scope {
    std::map<std::string, int> registers;
    std::map<std::string, int> labels;
    std::map<std::string, std::string> variables;  // name there to name in the function, where it stands once
    std::vector<Pending> pending;
  };

  void scope() {
    expect("{");
    scopes_.emplace_back();
    while (!accept("}")) {
      const Token& t = peek();
      if (t.kind == Token::end) fail("`}` is missing");
      if (t.value == "{") scope();
      else if (t.value == ".reg") registers();
      else if (t.value == ".shared" || t.value == ".local" || t.value == ".param") declare(variable());
      else if (t.value == ".callprototype" || t.value == ".calltargets") { while (!accept(";")) next(); }  // of indirect calls, which are refused
      else if (t.value == ".pragma") { next(); next(); expect(";"); }
      else if (t.value == ".loc") fail("debug information: compile without -lineinfo");
      else if (peek(1).value == ":" && t.kind == Token::word) {
        scopes_.back().labels[t.value] = static_cast<int>(fn_.statements.size());
        next(); next();
      } else if (t.value == ";") next();
      else statement();
    }
    close_scope();
  }

  void close_scope() {
    Scope closed = std::move(scopes_.back());
    scopes_.pop_back();
    for (Pending& p : closed.pending) {
      auto it = closed.labels.find(p.name);
      if (it != closed.labels.end()) fn_.statements[p.statement].operands[p.operand].index = it->second;
      else if (!scopes_.empty()) scopes_.back().pending.push_back(p);
      else throw SimError(format("PTX line %d: unknown name `%s`", p.line, p.name.c_str()));
    }
  }

  void registers() {
    next();
    std::string type = next().value;
    int bytes = type_bytes(type);
    if (bytes < 0) fail("unknown register type `" + type + "`");
    do {
      std::string name = next().value;
      if (accept("<")) {
        int64_t count = integer();
        expect(">");
        for (int64_t i = 0; i < count; ++i) declare(name + std::to_string(i), bytes);
      } else {
        declare(name, bytes);
      }
    } while (accept(","));
    expect(";");
  }

  int declare(const std::string& name, int bytes) {
    int number = static_cast<int>(fn_.registers.size());
    scopes_.back().registers[name] = number;
    fn_.registers.push_back({name, bytes});
    return number;
  }

  // Scopes that follow one another may use the same name.
  const std::string& declare(Symbol s) {
    std::string& unique = scopes_.back().variables[s.name];
    unique = s.name;
    while (find_symbol(unique)) unique += "'";
    s.name = unique;
    fn_.variables.push_back(std::move(s));
    return unique;
  }

  int find_register(const std::string& name) const {
    for (size_t i = scopes_.size(); i-- > 0;) {
      auto it = scopes_[i].registers.find(name);
      if (it != scopes_[i].registers.end()) return it->second;
    }
    return -1;
  }

  const Symbol* find_symbol(std::string name) const {
    for (size_t i = scopes_.size(); i-- > 0;) {
      auto it = scopes_[i].variables.find(name);
      if (it == scopes_[i].variables.end()) continue;
      name = it->second;
      break;
    }
    for (const auto* list : {&fn_.params, &fn_.variables, static_cast<const std::vector<Symbol>*>(&module_.variables)})
      for (const Symbol& s : *list)
        if (s.name == name) return &s;
    return nullptr;
  }

  void statement() {
    Statement st;
    st.line = peek().line;
    size_t begin = peek().begin;
    if (accept("@")) {
      st.guard_negated = accept("!");
      st.guard = find_register(next().value);
      if (st.guard < 0) fail("guard is not a register");
    }
    const Token& op = next();
    if (op.kind != Token::word) throw SimError(format("PTX line %d: expected an instruction, found `%s`", op.line, op.value.c_str()));
    if (op.value == ".branchtargets") st.opcode.push_back(op.value);
    else split(op.value, st.opcode);
    while (peek().value[0] == '.' && peek().kind == Token::word && peek().begin == tokens_[at_ - 1].stop) split(next().value.substr(1), st.opcode);
    if (st.opcode[0] == "call") {
      call_operands(st.operands);
      expect(";");
    } else if (!accept(";")) {
      do {
        st.operands.push_back(operand());
        const Operand& o = st.operands.back();
        if (o.kind == Operand::label) scopes_.back().pending.push_back({fn_.statements.size(), st.operands.size() - 1, o.name, st.line});
      } while (accept(","));
      expect(";");
    }
    st.text = source_.substr(begin, tokens_[at_ - 1].stop - begin);
    if (st.text.size() > 240) st.text = st.text.substr(0, 240) + "...";
    // Parameters of device functions, and of calls, live in local memory.
    for (const Operand& o : st.operands)
      if (o.kind == Operand::address && o.items[0].kind == Operand::symbol && find_symbol(o.items[0].name)->space == Symbol::local)
        for (std::string& m : st.opcode)
          if (m == "param" || m == "param::func") m = "local";
    fn_.statements.push_back(std::move(st));
  }

  // `(returns), function, (arguments), prototype`: always a vector, the function and a vector, and a fourth if there is one.
  void call_operands(std::vector<Operand>& operands) {
    auto list = [&] {
      Operand o;
      o.kind = Operand::vector;
      if (!accept("(") || accept(")")) return o;
      do o.items.push_back(operand()); while (accept(","));
      expect(")");
      return o;
    };
    operands.push_back(list());
    accept(",");
    Operand function;
    function.kind = Operand::symbol;
    function.name = next().value;
    if ((function.index = find_register(function.name)) >= 0) function.kind = Operand::reg;
    operands.push_back(function);
    bool more = accept(",");
    operands.push_back(list());
    if ((more && accept(",")) || (more && peek().value != ";")) {
      function.name = next().value;
      operands.push_back(function);
    }
  }

  // Splits at single dots: `a.b::c.d` -> a, b::c, d.
  static void split(const std::string& word, std::vector<std::string>& parts) {
    size_t start = 0;
    for (size_t i = 0; i <= word.size(); ++i) {
      if (i < word.size() && word[i] != '.') continue;
      parts.push_back(word.substr(start, i - start));
      start = i + 1;
    }
  }

  Operand operand() {
    Operand o;
    if (accept("{")) {
      o.kind = Operand::vector;
      if (!accept("}")) {
        do o.items.push_back(operand()); while (accept(","));
        expect("}");
      }
      return o;
    }
    if (accept("[")) {
      o.kind = Operand::address;
      o.items.push_back(operand());
      Operand& base = o.items[0];
      if (base.kind == Operand::integer || base.kind == Operand::symbol) std::swap(o.value, base.value);
      if (accept("+")) o.value += static_cast<uint64_t>(integer());
      else if (peek().value == "-") o.value += static_cast<uint64_t>(integer());
      while (accept(",")) o.items.push_back(operand());
      expect("]");
      return o;
    }
    if (accept("!")) {
      o = operand();
      o.negated = true;
      return o;
    }
    if (peek().kind == Token::number || peek().value == "-") return number();
    if (peek().kind != Token::word) fail("expected an operand, found `" + peek().value + "`");
    std::string name = next().value;
    if (name == "_") {
      o.kind = Operand::sink;
    } else if ((o.index = find_register(name)) >= 0) {
      o.kind = Operand::reg;
    } else if (const Symbol* s = find_symbol(name)) {
      o.kind = Operand::symbol;
      o.name = s->name;
      if (accept("+")) o.value = static_cast<uint64_t>(integer());
    } else if (name[0] == '%') {
      o.kind = Operand::special;
      o.name = name;
    } else if (name == "WARP_SZ") {
      o.value = kLanes;
    } else {
      o.kind = Operand::label;
      o.name = name;
    }
    if (accept("|")) {
      Operand other = operand();
      if (other.kind == Operand::sink) return o;
      if (other.kind != Operand::reg) fail("expected a register after `|`");
      o.second = other.index;
    }
    return o;
  }

  Operand number() {
    Operand o;
    bool minus = peek().value == "-";
    const std::string& text = peek(minus).value;
    if (text.size() == 10 && (text.compare(0, 2, "0f") == 0 || text.compare(0, 2, "0F") == 0)) {
      o.kind = Operand::real;
      o.single = true;
      float f = bit_cast<float>(static_cast<uint32_t>(std::strtoul(text.c_str() + 2, nullptr, 16)));
      // Kept as bits of a float64 so that one operand kind serves both; a float32 survives the trip exactly.
      o.value = bit_cast<uint64_t>(static_cast<double>(minus ? -f : f));
    } else if (text.size() == 18 && (text.compare(0, 2, "0d") == 0 || text.compare(0, 2, "0D") == 0)) {
      o.kind = Operand::real;
      double d = bit_cast<double>(static_cast<uint64_t>(std::strtoull(text.c_str() + 2, nullptr, 16)));
      o.value = bit_cast<uint64_t>(minus ? -d : d);
    } else if (text.find('.') != std::string::npos) {
      o.kind = Operand::real;
      double d = std::strtod(text.c_str(), nullptr);
      o.value = bit_cast<uint64_t>(minus ? -d : d);
    } else {
      o.value = static_cast<uint64_t>(integer());
      return o;
    }
    if (minus) next();
    next();
    return o;
  }

  const std::string& source_;
  std::vector<Token> tokens_;
  size_t at_ = 0;
  Module module_;
  Function fn_;
  std::vector<Scope> scopes_;
};

}  // namespace

Module parse(const std::string& text) {
  Module module = Parser(text).run();
  inline_calls(module);
  return module;
}

}  // namespace ptxsim
