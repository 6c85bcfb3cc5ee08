// The execution core: decoded programs, warps, CTAs, clusters and the seeded scheduler.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "memory.h"
#include "parser.h"
#include "registers.h"

namespace ptxsim {

struct Warp;
struct Cta;
struct Cluster;
struct Machine;
struct Instr;

// Executes one instruction for the lanes of `mask`. `warp.cur.pc` already points at the next instruction.
using Handler = void (*)(Warp& warp, const Instr& in, uint32_t mask);

// Where an operand lives: the byte offset of its 32 lanes (or of its predicate word) in the warp's register file.
// Immediates and special registers are registers that are filled when the warp starts.
using Slot = int32_t;

struct Instr {
  Handler fn = nullptr;
  Slot guard = -1;
  bool guard_negated = false;
  uint16_t live = 0;                                 // 32-bit registers that hold values before it; 0: nobody asks
  bool aligned = false;                              // all lanes of the warp must execute it together
  std::array<Slot, 6> a{{-1, -1, -1, -1, -1, -1}};  // operands, destination first
  int32_t list = 0;                                  // further operands: Program::lists[list ...]
  int32_t n = 0;                                     // how many of them, or an element count
  int32_t kind = 0;                                  // meaning belongs to the handler
  int32_t size = 0;                                  // bytes of an element
  uint64_t imm = 0;
  int32_t uses = 0, use_count = 0;                   // registers touched: Program::lists[uses ...], register numbers
  const Statement* source = nullptr;
};

struct Program {
  const Function* function = nullptr;
  std::vector<Instr> code;
  std::vector<int32_t> lists;
  std::vector<Slot> register_slot;  // of each register
  uint32_t file_bytes = 0;
  enum Relocation { none, param, shared };  // added when a warp starts: the parameters' address, the CTA's rank
  struct Constant { Slot slot; int bytes; uint64_t bits; Relocation relocation; };
  std::vector<Constant> constants;
  struct Special { Slot slot; std::string name; };
  std::vector<Special> specials;
  uint32_t dynamic_begin = 0;   // where dynamic shared memory starts
  uint32_t local_bytes = 0;     // of one thread
  bool moves_registers = false; // with setmaxnreg
};

constexpr uint32_t kSharedBegin = 1024;           // the system keeps the first KiB of a CTA's shared memory
constexpr uint32_t kSharedEnd = 228 * 1024;       // sm_90, sm_100: 227 KiB are a CTA's own
constexpr uint64_t kSharedWindow = 1ull << 56;    // generic addresses
constexpr uint64_t kLocalWindow = 1ull << 57;
constexpr int kRankShift = 24;                    // a shared::cluster address is rank << 24 | address within the CTA
constexpr uint32_t kRankMask = (1u << kRankShift) - 1;

// Lanes of a warp that are at the same instruction.
struct Fragment {
  enum State { ready, converge, parked };  // converge: waits for the lanes of `need`; parked: a try_wait that failed
  int pc = 0;
  uint32_t mask = 0;
  State state = ready;
  uint32_t need = 0;
  bool polled = false;    // nothing else can run: let the failed wait return
  int failed_at = -1;     // the try_wait that failed last, to tell a spin loop from a single look
};

// Groups of asynchronous operations of a warp: committed in order, waited for in order. Marks count commits (and
// whatever else has to tell earlier operations from later ones); they are the clock of the group's agent.
struct Groups {
  uint32_t agent = 0;           // 0: none yet (agent 0 is always a warp)
  uint32_t mark = 1;            // of operations issued now
  uint32_t last = 0;            // of the latest operation
  std::vector<uint32_t> committed;
  std::map<uint32_t, int> outstanding;  // by mark: operations that have not taken effect
  void commit() { committed.push_back(mark++); }
  // The mark that a wait for all but the `pending` latest groups covers; 0: none.
  uint32_t covered(uint64_t pending) const { return committed.size() > pending ? committed[committed.size() - 1 - pending] : 0; }
  bool done(uint32_t up_to) const { return outstanding.empty() || outstanding.begin()->first > up_to; }
  void finished(uint32_t of) { if (--outstanding[of] == 0) outstanding.erase(of); }
};

struct Mbarrier {
  uint32_t expected = 0;
  int64_t pending = 0;
  int64_t transactions = 0;
  uint32_t phase = 0;
  uint32_t agent = 0;           // channel of the asynchronous operations that complete here
  uint32_t initialized_by = 0;  // epoch
  Clock arriving, completed;
  std::vector<Warp*> waiters;
};

struct NamedBarrier {
  uint32_t arrived = 0;         // threads
  uint32_t expected = 0;        // 0: every warp of the CTA that has not exited
  bool in_use = false;
  uint32_t votes = 0;           // barrier.red: threads whose predicate was true
  Clock clock;
  std::vector<Warp*> waiters;
};

constexpr uint8_t kOwnedByWgmma = 1, kOwnedByLoad = 2;  // registers of operations that are not complete

struct Warpgroup;
struct TensorMemory;

// Operations of a warp that take effect one after the other: tcgen05.mma, .cp and .commit; tcgen05.ld; tcgen05.st.
struct Pipeline {
  uint32_t agent = 0;  // 0: none yet
  uint32_t mark = 1;   // of operations issued now
  struct Operation { int at; std::function<void()> effect; };  // at: its instruction
  std::deque<Operation> operations;
  bool scheduled = false;
  bool empty() const { return operations.empty() && !scheduled; }
};

struct Warp {
  Machine* machine = nullptr;
  Cta* cta = nullptr;
  const Program* program = nullptr;
  int index = 0;                // within the CTA
  uint32_t agent = 0;
  std::vector<uint8_t> file;
  std::vector<uint8_t> local;   // 32 lanes, one after the other

