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
  std::vector<Handler> behind;  // of kernels with wgmma, by instruction: what watch_wgmma_registers put its own handler before
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

// Groups of asynchronous operations of a thread: committed in order, waited for in order. Marks count commits (and
// whatever else has to tell earlier operations from later ones); they are the clock of the group's agent.
struct Groups {
  uint32_t mark = 1;            // of operations issued now
  uint32_t last = 0;            // of the latest operation
  std::vector<uint32_t> committed;
  std::map<uint32_t, int> outstanding;  // by mark: operations that have not taken effect
  void issued() { ++outstanding[last = mark]; }
  void commit() { committed.push_back(mark++); }
  // The mark that a wait for all but the `pending` latest groups covers; 0: none.
  uint32_t covered(uint64_t pending) const { return committed.size() > pending ? committed[committed.size() - 1 - pending] : 0; }
  bool done(uint32_t up_to) const { return outstanding.empty() || outstanding.begin()->first > up_to; }
  void finished(uint32_t of) { if (--outstanding[of] == 0) outstanding.erase(of); }
};

// The groups of a warp's threads. Bulk copies have a second agent for their reads, which are waited for apart.
struct ThreadGroups {
  uint32_t agent = 0, reads = 0;  // 0: none yet (agent 0 is always a warp)
  std::array<Groups, kLanes> of;
  size_t outstanding() const {
    size_t n = 0;
    for (const Groups& g : of) n += g.outstanding.size();
    return n;
  }
};

struct Mbarrier {
  uint32_t expected = 0;
  int64_t pending = 0;
  int64_t transactions = 0;
  uint32_t phase = 0;
  uint32_t agent = 0;           // channel of the asynchronous operations that complete here
  uint32_t initialized_by = 0;  // epoch
  uint32_t initializer = 0;     // lane, as a mask
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

// Owners of registers of operations that are not complete: a wgmma, or from here on the tcgen05.ld of that number.
constexpr uint32_t kOwnedByWgmma = 1, kOwnedByLoad = 2;

// What happened to the value in a register that some wgmma of the kernel names. Times count the warp's wgmma.fence; 0: never.
struct WgmmaRegister {
  uint32_t touched = 0;  // by another instruction
  uint32_t used = 0;     // by a wgmma
  uint32_t shape = 0;    // of that wgmma, where this was an accumulator; 0: where it held a part of A
};

struct Warpgroup;
struct TensorMemory;

// Lanes of a warp that know the same.
struct LaneSet {
  uint32_t mask = 0;
  Clock clock;
  View ordered;  // what their next tcgen05 operations come after
  std::shared_ptr<const Clock> released[4];  // by Scope: what relaxed writes publish, since a fence of that scope
  Clock observed[4];                         // by Scope: what relaxed reads have met, for the next fence of that scope
  void join(const LaneSet& other);
};

// What strong writes to one place have released, by who may take it in.
struct Released {
  std::map<uint32_t, Clock> cta, cluster;  // by number, and by rank in the cluster for `cta`
  Clock gpu{kAnyCluster};
};

// Operations of the tensor core that one thread has issued and that have not taken effect, oldest first. They follow one
// another only where the ISA says so (see tcgen05.cpp), and commits follow everything.
struct TensorCore {
  uint32_t mark = 1;  // of operations issued now
  struct Operation { uint64_t number; int at; uint64_t key; bool scheduled; std::function<void()> effect; };
  std::deque<Operation> operations;
};

// Loads or stores of tensor memory by a warp, which nothing orders but a wait; its allocations.
struct TensorAccesses {
  uint32_t agent = 0;  // 0: none yet
  uint32_t mark = 1;
  uint32_t outstanding = 0;
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

