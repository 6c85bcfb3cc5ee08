// Order: who has accessed what, and what a thread may rely on. No data moves here.
//
// An *agent* is a warp, or a channel through which asynchronous operations complete (an mbarrier, a warp's bulk copies,
// a warpgroup's wgmma groups). An *epoch* is (agent, clock). Every unit of memory remembers the epoch and the lane of
// its last write and of the reads since. Lanes of a warp share its clock, but each knows only what it has synchronised
// with, lanes of its own warp included: a `View` says up to which clock all lanes of an agent are known, and which lanes
// are known further.
//
// Three orders are followed side by side. `seen` is what happened before, as loads and stores count it. `fenced` is the
// part of it that a fence.proxy.async lies behind of, all that the async proxy may rely on. `passed` orders execution
// only: relaxed arrivals give it too, and it is what the fences of tcgen05 build upon.
#pragma once

#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "common.h"

namespace ptxsim {

enum Check : uint32_t {
  kGlobalBounds = 1u << 0,
  kSharedBounds = 1u << 1,
  kLocalBounds = 1u << 2,
  kAlignment = 1u << 3,
  kUninitialized = 1u << 4,
  kRace = 1u << 5,
  kAsyncEarly = 1u << 6,
  kProxyFence = 1u << 7,
  kMbarrier = 1u << 8,
  kDeadlock = 1u << 9,
  kDescriptor = 1u << 10,
  kSharedLimit = 1u << 11,
  kInFlightRegisters = 1u << 12,
  kConvergence = 1u << 13,
  kBarrier = 1u << 14,
  kTensorBounds = 1u << 15,
  kTensorLeak = 1u << 16,
  kScaleFactors = 1u << 17,
  kTensorFence = 1u << 18,
  kTensorOrder = 1u << 19,
  kCluster = 1u << 20,
  kCtaGroup = 1u << 21,
  kRegisters = 1u << 22,
};
constexpr uint32_t kOrderChecks = kRace | kAsyncEarly | kProxyFence | kTensorFence;
extern const char* const kCheckNames[];  // in bit order, ends with nullptr

constexpr int kEpochClockBits = 22;
constexpr uint32_t kMaxAgents = (1u << (32 - kEpochClockBits)) - 1;  // the last number marks a set of readers

inline uint32_t epoch(uint32_t agent, uint32_t clock) { return agent << kEpochClockBits | clock; }
inline uint32_t epoch_agent(uint32_t e) { return e >> kEpochClockBits; }
inline uint32_t epoch_clock(uint32_t e) { return e & ((1u << kEpochClockBits) - 1); }

struct View {
  struct Lane { uint32_t who, clock; };  // who: agent << 5 | lane
  std::vector<uint32_t> all;   // by agent: every lane's past up to this clock is known
  std::vector<Lane> lanes;     // lanes that are known further, sorted
  bool has(uint32_t e, uint32_t mask) const {
    uint32_t agent = epoch_agent(e), clock = epoch_clock(e);
    return (agent < all.size() && clock <= all[agent]) || (!lanes.empty() && has_lanes(agent, clock, mask));
  }
  bool knows(uint32_t agent) const;  // anything of it
  void join(const View& other);
  void see(uint32_t agent, uint32_t clock);
  void see(uint32_t agent, uint32_t clock, uint32_t mask);
  void forget(uint32_t agent);

 private:
  bool has_lanes(uint32_t agent, uint32_t clock, uint32_t mask) const;
};

// Scopes of strong operations and fences, the narrowest first.
enum Scope : uint8_t { kNoScope, kCtaScope, kClusterScope, kGpuScope };

constexpr uint32_t kNoCluster = ~0u;    // of a clock that has joined nothing yet
constexpr uint32_t kAnyCluster = ~1u;   // of a place in global memory: no cluster's own

// What is known. Agents are numbered within a cluster; what is known of other clusters is kept apart, as few programs
// let clusters speak to each other.
struct Clock {
  struct Past { View seen, fenced; };
  struct Far { uint32_t cluster; std::shared_ptr<const Past> past; };
  explicit Clock(uint32_t of = kNoCluster) : cluster(of) {}
  uint32_t cluster;
  uint32_t before = 0;   // clusters with lower numbers, of earlier launches too, are known to have ended
  View seen, fenced, fenced_global, passed;
  std::vector<Far> far;  // sorted by cluster
  void join(const Clock& other);
  void see(uint32_t agent, uint32_t clock, uint32_t mask) { seen.see(agent, clock, mask); passed.see(agent, clock, mask); }
  bool has_seen(uint32_t of, uint32_t e, uint32_t mask) const;
  bool has_fenced(uint32_t of, uint32_t e, uint32_t mask, bool global) const;