  enum Status { runnable, waiting, done };
  Status status = runnable;
  bool queued = false;
  std::string (*describe_wait)(const Warp&) = nullptr;  // what a waiting warp waits for
  uint64_t wait_argument = 0;

  Fragment cur;
  std::vector<Fragment> others;
  uint32_t registers = UINT32_MAX;  // of each thread, that the warp owns now
  size_t register_changes = 0;      // how many setmaxnreg it has executed
  int limit = 0;                // look at the other fragments when the program counter gets here
  uint32_t live = 0;            // lanes that have not exited
  int at = 0;                   // instruction being executed
  int lane = -1;                // lane of the access being checked, for reports
  uint64_t address = 0;

  Clock clock;
  Clock fence_release, fence_acquire;  // what relaxed accesses to shared memory publish, and what the next fence takes in
  Groups bulk, cp_async, wgmma;
  Pipeline tensor_core, tensor_load, tensor_store;
  // cp.async.mbarrier.arrive: done once every copy up to the mark has taken effect.
  std::vector<std::pair<uint32_t, std::function<void()>>> after_copies;
  bool wgmma_fenced = false;
  std::vector<uint8_t> in_flight;  // by register number: kOwnedByWgmma, kOwnedByLoad or 0
  std::vector<std::pair<uint32_t, int32_t>> owned;  // by wgmma: mark of the operation, register number
  std::vector<int32_t> loading;                     // by tcgen05.ld
  int in_flight_count = 0;

  template <class T> T* reg(Slot slot) { return reinterpret_cast<T*>(file.data() + slot); }
  uint32_t& pred(Slot slot) { return *reinterpret_cast<uint32_t*>(file.data() + slot); }
  // Writes the lanes of `mask`.
  template <class T> void put(Slot slot, const T* values, uint32_t mask) {
    T* d = reg<T>(slot);
    if (mask == kFullMask) { std::memcpy(d, values, sizeof(T) * kLanes); return; }
    for (int l = 0; l < kLanes; ++l) d[l] = mask >> l & 1 ? values[l] : d[l];
  }
  void put_pred(Slot slot, uint32_t bits, uint32_t mask) { uint32_t& p = pred(slot); p = (p & ~mask) | (bits & mask); }

  void tick();                          // a new clock value: what follows is not covered by what was released
  Actor actor() { return {epoch(agent, clock.seen[agent]), &clock, false, false, line()}; }
  int line() const { return program->code[static_cast<size_t>(at)].source->line; }