  uint32_t now = 1;             // the clock of all lanes
  std::vector<LaneSet> known;   // what lanes know; a partition of them
  LaneSet joint;                // scratch of actor(): what several sets know together
  ThreadGroups bulk, cp_async;
  Groups wgmma;
  std::map<int, TensorCore> tensor_core;       // by lane
  std::map<uint64_t, uint32_t> core_agents;     // of the tensor core's operations, by key
  TensorAccesses tensor_load, tensor_store, tensor_alloc;
  // cp.async.mbarrier.arrive: done once every copy of the lane up to the mark has taken effect.
  struct AfterCopies { int lane; uint32_t mark; std::function<void()> action; };
  std::vector<AfterCopies> after_copies;
  uint32_t wgmma_fences = 0;
  std::vector<WgmmaRegister> wgmma_registers;  // by register number; empty where the kernel has no wgmma
  std::vector<uint32_t> in_flight;  // by register number: its owner, or 0
  std::vector<std::pair<uint32_t, int32_t>> owned;  // by wgmma: mark of the operation, register number
  uint32_t next_load = kOwnedByLoad;
  int loading = 0;                                  // registers of tcgen05.ld
  int in_flight_count = 0;
  std::vector<uint64_t> changed_maps;  // tensor maps in global memory that it has yet to release

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
  LaneSet& set_of(int l) {
    if (known.size() == 1) return known[0];
    for (LaneSet& s : known)
      if (s.mask >> l & 1) return s;
    return known[0];
  }
  // Visits the sets of the lanes of `mask`, cut so that they hold no others.
  template <class F>
  void for_sets(uint32_t mask, F f) {
    for (size_t i = 0; i < known.size(); ++i) {
      uint32_t inside = known[i].mask & mask;
      if (!inside) continue;
      if (inside != known[i].mask) {
        LaneSet rest = known[i];
        rest.mask &= ~mask;
        known[i].mask = inside;
        known.push_back(std::move(rest));
      }
      f(known[i]);
    }
  }
  // A lane's own access.
  Actor actor(int l) { return {epoch(agent, now), 1u << l, &set_of(l).clock, agent, 1u << l, line()}; }
  // An access of a whole warp, which may rely on what any of its lanes knows.
  Actor collective_actor();
  // What the lanes of `mask` have done and know goes to `to`. The caller ticks when it has released all.
  void release(uint32_t mask, Clock& to);
  void release_relaxed(uint32_t mask, Scope scope, Clock& to);  // what a fence has released; execution order otherwise
  void acquire(uint32_t mask, const Clock& from);
  void acquire_relaxed(uint32_t mask, Scope scope, const Clock& from);
  void fence(uint32_t mask, Scope scope);
  void fence_proxy_async(uint32_t mask, bool shared, bool global);
  void sync(uint32_t mask);             // the lanes of `mask` have met: each knows what all of them know
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
};

// A tensor map in global memory that the kernel changed; `number` tells one change from the next.
struct ChangedMap {
  uint64_t number;
  bool released;  // by a fence.proxy.tensormap::generic.release of the warp that changed it
};
struct AcquiredMap {
  uint64_t number;
  uint32_t by;  // epoch of the fence.proxy.tensormap::generic.acquire
  uint32_t lanes;
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
  std::map<uint32_t, Released> released;  // by address: what strong writes there have released
  std::unordered_map<uint64_t, AcquiredMap> acquired_maps;  // by address
  bool saw_no_cluster_left = false;     // a request of clusterlaunchcontrol.try_cancel failed, and the CTA knows
  int live_warps = 0;
  bool lets_dependents_start = false;   // griddepcontrol.launch_dependents
  // Accesses of the cluster's other CTAs to this one's memory, the last of each agent and lane; and what the warps that
  // have exited knew: it must cover them before the memory goes.
  struct Visit { uint32_t epoch, lanes; int line; };
  std::map<uint32_t, Visit> visits;
  Clock left;
  Cta();
  ~Cta();
};

struct Cluster {
  Machine* machine = nullptr;
  uint32_t number = 0;          // among all of the stream
  std::shared_ptr<Agents> agents;
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
  bool chip_accuracy;     // approximations and sums of tensor cores with the errors that chips make
  const volatile uint32_t* stop;  // the run ends soon after this is not 0
  bool dependent;         // starts before the launches before it have ended, as programmatic dependent launch allows
};

struct Machine {
  Machine(const Module& module, const Program& program, const Launch& launch, GlobalMemory& global, Stream& stream);
  void run();

  bool checking(Check check) const { return launch.checks & check; }
  // Schedules `effect` for a seeded later time.
  void issue(Warp& issuer, std::function<void()> effect) { issue(issuer, issuer.at, std::move(effect)); }
  void issue(Warp& issuer, int at, std::function<void()> effect);  // at: the instruction, for reports
  void make_runnable(Warp* warp);
  void warp_exited(Warp& warp);
  // Takes a cluster that has not started out of the grid; its first CTA's number goes to `first`. False: none is left.
  bool cancel_cluster(uint32_t* first);

  const Module& module;
  const Program& program;
  const Launch& launch;
  GlobalMemory& global;
  Stream& stream;
  std::unordered_map<uint64_t, Released> released;  // by global address
  uint32_t first_cluster;   // its number
  uint32_t ended_before;    // clusters below this number have ended when the launch starts
  bool waited = false;      // a CTA has waited for the launches before before it let dependents start
  Rng rng;
  uint64_t steps = 0;      // warp instructions
  uint64_t lane_steps = 0; // thread instructions
  std::vector<uint8_t> executed;  // by instruction: some lane has executed it
  std::unordered_map<uint64_t, ChangedMap> changed_maps;  // by address
  uint64_t progress = 0;   // changes whenever something happens that another warp may wait for
  uint64_t next_number = 0;  // of operations of the tensor core
  Warp* running = nullptr;

 private:
  void start_cluster(uint64_t number);
  void first_cta(uint64_t cluster, uint32_t* id) const;
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

// At the exit of lanes: nobody else can wait for their bulk groups.
void check_copies_waited_for(Warp& warp, uint32_t mask);

// Whether `lane` may use the memory of another CTA of its cluster: it must know that the CTA has started, and the CTA
// must not have ended. The access is remembered for the CTA's end.
void note_visit(Warp& warp, int lane, Cta& cta, const Actor& actor);

// Gives every variable of the module its address; before any decode.
void place_variables(Module& module);

// Has every instruction that names a register of a wgmma note that it ran. Kernels without wgmma stay as they are.
void watch_wgmma_registers(Program& program);

// Decodes one kernel. Throws SimError at an instruction, modifier or operand that is not known.
Program decode(const Module& module, const Function& function);

}  // namespace ptxsim