 private:
  const Past* find(uint32_t of) const;
  void add_far(uint32_t of, const std::shared_ptr<const Past>& past);
};

// The agents of one cluster.
struct Agents {
  struct Agent {
    std::string name;
    bool asynchronous;  // accesses memory through the async proxy
    uint32_t rank;      // of its CTA
    uint32_t core_of;   // of operations of the tensor core: the warp that issues them
  };
  static constexpr uint32_t kNoCore = kMaxAgents;
  std::vector<Agent> list;
  uint32_t add(const std::string& name, bool asynchronous, uint32_t rank, uint32_t core_of = kNoCore);
};
// Of every cluster, by its number; clusters of earlier launches come first.
using Clusters = std::vector<std::shared_ptr<Agents>>;

// Who accesses memory, and what it may rely on.
struct Actor {
  uint32_t tag;              // epoch that the memory will remember
  uint32_t lanes;            // and the lanes; 1 for an agent that has none
  const Clock* clock;        // of the issuing lanes
  uint32_t self, self_lanes; // their own past needs no synchronisation: warp and lanes
  int line = 0;
  bool async_proxy = false;
  Scope scope = kNoScope;    // of a strong access: it does not race with another strong one whose scope includes it
  // Of an operation of the tensor core: the agents of its thread's operations that it comes after by itself.
  const std::vector<uint32_t>* follows = nullptr;
  const View* ordered = nullptr;  // in tensor memory: what the tcgen05 operations of these lanes come after
  bool read_only = false;    // ld.global.nc: what it reads must not be written while the kernel runs
  // Whether what an agent of its cluster did comes before; of an agent's own lane it always does.
  bool knows(uint32_t e, uint32_t mask) const { return (epoch_agent(e) == self && !(mask & ~self_lanes)) || clock->seen.has(e, mask); }
};

// What is known about the accesses to a stretch of memory, by unit: a byte, or a word of tensor memory.
class History {
 public:
  History(size_t units, bool far);  // far: agents of several clusters come here
  size_t run(size_t first, size_t end) const;  // the end of the units from `first` on that have the same past

  std::vector<uint64_t> writer;     // packed, see Written; 0: nobody
  std::vector<uint64_t> reader;     // epoch << 32 | lanes; of agent kMaxAgents: index of a set
  std::vector<uint32_t> reader_line;
  std::vector<uint8_t> flags;       // see Flags
  std::vector<uint32_t> writer_cluster, reader_cluster;  // empty unless far
};

struct Written {
  uint32_t epoch;
  uint32_t lane;
  Scope scope;
  bool async_proxy;
  int line;
  uint64_t pack() const {
    return static_cast<uint64_t>(epoch) << 32 | static_cast<uint64_t>(lane) << 27 | static_cast<uint64_t>(scope) << 25 | static_cast<uint64_t>(async_proxy) << 24 | (static_cast<uint32_t>(line) & 0xffffffu);
  }
  static Written unpack(uint64_t w) {
    return {static_cast<uint32_t>(w >> 32), static_cast<uint32_t>(w >> 27 & 31), static_cast<Scope>(w >> 25 & 3), (w >> 24 & 1) != 0, static_cast<int>(w & 0xffffff)};
  }
};

struct Flags {
  static constexpr uint8_t readers_scope = 3;  // the narrowest of the readers; 0: one of them was weak
  static constexpr uint8_t guarded = 4;        // holds an mbarrier, which only its own operations may touch
};

// The rules: which accesses to a memory need an order between them.
class OrderRules {
 public:
  // kind: names the memory in reports. cluster: whose memory it is, kAnyCluster for global memory. tensor: for tcgen05,
  // whose accesses only its own fences order.
  OrderRules(const char* kind, uint32_t checks, const Clusters* clusters, uint32_t cluster, uint32_t unit, bool tensor)
      : kind_(kind), checks_(checks), clusters_(clusters), cluster_(cluster), unit_(unit), tensor_(tensor) {}
  // Units [first, first + n) of a history that starts at `base`.
  void read(History& h, uint64_t base, size_t first, size_t n, const Actor& actor);
  void write(History& h, uint64_t base, size_t first, size_t n, const Actor& actor);
  // Of global memory: the checks of the launch that comes, and its first cluster.
  void start_launch(uint32_t checks, uint32_t first) { checks_ = checks; launch_begin_ = first; }

 private:
  struct Reader {
    uint32_t cluster, epoch, lanes;
    bool operator==(const Reader& o) const { return cluster == o.cluster && epoch == o.epoch && lanes == o.lanes; }
    bool operator<(const Reader& o) const { return cluster != o.cluster ? cluster < o.cluster : epoch != o.epoch ? epoch < o.epoch : lanes < o.lanes; }
  };
  void check_writer(const History& h, uint64_t base, size_t at, const Actor& actor, bool writing) const;
  void check_readers(const History& h, uint64_t base, size_t at, const Actor& actor) const;
  void check_reader(const History& h, uint64_t base, size_t at, const Actor& actor, const Reader& reader) const;
  Reader add_reader(const History& h, size_t at, const Actor& actor);
  Reader join_readers(const Reader& single, bool is_set, const Actor& actor, Reader added);
  bool includes(Scope mine, const Actor& actor, Scope theirs, uint32_t cluster, uint32_t e) const;
  bool knows(const Actor& actor, uint32_t cluster, uint32_t e, uint32_t lanes) const;
  bool same_thread(const Actor& actor, uint32_t cluster, uint32_t e, uint32_t lanes) const;
  bool follows(const Actor& actor, uint32_t e) const;
  [[noreturn]] void report(uint64_t address, const std::string& what, uint32_t cluster, uint32_t e, uint32_t lanes, int line) const;
  const Agents::Agent* agent(uint32_t cluster, uint32_t e) const;

  const char* kind_;
  uint32_t checks_;
  const Clusters* clusters_;
  uint32_t cluster_, unit_;
  bool tensor_;
  uint32_t launch_begin_ = 0;
  std::vector<std::vector<Reader>> sets_;
  std::map<std::vector<Reader>, uint32_t> set_numbers_;
  Reader last_before_{}, last_added_{}, last_after_{};
};

}  // namespace ptxsim