  void jump(int pc) { cur.pc = pc; if (!others.empty()) limit = 0; }
  void split(uint32_t taken, int target);  // lanes of `taken` go to `target`, the others on
  void exit(uint32_t mask);
  void select();                        // choose the fragment to run
  bool converged(uint32_t need);        // whether all live lanes of `need` are here; else the fragment waits for them
  // The current fragment stops and repeats its instruction when woken; other lanes of the warp may go on.
  void park(std::string (*describe)(const Warp&), uint64_t argument);
  void wait(std::string (*describe)(const Warp&), uint64_t argument = 0);  // stop after this instruction, until woken
  void retry() { cur.pc = at; if (!others.empty()) limit = 0; }
  void wake();
  void wake_from_tensor_wait();
};

struct Cta {
  Cluster* cluster = nullptr;
  uint32_t rank = 0;                    // within the cluster
  uint32_t id[3] = {0, 0, 0};
  std::unique_ptr<TrackedMemory> shared;
  std::vector<std::unique_ptr<Warp>> warps;
  std::unordered_map<uint32_t, Mbarrier> mbarriers;
  NamedBarrier barriers[16];
  std::vector<std::unique_ptr<Warpgroup>> warpgroups;
  std::unique_ptr<TensorMemory> tensor;
  RegisterPool registers;
  std::map<uint32_t, Clock> released;   // by address: what strong writes there have released
  int live_warps = 0;
  Cta();
  ~Cta();
};

struct Cluster {
  Machine* machine = nullptr;
  Agents agents;
  std::vector<std::unique_ptr<Cta>> ctas;
  int live_warps = 0;
  // barrier.cluster: warps that arrived in the current phase
  uint32_t phase = 0;
  int arrived = 0;
  Clock arriving, completed;
  std::vector<Warp*> waiters;
  std::unordered_map<Warp*, uint32_t> arrived_phase;
};

// Something issued that has not taken effect yet.
struct AsyncOperation {
  uint64_t due;
  uint64_t number;
  std::function<void()> effect;
  const Warp* issuer;
  int at;
};

struct Launch {
  uint32_t grid[3], block[3], cluster[3];
  uint32_t dynamic_shared;
  uint32_t registers;     // of each thread when the kernel starts; 0: as many as there are, or .maxnreg
  DeviceBytes params;
  uint64_t seed;
  uint32_t checks;
  uint32_t resident;      // CTAs that run at the same time
  uint64_t max_steps;     // warp instructions; 0: no limit
  const volatile uint32_t* stop;  // the run ends soon after this is not 0
};

struct Machine {
  Machine(const Module& module, const Program& program, const Launch& launch, GlobalMemory& global);
  void run();

  bool checking(Check check) const { return launch.checks & check; }
  // Schedules `effect` for a seeded later time.
  void issue(Warp& issuer, std::function<void()> effect) { issue(issuer, issuer.at, std::move(effect)); }
  void issue(Warp& issuer, int at, std::function<void()> effect);  // at: the instruction, for reports
  void make_runnable(Warp* warp);
  void warp_exited(Warp& warp);

  const Module& module;
  const Program& program;
  const Launch& launch;
  GlobalMemory& global;
  Rng rng;
  uint64_t steps = 0;      // warp instructions
  uint64_t lane_steps = 0; // thread instructions
  std::vector<uint8_t> executed;  // by instruction: some lane has executed it
  uint64_t progress = 0;   // changes whenever something happens that another warp may wait for
  Warp* running = nullptr;

 private:
  void start_cluster(uint64_t number);
  void start_warp(Warp& warp);
  void run_warp(Warp& warp, uint32_t quantum);
  void fire_next();
  bool poll_parked();
  [[noreturn]] void deadlock();
  std::string where(const Warp& warp, int at) const;

  std::vector<std::unique_ptr<Cluster>> clusters_;
  std::vector<Warp*> runnable_;
  std::vector<AsyncOperation> async_;  // heap, earliest first
  uint64_t issued_ = 0;
  uint64_t next_cluster_ = 0, total_clusters_ = 0;
  uint64_t last_progress_ = 0, last_progress_step_ = 0;
  int idle_polls_ = 0;
};

// Completes named barriers and cluster barriers that only waited for warps which have exited.
void recheck_barriers(Cta& cta);

// At the exit of a warp: nobody else can wait for its bulk groups.
void check_copies_waited_for(Warp& warp);

// Gives every variable of the module its address; before any decode.
void place_variables(Module& module);

// Decodes one kernel. Throws SimError at an instruction, modifier or operand that is not known.
Program decode(const Module& module, const Function& function);

}  // namespace ptxsim
